"""Caches of 8 bits: a token's bytes depend on the token alone, and all readers see them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray

from semantic import BlockPool, BlockPoolBatchEngine, CompletedGeneration
from semantic.adapters.mlx.kv_cache.eight_bits import pack, packed_size, unpack, width_of
from semantic.adapters.mlx.kv_cache.paged.attention import PortableAttention
from semantic.adapters.mlx.model.provider import wrap_model
from semantic.adapters.stores.memory import MemoryStore
from semantic.application.cache.agent_notes import end_reason
from semantic.bootstrap import load
from semantic.domain.block_hash import Part
from semantic.domain.errors import InvalidRequestError, UnsupportedModelError
from tests.support.bodies import exported
from tests.support.char_tokenizer import CharTokenizer
from tests.support.eight_bits import EIGHT, EIGHT_BITS
from tests.support.in_pages import SUFFIX, tiny_backend
from tests.support.lanes import more
from tests.support.reference import generate, is_answer
from tests.support.rig import Rig
from tests.support.tiny_models import VOCAB, tiny_model

every_form = pytest.mark.parametrize(
    "name", [*EIGHT_BITS, EIGHT_BITS[0] + SUFFIX, *more(*(one + SUFFIX for one in EIGHT_BITS[1:]))]
)


def text(n_tokens: int, seed: int) -> list[int]:
    return [(seed + i * i * 31 + i // 7 * 13) % VOCAB for i in range(n_tokens)]


def by_hand(numbers: NDArray[np.float32]) -> NDArray[np.float32]:
    """What heads of 64 numbers become, in float64 where the code has float32."""

    def half(given: float) -> float:
        rounded = mx.array(given, mx.float32).astype(mx.bfloat16).astype(mx.float32)
        return cast(float, rounded.item())

    found = np.empty_like(numbers)
    for at in np.ndindex(*numbers.shape[:-1]):
        for first in range(0, numbers.shape[-1], 64):
            group = numbers[at][first : first + 64].astype(np.float64)
            lowest = half(group.min())
            step = half((group.max() - lowest) / 255) or 1.0
            levels = np.clip(np.rint((group - lowest) / step), 0, 255)
            found[at][first : first + 64] = levels * step + lowest
    return found


@pytest.mark.parametrize("width", [64, 128, 192, 576])
def test_heads_are_rounded_to_levels_of_their_groups(width: int) -> None:
    numbers = mx.random.normal((2, 3, 5, width), key=mx.random.key(1)) * 3 + 0.5
    heads = pack(numbers)
    assert heads.shape[-1] == packed_size(width) <= 0.54 * 2 * width
    assert width_of(heads.shape[-1]) == width
    found, expected = np.array(unpack(heads, mx.float32)), by_hand(np.array(numbers))
    # A number between two levels may go either way where float64 decides otherwise.
    assert np.isclose(found, expected, atol=1e-5).mean() > 0.999
    steps = (numbers.max(axis=-1) - numbers.min(axis=-1)).max().item() / 255
    assert np.abs(found - np.array(numbers)).max() < cast(float, steps)


@pytest.mark.parametrize("value", [0.0, 1.0, -3.7, 1e-30, 65504.0])
def test_equal_numbers_stay_as_close_as_bfloat16_is(value: float) -> None:
    found = unpack(pack(mx.full((1, 64), value)), mx.float32)
    assert mx.allclose(found, mx.full((1, 64), value), rtol=2**-8).item()


def test_what_is_not_finite_shows() -> None:
    numbers = mx.ones((1, 128))
    numbers[0, 70] = float("nan")
    found = unpack(pack(numbers), mx.float32)
    assert mx.isfinite(found[0, :64]).all().item()
    assert not mx.isfinite(found[0, 64:]).any().item()


@every_form
def test_answers_are_those_of_mlx_lm_with_rounded_caches(name: str) -> None:
    rig, model = Rig(name), tiny_model(name.removesuffix(SUFFIX))
    asked = [text(n, seed) for seed, n in enumerate((5, 256, 517, 900))]
    uids = [rig.engine.submit(f"agent-{i}", one, max_tokens=16) for i, one in enumerate(asked)]
    done = rig.run()
    for i, (uid, prompt) in enumerate(zip(uids, asked, strict=True)):
        said = done[uid].tokens
        assert is_answer(model, prompt, said, 16)
        again = [*prompt, *said, 3, 1, 4]
        warm = rig.answer(f"agent-{i}", again, 12)
        assert warm.cached_tokens >= len(prompt)
        assert is_answer(model, again, warm.tokens, 12)
    rig.check()


def test_the_reference_rounds() -> None:
    """Else the answers above would say nothing."""
    prompts = [text(400, seed) for seed in range(6)]
    rounded = [generate(tiny_model(EIGHT_BITS[2]), one, 24) for one in prompts]
    exact = [generate(tiny_model(EIGHT_BITS[2].removesuffix(EIGHT)), one, 24) for one in prompts]
    assert rounded != exact


@every_form
def test_a_block_takes_at_most_54_percent(name: str) -> None:
    spec = tiny_backend(name).cache_spec()
    exact = tiny_backend(name.removesuffix(SUFFIX).removesuffix(EIGHT)).cache_spec()
    for mine, theirs in zip(spec.layers, exact.layers, strict=True):
        if mine.kv_heads:  # the model computes in fp32, with twice the bytes of bfloat16
            assert mine.bytes_per_block <= 0.54 * theirs.bytes_per_block / 2
        else:
            assert mine == theirs


@pytest.mark.parametrize("name", [EIGHT_BITS[0], EIGHT_BITS[1]])
def test_buffers_and_pages_store_the_same_bytes(name: str) -> None:
    bodies = []
    for form in (name, name + SUFFIX):
        backend = tiny_backend(form)
        sequence = backend.open(512)
        backend.prefill(sequence, text(300, 1))
        bodies.append(exported(backend, sequence, Part.FULL, 0, 256))
        backend.close(sequence)
    assert bodies[0] == bodies[1]


def test_blocks_of_8_bits_are_in_a_namespace_of_their_own() -> None:
    name = EIGHT_BITS[0]
    packed = tiny_backend(name).layout().name
    assert packed != tiny_backend(name.removesuffix(EIGHT)).layout().name
    assert "in groups of 64" in packed


def test_heads_that_groups_do_not_divide_are_refused() -> None:
    words = "must be 16 for this model, got 8: groups of 64 numbers do not divide its heads of 8"
    with pytest.raises(UnsupportedModelError, match=words):
        wrap_model(tiny_model("llama"), kv_bits=8)
    with pytest.raises(UnsupportedModelError, match=words):
        wrap_model(tiny_model("llama"), attention=lambda _: PortableAttention(), kv_bits=8)


@pytest.mark.parametrize("bits", [4, "8", None, True, 8.0])
def test_other_bits_are_refused_by_the_library(bits: object) -> None:
    with pytest.raises(InvalidRequestError, match="kv_bits must be 8 or 16, got "):
        load(kv_bits=bits)  # type: ignore[arg-type]


def test_a_model_that_keeps_other_caches_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="it has only states"):
        wrap_model(tiny_model("mamba"), kv_bits=8)


def test_a_pool_holds_nearly_twice_the_agents() -> None:
    held = []
    for name in (EIGHT_BITS[0].removesuffix(EIGHT), EIGHT_BITS[0]):
        backend = tiny_backend(name)
        spec = backend.cache_spec()
        pool: BlockPool = BlockPool(spec, max_bytes=8 << 20)
        engine = BlockPoolBatchEngine(backend, CharTokenizer(), pool, spec)
        for number in range(24):
            engine.submit(f"agent-{number}", text(500, number), max_tokens=1)
            while engine.has_work:
                list(engine.step())
        held.append(len(engine.idle_caches.lru_order()))
    assert held[1] >= 1.8 * held[0]


@pytest.mark.parametrize("name", [EIGHT_BITS[0], EIGHT_BITS[1], EIGHT_BITS[5]])
def test_an_agent_moves_between_bits_by_computing_again(name: str) -> None:
    """Its caches of both kinds are in one store, side by side."""
    store = MemoryStore(64 << 20)
    prompt = text(700, 1)
    ends = []
    for bits in (16, 8, 16, 8):
        backend = wrap_model(tiny_model(name.removesuffix(EIGHT)), "one model", kv_bits=bits)
        spec = backend.cache_spec()
        pool: BlockPool = BlockPool(spec, 100 * spec.n_layers)
        engine = BlockPoolBatchEngine(backend, CharTokenizer(), pool, spec, store=store)
        (done,) = run_requests(engine, {"ann": prompt})
        engine.flush()
        assert done.match is not None
        ends.append((end_reason(done.match), done.cached_tokens > 0))
        model = tiny_model(name if bits == 8 else name.removesuffix(EIGHT))
        assert is_answer(model, prompt, done.tokens, 8)
        engine.close(keep_store=True)
    assert [reused for _, reused in ends] == [False, False, True, True]
    assert ends[0][0] == "No cached prefix matches it."
    assert ends[1][0] == "The agent's cache has other bits; see --kv-bits."


def run_requests(
    engine: BlockPoolBatchEngine, prompts: Mapping[str, list[int]]
) -> list[CompletedGeneration]:
    for agent, prompt in prompts.items():
        engine.submit(agent, prompt, max_tokens=8)
    events: list[object] = []
    while engine.has_work:
        events += engine.step_once()
    return [event for event in events if isinstance(event, CompletedGeneration)]


@pytest.mark.parametrize("name", [EIGHT_BITS[0], EIGHT_BITS[1]])
def test_the_store_gets_no_heads_that_are_not_finite(name: str) -> None:
    backend = tiny_backend(name)
    sequence = backend.open(1024)
    backend.prefill(sequence, text(700, 1))
    bodies = {Part.FULL: exported(backend, sequence, Part.FULL, 512, 700)}
    if backend.layout().needs_checkpoint:
        bodies[Part.CHECKPOINT] = backend.export_checkpoint(sequence)
    for part, body in bodies.items():
        assert backend.is_finite(part, body)
        bad = bytearray(body)
        bad[-2:] = np.array([0x7FC0], np.uint16).tobytes()  # the last group's lowest number
        assert not backend.is_finite(part, bytes(bad))
    backend.close(sequence)
