"""A shell is offered the agents of the store and the models at hand, and nothing that it would
have to quote or that harms it."""

from __future__ import annotations

import os
import sqlite3
import subprocess
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from semantic.adapters.hub.aliases import default_file, set_alias
from semantic.adapters.stores.disk import folder as reader
from semantic.adapters.stores.disk.folder import agent_names
from semantic.cli.shell.completion import complete_models
from tests.cli.stocked import disk_store, new_agent
from tests.cli.support import command_line, environment
from tests.support.store_blocks import saved_agents

HOSTILE = [
    "$(touch pwned)", "`id`",
    "a b", "a'b", 'a"b', "a\nb", "-rf", "a;b", "a\\b", "é", "", "a*", "(a)", "a$HOME",
]  # fmt: skip


def offered(shell: str, line: str) -> list[str]:
    """What the program prints when a shell completes `line`, whose last word is not finished."""
    words = line.split(" ")
    asked = {
        "_SEMANTIC_COMPLETE": f"complete_{shell}",
        "_TYPER_COMPLETE_ARGS": line,
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(words) - 1),
    }
    ran = subprocess.run(
        command_line(), capture_output=True, text=True, check=True, env={**environment(), **asked}
    )
    assert ran.stderr == ""
    return ran.stdout.split()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A closed store with agents, those of another tenant too."""
    root = tmp_path / "store"
    with disk_store(root) as store:
        for name in ["ada", "alan", "a.b/c:1@x", "bob", *(name for name in HOSTILE if name)]:
            new_agent(store, name, n_tokens=300)
        new_agent(store, "ada", model="other", n_tokens=300)
        new_agent(store, "alien", tenant="other", n_tokens=300)
    return root


@pytest.mark.process
def test_shells_get_the_names_of_agents(folder: Path) -> None:
    line = f"semantic --store {folder} agents show a"
    assert sorted(offered("bash", line)) == ["a.b/c:1@x", "ada", "alan"]
    assert sorted(offered("fish", line)) == ["a.b/c:1@x", "ada", "alan"]
    zsh = " ".join(offered("zsh", f"semantic agents fork --store {folder} a"))
    assert '"ada"' in zsh
    assert "pwned" not in zsh


def test_the_store_is_as_it_was(folder: Path) -> None:
    """Nothing is created, nothing repaired: the next program opens it by its seal."""

    def files() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    before = files()
    assert set(agent_names(folder, "b", 10)) == {"bob"}
    assert files() == before


def test_names_are_bounded_and_begin_with_those_last_saved(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with disk_store(folder) as store:
        (bob,) = (one for one in saved_agents(store) if one.agent_id == "bob")
        assert store.agents.save(replace(bob, agent_id="ape", saved_at=2e9))
        assert store.agents.save(replace(bob, agent_id="asp", saved_at=1e9))
    assert agent_names(folder, "a", 2) == ["ape", "asp"]
    monkeypatch.setattr(reader, "_MOST_STEPS", 10)
    assert agent_names(folder, "a", 2) == []


def test_a_running_program_is_asked_no_lock(folder: Path) -> None:
    with disk_store(folder):
        assert agent_names(folder, "bo", 10) == ["bob"]


@pytest.mark.process
def test_what_cannot_be_read_offers_nothing(folder: Path, tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    assert agent_names(missing, "", 10) == []
    assert not missing.exists()
    with closing(sqlite3.connect(folder / "index.sqlite", isolation_level=None)) as db:
        db.execute("PRAGMA locking_mode = EXCLUSIVE")
        db.execute("BEGIN EXCLUSIVE")
        assert agent_names(folder, "", 10) == []
    (folder / "index.sqlite").write_bytes(b"no database" * 100)
    assert agent_names(folder, "", 10) == []
    assert offered("bash", f"semantic --store {folder} agents show a") == []


@pytest.mark.process
def test_models_are_those_of_the_package_and_of_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ["models--org--name-4bit", "datasets--org--d", "models--o$(id)--n", "version.txt"]:
        (tmp_path / "hub" / name).mkdir(parents=True)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    assert complete_models("") == ["semantic-tiny", "org/name-4bit"]
    assert complete_models("org/") == ["org/name-4bit"]
    monkeypatch.setenv("HF_HUB_CACHE", os.devnull)
    assert complete_models("") == ["semantic-tiny"]
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    assert offered("bash", "semantic serve --model org") == ["org/name-4bit"]


def test_aliases_are_offered_if_their_file_can_be_read() -> None:
    set_alias("coder", "org/Coder-7B")
    set_alias("co$(id)", "org/Coder-7B")
    assert complete_models("co") == ["coder"]
    default_file().write_text("no TOML")
    assert complete_models("co") == []
