"""Caches of 8 bits: how much they change a model, which servers ask before they use them."""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict
from pathlib import Path

import pytest

from semantic.adapters.mlx import kernel_files
from semantic.adapters.mlx.kernel_files import KernelFolder, write_note
from semantic.adapters.mlx.kv_cache.model_spec import read_context
from semantic.adapters.mlx.model.cache_quality import (
    CacheQuality,
    finding_quality,
    measuring,
    note_of,
    text,
)
from semantic.adapters.mlx.model.provider import MLXModelProvider
from semantic.domain.errors import UnsupportedModelError
from semantic.ports.generation import at_once
from tests.cli.support import semantic
from tests.support.model_folder import write_model
from tests.zoo.folder import drawn


@pytest.fixture(scope="module")
def unsure(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights, with which many tokens are about as likely as the likeliest."""
    return write_model(tmp_path_factory.mktemp("models") / "unsure", "qwen3_coder", head_dim=64)


def test_a_model_is_compared_with_itself() -> None:
    model, tokenizer = MLXModelProvider().load_model()
    tokens = text(tokenizer, 600)
    assert len(tokens) == 600
    same = at_once(measuring(model.model, tokens, lambda numbers: numbers))
    assert (same.divergence, same.agreement, same.n_tokens) == (0, 1, 600)
    rounded = at_once(measuring(model.model, tokens))
    assert 0 < rounded.divergence < 0.001
    assert 0.98 < rounded.agreement < 1
    none = at_once(measuring(model.model, tokens, lambda numbers: 0 * numbers))
    assert none.divergence > 0.1
    assert not none.is_good


@pytest.mark.parametrize(
    ("divergence", "agreement", "good"),
    [(0.01, 0.965, True), (0.0101, 1.0, False), (0.0, 0.9649, False), (math.nan, 1.0, False)],
)
def test_the_bounds_are_the_last_good_values(
    divergence: float, agreement: float, good: bool
) -> None:
    assert CacheQuality(divergence, 1.0, agreement, 4096).is_good == good


def test_a_model_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_files, "_own", [KernelFolder(tmp_path)])
    model, tokenizer = MLXModelProvider().load_model(kv_bits=8)
    (file,) = (tmp_path / "notes").glob("kv8-*")
    noted = CacheQuality(**json.loads(file.read_bytes()))
    assert noted.is_good
    assert noted.n_tokens == 4096
    again = finding_quality(model.model, model.model_id, tokenizer)
    with pytest.raises(StopIteration) as found:
        next(again)
    assert found.value.value == noted
    other = finding_quality(model.model, "another model", tokenizer)
    assert next(other) is None  # it computes


@pytest.mark.parametrize(
    "change",
    [{"divergence": "abc"}, {"divergence": None}, {"agreement": [1]}, {"largest": math.nan},
     {"n_tokens": True}, {"more": 1}, "[" * 100_000, "9" * 5000, "{}", " " * (2 << 20)],
)  # fmt: skip
def test_a_damaged_note_is_measured_again(
    change: dict[str, object] | str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_files, "_own", [KernelFolder(tmp_path)])
    model, tokenizer = MLXModelProvider().load_model()
    good = CacheQuality(0.001, 0.01, 0.99, 4096)
    write_note(note_of("a model"), asdict(good))
    (file,) = (tmp_path / "notes").glob("kv8-*")
    with pytest.raises(StopIteration):
        next(finding_quality(model.model, "a model", tokenizer))
    file.write_text(change if isinstance(change, str) else json.dumps(asdict(good) | change))
    assert next(finding_quality(model.model, "a model", tokenizer)) is None
    file.unlink()
    os.mkfifo(file)
    assert next(finding_quality(model.model, "a model", tokenizer)) is None
    file.unlink()
    file.mkdir()
    write_note(file, asdict(good))
    assert [one.name for one in (tmp_path / "notes").iterdir()] == [file.name]


def test_a_text_is_not_longer_than_the_context() -> None:
    """GPT-2 would read past its table of positions."""
    model, tokenizer = MLXModelProvider().load_model()
    assert len(text(tokenizer)) == 4096
    assert len(text(tokenizer, 100)) == 100
    assert read_context(model.model) == 8192
    learned = drawn("gpt2")
    assert read_context(learned) == learned.args.n_positions


def test_a_model_that_8_bits_change_too_much_needs_force(unsure: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"after 8\d\.\d%.*or --kv-bits-force"):
        MLXModelProvider().load_model(str(unsure), kv_bits=8)
    model, _ = MLXModelProvider(any_quality=True).load_model(str(unsure), kv_bits=8)
    assert model.cache_spec().bytes_for(256) < 0.27 * 256 * 2 * 2 * 2 * 64 * 4
    MLXModelProvider().load_model(str(unsure))


def test_doctor_says_what_8_bits_change_and_save(unsure: Path) -> None:
    ran = semantic("doctor", "--kv-bits", "8", "--json")
    findings = {one["name"]: one for one in json.loads(ran.out)["findings"]}
    assert ran.code == 0
    assert findings["8 bits"]["verdict"] == "ok"
    assert findings["8 bits"]["detail"].startswith("a mean divergence of 0.000")
    assert findings["bytes"]["detail"].startswith("256 tokens take 340.0 KiB of 1.2 MiB in global")
    assert "fit instead of" in findings["bytes"]["detail"]
    ran = semantic("doctor", "--kv-bits", "8", "--json", "--model", str(unsure))
    findings = {one["name"]: one for one in json.loads(ran.out)["findings"]}
    assert (ran.code, findings["8 bits"]["verdict"]) == (1, "failed")
    assert "--kv-bits-force" in findings["8 bits"]["advice"]
    ran = semantic("doctor", "--json", "--model", str(unsure))
    assert "8 bits" not in {one["name"] for one in json.loads(ran.out)["findings"]}
