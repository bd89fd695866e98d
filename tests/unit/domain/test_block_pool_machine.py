"""The pool against a naive model of it: a list of who holds what."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from semantic.domain.entities import BlockId, KVBlock
from semantic.domain.errors import InvalidRequestError, PoolExhaustedError
from semantic.domain.services import BlockPool
from semantic.domain.value_objects import LayerKind, LayerSpec, ModelCacheSpec
from tests.support.lanes import examples
from tests.support.pools import available, holders

SIZES = (100, 30)
SPEC = ModelCacheSpec(
    tuple(LayerSpec(LayerKind.STATE, state_bytes=size, state_grows=True) for size in SIZES)
)
AGENTS = ("a", "b", "c")
agents = st.sampled_from(AGENTS)
counts = st.tuples(st.integers(0, 4), st.integers(0, 4))


class PoolMachine(RuleBasedStateMachine):
    """`holds` has one entry for each time that an agent holds a block."""

    @initialize(
        blocks=st.one_of(st.none(), st.integers(1, 12)), n_bytes=st.one_of(st.integers(1, 900))
    )
    def make(self, blocks: int | None, n_bytes: int) -> None:
        self.total_blocks = blocks
        self.max_bytes = n_bytes if blocks is None or n_bytes % 2 else None
        self.pool = BlockPool(SPEC, blocks, max_bytes=self.max_bytes)
        self.holds: list[tuple[str, int]] = []
        self.marked: list[tuple[str, list[KVBlock]]] = []
        self.known: dict[int, KVBlock] = {}

    # The model

    def fits(self, n: tuple[int, ...], held: set[int]) -> bool:
        blocks = sum(n) + len(held)
        n_bytes = sum(count * size for count, size in zip(n, SIZES, strict=True))
        n_bytes += sum(SIZES[self.known[block].layer_id] for block in held)
        return (self.total_blocks is None or blocks <= self.total_blocks) and (
            self.max_bytes is None or n_bytes <= self.max_bytes
        )

    def held(self, *agents: str) -> set[int]:
        return {block for agent, block in self.holds if agent in agents}

    def some(self, data: st.DataObject) -> list[KVBlock]:
        """Some blocks, freed ones and repeated ones included."""
        numbers = data.draw(st.lists(st.sampled_from(sorted(self.known)), max_size=4))
        return [self.known[number] for number in numbers]

    # What can be done

    @rule(n=counts, agent=agents)
    def allocate_layers(self, n: tuple[int, int], agent: str) -> None:
        if not self.fits(n, self.held(*AGENTS)):
            with pytest.raises(PoolExhaustedError, match=f"^Cannot allocate {sum(n)} blocks"):
                self.pool.allocate_layers(n, agent)
            return
        for layer, given in enumerate(self.pool.allocate_layers(n, agent)):
            assert [block.layer_id for block in given] == [layer] * n[layer]
            for block in given:
                assert block.block_id not in self.known
                self.known[block.block_id] = block
                self.holds.append((agent, block.block_id))

    @rule(n=st.integers(-1, 4), layer=st.integers(-1, 2), agent=agents)
    def allocate(self, n: int, layer: int, agent: str) -> None:
        if n < 0 or layer not in (0, 1):
            with pytest.raises(InvalidRequestError):
                self.pool.allocate(n, layer, agent)
            return
        wanted = (n, 0) if layer == 0 else (0, n)
        if not self.fits(wanted, self.held(*AGENTS)):
            with pytest.raises(PoolExhaustedError):
                self.pool.allocate(n, layer, agent)
            return
        for block in self.pool.allocate(n, layer, agent):
            self.known[block.block_id] = block
            self.holds.append((agent, block.block_id))

    @precondition(lambda self: self.known)
    @rule(data=st.data(), agent=agents)
    def share(self, data: st.DataObject, agent: str) -> None:
        blocks = self.some(data)
        if all(block.block_id in self.held(*AGENTS) for block in blocks):
            self.pool.share(blocks, agent)
            self.holds += [(agent, block.block_id) for block in blocks]
        else:
            with pytest.raises(InvalidRequestError, match="it has no holder"):
                self.pool.share(blocks, agent)

    @precondition(lambda self: self.known)
    @rule(data=st.data(), agent=agents)
    def free(self, data: st.DataObject, agent: str) -> None:
        blocks = self.some(data)
        wanted = Counter((agent, int(block.block_id)) for block in blocks)
        if wanted <= Counter(self.holds):
            self.pool.free(blocks, agent)
            for hold in wanted.elements():
                self.holds.remove(hold)
        else:
            with pytest.raises(InvalidRequestError, match="does not hold it"):
                self.pool.free(blocks, agent)

    @precondition(lambda self: self.known)
    @rule(data=st.data(), agent=agents)
    def mark_evictable(self, data: st.DataObject, agent: str) -> None:
        blocks = [block for block in self.some(data) if block.block_id in self.held(agent)]
        self.pool.mark_evictable(blocks, agent)
        self.marked.append((agent, blocks))

    @precondition(lambda self: self.marked)
    @rule(data=st.data())
    def unmark_evictable(self, data: st.DataObject) -> None:
        agent, blocks = self.marked.pop(data.draw(st.integers(0, len(self.marked) - 1)))
        self.pool.unmark_evictable(blocks, agent)

    # What can be asked

    @rule(data=st.data(), n=counts)
    def look_ahead(self, data: st.DataObject, n: tuple[int, int]) -> None:
        assert self.pool.can_allocate(n) == self.fits(n, self.held(*AGENTS))
        beside = data.draw(st.sets(agents))
        assert self.pool.fits_alone(n, beside=beside) == self.fits(n, self.held(*beside))
        if self.known:
            blocks, agent = self.some(data), data.draw(agents)
            times = Counter(block for _, block in self.holds)
            freed = Counter(int(b.block_id) for b in blocks)
            freed.update(int(b.block_id) for _, marked in self.marked for b in marked)
            gone = {block for block, n_times in freed.items() if times[block] <= n_times}
            left = self.held(*AGENTS) - gone
            self.pool.mark_evictable(blocks, agent)
            assert self.pool.can_allocate(n, after_eviction=True) == self.fits(n, left)
            self.pool.check_integrity()
            self.pool.unmark_evictable(blocks, agent)

    @precondition(lambda self: self.known)
    @rule(data=st.data(), agent=agents)
    def ask_about_blocks(self, data: st.DataObject, agent: str) -> None:
        blocks = self.some(data)
        times = Counter(self.holds)
        assert self.pool.is_live(blocks) == all(
            block.block_id in self.held(*AGENTS) for block in blocks
        )
        assert self.pool.is_exclusive(blocks, agent) == all(
            sum(times[other, int(block.block_id)] for other in AGENTS) == 1
            and times[agent, int(block.block_id)] == 1
            for block in blocks
        )

    # What always holds

    @invariant()
    def accounts_agree(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check_integrity()
        held = self.held(*AGENTS)
        assert self.pool.used_blocks == len(held)
        assert self.pool.used_bytes == sum(SIZES[self.known[b].layer_id] for b in held)
        known = {agent for agent, _ in self.holds}
        assert set(holders(self.pool)) == known
        assert set(self.pool.busy_holders()) == known - {agent for agent, _ in self.marked}
        limits = []
        if self.total_blocks is not None:
            limits.append(self.total_blocks - len(held))
        if self.max_bytes is not None:
            limits.append((self.max_bytes - self.pool.used_bytes) // max(SIZES))
        assert available(self.pool) == min(limits)
        for agent in AGENTS:
            mine = Counter(self.known[BlockId(b)].layer_id for b in self.held(agent))
            view = self.pool.view(agent)
            assert view.blocks_per_layer == (mine[0], mine[1])
            assert view.n_bytes == mine[0] * SIZES[0] + mine[1] * SIZES[1]


PoolMachine.TestCase.settings = settings(
    max_examples=examples(40, thorough=500), stateful_step_count=40
)
TestPoolAgainstANaiveModel = PoolMachine.TestCase
