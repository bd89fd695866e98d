"""Many agents, small pools, anything in any order: every answer is the solo answer.

The fake model's next token depends on all that its caches hold, so one wrong token anywhere in
any cache makes an answer differ.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from semantic.domain.entities import AgentBlocks, KVBlock
from semantic.domain.errors import CacheReconstructionError, InvalidRequestError, PoolExhaustedError
from semantic.domain.value_objects import ModelCacheSpec, PrefillEvent, TokenEvent, whole_blocks
from tests.support.char_tokenizer import CharTokenizer
from tests.support.lanes import examples
from tests.unit.application.world import (
    EOS,
    SPECS,
    VARIANTS,
    Answer,
    Done,
    Event,
    World,
    expected,
    text_of,
)

AGENTS = ("ann", "bob", "cy")
LONGEST = 512
MOST_NEW = 40

agents = st.sampled_from(AGENTS)
lengths = st.sampled_from([1, 17, 250, 254, 256, 300, 500, LONGEST])
new_tokens = st.sampled_from([MOST_NEW, 1, 9])
variants = st.integers(0, len(VARIANTS) - 1)
seeds = st.integers(0, 1)


@dataclass(frozen=True)
class Setup:
    """What the machine runs on."""

    kind: str
    spare: int
    by_bytes: bool
    max_batch: int
    largest_chunk: int
    silent_steps: int
    shares: bool

    def world(self) -> World:
        """A pool in which the longest request just fits."""
        spec = ModelCacheSpec(SPECS[self.kind])
        tokens = whole_blocks(LONGEST + MOST_NEW)
        n_bytes = spec.bytes_for(tokens) + self.spare * spec.bytes_per_block(0)
        return World(
            spec,
            None if self.by_bytes else sum(spec.blocks_for(tokens)) + self.spare,
            n_bytes if self.by_bytes else None,
            max_batch=self.max_batch,
            eos=EOS,
            silent_steps=self.silent_steps,
            shares=self.shares,
            largest_chunk=self.largest_chunk,
        )


setups = st.builds(
    Setup,
    kind=st.sampled_from(sorted(SPECS)),
    spare=st.integers(0, 5),
    by_bytes=st.booleans(),
    max_batch=st.sampled_from([1, 2, 3, 8]),
    largest_chunk=st.sampled_from([64, 200, 512]),
    silent_steps=st.integers(0, 2),
    shares=st.booleans(),
)


@dataclass
class Asked:
    """A request that was submitted, and what was heard of it."""

    agent: str
    prompt: tuple[int, ...]
    max_tokens: int
    answer: Answer
    keep: bool = True
    cancelled: bool = False
    tokens: list[int] = field(default_factory=list)
    text: str = ""


class EngineMachine(RuleBasedStateMachine):
    """Submits, steps, cancels and forgets; nothing else touches the pool and nothing fails."""

    world: World

    @initialize(setup=setups)
    def make(self, setup: Setup) -> None:
        self.world = setup.world()
        self.asked: dict[str, Asked] = {}
        self.done: dict[str, Done] = {}
        self.steps = 0

    # Asking

    def submit(
        self,
        agent: str,
        tokens: tuple[int, ...],
        max_tokens: int,
        variant: int,
        *,
        cache: AgentBlocks | None = None,
        appended: tuple[int, ...] | None = None,
        keep: bool = True,
    ) -> None:
        """`tokens` is the whole prompt, of which only `appended` is sent, if that is given."""
        world = self.world

        def send() -> str:
            return world.engine.submit(
                agent,
                tokens if appended is None else appended,
                cache,
                max_tokens,
                sampling=VARIANTS[variant],
                append=appended is not None,
                keep=keep,
            )

        if not self.fits(len(tokens) + max_tokens):
            self.expect_refusal(send)
            return
        uid = send()
        assert uid not in self.asked
        answer = expected(world.spec, tokens, max_tokens, variant, eos=EOS)
        self.asked[uid] = Asked(agent, tokens, max_tokens, answer, keep)

    def fits(self, n_tokens: int) -> bool:
        world = self.world
        counts = world.spec.blocks_for(whole_blocks(n_tokens))
        n_bytes = world.spec.bytes_for(whole_blocks(n_tokens))
        return (world.total_blocks is None or sum(counts) <= world.total_blocks) and (
            world.max_bytes is None or n_bytes <= world.max_bytes
        )

    def expect_refusal(self, send: Callable[[], str]) -> None:
        before = self.world.pool.used_blocks, self.world.store.lru_order()
        with pytest.raises(PoolExhaustedError, match=r"^Cannot allocate"):
            send()
        assert (self.world.pool.used_blocks, self.world.store.lru_order()) == before

    @rule(agent=agents, seed=seeds, n=lengths, max_tokens=new_tokens, variant=variants)
    def ask_anew(self, agent: str, seed: int, n: int, max_tokens: int, variant: int) -> None:
        self.submit(agent, text_of(seed, n), max_tokens, variant)

    @rule(seed=seeds, n=st.integers(240, 256), variant=variants, steps=st.integers(0, 30))
    def everybody_asks(self, seed: int, n: int, variant: int, steps: int) -> None:
        """All at once, and all about to need another block."""
        for i, agent in enumerate(AGENTS):
            self.submit(agent, text_of(seed + i, n), MOST_NEW, variant)
        self.step(steps)

    @precondition(lambda self: self.done)
    @rule(
        agent=agents, by=agents, max_tokens=new_tokens, variant=variants, passed=st.booleans(),
        keep=st.sampled_from([True, True, False]),
    )  # fmt: skip
    def go_on_talking(
        self, agent: str, by: str, max_tokens: int, variant: int, passed: bool, keep: bool
    ) -> None:
        """`by` takes up the last conversation of `agent`, be it its own or another's."""
        last = [uid for uid, done in self.done.items() if done.agent_id == agent][-1:]
        for uid in last:
            whole = (*self.asked[uid].prompt, *self.done[uid].tokens, *text_of(7, 3))
            cache = self.done[uid].blocks if passed else None
            self.submit(by, whole, max_tokens, variant, cache=cache, keep=keep)

    @precondition(lambda self: self.done)
    @rule(
        data=st.data(),
        agent=agents,
        change=st.sampled_from(["repeat", "extend", "edit", "shorten"]),
        passed=st.booleans(),
        max_tokens=new_tokens,
        variant=variants,
    )
    def ask_again(
        self,
        data: st.DataObject,
        agent: str,
        change: str,
        passed: bool,
        max_tokens: int,
        variant: int,
    ) -> None:
        """On top of any agent's earlier conversation, its cache passed or not, stale or not."""
        uid = data.draw(st.sampled_from(sorted(self.done)))
        prompt = self.asked[uid].prompt
        whole = (*prompt, *self.done[uid].tokens)
        at = data.draw(st.integers(0, len(whole) - 1))
        match change:
            case "repeat":
                tokens = prompt
            case "extend":
                tokens = (*whole, *text_of(9, 20))
            case "edit":
                tokens = (*whole[:at], (whole[at] + 1) % 96, *whole[at + 1 :])
            case _:
                tokens = whole[: at + 1]
        cache = self.done[uid].blocks if passed else None
        self.submit(agent, tokens, max_tokens, variant, cache=cache)

    @rule(
        data=st.data(), agent=agents, n=st.sampled_from([1, 30]), max_tokens=new_tokens,
        variant=variants, passed=st.booleans(),
    )  # fmt: skip
    def append(
        self, data: st.DataObject, agent: str, n: int, max_tokens: int, variant: int, passed: bool
    ) -> None:
        cache = None
        kept = self.world.store.get(self.world.key(agent))
        if passed and self.done:
            cache = self.done[data.draw(st.sampled_from(sorted(self.done)))].blocks
        before = kept if cache is None else cache
        if before is None:
            with pytest.raises(InvalidRequestError, match="no cache to append to"):
                self.world.engine.submit(agent, text_of(5, n), append=True)
            return
        more = text_of(5, n)
        tokens = (*before.token_ids, *more)
        self.submit(agent, tokens, max_tokens, variant, cache=cache, appended=more)

    # Going on

    @rule(times=st.sampled_from([1, 2, 5, 30, 60]))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.step_once()

    def step_once(self) -> None:
        self.steps += 1
        for event in self.world.engine.step_once():
            self.hear(event)
        self.world.check(self.empty_bytes(), opened=True)

    def hear(self, event: Event) -> None:
        asked = self.asked[event.uid]
        assert event.uid not in self.done, "heard of a request after its end"
        assert event.agent_id == asked.agent
        match event:
            case TokenEvent():
                asked.tokens.append(event.token)
                asked.text += event.text
            case PrefillEvent():
                assert 0 <= event.done <= event.total
                assert event.total == len(asked.prompt) + len(asked.tokens) - 1
            case _:
                self.done[event.uid] = event
                self.check_end(asked, event)

    def check_end(self, asked: Asked, done: Done) -> None:
        assert list(done.tokens) == asked.tokens, "the events and the end differ"
        assert done.tokens == asked.answer.tokens[: len(done.tokens)], "not the solo answer"
        assert done.prompt_tokens == len(asked.prompt)
        assert 0 <= done.cached_tokens < done.prompt_tokens
        if done.finish_reason == "cancelled":
            assert asked.cancelled
            assert done.text == CharTokenizer().decode(done.tokens)
        elif done.finish_reason == "error":
            self.check_error(done)
        else:
            found = Answer(done.tokens, done.text, done.finish_reason)
            assert found == asked.answer
            assert asked.text == done.text
            assert done.blocks is not None or self.world.backend.failures or not asked.keep
        assert asked.keep or done.blocks is None
        if done.blocks is not None:
            whole = (*asked.prompt, *done.tokens)
            assert done.blocks.token_ids == whole[: done.blocks.total_tokens]
            assert done.finish_reason == "cancelled" or done.blocks.total_tokens == len(whole)
            assert done.blocks.retired or self.world.pool.is_live(done.blocks.all_blocks())

    def check_error(self, done: Done) -> None:
        raise AssertionError(f"nothing was broken, but a request failed: {done.error}")

    @precondition(lambda self: self.asked)
    @rule(data=st.data(), ended=st.sampled_from([True, False, True]))
    def cancel(self, data: st.DataObject, ended: bool) -> None:
        uids = sorted(uid for uid in self.asked if ended == (uid in self.done))
        if uids:
            uid = data.draw(st.sampled_from(uids))
            assert self.world.engine.cancel(uid) == (not ended)
            self.asked[uid].cancelled = True

    @rule(agent=agents)
    def forget(self, agent: str) -> None:
        kept = self.world.store.get(self.world.key(agent))
        assert self.world.engine.forget(agent) == (kept is not None)
        assert kept is None or kept.retired

    # What always holds

    @invariant()
    def check(self) -> None:
        if hasattr(self, "world"):
            self.world.check(self.empty_bytes())

    def empty_bytes(self) -> int:
        return 0

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        limit = self.steps + self.most_steps()
        while self.world.engine.has_work:
            assert self.steps < limit, "a request starves"
            self.step_once()
        assert self.done.keys() == self.asked.keys()
        self.leave()
        self.world.forget_all()
        assert self.world.pool.used_blocks == 0
        assert self.world.backend.held_bytes == 0

    def most_steps(self) -> int:
        """Each alone, after the other, computed again each time that an older one ends."""
        alone = [len(a.prompt) // 16 + a.max_tokens + 7 for a in self.asked.values()]
        return (len(alone) + 1) * sum(alone)

    def leave(self) -> None:
        """Outsiders give back what they hold."""


class CrowdedEngineMachine(EngineMachine):
    """The same, while others hold blocks of the pool and the backend fails now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.outside: list[list[KVBlock]] = []
        self.empty: list[KVBlock] = []

    def fits(self, n_tokens: int) -> bool:
        world = self.world
        counts = world.spec.blocks_for(whole_blocks(n_tokens))
        return world.pool.fits_alone(counts, beside=["outsider"])

    def check_error(self, done: Done) -> None:
        assert done.error
        assert self.world.backend.failures or done.error.startswith("Cannot allocate")

    @rule(data=st.data(), n=st.integers(1, 3))
    def somebody_takes_blocks(self, data: st.DataObject, n: int) -> None:
        layer = data.draw(st.integers(0, self.world.spec.n_layers - 1))
        try:
            taken = self.world.pool.allocate(n, layer, "outsider")
        except PoolExhaustedError:
            return
        self.outside.append(taken)
        self.empty += taken

    @precondition(lambda self: self.done)
    @rule(data=st.data())
    def somebody_shares_a_cache(self, data: st.DataObject) -> None:
        blocks = self.done[data.draw(st.sampled_from(sorted(self.done)))].blocks
        if blocks is None or blocks.retired:
            return
        shared = list(blocks.all_blocks())
        self.world.pool.share(shared, "outsider")
        self.outside.append(shared)

    @precondition(lambda self: self.outside)
    @rule()
    def somebody_gives_back(self) -> None:
        given = self.outside.pop(0)
        self.world.pool.free(given, "outsider")
        self.empty = [block for block in self.empty if block not in given]

    @rule(
        method=st.sampled_from(
            ["open", "prefill", "start", "decode", "restore", "reserve", "extract", "close"]
        )
    )
    def something_will_break(self, method: str) -> None:
        self.world.backend.fail_next(method)

    @rule()
    def a_cache_will_not_fit(self) -> None:
        self.world.backend.fail_next("restore", CacheReconstructionError)

    def empty_bytes(self) -> int:
        return sum(self.world.spec.bytes_per_block(block.layer_id) for block in self.empty)

    def leave(self) -> None:
        while self.outside:
            self.somebody_gives_back()


EngineMachine.TestCase.settings = settings(
    max_examples=examples(12, thorough=500), stateful_step_count=50
)
CrowdedEngineMachine.TestCase.settings = settings(
    max_examples=examples(12, thorough=500), stateful_step_count=50
)
TestEveryAnswerIsTheSoloAnswer = EngineMachine.TestCase
TestEveryAnswerIsTheSoloAnswerInACrowd = CrowdedEngineMachine.TestCase
