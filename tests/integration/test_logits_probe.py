"""Whether a batch's logits are right: rounding is measured, not assumed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx
import pytest

from semantic.adapters.mlx.kv_cache import probe
from semantic.adapters.mlx.kv_cache.paged.attention import DecodeStep, PortableAttention
from semantic.adapters.mlx.kv_cache.paged.layers import PagedLayers
from semantic.adapters.mlx.kv_cache.paged.page_pool import page_kinds
from semantic.adapters.mlx.kv_cache.probe import AttentionUse, LogitsProbe, attention_use
from semantic.adapters.mlx.kv_cache.spec_reader import read_shapes, read_spec
from semantic.ports.generation import Slices
from tests.support.tiny_models import tiny_model

NEAR, FAR = 0.08, 1.0
"""Differences relative to the norm: above what is always rounding in bf16, and what is wrong."""


class RotatesRows(PortableAttention):
    """Gives every row the result of another."""

    def attend(self, step: DecodeStep) -> mx.array:
        return super().attend(step)[::-1]


def pages(architecture: str, attention: Sequence[PortableAttention]) -> PagedLayers:
    model = tiny_model(architecture)
    spec, shapes = read_spec(model), read_shapes(model)
    assert spec is not None
    kinds = page_kinds(spec, shapes)
    assert kinds is not None
    return PagedLayers(spec, kinds, attention)


@pytest.fixture
def differing(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Make batches in pages and batches of mlx-lm differ from single sequences by so much."""

    def differ(
        *, pages: Sequence[float], mlx_lm: Sequence[float], dtype: mx.Dtype = mx.bfloat16
    ) -> None:
        def solo(_: object) -> Slices[list[mx.array]]:
            yield None
            return [mx.ones((2, 8), dtype) for _ in range(3)]

        def batched(_: object, layers: object) -> Slices[list[mx.array]]:
            yield None
            by = mlx_lm if isinstance(layers, probe._Padded) else pages
            rows = mx.array(list(by)).reshape(3, 2, 1)
            return list(mx.ones((3, 2, 8)) * (1 + rows))

        monkeypatch.setattr(probe, "_solo", solo)
        monkeypatch.setattr(probe, "_batched", batched)

    return differ


def accepted() -> bool:
    model = tiny_model("llama")
    return LogitsProbe(model).accepts(pages("llama", [PortableAttention()]))


@pytest.mark.parametrize(
    ("pages", "mlx_lm", "right"),
    [
        ([0.01] * 6, [FAR] * 6, True),  # always rounding, whatever mlx-lm does
        ([NEAR] * 6, [0.0] * 6, False),
        ([NEAR] * 6, [NEAR] * 6, True),
        ([NEAR] * 6, [NEAR / 3] * 6, False),
        ([NEAR] * 6, [FAR] * 6, False),  # mlx-lm's batch may be wrong as well
        ([FAR] * 6, [FAR] * 6, False),
        ([0.01] * 4 + [FAR] * 2, [0.0] * 6, True),  # tokens that went to another expert
        ([0.01] * 3 + [FAR] * 3, [0.0] * 6, False),
        ([float("nan")] + [0.0] * 5, [NEAR] * 6, False),
        ([NEAR] * 6, [float("nan")] * 6, False),
    ],
)
def test_rounding_is_what_mlx_lms_own_batch_differs_by(
    differing: Callable[..., None], pages: Sequence[float], mlx_lm: Sequence[float], right: bool
) -> None:
    differing(pages=pages, mlx_lm=mlx_lm)
    assert accepted() is right


def test_the_finer_a_type_the_less_is_rounding(differing: Callable[..., None]) -> None:
    differing(pages=[0.04] * 6, mlx_lm=[0.001] * 6, dtype=mx.bfloat16)
    assert accepted()
    differing(pages=[0.04] * 6, mlx_lm=[0.001] * 6, dtype=mx.float16)
    assert not accepted()


def test_on_a_cpu_in_fp32_nothing_is(differing: Callable[..., None]) -> None:
    differing(pages=[0.002] + [0.0] * 5, mlx_lm=[0.002] * 6, dtype=mx.float32)
    assert not accepted()


@pytest.mark.parametrize("architecture", ["llama bf16", "gemma3 bf16"])
def test_in_half_precision_pages_are_right_and_wrong_kernels_wrong(architecture: str) -> None:
    model = tiny_model(architecture)
    n_kinds = 1 if architecture.startswith("llama") else 2
    right: list[PortableAttention] = [PortableAttention() for _ in range(n_kinds)]
    assert LogitsProbe(model).accepts(pages(architecture, right))
    for wrong in range(n_kinds):
        mixed = [RotatesRows() if i == wrong else one for i, one in enumerate(right)]
        assert not LogitsProbe(model).accepts(pages(architecture, mixed))


def test_mlx_lms_batch_is_not_run_where_pages_differ_little(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(probe, "_Padded", lambda _: pytest.fail("a batch of mlx-lm's was run"))
    one = LogitsProbe(tiny_model("llama bf16"))
    assert one.accepts(pages("llama bf16", [PortableAttention()]))


@pytest.mark.parametrize(
    ("architecture", "sinks", "latent"),
    [("gpt_oss", True, False), ("gemma3", False, False), ("deepseek_v3", False, True)],
)
def test_how_a_model_calls_attention_is_read_without_computing(
    architecture: str, sinks: bool, latent: bool
) -> None:
    model = tiny_model(architecture)
    spec, shapes = read_spec(model), read_shapes(model)
    assert spec is not None
    kinds = page_kinds(spec, shapes)
    assert kinds is not None
    expected = AttentionUse(4, frozenset({sinks}), latent)
    assert attention_use(model, spec, kinds) == [expected] * len(kinds)
