"""With a store behind the engine that is small, forgetful and sometimes wrong: the solo answers.

The engine is killed and started again at any moment, agents fork, bodies cannot be exported, read
or believed; no answer changes and no request fails for it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from semantic.adapters.stores.memory import MemoryStore
from semantic.domain.block_hash import BlockKey
from semantic.domain.errors import BackendError, CacheReconstructionError, InvalidRequestError
from semantic.domain.stored import BlockHeader, BlockRead, StoredBlock
from tests.support.lanes import examples
from tests.support.late_reads import LateReads
from tests.unit.application.test_engine_machine import (
    EngineMachine,
    Setup,
    agents,
    new_tokens,
    setups,
    variants,
)
from tests.unit.application.world import text_of


class Unreliable(MemoryStore):
    """Drops what it is given, and cannot read what it has, at random."""

    def __init__(self, max_bytes: int, *, drops: float, fails: float) -> None:
        super().__init__(max_bytes)
        self.drops = drops
        self.fails = fails
        self.draw = random.Random(max_bytes)

    def put(self, block: StoredBlock) -> bool:
        return self.draw.random() >= self.drops and super().put(block)

    def resident(self, headers: Sequence[BlockHeader]) -> dict[BlockKey, bytes | memoryview]:  # noqa: ARG002
        return {}

    def read_into(self, reads: Sequence[BlockRead]) -> Sequence[bool]:
        proven = list(super().read_into(reads))
        for i, read in enumerate(reads):
            if self.draw.random() < self.fails:
                for target in read.targets:
                    target.cast("B")[:] = b"\xa5" * target.nbytes
                proven[i] = False
        return proven


class StoredEngineMachine(EngineMachine):
    """Submits, steps, cancels and forgets as without a store; and restarts, forks, breaks."""

    store: Unreliable
    reads: LateReads

    @initialize(
        setup=setups,
        max_bytes=st.sampled_from([1 << 30, 400_000, 60_000]),
        drops=st.sampled_from([0.0, 0.2]),
        fails=st.sampled_from([0.0, 0.2]),
    )
    def make_with_store(self, setup: Setup, max_bytes: int, drops: float, fails: float) -> None:
        super().make(setup)
        self.store = Unreliable(max_bytes, drops=drops, fails=fails)
        self.restart()

    def make(self, setup: Setup) -> None:
        """See `make_with_store`."""

    @rule()
    def restart(self) -> None:
        """Killed in the middle of whatever it does, and started again."""
        self.asked, self.done = {}, {}
        self.world = replace(self.world, prefix_store=self.store)
        prefix_store = self.world.engine._prefixes
        assert prefix_store is not None
        self.reads = prefix_store._loader._threads = LateReads()
        # When nothing else can be done, the engine waits until something is read.
        prefix_store._loader.wait = lambda *_: self.reads.arrive(1)  # type: ignore[method-assign]

    @rule(most=st.sampled_from([1, None]))
    def what_is_read_arrives(self, most: int | None) -> None:
        self.reads.arrive(most)

    @rule(agent=agents, new=agents)
    def fork(self, agent: str, new: str) -> None:
        engine, allocator = self.world.engine, self.world.engine._allocator
        there = {
            name: engine.manifest(name) or allocator.idle_tokens(name, "") for name in (agent, new)
        }
        if there[agent] is None or there[new] is not None:
            with pytest.raises(InvalidRequestError, match="fork"):
                engine.fork(agent, new)
            return
        engine.fork(agent, new)

    @precondition(lambda self: self.asked)
    @rule(agent=agents, n=st.sampled_from([300, 700]), max_tokens=new_tokens, variant=variants)
    def several_begin_alike(self, agent: str, n: int, max_tokens: int, variant: int) -> None:
        for number in range(3):
            tokens = (*text_of(0, n % 500), number)
            keep = number != 1 or bool(variant)
            self.submit(f"{agent}-{number}", tokens, max_tokens, variant, keep=keep)

    @rule(method=st.sampled_from(["export_block", "export_checkpoint", "pause"]))
    def something_cannot_be_kept(self, method: str) -> None:
        self.world.backend.fail_next(method, BackendError)

    @rule()
    def something_loaded_is_refused(self) -> None:
        self.world.backend.fail_next("loaded", CacheReconstructionError)

    # What is different with a store

    @rule(agent=agents)
    def forget(self, agent: str) -> None:
        engine = self.world.engine
        known = self.world.store.get(self.world.key(agent)) or engine.manifest(agent)
        assert engine.forget(agent) == (known is not None)
        assert engine.manifest(agent) is None

    @rule(agent=agents, n=st.sampled_from([1, 30]), max_tokens=new_tokens, variant=variants)
    def append_to_what_is_known(self, agent: str, n: int, max_tokens: int, variant: int) -> None:
        known = self.world.engine._agents.recall(agent, "").history
        more = text_of(5, n)
        if known is None:
            with pytest.raises(InvalidRequestError, match="no cache to append to"):
                self.world.engine.submit(agent, more, append=True)
            return
        self.submit(agent, (*known, *more), max_tokens, variant, appended=more)

    def append(self) -> None:
        """Without a store an agent is known only while its cache is in the pool."""


StoredEngineMachine.TestCase.settings = settings(
    max_examples=examples(12, thorough=600), stateful_step_count=50
)
TestEveryAnswerIsTheSoloAnswerWithAStore = StoredEngineMachine.TestCase
