"""A model's configuration says what the loaded model says, and no weight is read for it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import cast

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from semantic.adapters.mlx.kv_cache.model_spec import read_spec
from semantic.adapters.mlx.model.description import CacheForm, describe
from semantic.adapters.mlx.model.provider import MLXModelProvider
from semantic.domain.errors import ModelNotFoundError, UnsupportedModelError
from tests.support.lanes import more
from tests.support.model_folder import small_model
from tests.zoo.configurations import configuration
from tests.zoo.folder import drawn

pytestmark = pytest.mark.mlx

ROWS = ["gemma3_text", "qwen3_next", "deepseek_v3", "deepseek_v41", "falcon_h1"]


@pytest.mark.parametrize("row", [*ROWS, *more("mamba2", "gpt_oss", "kimi_linear", "mistral4")])
def test_the_caches_are_those_of_the_model(tmp_path: Path, row: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(configuration(row)))
    assert describe(tmp_path, 1).spec == read_spec(drawn(row))


@pytest.mark.parametrize(
    ("row", "kinds"),
    [
        ("llama", {"full"}),
        ("gemma3_text", {"window", "full"}),
        ("qwen3_next", {"state", "full"}),
        ("deepseek_v3", {"latent"}),
        ("deepseek_v41", {"compressed"}),
    ],
)
def test_the_forms_have_their_names(tmp_path: Path, row: str, kinds: set[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(configuration(row)))
    found = describe(tmp_path, 1)
    assert {form.kind for form in found.forms} == kinds
    assert sum(form.layers for form in found.forms) == found.spec.n_layers


def test_the_weights_of_a_folder_are_counted_as_they_are_loaded(tmp_path: Path) -> None:
    folder = small_model(tmp_path / "model")
    backend, _ = MLXModelProvider().load_model(str(folder))
    found = describe(folder)
    assert found.spec == backend.cache_spec()
    assert found.forms == (CacheForm("full", 2),)
    assert found.context_tokens == 1 << 16
    parameters = cast("Callable[[], object]", backend.model.parameters)()
    weights = cast("list[tuple[str, mx.array]]", tree_flatten(parameters))
    assert found.weights_bytes == sum(weight.nbytes for _, weight in weights)


def test_halves_become_fp32_on_a_cpu_unless_they_are_quantized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configuration("llama") | {"dtype": "bfloat16"}
    monkeypatch.setattr("semantic.adapters.mlx.model.description.on_cpu", lambda: True)

    def weights(more: dict[str, object]) -> int:
        (tmp_path / "config.json").write_text(json.dumps({**config, **more}))
        return describe(tmp_path, 1000).weights_bytes

    assert weights({}) == 2000
    assert weights({"dtype": "float32"}) == 1000
    assert weights({"quantization": {"bits": 4, "group_size": 64}}) == 1000
    monkeypatch.setattr("semantic.adapters.mlx.model.description.on_cpu", lambda: False)
    assert weights({}) == 1000


def test_a_large_model_takes_no_memory_to_describe(tmp_path: Path) -> None:
    """A model of 64 GiB, which this machine could not hold."""
    large = {"hidden_size": 8192, "intermediate_size": 32768, "num_hidden_layers": 64}
    heads = {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128}
    (tmp_path / "config.json").write_text(json.dumps(configuration("llama") | large | heads))
    before = mx.get_active_memory()  # of models that other tests hold
    mx.reset_peak_memory()
    found = describe(tmp_path, 1 << 36)
    assert mx.get_peak_memory() < before + (1 << 24)
    assert found.spec.bytes_for(256) == 64 * 8 * 2 * 128 * 256 * found.spec.layers[0].itemsize


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "cannot read"),
        ("[]", "must be a JSON object"),
        ("{}", "has no model_type"),
        ('{"model_type": "bert"}', "cannot build the model .*bert not supported"),
        ('{"model_type": "llama"}', "cannot build the model"),
        ('{"model_type": "llama", "num_hidden_layers": 1000000000}', "must be at most 2048"),
        ('{"model_type": "x", "text_config": {"n_layers": 9999}}', "must be at most 2048"),
        ('{"model_type": "llama", "model_file": "own.py"}', "program of the model's own"),
        ("{" * 100_000, "cannot read"),
    ],
)
def test_a_configuration_of_another_kind_is_one_error(
    tmp_path: Path, text: str, words: str
) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises((ModelNotFoundError, UnsupportedModelError), match=words):
        describe(tmp_path, 1)


def test_a_folder_without_a_configuration_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"it has no config\.json"):
        describe(tmp_path)


def test_a_huge_configuration_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b" " * ((1 << 22) + 1))
    with pytest.raises(ModelNotFoundError, match="is longer than"):
        describe(tmp_path)
