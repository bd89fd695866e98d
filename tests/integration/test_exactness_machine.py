"""Whatever agents do together, each answer is the one that plain mlx-lm gives it alone.

A hypothesis state machine drives a real engine on real mlx-lm models in pools so small that idle
caches are dropped and running requests preempted, and compares every answer token by token.
"""

from __future__ import annotations

import functools
from typing import ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from semantic import CompletedGeneration
from semantic.adapters.mlx.batch.draft_costs import StepSeconds
from tests.support.drafted import DRAFTED
from tests.support.eight_bits import EIGHT_BITS
from tests.support.in_pages import IN_PAGES, SUFFIX
from tests.support.lanes import THOROUGH, examples
from tests.support.reference import is_answer
from tests.support.rig import Done, Rig, cache_bytes
from tests.support.tiny_models import ARCHITECTURES, VOCAB, tiny_model

_MOST_NEW = 40

lengths = st.sampled_from([1, 2, 3, 17, 100, 255, 256, 257, 300, 511, 513, 700])
agents = st.sampled_from(["ann", "bob", "cat", "dan"])
new_tokens = st.integers(1, _MOST_NEW)


@functools.cache
def text(seed: int, n: int) -> tuple[int, ...]:
    """`n` tokens; the same seed gives texts that begin alike."""
    return tuple((seed * 7919 + i * i * 31 + i // 7 * 13) % VOCAB for i in range(n))


class Machine(RuleBasedStateMachine):
    """Agents that submit, continue, repeat, edit, fork, cancel and forget at random times."""

    architecture: ClassVar[str] = "llama"
    n_accepted: ClassVar[int] = 0

    @initialize(columns=st.sampled_from([6, 8, 40]), chunk=st.sampled_from([7, 64, 300, 5000]))
    def build(self, columns: int, chunk: int) -> None:
        self.rig = Rig(self.architecture, columns=columns, chunk=chunk)
        self.waiting: dict[str, tuple[tuple[int, ...], int]] = {}
        self.cancelled: set[str] = set()
        self.done: list[tuple[tuple[int, ...], Done]] = []

    def _submit(self, agent: str, prompt: tuple[int, ...], n: int, done: Done | None) -> None:
        prompt = prompt[:900]
        uid = self.rig.engine.submit(
            agent, prompt, cache=done.blocks if done else None, max_tokens=n
        )
        self.waiting[uid] = (prompt, n)

    @rule(agent=agents, seed=st.integers(0, 3), length=lengths, n=new_tokens)
    def fresh(self, agent: str, seed: int, length: int, n: int) -> None:
        self._submit(agent, text(seed, length), n, None)

    @rule(seed=st.integers(0, 3), length=st.sampled_from([254, 500, 760]))
    def crowd(self, seed: int, length: int) -> None:
        """Three at once that together outgrow a small pool."""
        for agent in ("ann", "bob", "cat"):
            self._submit(agent, text(seed + len(self.waiting), length), _MOST_NEW, None)

    @precondition(lambda self: self.done)
    @rule(
        data=st.data(),
        n=new_tokens,
        give_cache=st.booleans(),
        tail=st.integers(0, 30),
        how=st.sampled_from(["extend", "repeat", "edit"]),
    )
    def go_on(self, data: st.DataObject, n: int, give_cache: bool, tail: int, how: str) -> None:
        prompt, done = data.draw(st.sampled_from(self.done))
        whole = (*prompt, *done.tokens)
        if how == "extend":
            prompt = (*whole, *text(5, tail + 1))
        elif how == "edit":
            cut = data.draw(st.integers(0, len(whole) - 1))
            prompt = (*whole[:cut], (whole[cut] + 1) % VOCAB, *text(6, tail))
        agent = data.draw(st.sampled_from([done.agent_id, "eve"]))
        self._submit(agent, prompt, n, done if give_cache else None)

    @precondition(lambda self: any(done.blocks for _, done in self.done))
    @rule(data=st.data(), n=new_tokens)
    def append(self, data: st.DataObject, n: int) -> None:
        done = data.draw(st.sampled_from([done for _, done in self.done if done.blocks]))
        assert done.blocks is not None
        added = text(9, 5)
        prompt = (*done.blocks.token_ids, *added)
        if len(prompt) > 900:
            return
        uid = self.rig.engine.submit(
            done.agent_id, added, cache=done.blocks, max_tokens=n, append=True
        )
        self.waiting[uid] = (prompt, n)

    @rule(steps=st.integers(1, 25))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            for event in self.rig.engine.step_once():
                if isinstance(event, CompletedGeneration):
                    self._check(event)
            self.rig.check()

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        uid = data.draw(st.sampled_from(sorted(self.waiting)))
        assert self.rig.engine.cancel(uid)
        self.cancelled.add(uid)

    @rule(agent=agents)
    def forget(self, agent: str) -> None:
        self.rig.engine.forget(agent)

    @invariant()
    def accounts_agree(self) -> None:
        self.rig.engine.check_integrity()

    def _check(self, done: Done) -> None:
        prompt, n = self.waiting.pop(done.uid)
        architecture = self.architecture.removesuffix(DRAFTED).removesuffix(SUFFIX)
        if done.uid in self.cancelled:
            assert done.finish_reason == "cancelled"
            n = len(done.tokens)
        else:
            assert done.finish_reason == "length"
        right = is_answer(tiny_model(architecture), prompt, done.tokens, n)
        assert right, (len(prompt), done.cached_tokens, done.tokens)
        self.done.append((prompt, done))

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        for done in self.rig.engine.step():
            self._check(done)
            self.rig.check()
        assert not self.waiting
        type(self).n_accepted += sum(one.n_accepted for one in self.rig.drafts.oracles)
        self.rig.forget_all()
        assert self.rig.pool.used_blocks == 0
        assert cache_bytes(self.rig.backend) == 0


# The caches differ between full attention and windows, with and without sinks; the other
# architectures share those of llama and differ in what is around them.
_EXAMPLES = {"llama": 3, "gemma3": 2, "gpt_oss": 1} | dict.fromkeys(IN_PAGES, 1)
_DRAFTED = ("llama", "gemma3", "deepseek_v3", "moe") if THOROUGH else ("llama",)
_EXAMPLES |= dict.fromkeys((kind + DRAFTED for kind in _DRAFTED), 2)


# Without a kernel pages are read slowly; `test_paged_batch.py` has a smaller machine for every run.
@pytest.mark.parametrize(
    "architecture",
    [
        *ARCHITECTURES,
        *(IN_PAGES if THOROUGH else ()),
        *(kind + DRAFTED for kind in _DRAFTED),
        *EIGHT_BITS[: None if THOROUGH else 1],
    ],
)
def test_every_answer_is_that_of_mlx_lm_alone(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StepSeconds, "of", lambda *_, **__: 1.0)  # drafts always pay
    machine: type[Machine] = type(
        f"Machine_{architecture}", (Machine,), {"architecture": architecture}
    )
    usual = _EXAMPLES.get(architecture, 1)
    n_examples = examples(usual, thorough=15 * usual)
    run_state_machine_as_test(
        machine, settings=settings(max_examples=n_examples, stateful_step_count=25)
    )
    assert (machine.n_accepted > 0) == architecture.endswith(DRAFTED)
