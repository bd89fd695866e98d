"""An engine thread on fakes, and listeners that remember what they heard."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from semantic.adapters.stores.memory import MemoryStore
from semantic.application.engine.admission import QueueLimits
from semantic.application.engine.batch_engine import BlockPoolBatchEngine
from semantic.application.engine.engine_thread import EngineThread
from semantic.application.engine.prefill_budget import PrefillBudget
from semantic.application.engine.submission import RequestHandle, Submission
from semantic.domain.value_objects import (
    CompletedGeneration,
    ModelCacheSpec,
    SampledToken,
    SequenceId,
    TokenEvent,
)
from semantic.ports.generation import Clock
from semantic.ports.store import StorePort
from tests.support.char_tokenizer import CharTokenizer
from tests.support.fake_backend import FakeBackend
from tests.unit.application.world import SPECS, VARIANTS, Done, Event, World, expected, text_of

PATIENCE = 60.0
"""Seconds after which something that should happen is taken never to."""

FakeEngine = BlockPoolBatchEngine


class Bug(Exception):  # noqa: N818  it stands for what is not expected
    """What is not expected."""


class Panic(BaseException):
    """What a library that is written in Rust raises when it panics: no Exception."""


class FragileBackend(FakeBackend):
    """Raises `breaks` in its next computation, once."""

    breaks: BaseException | None = None

    def decode(self) -> list[SampledToken]:
        self._break()
        return super().decode()

    def prefill(self, sequence: SequenceId, tokens: Sequence[int]) -> None:
        self._break()
        super().prefill(sequence, tokens)

    def _break(self) -> None:
        error, self.breaks = self.breaks, None
        if error is not None:
            raise error


class FragileWorld(World):
    """A world whose backend can break."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.backend: FragileBackend = FragileBackend(self.spec, clock=self.clock)
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


@dataclass
class Heard:
    """What a listener got of one order, call by call."""

    order: Submission
    variant: int = 0
    raises: bool = False
    calls: list[list[Event]] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)

    def __call__(self, events: Sequence[Event]) -> None:
        assert not self.ended.is_set(), "heard of an order after its end"
        self.calls.append(list(events))
        if isinstance(events[-1], CompletedGeneration):
            self.ended.set()
        if self.raises:
            raise Bug("a listener broke")

    @property
    def events(self) -> list[Event]:
        return [event for call in self.calls for event in call]

    @property
    def done(self) -> Done:
        """How it ended, which must be soon."""
        assert self.ended.wait(PATIENCE), "it never ended"
        (done,) = [event for event in self.events if isinstance(event, CompletedGeneration)]
        return done

    def check(self, spec: ModelCacheSpec) -> Done:
        """Its answer is that of the model alone, as far as it goes."""
        done = self.done
        ended = done.finish_reason in ("stop", "length")
        most = self.order.max_tokens if ended else max(1, len(done.tokens))
        assert not isinstance(self.order.prompt, str)
        answer = expected(spec, self.order.prompt, most, self.variant)
        told = [event.token for event in self.events if isinstance(event, TokenEvent)]
        assert list(done.tokens) == told
        assert done.tokens == answer.tokens[: len(done.tokens)]
        if ended:
            assert (done.tokens, done.text) == (answer.tokens, answer.text)
        return done


class Life:
    """An engine thread, the worlds it went through and what it reported."""

    def __init__(
        self,
        kind: str = "full",
        *,
        columns: int = 50,
        max_batch: int = 8,
        limits: QueueLimits | None = None,
        store: StorePort | None = None,
        rebuilds: bool = True,
        build: Callable[[FakeEngine], FakeEngine] = lambda engine: engine,
        rebuild: Callable[[FakeEngine], FakeEngine] = lambda engine: engine,
        clock: Clock = time.monotonic,
    ) -> None:
        self.spec = ModelCacheSpec(SPECS[kind])
        self.store = store or MemoryStore(1 << 30)
        self.world = FragileWorld(
            self.spec, columns * self.spec.n_layers, max_batch=max_batch, prefix_store=self.store
        )
        self.worlds = [self.world]
        self.failures: list[Exception] = []
        self._build, self._rebuild = build, rebuild
        self.thread: EngineThread = EngineThread(
            lambda: self._build(self.world.engine),
            self._again if rebuilds else None,
            limits,
            clock=clock,
            on_failure=self.failures.append,
        )

    def _again(self) -> FakeEngine:
        self.world = replace(self.world)
        self.worlds.append(self.world)
        return self._rebuild(self.world.engine)

    def order(
        self, agent: str, seed: int = 1, n: int = 30, max_tokens: int = 5, variant: int = 0
    ) -> Submission:
        return Submission(agent, text_of(seed, n), max_tokens, VARIANTS[variant])

    def ask(
        self,
        agent: str,
        seed: int = 1,
        n: int = 30,
        max_tokens: int = 5,
        *,
        variant: int = 0,
        raises: bool = False,
    ) -> tuple[RequestHandle, Heard]:
        heard = Heard(self.order(agent, seed, n, max_tokens, variant), variant, raises)
        return self.thread.submit(heard.order, heard), heard

    @contextmanager
    def held(self) -> Iterator[None]:
        """The thread is busy between two steps, from the beginning to the end."""
        busy, release = threading.Event(), threading.Event()

        def hold(_: FakeEngine) -> None:
            busy.set()
            assert release.wait(PATIENCE)

        held = self.thread.call(hold)
        assert busy.wait(PATIENCE)
        try:
            yield
            assert not held.done(), "it went on before it was let go"
        finally:
            release.set()

    def steps(self, n: int = 1) -> None:
        """Return after `n` more steps, at least."""
        for _ in range(n):
            self.thread.call(lambda _: None).result(PATIENCE)


@contextmanager
def running(life: Life) -> Iterator[Life]:
    """The life begins, and ends in order."""
    life.thread.start()
    life.thread.ready.result(PATIENCE)
    try:
        yield life
    finally:
        life.thread.stop(drain=False)
