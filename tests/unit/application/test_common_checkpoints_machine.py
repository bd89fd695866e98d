"""Prompts that part anywhere, and everything that can go wrong: the solo answers, in time.

As the machine with a store; here the prompts are a tree whose branches begin at, beside and between
the positions where checkpoints are taken. Requests are preempted, scored and of several tenants,
and a store may lose a part of what it was given at any moment.
"""

from __future__ import annotations

import random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from semantic.application.request import Phase, Request
from semantic.domain.block_hash import Part
from semantic.domain.errors import BackendError
from semantic.domain.value_objects import SamplingParams
from tests.support.lanes import examples
from tests.unit.application.test_engine_machine import Asked, Setup, setups
from tests.unit.application.test_prefix_store_machine import StoredEngineMachine, Unreliable
from tests.unit.application.world import EOS, VARIANTS, Done, expected, text_of

PARTS_AT = (1, 2, 63, 64, 65, 66, 127, 128, 129, 190, 254, 255, 256, 257, 258, 300, 319, 320, 321)
branches = st.tuples(
    st.sampled_from(PARTS_AT), st.integers(0, 2), st.sampled_from([0, 1, 2, 16, 63, 64, 65, 150])
)


class SharingMachine(StoredEngineMachine):
    """Many requests that share heads, and a store that loses what it had."""

    @initialize(
        setup=setups.filter(lambda one: one.kind != "full"),
        max_bytes=st.sampled_from([1 << 30, 400_000, 60_000, 1]),
        drops=st.sampled_from([0.0, 0.1]),
        fails=st.sampled_from([0.0, 0.1, 1.0]),
    )
    def make_with_store(self, setup: Setup, max_bytes: int, drops: float, fails: float) -> None:
        self.world = setup.world()
        self.steps = 0
        self.store = Unreliable(max_bytes, drops=drops, fails=fails)
        self.restart()

    @rule(
        branches=st.lists(branches, min_size=1, max_size=6),
        more=st.sampled_from([1, 9]),
        tenant=st.sampled_from(["", "", "x"]),
        scores=st.sampled_from([False, False, False, True]),
        keeps=st.integers(0, 7),
        steps=st.integers(0, 12),
    )
    def a_tree_of_prompts(
        self,
        branches: list[tuple[int, int, int]],
        more: int,
        tenant: str,
        scores: bool,
        keeps: int,
        steps: int,
    ) -> None:
        """Each leaves the common text at one position, goes on differently, and steps go by.

        Number `keeps` is not kept.
        """
        for number, (at, branch, n) in enumerate(branches):
            prompt = (*text_of(0, at), *text_of(branch + 3, n))
            scored, keep = scores and not number, number != keeps
            self.ask(f"leaf-{number}", prompt, more, tenant, scores=scored, keep=keep)
        self.step(steps)

    def ask(
        self,
        agent: str,
        prompt: tuple[int, ...],
        more: int,
        tenant: str,
        *,
        scores: bool,
        keep: bool,
    ) -> None:
        if not self.fits(len(prompt) + more):
            return
        sampling = SamplingParams(prompt_logprobs=0) if scores else VARIANTS[0]
        uid = self.world.engine.submit(
            agent, prompt, max_tokens=more, sampling=sampling, tenant=tenant, keep=keep
        )
        answer = expected(self.world.spec, prompt, more, eos=EOS)
        self.asked[uid] = Asked(agent, prompt, more, answer, keep)

    def running(self) -> list[Request]:
        return [one for one in self.world.engine.requests if one.sequence is not None]

    @precondition(lambda self: self.asked and self.running())
    @rule(first=st.booleans())
    def one_is_preempted(self, first: bool) -> None:
        """The one that has computed most, for which others wait, or the youngest."""
        chosen = max(self.running(), key=lambda one: one.computed if first else one.number)
        for event in self.world.engine._preempt(chosen):
            self.hear(event)
        self.world.engine._scheduler._preempt(chosen)

    @precondition(lambda self: self.asked and self.running())
    @rule()
    def the_first_is_cancelled(self) -> None:
        computing = [one for one in self.running() if one.phase is Phase.PREFILL]
        for one in sorted(computing, key=lambda one: -one.computed)[:1]:
            assert self.world.engine.cancel(one.uid)
            self.asked[one.uid].cancelled = True

    @rule(part=st.sampled_from(list(Part)), seed=st.integers(0, 9))
    def the_store_loses_some(self, part: Part, seed: int) -> None:
        draw = random.Random(seed)
        keys = [key for key in list(self.store._blocks) if key.part is part]
        for key in draw.sample(keys, len(keys) // 2):
            if key in self.store._blocks:
                for each in self.store._order._dependents_first(key):
                    self.store._evict(each)

    @rule(slower=st.booleans())
    def reading_is_slow_or_not(self, slower: bool) -> None:
        prefixes = self.world.engine._prefixes
        assert prefixes is not None
        if slower:
            prefixes.break_even.terms = lambda *_: None  # type: ignore[method-assign]
        else:
            prefixes.break_even.__dict__.pop("terms", None)

    @rule(method=st.sampled_from(["open", "loading", "prefill", "prefill_together", "close"]))
    def something_breaks(self, method: str) -> None:
        self.world.backend.fail_next(method, BackendError)

    def check_error(self, done: Done) -> None:
        assert done.error
        assert self.world.backend.failures


SharingMachine.TestCase.settings = settings(
    max_examples=examples(12, thorough=600), stateful_step_count=40
)
TestRequestsThatShareHeadsGetTheSoloAnswer = SharingMachine.TestCase
