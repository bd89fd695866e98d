"""The words of the source: those of the field, as `docs/glossary.md` has them.

Persons do not act in a program: a docstring names the caller, the request or the thread.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "semantic"
PERSONS = re.compile(
    r"\b(?:nobody|whoever|somebody|anybody|someone|everybody|(?:is|are) told)\b", re.IGNORECASE
)
SPOKEN = SOURCE / "cli" / "demo"
"""What agents of the demonstration say to each other is no prose about the program."""


def persons(text: str) -> list[str]:
    """The words for persons in a text."""
    return PERSONS.findall(text)


def test_no_person_acts_in_the_source() -> None:
    modules = [path for path in sorted(SOURCE.rglob("*.py")) if SPOKEN not in path.parents]
    found = {
        path.relative_to(SOURCE).as_posix(): persons(path.read_text(encoding="utf-8"))
        for path in modules
    }
    assert {name: words for name, words in found.items() if words} == {}


@pytest.mark.parametrize("text", ["Nobody waits for it.", "each part is told", "of whoever calls"])
def test_a_person_is_found(text: str) -> None:
    assert persons(text) != []


@pytest.mark.parametrize("text", ["The caller waits.", "It is logged.", "the body of a block"])
def test_plain_words_pass(text: str) -> None:
    assert persons(text) == []
