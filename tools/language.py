"""How the repository says things: sentences of a kind that has to be read twice.

    python -m tools.language [KIND]

Prints how many sentences of each kind the documents, docstrings, comments and messages have; with a
KIND it prints each of them and where it is. `budgets.toml` bounds the numbers.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]

_IRREGULAR: Final = (
    "begun|bound|broken|brought|built|chosen|cut|done|drawn|driven|fed|forgotten|found|frozen|given"
    "|gone|held|hidden|kept|known|laid|left|lent|lost|made|meant|met|overwritten|paid|put|read|run"
    "|said|seen|sent|set|shown|shut|split|spent|spoken|stolen|sworn|taken|taught|thrown|told|woken"
    "|written"
)
KINDS: Final = {
    "openings": re.compile(r"^(?:What|Whether|Which|Of|Those|That)\b"),
    "is_no": re.compile(r"(?<![Tt]here )\b(?:is|are|was|were|be) no\b(?! (?:longer|more|later)\b)"),
    "passive": re.compile(
        r"\b(?:is|are|was|were|be|been|being) (?:\w+ly |not |also |then |still |only |never )*"
        rf"(?:\w+ed|{_IRREGULAR})\b(?!-)"
    ),
}
"""What is looked for in a sentence."""

_SENTENCE: Final = re.compile(r"(?<=[.!?:])\s+(?=[A-Z`(])|\n\s*\n|\n(?=\s*[-*|#])|\s\|\s")
FILLED: Final = re.compile(r"<!-- (\w+)\b[^>]*-->.*?<!-- /\1 -->", re.DOTALL)
"""A region of a document that a program fills."""
_CODE: Final = re.compile(r"^```.*?^```|^ {4,}\S[^\n]*$", re.DOTALL | re.MULTILINE)
_MARKS: Final = re.compile(r"^[\s\-*|#>\"'`(\d.]+")
GENERATED: Final = frozenset({"cli.md", "families.md", "http.md", "models.md"})


def sentences(text: str) -> Iterator[str]:
    """Each sentence of a text in one line, without the marks before its first word."""
    for one in _SENTENCE.split(text):
        words = " ".join(_MARKS.sub("", one).split())
        if " " in words:
            yield words


def spoken(root: Path) -> Iterator[tuple[str, str]]:
    """(place, text) of each document, docstring, comment and message."""
    for path in [*root.glob("*.md"), *(root / "docs").rglob("*.md")]:
        if path.name not in GENERATED:
            text = FILLED.sub("", path.read_text(encoding="utf-8"))
            yield path.relative_to(root).as_posix(), _CODE.sub("", text)
    for path in sorted((root / "src").rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        name = path.relative_to(root).as_posix()
        for line, text in [*_comments(source), *_strings(ast.parse(source))]:
            yield f"{name}:{line}", text


def found(root: Path) -> dict[str, list[str]]:
    """The sentences of each kind, with their places."""
    by_kind: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for place, text in spoken(root):
        for sentence in sentences(text):
            for kind, pattern in KINDS.items():
                if pattern.search(sentence):
                    by_kind[kind].append(f"{place}: {sentence}")
    return by_kind


def _comments(source: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not token.string.startswith("# noqa"):
            yield token.start[0], token.string.lstrip("# ")


def _strings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Docstrings, and texts of several words: messages, help, descriptions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else "X" for part in node.values]
            yield node.lineno, "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def main() -> None:
    """Entry point."""
    by_kind = found(ROOT)
    for kind in sys.argv[1:]:
        print("\n".join(by_kind[kind]))
    for kind, those in by_kind.items():
        print(f"{kind:9} {len(those):5}")


if __name__ == "__main__":
    main()
