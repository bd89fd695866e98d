"""An engine on fakes, and what its answers must be."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

from semantic.application.cache.idle_caches import IdleCaches
from semantic.application.engine.batch_engine import BlockPoolBatchEngine
from semantic.application.engine.prefill_budget import PrefillBudget
from semantic.domain.services import BlockPool
from semantic.domain.value_objects import (
    CacheKey,
    CompletedGeneration,
    FinishReason,
    LayerSpec,
    ModelCacheSpec,
    SamplingParams,
)
from semantic.ports.generation import EngineEvent
from semantic.ports.store import StorePort
from tests.support.char_tokenizer import CharTokenizer
from tests.support.fake_backend import (
    FULL,
    GROWING_STATE,
    STATE,
    VOCAB,
    FakeBackend,
    solo_answer,
    window,
)
from tests.support.fake_clock import FakeClock
from tests.support.late_reads import ImmediateReads

Event = EngineEvent
Done = CompletedGeneration

EOS = frozenset({3, 50})
GREEDY = SamplingParams()

SPECS: dict[str, tuple[LayerSpec, ...]] = {
    "full": (FULL, FULL),
    "window": (FULL, window(300)),
    "narrow windows": (window(16), FULL, window(1)),
    "state": (FULL, STATE),
    "growing state": (window(128), GROWING_STATE, FULL),
    "window alone": (window(512),),
}


def text_of(seed: int, n: int) -> tuple[int, ...]:
    """A prompt of `n` tokens; those of one seed begin alike."""
    return tuple((seed * 31 + i * i * 7 + i) % VOCAB for i in range(n))


@dataclass(frozen=True)
class Answer:
    """What a request must give when nothing interrupts it."""

    tokens: tuple[int, ...]
    text: str
    reason: FinishReason


@functools.lru_cache(maxsize=4096)
def _solo(
    spec: ModelCacheSpec, prompt: tuple[int, ...], n: int, variant: int, eos: frozenset[int]
) -> tuple[int, ...]:
    return tuple(solo_answer(spec, prompt, n, VARIANTS[variant], eos=eos))


VARIANTS = (
    GREEDY,
    SamplingParams(temperature=0.7, seed=11),
    SamplingParams(repetition_penalty=1.1, repetition_context=7),
    SamplingParams(stop=("A", "B", "C", "xy", "^"), logprobs=2),
    SamplingParams(temperature=1.0, seed=12, logit_bias={4: 2.0}),
)


def expected(
    spec: ModelCacheSpec,
    prompt: Sequence[int],
    max_tokens: int,
    variant: int = 0,
    *,
    eos: frozenset[int] = frozenset(),
) -> Answer:
    """The fake model's answer alone, without caches, cut at end tokens and stop strings."""
    tokens = _solo(spec, tuple(prompt), max_tokens, variant, eos)
    stops = VARIANTS[variant].stop
    decode = CharTokenizer().decode
    for n, token in enumerate(tokens, 1):
        said = decode([t for t in tokens[:n] if t not in eos])
        if token in eos:
            return Answer(tokens[:n], said, "stop")
        begins = [said.find(stop) for stop in stops if stop in said]
        if begins:
            return Answer(tokens[:n], said[: min(begins)], "stop")
    return Answer(tokens, decode(tokens), "length")


@dataclass
class World:
    """Everything an engine needs, small and visible."""

    spec: ModelCacheSpec
    total_blocks: int | None = 100
    max_bytes: int | None = None
    max_batch: int = 8
    eos: frozenset[int] = frozenset()
    largest_chunk: int = 256
    silent_steps: int = 0
    shares: bool = False
    clock: FakeClock = field(default_factory=FakeClock)
    prefix_store: StorePort | None = None

    def __post_init__(self) -> None:
        self.backend = FakeBackend(
            self.spec, clock=self.clock, silent_steps=self.silent_steps, shares=self.shares
        )
        self.pool = BlockPool(self.spec, self.total_blocks, max_bytes=self.max_bytes)
        self.engine = BlockPoolBatchEngine(
            self.backend,
            CharTokenizer(self.eos),
            self.pool,
            self.spec,
            store=self.prefix_store,
            budget=PrefillBudget(largest=self.largest_chunk),
            max_batch=self.max_batch,
            clock=self.clock,
        )
        prefixes = self.engine._prefixes
        if prefixes is not None:
            prefixes._loader._threads = ImmediateReads()

    @property
    def store(self) -> IdleCaches:
        """The idle caches in the pool."""
        return self.engine.idle_caches

    def key(self, agent: str) -> CacheKey:
        return CacheKey(self.backend.model_id, agent)

    def finish(self, most_steps: int = 10_000) -> list[Done]:
        """Run to the end, in single steps, checking the accounts after each."""
        done: list[Done] = []
        for _ in range(most_steps):
            if not self.engine.has_work:
                break
            done += completions(self.engine.step_once())
            self.check(opened=True)
        assert not self.engine.has_work, f"still running after {most_steps} steps"
        return done

    def finish_beside(self, other: str, most_steps: int = 1000) -> list[Done]:
        """The same while `other` holds blocks of the pool that it did not fill."""
        done: list[Done] = []
        for _ in range(most_steps):
            if not self.engine.has_work:
                return done
            done += completions(self.engine.step_once())
            self.check(self.pool.view(other).n_bytes, opened=True)
        raise AssertionError(f"still running after {most_steps} steps")

    def run(self, agent: str, prompt: Sequence[int], max_tokens: int = 5, variant: int = 0) -> Done:
        """One request alone, from beginning to end; its answer is checked."""
        uid = self.engine.submit(agent, prompt, None, max_tokens, sampling=VARIANTS[variant])
        (done,) = [one for one in self.finish() if one.uid == uid]
        answer = expected(self.spec, prompt, max_tokens, variant, eos=self.eos)
        assert done.tokens == answer.tokens
        return done

    def check(self, empty_bytes: int = 0, *, opened: bool = False) -> None:
        """The accounts agree with each other and with the memory that is really held.

        `empty_bytes` are those of blocks that are held without having been filled;
        `opened` says that no request was admitted since the last step.
        """
        self.engine.check_integrity()
        if self.shares:
            return  # the fake copies: `tests/integration/test_pool_forks.py` counts pages
        counted = self.pool.used_bytes - empty_bytes
        assert self.backend.held_bytes <= counted
        if opened or not self.engine.has_work:
            assert self.backend.held_bytes == counted
        if not self.engine.has_work:
            assert self.backend.n_open == 0
            prefixes = self.engine._prefixes
            if prefixes is not None:
                assert not prefixes._states
                assert not prefixes.shared._plans
                assert not prefixes.shared._in_flight
                assert not prefixes.shared._common._live
                assert not prefixes.shared._common._groups

    def forget_all(self) -> None:
        for key in self.store.lru_order():
            assert self.engine.forget(key.agent_id, tenant=key.tenant)
        assert self.store.lru_order() == ()


def world(
    kind: str = "full", columns: int = 50, *, max_batch: int = 8, largest_chunk: int = 256
) -> World:
    """A world of one of SPECS, with room for `columns` blocks of every layer."""
    spec = ModelCacheSpec(SPECS[kind])
    return World(spec, columns * spec.n_layers, max_batch=max_batch, largest_chunk=largest_chunk)


def completions(events: Sequence[Event]) -> list[Done]:
    return [event for event in events if isinstance(event, CompletedGeneration)]
