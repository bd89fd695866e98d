"""Log-probabilities of a prompt: those of one whole forward pass, and bit-equal however served."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import mlx.core as mx
import pytest

from semantic import SamplingParams
from semantic.adapters.mlx.sampling.sampler import score_tokens
from semantic.adapters.stores.memory import MemoryStore
from semantic.domain.match import MatchEnd
from semantic.domain.value_objects import TokenLogprob
from tests.integration.test_exactness import prompts
from tests.support.lanes import THOROUGH, more
from tests.support.rig import Rig
from tests.support.rounding import log_probabilities, most_rounding

SCORED = SamplingParams(prompt_logprobs=3)
Scores = tuple[TokenLogprob | None, ...]


def scored(rig: Rig, agent: str, prompt: Sequence[int], n: int = 4) -> Scores:
    done = rig.answer(agent, prompt, n, sampling=SCORED)
    assert done.finish_reason == "length", done
    assert done.cached_tokens == 0
    return done.prompt_logprobs


@pytest.mark.parametrize("architecture", ["llama", "gemma3", *more("qwen3", "gpt_oss")])
@pytest.mark.parametrize("n", [1, 2, 128, 129, 130, 400])
def test_the_figures_are_those_of_mlx_lm(architecture: str, n: int) -> None:
    rig = Rig(architecture)
    (prompt,) = prompts(n, seed=40)
    found = scored(rig, "ann", prompt)
    assert len(found) == n
    assert found[0] is None
    near = most_rounding(rig.model)
    for chunk in (128, n):
        rows = cast("list[list[float]]", log_probabilities(rig.model, prompt, chunk).tolist())
        for i, one in enumerate(found[1:], 1):
            assert one is not None
            row = rows[i - 1]
            assert one.token == prompt[i]
            assert one.logprob == pytest.approx(row[prompt[i]], abs=near)
            best = sorted(row, reverse=True)[:3]
            assert [value for _, value in one.top] == pytest.approx(best, abs=near)
            assert all(value == pytest.approx(row[token], abs=near) for token, value in one.top)


@pytest.mark.parametrize("architecture", ["gemma3", *more("llama")])
def test_the_figures_are_bit_equal_however_they_are_computed(architecture: str) -> None:
    (prompt,) = prompts(600, seed=41)
    others = prompts(300, 500, seed=42)
    first = scored(Rig(architecture, chunk=64), "ann", prompt)
    assert scored(Rig(architecture), "ann", prompt) == first
    for chunk in (16, 300, 2048) if THOROUGH else (300,):
        rig = Rig(architecture, chunk=chunk, prefix_store=MemoryStore(1 << 30))
        assert scored(rig, "ann", prompt) == first
        assert scored(rig, "ann", prompt) == first, "its own cache was there"
        assert scored(rig, "ben", prompt) == first, "another's blocks were in the store"
        rig.engine.submit("cay", others[0], max_tokens=20)
        rig.engine.submit("dan", others[1], max_tokens=20, sampling=SCORED)
        assert scored(rig, "eve", prompt) == first, "others ran beside it"
        rig.check()


def test_the_figures_are_the_same_after_a_restart() -> None:
    (prompt,) = prompts(600, seed=43)
    store = MemoryStore(1 << 30)
    first = scored(Rig("gemma3", chunk=100, prefix_store=store), "ann", prompt)
    assert scored(Rig("gemma3", chunk=70, prefix_store=store), "ann", prompt) == first


def test_what_was_scored_is_kept_as_usual() -> None:
    (prompt,) = prompts(600, seed=44)
    rig = Rig("llama", chunk=64, prefix_store=MemoryStore(1 << 30))
    done = rig.answer("ann", prompt, 5, sampling=SCORED)
    assert done.match is not None
    assert done.match.end is MatchEnd.SCORED
    again = rig.answer("ann", [*prompt, *done.tokens, 1, 2], 5)
    assert again.cached_tokens == 605
    assert rig.answer("ben", prompt, 5).cached_tokens == 599
    assert rig.answer("cay", prompt, 5).tokens == done.tokens


def test_a_prompt_that_is_preempted_is_scored_once() -> None:
    long, *others = prompts(1000, 250, 250, 250, seed=45)
    expected = scored(Rig("llama", chunk=64), "x", long)
    rig = Rig("llama", chunk=64, columns=7)
    before = [rig.engine.submit(f"a{i}", text, max_tokens=40) for i, text in enumerate(others)]
    uid = rig.engine.submit("z", long, max_tokens=40, sampling=SCORED)
    done = rig.run()
    assert rig.engine.preemptions > 0
    assert done[uid].prompt_logprobs == expected
    assert all(done[one].prompt_logprobs == () for one in before)


def test_half_precision_is_scored_in_single_precision() -> None:
    logits = mx.random.normal((70, 50), key=mx.random.key(1)).astype(mx.bfloat16)
    tokens = [i % 50 for i in range(70)]
    wide = logits.astype(mx.float32)
    expected = wide - mx.logsumexp(wide, axis=-1, keepdims=True)
    found = score_tokens(logits, tokens, 60)
    assert [one.token for one in found] == tokens
    for i, one in enumerate(found):
        assert one.logprob == cast(float, expected[i, tokens[i]].item())
        assert len(one.top) == 50
