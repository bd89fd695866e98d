"""The sizes that `budgets.toml` bounds, and who may raise a bound.

    python -m tools.budgets

Prints each size beside its bound. A commit that raises a bound adds a decision record to `docs/adr`
that says who asked for it and which figure shows that it pays: lines that begin with `**Asked by**`
and `**Figure**`.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, TypeAlias

from tools import language
from tools.history import git, is_whole

ROOT: Final = Path(__file__).resolve().parents[1]
FILE: Final = "budgets.toml"
RECORDS: Final = "docs/adr/"
WINGS: Final = {"fleet": "semantic_fleet", "server": "semantic_server", "engine": "semantic"}
"""Packages below `src` by the name of their bounds."""
_WORD: Final = re.compile(r"\S*\w\S*")
"""Not a bar of a table, nor a dash."""
SAID: Final = ("**Asked by**", "**Figure**")

Bounds: TypeAlias = Mapping[str, int]
"""Numbers by a name with dots, as in `engine.lines`."""


def sizes(root: Path) -> dict[str, int]:
    """What can be counted without running anything."""
    found: dict[str, int] = {}
    longest = 0
    for wing, package in WINGS.items():
        lines = [_lines(path) for path in (root / "src" / package).rglob("*.py")]
        found |= {f"{wing}.modules": len(lines), f"{wing}.lines": sum(lines)}
        longest = max(longest, *lines)
    words = sum(
        len(_WORD.findall(language.FILLED.sub("", _text(path)))) for path in hand_written(root)
    )
    spoken = {f"language.{kind}": len(those) for kind, those in language.found(root).items()}
    return found | {"longest_file": longest, "document_words": words} | spoken


def hand_written(root: Path) -> list[Path]:
    """Documents without those that the program writes."""
    docs = [path for path in (root / "docs").rglob("*.md") if path.name not in language.GENERATED]
    return [*docs, *root.glob("*.md")]


def bounds(text: str) -> dict[str, int]:
    """The numbers of a budget file."""
    return dict(_flat(tomllib.loads(text)))


def exceeded(found: Bounds, allowed: Bounds) -> list[str]:
    """Sizes beyond their bound, one line each."""
    return [
        f"{name} must be at most {allowed[name]}, got {size}; make room, or lower another size"
        for name, size in found.items()
        if size > allowed[name]
    ]


def raised(root: Path) -> list[str] | None:
    """Commits that raised a bound without a record that says why; None without a whole history."""
    listed = git(root, "rev-list", "HEAD", "--", FILE)
    if listed is None or not is_whole(root):
        return None
    return [line for commit in listed.split() for line in _raised_by(root, commit)]


def _raised_by(root: Path, commit: str) -> Iterator[str]:
    before = git(root, "show", f"{commit}^:{FILE}")
    after = git(root, "show", f"{commit}:{FILE}")
    if before is None or after is None:
        return
    old, new = bounds(before), bounds(after)
    higher = [name for name in new if new[name] > old.get(name, new[name])]
    gone = [name for name in old if name not in new]
    if (higher or gone) and not any(map(_says_why, _records(root, commit))):
        yield f"{commit[:10]} raises {', '.join([*higher, *gone])} without a record in {RECORDS}"


def _records(root: Path, commit: str) -> Iterator[str]:
    """The texts of the decision records that a commit adds."""
    added = git(root, "diff", "--name-only", "--diff-filter=A", f"{commit}^", commit, "--", RECORDS)
    for path in (added or "").splitlines():
        yield git(root, "show", f"{commit}:{path}") or ""


def _says_why(record: str) -> bool:
    lines = record.splitlines()
    return all(any(line.startswith(said) for line in lines) for said in SAID)


def _flat(table: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, int]]:
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        elif isinstance(value, int):
            yield f"{prefix}{name}", value


def _lines(path: Path) -> int:
    return len(_text(path).splitlines())


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def main() -> None:
    """Entry point."""
    allowed, found = bounds((ROOT / FILE).read_text(encoding="utf-8")), sizes(ROOT)
    for name, size in found.items():
        print(f"{name:18} {size:7} of {allowed[name]:7}")
    sys.exit(bool(exceeded(found, allowed)))


if __name__ == "__main__":
    main()
