"""`semantic config show`: each value and where it is from; flag, environment, file, default."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from semantic.composition.process_stores import default_store_folder
from semantic_server.http.settings import default_file
from tests.cli.support import semantic


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No settings of the user who runs the tests."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SEMANTIC_STORE", raising=False)


def shown(*arguments: str) -> dict[str, dict[str, object]]:
    ran = semantic("config", "show", "--json", *arguments)
    assert ran.code == 0, ran.err
    found: dict[str, dict[str, object]] = json.loads(ran.out)
    return found


def test_a_flag_goes_before_the_environment_that_before_the_file_that_before_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "own.toml"
    file.write_text('port = 1\nhost = "localhost"\nmax_waiting = 7\n')
    monkeypatch.setenv("SEMANTIC_PORT", "2")
    monkeypatch.setenv("SEMANTIC_HOST", "127.0.0.2")
    found = shown("--config", str(file), "--port", "3")
    assert found["port"] == {"value": 3, "origin": "flag"}
    assert found["host"] == {"value": "127.0.0.2", "origin": "env SEMANTIC_HOST"}
    assert found["max_waiting"] == {"value": 7, "origin": f"file {file}"}
    assert found["log_format"] == {"value": "text", "origin": "default"}


def test_the_users_own_file_is_read_if_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "mine" / "config.toml"
    monkeypatch.setattr("semantic_server.http.settings.default_file", lambda: file)
    assert shown()["port"]["origin"] == "default"
    file.parent.mkdir()
    file.write_text("port = 9\n")
    assert shown()["port"] == {"value": 9, "origin": f"file {file}"}


def test_what_is_in_force_is_shown_and_the_files_path(tmp_path: Path) -> None:
    found = shown("--model", "/models/Some-7B")
    path = str(default_file())
    assert found["config"] == {"value": path, "origin": "default, no such file"}
    assert path in semantic("config", "show").out
    assert found["store"] == {"value": str(default_store_folder()), "origin": "default"}
    assert found["served_model_name"] == {"value": ["Some-7B"], "origin": "default"}
    assert str(found["top_p"]["origin"]).startswith("default, from the model")
    own = tmp_path / "own.toml"
    own.write_text("top_p = 1\n")
    found = shown("--config", str(own))
    assert found["config"] == {"value": str(own), "origin": "flag"}
    assert found["top_p"] == {"value": 1.0, "origin": f"file {own}"}


def test_secrets_are_masked_wherever_they_come_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("from-file\n\n# remark\n")
    monkeypatch.setenv("SEMANTIC_API_KEYS", "one,two")
    for arguments in (("--json",), ()):
        ran = semantic("config", "show", "--api-key-file", str(keys), *arguments)
        assert ran.out.count("********") == 3
        assert not [key for key in ("one,", "two", "from-file") if key in ran.out]


@pytest.mark.parametrize(
    ("url", "shows"),
    [
        ("s3://KEY:SECRET@bucket/models", "s3://********@bucket/models"),
        ("az://box/models?sv=1&sig=SECRET", "az://box/models?sv=********&sig=********"),
        ("s3://bucket/models", "s3://bucket/models"),
    ],
)
def test_secrets_in_a_url_are_masked(url: str, shows: str) -> None:
    assert shown("--remote-store", url)["remote_store"]["value"] == shows
    assert "SECRET" not in semantic("config", "show", "--remote-store", url).out


def test_no_store_goes_before_a_store_that_is_set_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SEMANTIC_STORE", str(tmp_path))
    assert shown("--no-store")["store"]["value"] is None
    monkeypatch.setenv("SEMANTIC_NO_STORE", "false")
    assert shown()["store"]["value"] == str(tmp_path)
    monkeypatch.delenv("SEMANTIC_STORE")
    monkeypatch.setenv("SEMANTIC_NO_STORE", "true")
    assert shown("--store", "here")["no_store"]["value"] is False


def test_lists_are_separated_by_commas_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEMANTIC_ALLOWED_HOSTS", "a.lan, b.lan")
    assert shown()["allowed_hosts"]["value"] == ["a.lan", "b.lan"]
    assert shown("--allowed-host", "c", "--allowed-host", "d")["allowed_hosts"]["value"] == [
        "c",
        "d",
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("prot = 1", "prot (file {}) is not a setting; did you mean port?"),
        ('port = "x"', "port (file {}): expected a valid integer"),
        ("port = ", "{} is not valid TOML"),
        ('store = "a"\nno_store = true', "expected at most one of store and no_store"),
        ('kv_events = "ipc://a"\nmodel_ttl = 9', "kv_events: expected one model that stays loaded"),
        ('any_model_name = true\nmodel = ["a", "b"]', "any_model_name must be false with several"),
        ('any_model_name = true\nadapters = ["a"]', "any_model_name must be false with several"),
        ('any_model_name = true\nembedding_model = "a"', "any_model_name must be false with"),
        ("[server]\nport = 1", "server (file {}) is not a setting; `semantic config show` lists"),
    ],
)
def test_a_wrong_file_is_one_line_that_names_the_key(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "own.toml"
    file.write_text(text)
    ran = semantic("config", "show", "--config", str(file))
    assert (ran.code, len(ran.error_lines)) == (2, 1)
    assert words.format(file) in ran.err


def test_a_wrong_variable_is_named_and_a_secret_is_not_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SEMANTIC_API_KEYS", "schlüssel")
    ran = semantic("config", "show")
    assert (ran.code, len(ran.error_lines)) == (2, 1)
    assert "api_keys (env SEMANTIC_API_KEYS)" in ran.err
    assert "schl" not in ran.err


def test_an_empty_key_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# nothing\n")
    ran = semantic("config", "show", "--api-key-file", str(file))
    assert (ran.code, len(ran.error_lines)) == (2, 1)
    assert "has no key" in ran.err
