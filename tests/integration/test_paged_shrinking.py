"""Pools of pages that shrink while sequences decode: pages move, and no token changes."""

from __future__ import annotations

from typing import cast

import pytest

from semantic import BlockPool, BlockPoolBatchEngine
from semantic.adapters.mlx.kv_cache.paged.layers import PagedLayers
from semantic.domain.value_objects import CompletedGeneration
from tests.support.char_tokenizer import CharTokenizer
from tests.support.in_pages import IN_PAGES, tiny_backend
from tests.support.rig import FixedBudget
from tests.support.tiny_models import VOCAB


@pytest.mark.parametrize("name", IN_PAGES)
def test_pools_shrink_between_steps_and_no_token_changes(name: str) -> None:
    def answers(*, shrinks: bool) -> tuple[list[tuple[int, ...]], list[int]]:
        backend = tiny_backend(name)
        spec = backend.cache_spec()
        pool: BlockPool = BlockPool(spec, 400)
        engine = BlockPoolBatchEngine(backend, CharTokenizer(), pool, spec, budget=FixedBudget(64))
        sizes: list[int] = []
        said: list[tuple[int, ...]] = []
        for turn in range(2):
            for n in range(5):
                prompt = [(n * 7 + i * i) % VOCAB for i in range(300 + 40 * n + 90 * turn)]
                engine.submit(f"agent-{n}", prompt, max_tokens=6 + 5 * n)
            step = 0
            while engine.has_work:
                events = engine.step_once()
                said += [e.tokens for e in events if isinstance(e, CompletedGeneration)]
                step += 1
                if shrinks and step % 5 == 0:
                    before = sum(one.nbytes for one in cast(PagedLayers, backend._layers).pools)
                    engine.evict_idle(1)
                    engine.check_integrity()
                    after = sum(one.nbytes for one in cast(PagedLayers, backend._layers).pools)
                    assert after <= before
                    sizes.append(after)
        assert engine.evict_idle(1, room=0), "nothing runs: all can go"
        assert not any(one.nbytes for one in cast(PagedLayers, backend._layers).pools)
        return said, sizes

    said, sizes = answers(shrinks=True)
    assert said == answers(shrinks=False)[0]
    assert min(sizes) < max(sizes)


def test_unused_pages_go_before_idle_caches() -> None:
    backend = tiny_backend(IN_PAGES[0])
    spec = backend.cache_spec()
    pool: BlockPool = BlockPool(spec, 400)
    engine = BlockPoolBatchEngine(backend, CharTokenizer(), pool, spec)
    for name in ("one", "other"):
        engine.submit(name, [i * len(name) % VOCAB for i in range(700)], max_tokens=2)
        while engine.has_work:
            list(engine.step())
    pools = cast(PagedLayers, backend._layers).pools
    engine.forget("other")
    assert engine.evict_idle(1)
    assert [key.agent_id for key in engine.idle_caches.lru_order()] == ["one"]
    assert all(one.n_pages == one.n_used for one in pools)

    assert engine.evict_idle(1), "none is unused"
    assert not engine.idle_caches.lru_order()
