"""Puts agents of any length into an engine, or into mlx-lm's own caches, without prefill.

Keys and values are random: the cost of a decode step depends on their number, not on their values.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import semantic.adapters.mlx  # isort: skip  # noqa: F401  loads OpenBLAS before MLX
import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import KVCache

from semantic import AgentBlocks, BlockPool, BlockPoolBatchEngine
from semantic.adapters.mlx.backend import MLXBackend
from semantic.adapters.mlx.kv_cache.contiguous.cache import BufferRange, KVBuffer
from semantic.adapters.mlx.model.provider import wrap_model
from semantic.application.cache.idle_caches import IdleCaches
from semantic.application.engine.prefill_budget import PrefillBudget
from semantic.domain.value_objects import (
    BLOCK_TOKENS,
    CacheKey,
    ModelCacheSpec,
    TokenEvent,
    whole_blocks,
)
from semantic.ports.store import StorePort
from tests.support.char_tokenizer import CharTokenizer


@dataclass(frozen=True, slots=True)
class FirstToken:
    """An agent's first token, the seconds to it, and the seconds of a decode step after it."""

    token: int
    ttft: float
    step: float


@dataclass
class Rig:
    """An engine and its parts."""

    backend: MLXBackend
    spec: ModelCacheSpec
    pool: BlockPool
    store: IdleCaches
    engine: BlockPoolBatchEngine

    @classmethod
    def build(
        cls,
        model: Module,
        *,
        target_gap: float = 0.25,
        store: StorePort | None = None,
        model_id: str | None = None,
    ) -> Rig:
        """An engine around `model` whose pool is never short.

        What it keeps in `store` is found by another rig only with the same `model_id`.
        """
        backend = wrap_model(model, model_id)
        spec = backend.cache_spec()
        pool: BlockPool = BlockPool(spec, max_bytes=1 << 40)
        engine = BlockPoolBatchEngine(
            backend,
            CharTokenizer(),
            pool,
            spec,
            store=store,
            budget=PrefillBudget(target_gap, largest=backend.best_chunk),
        )
        return cls(backend, spec, pool, engine.idle_caches, engine)

    def add_idle_agent(self, agent_id: str, n_tokens: int, *, first: int = 0) -> tuple[int, ...]:
        """Give `agent_id` an idle cache of `n_tokens` tokens; returns their ids.

        Agents with another `first` token, below 90, have no prefix in common.
        """
        tokens = tuple((first + i) % 90 for i in range(n_tokens))
        blocks: AgentBlocks = AgentBlocks(
            agent_id, token_ids=tokens, model_id=self.backend.model_id
        )
        chains = self.pool.allocate_layers(self.spec.blocks_for(n_tokens), agent_id)
        for layer, chain in zip(self.spec.layers, chains, strict=True):
            shape = (1, layer.kv_heads, len(chain) * BLOCK_TOKENS)
            buffer = KVBuffer(
                mx.random.normal((*shape, layer.k_head_dim)),
                mx.random.normal((*shape, layer.v_head_dim)),
            )
            mx.eval(buffer.k, buffer.v)
            for i, block in enumerate(chain):
                block.start = i * BLOCK_TOKENS
                stop = min(block.start + BLOCK_TOKENS, n_tokens)
                block.token_count = stop - block.start
                block.layer_data = BufferRange(buffer, block.start, stop)
                blocks.add_block(block)
        self.store.put(CacheKey(self.backend.model_id, agent_id), blocks)
        return tokens

    def start_agents(self, lengths: list[int], *, max_tokens: int = 100_000) -> None:
        """Agents of these lengths, all decoding."""
        for i, length in enumerate(lengths):
            tokens = self.add_idle_agent(f"agent-{i}", length)
            self.engine.submit(f"agent-{i}", (*tokens, 1), max_tokens=max_tokens)
        self.settle(2)

    def first_token(self, agent_id: str, prompt: Sequence[int]) -> FirstToken:
        """Let the agent answer, and measure decode steps after that; then forget it."""
        begin = time.perf_counter()
        uid = self.engine.submit(agent_id, prompt, max_tokens=1000)
        said: list[TokenEvent] = []
        while not said:
            said = [e for e in self.engine.step_once() if isinstance(e, TokenEvent)]
        ttft = time.perf_counter() - begin
        self.step()
        step = statistics.median(self.step() for _ in range(3))
        self.engine.cancel(uid)
        self.settle(1)
        return FirstToken(said[0].token, ttft, step)

    def settle(self, steps: int) -> None:
        """Run some steps that are not measured."""
        for _ in range(steps):
            self.step()

    def step(self) -> float:
        """Seconds of one engine step, with everything that it started finished."""
        started = time.perf_counter()
        self.engine.step_once()
        mx.synchronize(self.backend.stream)
        return time.perf_counter() - started


class PaddedBatch:
    """mlx-lm's BatchGenerator with its own caches, holding sequences of given lengths."""

    def __init__(self, model: Module, spec: ModelCacheSpec) -> None:
        self._generator = BatchGenerator(model, completion_batch_size=64, prefill_batch_size=64)
        self._spec = spec

    def add(self, lengths: list[int], *, max_tokens: int = 100_000) -> None:
        """Insert sequences with random caches of these lengths."""
        caches = [self._caches(length) for length in lengths]
        self._generator.insert([[1]] * len(lengths), [max_tokens] * len(lengths), caches=caches)

    def add_prompt(self, tokens: list[int]) -> None:
        """Insert a prompt to prefill."""
        self._generator.insert([tokens], [100])

    @property
    def stream(self) -> mx.Stream:
        """The stream of the generator."""
        return cast(mx.Stream, self._generator.stream)

    def advance(self) -> int:
        """One step; how many sequences gave a token."""
        return len(self._generator.next()[1])

    def step(self) -> float:
        """Seconds of one step, with everything that it started finished."""
        started = time.perf_counter()
        self.advance()
        mx.synchronize(self.stream)
        return time.perf_counter() - started

    def _caches(self, n_tokens: int) -> list[KVCache]:
        caches = []
        for layer in self._spec.layers:
            cache = KVCache()
            shape = (1, layer.kv_heads, whole_blocks(n_tokens))
            cache.keys = mx.random.normal((*shape, layer.k_head_dim))
            cache.values = mx.random.normal((*shape, layer.v_head_dim))
            cache.offset = n_tokens
            mx.eval(cache.keys, cache.values)
            caches.append(cache)
        return caches
