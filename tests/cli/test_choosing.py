"""`semantic models suggest` and `search`, and the names of models that the package knows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from semantic.adapters.mlx.device import Device
from semantic.cli.models import choosing
from semantic.composition.framework import read_device
from semantic.composition.known_models import known_models
from semantic.composition.named_models import model_of
from tests.cli.support import semantic
from tests.support.model_folder import small_model
from tests.support.model_hub import Hub, running_hub, use_hub

pytestmark = pytest.mark.mlx

GIB = 1 << 30


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with running_hub() as hub:
        use_hub(monkeypatch, hub.url, tmp_path / "hub")
        yield hub


def machine(gib: float) -> Device:
    """A computer with this much memory, of which other programs take nearly all."""
    return replace(read_device(), name="a Mac", memory_bytes=int(gib * GIB), free_bytes=GIB)


@pytest.mark.parametrize(
    ("gib", "choice"),
    [(4, None), (10.7, "qwen3.5-4b"), (24, "gpt-oss-20b"), (36, "qwen3.6-35b"),
     (72, "qwen3-coder-next"), (128, "gpt-oss-120b")],
)  # fmt: skip
def test_the_first_choice_holds_a_coding_agent(
    gib: float, choice: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choosing, "read_device", lambda: machine(gib))
    best = choosing.best(choosing.suggestions(machine(gib)))
    assert (best and best.model.name) == choice
    text = semantic("models", "suggest").out
    assert text.startswith("a Mac")
    marked = [line.split()[1] for line in text.splitlines() if line.startswith("*")]
    assert marked == ([] if choice is None else [choice])
    assert max(map(len, text.splitlines())) <= 80
    found = json.loads(semantic("models", "suggest", "--json").out)["models"]
    assert [one["name"] for one in found] == [one.name for one in known_models()]
    for one in found:
        fits = one["pool_tokens"] * one["token_bytes"] + one["n_bytes"] <= gib * GIB
        assert fits or not one["pool_tokens"]


def test_models_have_short_names_unless_the_user_gives_them_to_others(tmp_path: Path) -> None:
    assert len(known_models()) == len({one.name for one in known_models()}) >= 12
    assert all(one.hub_id.count("/") == 1 for one in known_models())
    assert model_of("qwen3-coder") == "mlx-community/Qwen3-Coder-30B-A3B-Instruct-4bit"
    semantic("models", "alias", "qwen3-coder", "org/other")
    assert model_of("qwen3-coder") == "org/other"
    semantic("models", "alias", "--remove", "qwen3-coder")
    folder = small_model(tmp_path / "qwen3-coder")
    assert model_of(str(folder)) == str(folder)
    assert "did you mean qwen3-coder?" in semantic("run", "hi", "--model", "qwen3-coder:30b").err


@pytest.mark.process
def test_the_hub_is_searched_for_models_in_mlx_format(hub: Hub, tmp_path: Path) -> None:
    folder = small_model(tmp_path / "tiny")
    for name in ("org/Coder-7B-4bit", "org/Other-4bit", "more/Coder-1B"):
        hub.add(name, folder)
    found = json.loads(semantic("models", "search", "coder", "--json").out)["models"]
    assert [one["hub_id"] for one in found] == ["org/Coder-7B-4bit", "more/Coder-1B"]
    text = semantic("models", "search", "coder", "4bit").out
    assert "org/Coder-7B-4bit  100        2026-10-01" in text
    assert "more/Coder-1B" not in text
    assert len(semantic("models", "search", "4bit", "--limit", "1", "--json").out) < 200
    none = semantic("models", "search", "nothing")
    assert (none.code, none.out) == (2, "")
    assert "the hub has no model for MLX with 'nothing' in its name" in none.err
