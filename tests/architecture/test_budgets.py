"""Sizes stay within `budgets.toml`, and a bound rises only with a decision record."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tools.budgets import FILE, ROOT, WINGS, bounds, exceeded, raised, sizes

ALLOWED = bounds((ROOT / FILE).read_text(encoding="utf-8"))
RECORD = "# More lines\n\n**Asked by** users of wires.\n\n**Figure**: tests/x.json, 3 of 4.\n"


def test_sizes_are_within_their_bounds() -> None:
    found = sizes(ROOT)
    assert found.keys() | {"chat_files"} == ALLOWED.keys()
    assert exceeded(found, ALLOWED) == []


@pytest.mark.process
def test_a_streamed_chat_request_enters_no_more_files(tmp_path: Path) -> None:
    result = tmp_path / "structure.json"
    command = (sys.executable, "tools/structure.py", "src", str(result))
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(result.read_text())["streamed_chat"]
    assert exceeded({"chat_files": found["files"]}, ALLOWED) == [], found["names"]


@pytest.mark.process
def test_no_commit_raised_a_bound_without_a_record() -> None:
    found = raised(ROOT)
    if found is None:
        pytest.skip("there is no history: whether bounds were raised is not known")
    assert found == []


def test_a_size_beyond_its_bound_is_told() -> None:
    assert exceeded({"a.lines": 3, "b": 2}, {"a.lines": 2, "b": 2}) == [
        "a.lines must be at most 2, got 3; make room, or lower another size"
    ]


def test_every_package_has_bounds() -> None:
    assert set(WINGS.values()) == {folder.name for folder in (ROOT / "src").iterdir()}


@pytest.mark.process
@pytest.mark.parametrize(
    ("changes", "is_raised"),
    [
        ({FILE: "[engine]\nlines = 11\n"}, True),
        ({FILE: "[engine]\nlines = 9\n"}, False),
        ({FILE: ""}, True),
        ({FILE: "[engine]\nlines = 11\n", "docs/adr/020-x.md": "# More lines\n"}, True),
        ({FILE: "[engine]\nlines = 11\n", "docs/adr/020-x.md": RECORD}, False),
    ],
    ids=["higher", "lower", "removed", "a record that says nothing", "a record"],
)
def test_a_raise_needs_a_record(tmp_path: Path, changes: dict[str, str], is_raised: bool) -> None:
    commit(tmp_path, {FILE: "[engine]\nlines = 10\n"})
    commit(tmp_path, changes)
    found = raised(tmp_path)
    assert found is not None
    assert bool(found) == is_raised


@pytest.mark.process
def test_without_a_history_nothing_is_known(tmp_path: Path) -> None:
    assert raised(tmp_path) is None


def commit(folder: Path, files: dict[str, str]) -> None:
    """Commit these files to the repository in `folder`."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    who = ("-c", "user.name=a", "-c", "user.email=a@b")
    for command in (("init", "-q"), ("add", "-A"), (*who, "commit", "-q", "-m", "a: change")):
        subprocess.run(["git", *command], cwd=folder, check=True, capture_output=True)
