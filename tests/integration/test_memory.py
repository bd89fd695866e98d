"""Nothing leaks: blocks, bytes and MLX's own memory come back."""

from __future__ import annotations

import gc
import random

import mlx.core as mx
import pytest

from semantic import CompletedGeneration
from semantic.adapters.mlx.kv_cache.contiguous.cache import BufferRange, SequenceCache
from tests.support.lanes import examples
from tests.support.own_process import in_own_process
from tests.support.pools import available
from tests.support.rig import Rig
from tests.support.tiny_models import VOCAB


@pytest.mark.process
def test_many_generations_return_every_block_and_every_byte() -> None:
    in_own_process("tests.integration.test_memory:many_generations")


def many_generations() -> None:
    """All that they took comes back, and MLX holds no byte more."""
    rig = Rig("gemma3", chunk=64)
    draw = random.Random(1)

    def generations(n: int) -> None:
        left = n
        while left or rig.engine.has_work:
            if left and draw.random() < 0.3:
                left -= 1
                prompt = [draw.randrange(VOCAB) for _ in range(draw.choice([3, 100, 300]))]
                rig.engine.submit(f"agent-{left % 7}", prompt, max_tokens=draw.randrange(1, 12))
            rig.engine.step_once()
            rig.check()
        # mlx-lm keeps the tokens of the answer that was in a batch last: always the same one.
        rig.engine.submit("last", [1, 2, 3], max_tokens=2)
        assert len(list(rig.engine.step())) == 1
        rig.forget_all()

    generations(10)  # whatever is allocated once and kept, is allocated now
    gc.collect()
    mx.clear_cache()
    free, active = available(rig.pool), mx.get_active_memory()
    generations(examples(30, thorough=300))
    gc.collect()
    mx.clear_cache()
    assert rig.pool.used_blocks == 0
    assert available(rig.pool) == free
    assert mx.get_active_memory() <= active


def test_a_window_never_holds_more_than_one_block_beyond_itself() -> None:
    rig = Rig("gemma3", chunk=200)
    rig.engine.submit("ann", [i % VOCAB for i in range(1000)], max_tokens=40)
    windows = [layer for layer in rig.spec.layers if layer.window]
    while rig.engine.has_work:
        rig.engine.step_once()
        view = rig.pool.view("ann")
        for layer, blocks in zip(rig.spec.layers, view.blocks_per_layer, strict=True):
            if layer.window:
                assert blocks <= -(-layer.window // 256) + 1
        rig.check()
    assert windows


def test_joining_and_leaving_copies_no_other_sequence() -> None:
    rig = Rig("llama", chunk=4096)
    rig.engine.submit("stays", [1] * 600, max_tokens=200)
    for _ in range(5):
        rig.engine.step_once()
    (stays,) = rig.backend.sequences()
    before = [id(cache) for cache in stays]
    joins = rig.engine.submit("joins", [2] * 300, max_tokens=5)
    done: list[str] = []
    while joins not in done:
        done += [
            event.uid for event in rig.engine.step_once() if isinstance(event, CompletedGeneration)
        ]
    assert [id(cache) for cache in rig.backend.sequences()[0]] == before


def test_finishing_and_resuming_move_no_array() -> None:
    rig = Rig("llama")
    first = rig.answer("ann", [3] * 500, 10)
    assert first.blocks is not None
    kept = {
        id(block.layer_data.buffer)
        for block in first.blocks.all_blocks()
        if isinstance(block.layer_data, BufferRange)
    }
    assert len(kept) == rig.spec.n_layers
    rig.engine.submit("ann", [*first.blocks.token_ids, 5], max_tokens=5)
    rig.engine.step_once()
    (caches,) = rig.backend.sequences()
    assert {id(cache.buffer) for cache in caches if isinstance(cache, SequenceCache)} == kept
