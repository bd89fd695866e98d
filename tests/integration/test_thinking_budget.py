"""A thinking budget cuts to the token: alone, in a batch, preempted, and continued from a cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from semantic import SamplingParams
from semantic.adapters.stores.memory import MemoryStore
from semantic.domain.value_objects import ThinkingBudget
from tests.integration.test_exactness import prompts
from tests.support.lanes import more
from tests.support.reference import is_answer
from tests.support.rig import Done, Rig
from tests.support.tiny_models import VOCAB

END = (5, 90, 41)


def limited(n: int, end: tuple[int, ...] = END, **more: object) -> SamplingParams:
    """The prompt opens a thought; no other is opened. Token i is the character 32 + i."""
    text = "".join(chr(32 + token) for token in end)
    budget = ThinkingBudget(n, "\0", text, end, opened=True)
    return replace(SamplingParams(thinking=budget), **more)  # type: ignore[arg-type]


def is_cut(
    rig: Rig, prompt: Sequence[int], done: Done, n: int, end: tuple[int, ...], most: int
) -> bool:
    """Whether the answer is a thought of `n` tokens, its end and what follows from both."""
    tokens = done.tokens
    assert len(tokens) == most
    assert tokens[n : n + len(end)] == end
    assert is_answer(rig.model, prompt, tokens[:n], n)
    rest = tokens[n + len(end) :]
    return is_answer(rig.model, [*prompt, *tokens[: n + len(end)]], rest, len(rest))


@pytest.mark.parametrize(
    "architecture", ["llama padded", "gemma3 in pages", "lfm2", *more("llama")]
)
def test_a_cut_is_exact_alone_in_a_batch_and_from_a_cache(architecture: str) -> None:
    rig = Rig(architecture, prefix_store=MemoryStore(1 << 30))
    asked = prompts(30, 250, 40, seed=61)
    budgets = [(4, END), (5, (7,)), (300, END)]
    uids = [
        rig.engine.submit(f"agent-{i}", prompt, max_tokens=24, sampling=limited(n, end))
        for i, (prompt, (n, end)) in enumerate(zip(asked, budgets, strict=True))
    ]
    done = rig.run()
    rig.check()
    for uid, prompt, (n, end) in zip(uids[:2], asked, budgets, strict=False):
        assert is_cut(rig, prompt, done[uid], n, end, 24)
    assert is_answer(rig.model, asked[2], done[uids[2]].tokens, 24)
    alone = rig.answer("alone", asked[1], 24, sampling=limited(5, (7,)))
    assert alone.tokens == done[uids[1]].tokens
    # The forced tokens are in the cache.
    turn = [*asked[1], *alone.tokens, 3, 4]
    again = rig.answer("alone", turn, 10)
    assert again.cached_tokens == len(turn) - 2
    assert is_answer(rig.model, turn, again.tokens, 10)


def test_a_seeded_answer_is_cut_alike_in_any_batch() -> None:
    rig = Rig("llama")
    (prompt, other) = prompts(40, 60, seed=62)
    params = limited(6, temperature=1.0, seed=3)
    free = rig.answer("free", prompt, 20, sampling=replace(params, thinking=None))
    alone = rig.answer("alone", prompt, 20, sampling=params)
    uid = rig.engine.submit("ann", prompt, max_tokens=20, sampling=params)
    rig.engine.submit("ben", other, max_tokens=30, sampling=replace(params, seed=4))
    assert rig.run()[uid].tokens == alone.tokens
    assert alone.tokens[:6] == free.tokens[:6]
    assert alone.tokens[6:9] == END


@pytest.mark.parametrize("n", [7, 8, 9, 10, 11])
def test_max_tokens_bounds_the_whole(n: int) -> None:
    rig = Rig("llama")
    (prompt,) = prompts(40, seed=63)
    done = rig.answer("ann", prompt, n, sampling=limited(8, logprobs=0))
    assert (done.finish_reason, len(done.tokens), len(done.logprobs)) == ("length", n, n)
    assert done.tokens[8:] == END[: max(0, n - 8)]
    assert [one.logprob for one in done.logprobs[8:]] == [0.0] * max(0, n - 8)
    more = [*prompt, *done.tokens, 1]
    assert is_answer(rig.model, more, rig.answer("ann", more, 5).tokens, 5)


@pytest.mark.parametrize("architecture", ["llama", "lfm2"])
def test_requests_that_are_cut_and_preempted_go_on_with_the_same_tokens(architecture: str) -> None:
    rig = Rig(
        architecture, columns=4 if architecture == "lfm2" else 5, prefix_store=MemoryStore(1 << 30)
    )
    asked = prompts(500, 250, 254, seed=64)
    uids = [
        rig.engine.submit(f"agent-{i}", prompt, max_tokens=30, sampling=limited(3 + i))
        for i, prompt in enumerate(asked)
    ]
    done = rig.run()
    rig.check()
    assert rig.engine.preemptions
    for i, (uid, prompt) in enumerate(zip(uids, asked, strict=True)):
        assert is_cut(rig, prompt, done[uid], 3 + i, END, 30)


def test_a_mark_of_no_token_is_refused() -> None:
    with pytest.raises(ValueError, match="thinking: token ids must be below"):
        Rig("llama").engine.submit("ann", [1, 2], sampling=limited(3, (VOCAB,)))
