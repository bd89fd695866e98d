"""The sides of the GPU benchmark: our engine and mlx-lm's BatchGenerator.

Each is driven end to end, token by token, as by a server. Caches are real: prompts are prefilled,
not synthesized.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import cast

import semantic.adapters.mlx  # isort: skip  # noqa: F401  loads OpenBLAS before MLX
import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import make_prompt_cache

from semantic import BlockPool, BlockPoolBatchEngine
from semantic.adapters.mlx.backend import MLXBackend
from semantic.adapters.mlx.model.provider import wrap_model
from semantic.application.engine.prefill_budget import PrefillBudget
from semantic.domain.value_objects import BLOCK_TOKENS, TokenEvent
from tests.support.char_tokenizer import CharTokenizer

CHUNK = 2048
MOST_TOKENS = 400
"""Tokens of an answer: no sequence ends during the measurement."""
MOST_AGENTS = 128
_ANY_GAP = 30.0
"""Seconds: prefill is not measured, so latency does not matter."""

Caches = list[object]


def prompt(length: int, number: int, vocab: int) -> list[int]:
    """A prompt that shares no prefix with another."""
    return [(number * 7919 + i * i * 31 + i) % (vocab - 1) for i in range(length)]


class Ours:
    """Our engine, with a pool for sequences of these lengths and their answers."""

    def __init__(
        self,
        model: Module,
        lengths: Sequence[int],
        vocab: int,
        *,
        backend: MLXBackend | None = None,
        any_form: bool = False,
    ) -> None:
        self.backend = backend or wrap_model(model, "benchmark")
        if not (self.backend.in_pages or any_form or backend is not None):
            raise SystemExit("caches are not in pages: the kernels do not work on this device")
        spec = self.backend.cache_spec()
        columns = sum(-(-(length + MOST_TOKENS) // BLOCK_TOKENS) + 1 for length in lengths)
        self.pool_bytes = columns * sum(layer.bytes_per_block for layer in spec.layers)
        pool: BlockPool = BlockPool(spec, max_bytes=self.pool_bytes)
        budget = PrefillBudget(_ANY_GAP, largest=self.backend.best_chunk)
        self.engine: BlockPoolBatchEngine = BlockPoolBatchEngine(
            self.backend, CharTokenizer(), pool, spec, budget=budget, max_batch=MOST_AGENTS
        )
        self._vocab = vocab
        self.said: dict[str, list[int]] = {}
        self._uids: dict[str, str] = {}
        self._asked: dict[str, list[int]] = {}

    def start(self, lengths: Sequence[int]) -> None:
        """Agents with prompts of these lengths, all decoding."""
        for number, length in enumerate(lengths):
            self.join(f"agent-{number}", prompt(length, number, self._vocab))
        while any(not self.said[uid] for uid in self._uids.values()):
            self.step()

    def join(self, agent: str, tokens: Sequence[int]) -> None:
        """Add an agent, from the next step on."""
        uid = self.engine.submit(agent, list(tokens), max_tokens=MOST_TOKENS)
        self._uids[agent] = uid
        self._asked[agent] = list(tokens)
        self.said[uid] = []

    def leave(self, agent: str) -> list[int]:
        """Remove an agent; returns the tokens that its cache holds."""
        uid = self._uids.pop(agent)
        self.engine.cancel(uid)
        return [*self._asked[agent], *self.said[uid]]

    def answer(self, agent: str) -> list[int]:
        """The agent's answer so far."""
        return self.said[self._uids[agent]]

    def step(self) -> None:
        """One step of the engine."""
        for event in self.engine.step_once():
            if isinstance(event, TokenEvent):
                self.said[event.uid].append(event.token)

    def end(self) -> None:
        """Remove all agents."""
        for agent in list(self._uids):
            self.leave(agent)
        self.step()


class Theirs:
    """mlx-lm's BatchGenerator with its own caches; prompts are computed one by one before."""

    def __init__(self, model: Module, vocab: int) -> None:
        self._model = model
        self._vocab = vocab
        self._generator = BatchGenerator(
            model,
            max_tokens=MOST_TOKENS * 4,
            completion_batch_size=MOST_AGENTS,
            prefill_batch_size=64,
        )
        self._uids: dict[str, int] = {}
        self._agents: dict[int, str] = {}
        self.said: dict[str, list[int]] = {}

    def start(self, lengths: Sequence[int]) -> None:
        """Agents with prompts of these lengths, all decoding."""
        for number, length in enumerate(lengths):
            tokens = prompt(length, number, self._vocab)
            self.join(f"agent-{number}", self.prefilled(tokens[:-1]), tokens[-1])
        while any(not said for said in self.said.values()):
            self.step()

    def prefilled(self, tokens: Sequence[int]) -> Caches:
        """Caches that hold `tokens`."""
        caches = cast(Caches, make_prompt_cache(self._model))
        with mx.stream(self._stream):
            for at in range(0, len(tokens), CHUNK):
                self._model(mx.array([list(tokens[at : at + CHUNK])]), cache=caches)
                mx.eval([cast(_Evaluated, cache).state for cache in caches])
        mx.clear_cache()
        return caches

    def join(self, agent: str, caches: Caches, last_token: int) -> None:
        """Add an agent."""
        (uid,) = self._generator.insert([[last_token]], [MOST_TOKENS * 4], caches=[caches])
        self._uids[agent], self._agents[uid] = uid, agent
        self.said[agent] = []

    def leave(self, agent: str) -> Caches:
        """Remove an agent; its caches are kept."""
        uid = self._uids.pop(agent)
        removed = self._generator.remove([uid], return_prompt_caches=True)
        return cast(Caches, removed[uid][0])

    def step(self) -> None:
        """One step of the generator."""
        for one in self._generator.next()[1]:
            self.said[self._agents[one.uid]].append(one.token)

    @property
    def _stream(self) -> mx.Stream:
        return cast(mx.Stream, self._generator.stream)


class _Evaluated:
    state: object


def milliseconds(step: Callable[[], None], n: int) -> list[float]:
    """Of each of `n` steps."""
    times = []
    for _ in range(n):
        begin = time.perf_counter()
        step()
        times.append((time.perf_counter() - begin) * 1e3)
    return times
