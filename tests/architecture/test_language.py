"""The words of the source and the documents: those of the field, as `docs/glossary.md` has them.

Persons do not act in a program: a text names the caller, the client, the request or the thread.
"""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.language import KINDS, sentences

ROOT = Path(__file__).resolve().parents[2]
PERSONS = re.compile(
    r"\b(?:nobody|whoever|(?:some|any|every)(?:body|one)|no one|speaks? first"
    r"|(?:is|are|was|were|be|been) told)\b",
    re.IGNORECASE,
)
TEXTS = ("*.md", "docs/**/*.md", "deploy/**/*", "examples/**/*", "Makefile", "src/**/*")
"""What is read whole; of other modules their comments and docstrings are."""
SUFFIXES = frozenset({"", ".css", ".html", ".js", ".md", ".py", ".toml", ".yaml", ".yml"})
MODULES = ("benchmarks", "experiments", "tests", "tools")
SPOKEN = (ROOT / "src" / "semantic" / "cli" / "demo.py", Path(__file__))
"""What agents of the demonstration say to each other is no prose about the program."""


def persons(text: str) -> list[str]:
    """The words for persons in a text."""
    return PERSONS.findall(" ".join(text.split()))


def prose(source: str) -> Iterator[str]:
    """The comments and docstrings of a module; attribute docstrings too."""
    begins_line = True
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT or (token.type == tokenize.STRING and begins_line):
            yield token.string
        if token.type not in {tokenize.COMMENT, tokenize.NL}:
            begins_line = token.type in {tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}


def _whole() -> Iterator[Path]:
    for pattern in TEXTS:
        for path in sorted(ROOT.glob(pattern)):
            is_text = path.is_file() and path.suffix in SUFFIXES and "__pycache__" not in path.parts
            if is_text and not any(path.is_relative_to(one) for one in SPOKEN):
                yield path


def test_no_person_acts_in_the_source_and_the_documents() -> None:
    texts = {path: path.read_text(encoding="utf-8") for path in _whole()}
    assert {"README.md", "server.md", "main.js", "app.py"} <= {path.name for path in texts}
    for folder in MODULES:
        for path in sorted((ROOT / folder).rglob("*.py")):
            source = path.read_text(encoding="utf-8")
            if persons(source) and path not in SPOKEN:
                texts[path] = "\n".join(prose(source))
    found = {path.relative_to(ROOT).as_posix(): persons(text) for path, text in texts.items()}
    assert {name: words for name, words in found.items() if words} == {}


@pytest.mark.parametrize(
    "text",
    ["Nobody waits for it.", "each part is\ntold", "of whoever calls", "No one reads", "anyone"],
)
def test_a_person_is_found(text: str) -> None:
    assert persons(text) != []


@pytest.mark.parametrize("text", ["The caller waits.", "It is logged.", "the body of a block"])
def test_plain_words_pass(text: str) -> None:
    assert persons(text) == []


def test_comments_and_docstrings_are_prose_and_other_strings_are_not() -> None:
    source = 'X = "a"\n"""b"""\ndef f():\n    """c"""\n    g("d")  # e\n    return "f"\n'
    assert list(prose(source)) == ['"""b"""', '"""c"""', "# e"]


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("What is known of a body.", "openings"),
        ("It waits. Of those it has the first.", "openings"),
        ("Whether it is done.", "openings"),
        ("The name is no digest.", "is_no"),
        ("The block is quietly dropped.", "passive"),
        ("Chunks have been halved.", "passive"),
        ("It was not written.", "passive"),
    ],
)
def test_a_sentence_that_has_to_be_read_twice_is_found(text: str, kind: str) -> None:
    assert [one for one in sentences(text) if KINDS[kind].search(one)] != []


@pytest.mark.parametrize(
    "text",
    [
        "Return whether the page belongs to the pool.",
        "There is no room.",
        "The engine evicts what no agent uses.",
        "A block-sized piece.\n\n- Offsets of it",
        "It is the first.",
    ],
)
def test_a_plain_sentence_passes(text: str) -> None:
    found = [one for one in sentences(text) for kind in KINDS.values() if kind.search(one)]
    assert found == []


def test_a_sentence_has_no_mark_before_its_first_word() -> None:
    assert list(sentences("- **Of** two.\n  more words | cells `x` here")) == [
        "Of** two. more words",
        "cells `x` here",
    ]
