"""The form of a commit's message: `area: imperative`, at most 72 characters, then the reason.

    python -m tools.commits FILE

Checks the message in FILE, as git's hook `commit-msg` does (`git config core.hooksPath .githooks`).
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Final

from tools.history import git, is_whole

ROOT: Final = Path(__file__).resolve().parents[1]
LONGEST: Final = 72
"""Characters of the first line, as `git log --oneline` shows them."""
FORM: Final = re.compile(r"[a-z][a-z0-9_.-]*(?: [a-z0-9_.-]+)?: (?P<verb>[a-z][a-z-]*)\b.*[^.\s]")
OTHER_FORM: Final = re.compile(r"(?!bring|embed|focus)\w+(?:[^e]ed|ing|[^s]s)")
"""Verbs in another form: added, adding, adds."""


def faults(message: str) -> list[str]:
    """Each rule that a message breaks, in words."""
    first, *rest = [line for line in message.splitlines() if not line.startswith("#")] or [""]
    found = []
    if len(first) > LONGEST:
        found.append(f"the first line must have at most {LONGEST} characters, got {len(first)}")
    match = FORM.fullmatch(first)
    if match is None or OTHER_FORM.fullmatch(match["verb"]):
        found.append(f"the first line must be `area: imperative`, no full stop, got {first!r}")
    if rest and rest[0].strip():
        found.append(f"the second line must be empty, got {rest[0]!r}")
    return found


def log(since: str) -> list[str] | None:
    """Messages of the commits after the one that added the file `since`; None without a history."""
    added = git(ROOT, "log", "--format=%H", "--diff-filter=A", "--", since)
    if not added or not is_whole(ROOT):
        return None
    text = git(ROOT, "log", "--no-merges", "--format=%B%x00", f"{added.split()[-1]}..HEAD") or ""
    return [message.strip("\n") for message in text.split("\0") if message.strip()]


def main() -> None:
    """Entry point."""
    found = faults(Path(sys.argv[1]).read_text(encoding="utf-8"))
    sys.exit("\n".join(found) or None)


if __name__ == "__main__":
    main()
