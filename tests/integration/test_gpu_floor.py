"""The least time of a decode step: which bytes count."""

from __future__ import annotations

import mlx.core as mx
import pytest

from benchmarks import shapes
from benchmarks.gpu_floor import copy_rate, floor_ms, kv_bytes, weight_bytes
from semantic.adapters.mlx.kv_cache.spec_reader import read_spec
from tests.support.tiny_models import tiny_model


def test_an_embedding_table_is_not_read_unless_it_is_the_output_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shapes, "evaluate", lambda _: None)
    assert weight_bytes(shapes.llama_8b()) == pytest.approx(15.01e9, rel=1e-3)
    tied = weight_bytes(tiny_model("llama"))
    assert tied >= 4 * 96 * 32 * 2  # fp32, vocabulary 96, 32 wide: the table alone is half of this


def test_a_window_is_read_no_further_than_it_reaches() -> None:
    spec = read_spec(tiny_model("gemma3"))  # windows of 300 in two of four layers
    assert spec is not None
    per_token = 2 * 16 * 4
    assert kv_bytes(spec, 100) == 4 * 100 * per_token
    assert kv_bytes(spec, 1000) == 2 * (1000 + 300) * per_token


def test_the_floor_is_bytes_over_the_rate() -> None:
    model = tiny_model("llama")
    spec = read_spec(model)
    assert spec is not None
    both = floor_ms(model, spec, [100, 200], 1e6)
    assert both == pytest.approx((weight_bytes(model) + kv_bytes(spec, 300)) / 1e3)


def test_a_copy_has_a_rate() -> None:
    rate = copy_rate(1 << 20)
    assert rate.bytes_per_s > 1e6
    if mx.default_device() == mx.Device(mx.cpu):
        assert rate.by == "MLX"
