"""Wrong settings: one line says so, and no mistake opens a server or moves it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.support import semantic


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No settings of the user who runs the tests."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SEMANTIC_STORE", raising=False)


@pytest.mark.parametrize(
    "text", ["port = " + "9" * 5000, "host = " + "[" * 5000], ids=["number", "lists"]
)
def test_a_file_that_no_parser_can_take_is_one_line(tmp_path: Path, text: str) -> None:
    file = tmp_path / "own.toml"
    file.write_text(text)
    ran = semantic("config", "show", "--config", str(file))
    assert (ran.code, len(ran.error_lines)) == (2, 1)
    assert f"{file} is not valid TOML" in ran.err


@pytest.mark.parametrize("name", ["STORE", "PORT", "MODEL", "NO_STORE", "ALLOWED_HOSTS"])
def test_a_variable_that_is_empty_is_not_set(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(f"SEMANTIC_{name}", "")
    found = json.loads(semantic("config", "show", "--json").out)
    before = found[name.lower()]
    monkeypatch.delenv(f"SEMANTIC_{name}")
    assert before == json.loads(semantic("config", "show", "--json").out)[name.lower()]
    assert before["origin"] == "default"


@pytest.mark.parametrize("keys", ["", " ", ",", " , "])
def test_no_keys_where_keys_are_meant_open_no_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: str
) -> None:
    file = tmp_path / "own.toml"
    file.write_text('api_keys = ["one"]')
    monkeypatch.setenv("SEMANTIC_API_KEYS", keys)
    ran = semantic("config", "show", "--config", str(file))
    assert (ran.code, len(ran.error_lines)) == (2, 1)
    assert "api_keys (env SEMANTIC_API_KEYS): expected at least one key" in ran.err


def test_keys_of_a_file_say_where_they_are_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("from-file\n")

    def origin() -> object:
        ran = semantic("config", "show", "--json", "--api-key-file", str(keys))
        return json.loads(ran.out)["api_keys"]["origin"]

    assert origin() == f"file {keys}"
    monkeypatch.setenv("SEMANTIC_API_KEYS", "another")
    assert origin() == f"env SEMANTIC_API_KEYS and file {keys}"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--operator-key", "x"], "operator_keys: expected api_keys too, got none"),
        (
            ["--operator-key", "x", "--api-key", "x"],
            "operator_keys: expected keys that are not in api_keys",
        ),
        (["--operator-key", "", "--api-key", "x"], "operator_keys (flag): expected printable"),
    ],
)
def test_an_operators_key_is_no_tenants(arguments: list[str], words: str) -> None:
    ran = semantic("config", "show", *arguments)
    assert (ran.code, len(ran.error_lines)) == (2, 1)
    assert words in ran.err


def test_events_have_the_prompts_of_one_key_alone() -> None:
    ran = semantic("config", "show", "--kv-events", "ipc://a", "--api-key", "a", "--api-key", "b")
    assert (ran.code, len(ran.error_lines)) == (2, 1)
    assert "kv_events: expected at most one API key" in ran.err


def test_operators_keys_come_from_a_file_too(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# ours\nfrom-file\n")
    ran = semantic("config", "show", "--json", "--api-key", "x", "--operator-key-file", str(keys))
    shown = json.loads(ran.out)["operator_keys"]
    assert shown == {"value": ["********"], "origin": f"file {keys}"}
