"""In a lane a sequence's log-probabilities have the same bits alone and beside any others."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import cast

import mlx.core as mx
import pytest
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear

from semantic import BlockPool, BlockPoolBatchEngine
from semantic.adapters.mlx import kernel_files
from semantic.adapters.mlx.backend import MLXBackend
from semantic.adapters.mlx.batch.batch_rows import BatchRows
from semantic.adapters.mlx.kernel_files import KernelFolder
from semantic.adapters.mlx.kv_cache.contiguous.layers import ContiguousLayers
from semantic.adapters.mlx.kv_cache.forms import LayerCache
from semantic.adapters.mlx.kv_cache.model_spec import read_shapes, read_spec
from semantic.adapters.mlx.kv_cache.paged.attention import DecodeStep, PortableAttention
from semantic.adapters.mlx.model import lanes
from semantic.adapters.mlx.model.joined import computing
from semantic.adapters.mlx.model.provider import wrap_model
from semantic.adapters.mlx.model.row_layers import parts_of
from semantic.domain.value_objects import ExactBatch, Lane
from tests.support.char_tokenizer import CharTokenizer
from tests.support.lanes import THOROUGH
from tests.support.one_batch import said_by, same_bits
from tests.support.tiny_models import VOCAB, build, randomize

LENGTHS = (300, 20, 70, 5, 257, 33, 12, 256, 290)
BESIDE = (1, 2, 8)
STEPS = 8
KINDS = ("llama", "gemma3", "qwen3_next", "deepseek_v3", "moe")
"""Full attention, windows, states, latents and experts."""


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    if not THOROUGH:
        monkeypatch.setattr(lanes, "_COMPARED", (2, 3, 8))
        monkeypatch.setattr(lanes, "_PROMPT", 40)


def model_of(name: str) -> Module:
    """A model of its own, as a lane changes its layers."""
    model = build(name)
    randomize(model)
    model.eval()
    return model


def backend_of(
    model: Module, attention: PortableAttention | None = None, exact_batch: ExactBatch = "on"
) -> MLXBackend:
    """In pages with that attention, else in contiguous caches."""
    chosen = None if attention is None else lambda _: attention
    return wrap_model(model, "lanes", attention=chosen, exact_batch=exact_batch)


def prompts() -> list[list[int]]:
    draw = random.Random(1)
    return [[draw.randrange(VOCAB) for _ in range(length)] for length in LENGTHS]


def same_beside(backend: MLXBackend) -> list[bool]:
    """Whether each token of the first prompt has its bits alone, beside so many others."""
    alone, *others = (said_by(backend, prompts()[: n + 1], STEPS, top=2)[0] for n in (0, *BESIDE))
    return [same for one in others for same in same_bits(one, alone)]


@pytest.mark.parametrize("in_pages", [False, True], ids=["contiguous", "pages"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_sequence_has_the_same_bits_beside_any_others(kind: str, in_pages: bool) -> None:
    backend = backend_of(model_of(kind), PortableAttention() if in_pages else None)
    assert backend.in_pages == in_pages
    assert backend.lane.problem == ""
    assert all(same_beside(backend))


def test_steps_of_more_rows_than_the_lane_has_are_several() -> None:
    model = model_of("llama")
    spec = read_spec(model)
    assert spec is not None
    layers = ContiguousLayers(model, spec, read_shapes(model), [True] * spec.n_layers)
    calls: list[int] = []

    class Counted(Module):
        def __call__(self, tokens: mx.array, cache: object) -> mx.array:
            calls.append(len(tokens))
            return cast("Callable[..., mx.array]", model)(tokens, cache=cache)

    rows = BatchRows(Counted(), Lane(most=2))  # type: ignore[no-untyped-call]
    rows.join([cast("list[LayerCache]", layers.empty(256)) for _ in range(5)])
    assert rows.logits(mx.zeros((5,), mx.uint32)).shape == (5, VOCAB)
    rows.leave(1)
    rows.logits(mx.zeros((4,), mx.uint32))
    assert calls == [2, 2, 1, 1, 2, 1]


def test_a_large_step_of_auto_is_outside_the_lane_and_its_answers_say_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, one in (("_MOST_OUTSIDE", 2), ("_MOST_PLAIN", -1), ("MOST_COST", math.inf)):
        monkeypatch.setattr(lanes, name, one)
    backend = backend_of(model_of("llama"), PortableAttention(), "auto")
    assert (backend.lane.most, backend.lane.splits, backend.lane.problem) == (2, False, "")
    spec = backend.cache_spec()
    engine = BlockPoolBatchEngine(backend, CharTokenizer(), BlockPool(spec, 400), spec)
    for n_requests in (1, 2, 3, 2):
        for number in range(n_requests):
            engine.submit(f"agent-{number}", prompts()[number][:20], max_tokens=4)
        assert [done.exact for done in engine.step()] == [n_requests < 3] * n_requests


def test_a_lane_survives_an_engine_that_is_built_again() -> None:
    model = model_of("llama")
    first = backend_of(model, PortableAttention())
    again = backend_of(model, PortableAttention())
    assert again.lane == first.lane
    assert all(same_beside(again))


def test_later_loads_make_the_same_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_files, "_own", [KernelFolder(tmp_path)])
    first = backend_of(model_of("llama"), PortableAttention())
    (file,) = (tmp_path / "notes").iterdir()
    probed = lanes._Probe.choosing
    monkeypatch.setattr(lanes._Probe, "choosing", lambda _: pytest.fail("chooses again"))
    again = backend_of(model_of("llama"), PortableAttention())
    assert again.lane == first.lane
    assert all(same_beside(again))
    monkeypatch.setattr(lanes._Probe, "choosing", probed)
    lane = '{"lane": {}, "parts": {"x": %s}}'
    damaged = ["{", "[]", '{"lane": {}}', '{"lane": {"most": "x"}, "parts": {}}']
    for text in (*damaged, *(lane % sizes for sizes in ("[]", "[0]", "[2, 65]", "3"))):
        file.write_text(text)
        assert backend_of(model_of("llama"), PortableAttention()).lane == first.lane
        assert file.read_text() != text
    backend_of(model_of("llama"))
    backend_of(model_of("qwen2"), PortableAttention())
    assert len(list((tmp_path / "notes").iterdir())) == 3


@pytest.mark.parametrize(("mode", "problem"), [("off", "is off"), ("auto", "without pages")])
def test_no_lane(mode: ExactBatch, problem: str) -> None:
    backend = backend_of(model_of("llama"), exact_batch=mode)
    assert problem in backend.lane.problem
    assert not any(parts_of(layer) for layer in computing(backend.model))


class _ByNumber(Linear):
    """A product whose bits depend on the number of rows."""

    def __call__(self, x: mx.array) -> mx.array:
        found = super().__call__(x)
        return found * (1 + 1e-6 * x.shape[0])


class _ByPlace(Linear):
    """A product whose bits depend on the place of a row, from the last one on."""

    def __call__(self, x: mx.array) -> mx.array:
        found = super().__call__(x)
        return found * (1 + 1e-6 * mx.arange(len(x), 0, -1).reshape(-1, 1, 1))


def planted(kind: type[Linear]) -> Module:
    model = model_of("llama")
    for layer in model.layers:
        layer.mlp.down_proj.__class__ = kind
    return model


def test_classes_of_planted_products() -> None:
    for kind in (_ByNumber, _ByPlace):
        found = lanes.row_classes(planted(kind))
        (one,) = (one for one in found if kind.__name__ in one.layer)
        assert all(len(numbers) == 1 for numbers in one.classes)
        assert one.classes[0] == (1,)
    assert len(one.classes) == 1


@pytest.mark.parametrize("kind", [_ByNumber, _ByPlace])
def test_a_planted_product_computes_one_row_at_a_time(kind: type[Linear]) -> None:
    assert not all(same_beside(backend_of(planted(kind), exact_batch="off")))
    backend = backend_of(planted(kind))
    assert backend.lane.problem == ""
    assert all(same_beside(backend))


class _SeesOthers(PortableAttention):
    """Attention that adds a little of all rows to each."""

    def attend(self, step: DecodeStep) -> mx.array:
        found = super().attend(step)
        return found + 1e-6 * found.sum(axis=0, keepdims=True)


def test_planted_attention_has_no_lane() -> None:
    backend = backend_of(model_of("llama"), _SeesOthers())
    assert backend.in_pages
    assert backend.lane.problem == "steps round differently with each number of rows"
    assert not all(same_beside(backend))
