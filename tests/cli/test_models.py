"""`semantic models`: what is here and what it takes, downloads, deletion, and short names."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from semantic_server.cli import serve
from semantic_server.http.settings import load_settings
from tests.cli.support import semantic
from tests.support.model_folder import small_model
from tests.support.model_hub import Hub, running_hub, use_hub

pytestmark = pytest.mark.mlx


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def server() -> Iterator[Hub]:
    with running_hub() as hub:
        yield hub


@pytest.fixture
def hub(server: Hub, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """A hub with one model, and an empty cache."""
    use_hub(monkeypatch, server.url, tmp_path / "hub")
    server.restart()
    server.add("org/tiny", folder)
    return server


def answer(*arguments: str) -> dict[str, Any]:
    """What a command prints as JSON."""
    ran = semantic("models", *arguments, "--json")
    assert ran.code == 0, ran.err
    found: dict[str, Any] = json.loads(ran.out)
    return found


def error(*arguments: str) -> str:
    """The only line of a command that fails."""
    ran = semantic(*arguments)
    assert ran.code != 0
    assert ran.out == ""
    (line,) = ran.error_lines
    return line


def names() -> list[str]:
    return [model["name"] for model in answer("ls")["models"]]


@pytest.mark.process
def test_a_model_is_known_fetched_used_and_deleted(hub: Hub) -> None:
    before = answer("show", "org/tiny")
    assert (before["source"], before["complete"], before["fits"]) == ("hub", False, True)
    assert before["caches"] == [{"kind": "full", "layers": 2, "window": None}]
    assert hub.ranges == []
    assert names() == ["semantic-tiny"]

    done = answer("pull", "org/tiny")
    assert done["fetched_bytes"] == before["bytes"] == done["bytes"]
    assert Path(done["folder"], "model.safetensors").is_file()
    assert names() == ["semantic-tiny", "org/tiny"]
    after = answer("show", "org/tiny")
    same = ("token_bytes", "fixed_bytes", "agent_bytes", "caches", "model_type", "context_tokens")
    assert [after[name] for name in same] == [before[name] for name in same]
    assert (after["source"], after["complete"]) == ("hub's cache", True)
    assert answer("pull", "org/tiny")["fetched_bytes"] == 0

    asked = error("models", "rm", "org/tiny")
    assert "cannot ask: delete" in asked
    assert "Add --yes" in asked
    assert names() == ["semantic-tiny", "org/tiny"]
    assert answer("rm", "org/tiny", "--yes")["freed_bytes"] == before["bytes"]
    assert names() == ["semantic-tiny"]


def test_what_a_token_and_an_agent_cost_is_said(folder: Path) -> None:
    found = answer("show", str(folder), "--pool-gb", "1")
    # Two layers of two heads of 8 numbers, keys and values; in fp32 on a CPU.
    assert found["token_bytes"] in (2 * 2 * 8 * 2 * 4, 2 * 2 * 8 * 2 * 2)
    assert found["agent_bytes"] == found["token_bytes"] * 32768
    assert found["agents"] == (1 << 30) // found["agent_bytes"]
    text = semantic("models", "show", str(folder), "--pool-gb", "1").out
    assert f"a pool of 1.0 GiB holds {found['agents']} agents of 32768 tokens" in text
    assert found["agents_8_bits"] is None  # 64 does not divide 8
    assert "--kv-bits" not in text
    packed = answer("show", "semantic-tiny", "--pool-gb", "1")
    assert packed["agents_8_bits"] >= 1.8 * packed["agents"]
    text = semantic("models", "show", "semantic-tiny", "--pool-gb", "1").out
    assert f"with --kv-bits 8 it holds {packed['agents_8_bits']}\n" in text


@pytest.mark.process
@pytest.mark.usefixtures("hub")
def test_a_model_that_does_not_fit_is_refused_before_it_is_fetched() -> None:
    shown = answer("show", "org/tiny", "--pool-gb", "100000")
    assert (shown["fits"], shown["agents"]) == (False, 0)
    assert "org/tiny does not fit" in error("models", "pull", "org/tiny", "--pool-gb", "100000")
    assert names() == ["semantic-tiny"]
    assert answer("pull", "org/tiny", "--pool-gb", "100000", "--anyway")["complete"]


@pytest.mark.process
def test_a_model_that_cannot_be_computed_is_refused_before_it_is_fetched(hub: Hub) -> None:
    hub.models["org/tiny"]["config.json"] = b'{"model_type": "bert"}'
    assert "bert not supported" in error("models", "pull", "org/tiny")
    assert "the memory it needs is unknown" in semantic("models", "show", "org/tiny").out
    del hub.models["org/tiny"]["model.safetensors"]
    assert "has no *.safetensors" in error("models", "pull", "org/tiny", "--anyway")
    assert hub.ranges == []


@pytest.mark.process
@pytest.mark.usefixtures("hub")
def test_folders_and_broken_ones_are_listed(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    semantic("models", "alias", "mine", str(folder))
    found = {one["name"]: one for one in answer("ls", str(tmp_path))["models"]}
    assert list(found) == ["semantic-tiny", str(folder), str(tmp_path / "broken")]
    assert found[str(folder)]["aliases"] == ["mine"]
    assert "cannot read" in found[str(tmp_path / "broken")]["problem"]
    listed = semantic("models", "ls", str(tmp_path))
    assert listed.code == 0
    assert [line.split()[0] for line in listed.out.splitlines()[1:]] == list(found)


@pytest.mark.process
def test_a_download_that_was_begun_is_shown_as_one(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("semantic.adapters.hub.download._Weights.fetch", stop)
        ran = semantic("models", "pull", "org/tiny")
    assert ran.code == 130
    weights = len(hub.models["org/tiny"]["model.safetensors"])
    assert ran.err.startswith("error: interrupted: ")
    assert "of org/tiny are missing, and the same command continues from there" in ran.err
    shown = answer("show", "org/tiny")
    assert (shown["complete"], shown["token_bytes"]) == (False, 256)
    assert ", incomplete" in semantic("models", "ls").out
    assert answer("pull", "org/tiny")["fetched_bytes"] == weights


@pytest.mark.process
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["pull", "org/tinny"], "has no model 'org/tinny'"),
        (["pull", "semantic-tiny"], "is not a hub model: expected a hub id like org/name"),
        (["rm", "semantic-tiny"], "is not a hub model"),
        (["rm", "org/none"], "'org/none' is not in the hub's cache"),
        (["rm", "../org"], "is not a hub id"),
        (["show", "semantic-tinny"], "did you mean semantic-tiny?"),
        (["ls", "nowhere"], "nowhere is not a folder"),
        (["alias", "a/b", "org/c"], "an alias must be printable"),
        (["alias", "semantic-tiny", "org/c"], "expected another name"),
        (["alias", "a", "nowhere"], "no model folder 'nowhere'"),
        (["alias", "a"], "there is no alias 'a'"),
        (["alias", "a", "--remove"], "there is no alias 'a'"),
        (["alias", "--remove"], "expected --remove with only a name"),
    ],
)
@pytest.mark.usefixtures("hub")
def test_a_mistake_is_one_line(arguments: list[str], words: str) -> None:
    assert words in error("models", *arguments)


@pytest.mark.process
@pytest.mark.usefixtures("hub")
def test_a_folder_is_never_deleted(folder: Path) -> None:
    semantic("models", "alias", "mine", str(folder))
    for name in (str(folder), "mine"):
        assert "is not a hub model" in error("models", "rm", name, "--yes")
    assert (folder / "model.safetensors").is_file()


@pytest.mark.process
@pytest.mark.usefixtures("hub")
def test_an_alias_is_a_model_everywhere() -> None:
    assert answer("alias", "t", "org/tiny") == {"name": "t", "model": "org/tiny", "here": False}
    assert answer("alias")["aliases"] == [{"name": "t", "model": "org/tiny", "by": "user"}]
    assert answer("pull", "t")["aliases"] == ["t"]
    assert answer("show", "t")["name"] == "org/tiny"
    ran = semantic("run", "--model", "t", "--no-store", "--max-tokens", "1", "--json", "Hello")
    assert json.loads(ran.out)["model"] == "org/tiny"
    settings = load_settings({"model": "t"}).settings
    assert serve.engine_settings(settings).model == "org/tiny"
    assert serve.served_names(settings) == ("org/tiny", "t")
    assert answer("rm", "t", "--yes")["name"] == "org/tiny"
    assert answer("alias", "t", "--remove") == {"name": "t", "removed": True}
    assert "did you mean semantic-tiny?" in error(
        "run", "--model", "semantic-tin", "--no-store", "x"
    )


@pytest.mark.process
@pytest.mark.usefixtures("hub")
def test_the_name_of_a_server_is_remembered(folder: Path) -> None:
    serve.remember(load_settings({"model": str(folder), "served_model_name": ("chat",)}).settings)
    assert answer("alias")["aliases"] == [{"name": "chat", "model": str(folder), "by": "serve"}]
    assert answer("show", "chat")["name"] == str(folder)


def test_a_server_starts_where_no_name_can_be_remembered(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = load_settings({"model": str(folder), "served_model_name": ("chat",)}).settings
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder / "config.json"))
    serve.remember(settings)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("cannot remember --served-model-name: cannot read ")
