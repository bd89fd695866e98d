"""Messages of commits have the form that `git log --oneline` can be scanned in."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools.commits import ROOT, faults, log


@pytest.mark.process
def test_every_commit_since_the_rule_has_the_form() -> None:
    messages = log("tools/commits.py")
    if messages is None:
        pytest.skip("there is no history: the form of its messages is not known")
    assert {message: found for message in messages if (found := faults(message))} == {}


@pytest.mark.parametrize(
    "message",
    [
        "store: evict blocks of the tenant that has most",
        "http: bring errors into one form\n\nThe reason.\n",
        "paged cache: embed the table\n# a comment of git's\n",
        "gpu_ranks: process frames",
    ],
)
def test_a_message_in_the_form(message: str) -> None:
    assert faults(message) == []


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("", "must be `area: imperative`"),
        ("Store: evict blocks", "must be `area: imperative`"),
        ("store: Evict blocks", "must be `area: imperative`"),
        ("The number of modules", "must be `area: imperative`"),
        ("store: evicts blocks", "must be `area: imperative`"),
        ("store: evicted blocks", "must be `area: imperative`"),
        ("store: evict blocks.", "must be `area: imperative`"),
        ("store: evict " + "e" * 60, "at most 72 characters, got 73"),
        ("store: evict blocks\nThe reason.", "the second line must be empty"),
    ],
)
def test_another_form_is_told(message: str, said: str) -> None:
    (found,) = faults(message)
    assert said in found


@pytest.mark.process
@pytest.mark.parametrize(("message", "code"), [("store: evict blocks", 0), ("Evict", 1)])
def test_the_hook_refuses_another_form(tmp_path: Path, message: str, code: int) -> None:
    file = tmp_path / "message"
    file.write_text(message)
    given = {**os.environ, "PYTHON": sys.executable}
    hook = (ROOT / ".githooks" / "commit-msg", file)
    done = subprocess.run(hook, cwd=ROOT, env=given, check=False, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert bool(done.stderr) == bool(code)
