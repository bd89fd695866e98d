"""Sampled decoding: as mlx-lm's filters say, reproducible, and with honest log-probabilities."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import cast

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.sample_utils import make_logits_processors

from semantic import SamplingParams
from semantic.adapters.mlx.sampling.sampler import draw, make_sampler
from tests.integration.test_exactness import prompts
from tests.support.rig import Done, Rig
from tests.support.rounding import most_rounding


def answer(rig: Rig, prompt: list[int], params: SamplingParams, n: int = 30) -> Done:
    uid = rig.engine.submit("ann", prompt, max_tokens=n, sampling=params)
    return rig.run()[uid]


@pytest.mark.parametrize("penalty", [0.7, 1.3])
def test_penalty_and_bias_are_those_of_mlx_lm(penalty: float) -> None:
    rig = Rig("llama")
    (prompt,) = prompts(300, seed=20)
    bias = {3: 4.0, 7: -2.0}
    processors = make_logits_processors(bias, repetition_penalty=penalty)
    expected = [
        int(token)
        for token, _ in generate_step(
            mx.array(prompt), rig.model, max_tokens=30, logits_processors=processors
        )
    ]
    params = SamplingParams(repetition_penalty=penalty, logit_bias=bias)
    assert list(answer(rig, prompt, params).tokens) == expected
    plain = answer(Rig("llama"), prompt, SamplingParams())
    assert list(plain.tokens) != expected


def test_log_probabilities_are_those_of_mlx_lm() -> None:
    rig = Rig("llama")
    (prompt,) = prompts(50, seed=21)
    near = most_rounding(rig.model)
    expected = list(generate_step(mx.array(prompt), rig.model, max_tokens=10))
    done = answer(rig, prompt, SamplingParams(logprobs=3), 10)
    assert len(done.logprobs) == 10
    for found, (token, logprobs) in zip(done.logprobs, expected, strict=True):
        assert found.token == int(token)
        assert found.logprob == pytest.approx(cast(float, logprobs[int(token)].item()), abs=near)
        assert len(found.top) == 3
        assert found.top[0] == (found.token, found.logprob)
        values = [value for _, value in found.top]
        assert values == sorted(values, reverse=True)
        best = cast(list[float], mx.sort(logprobs)[-3:].tolist())
        assert values == pytest.approx(sorted(best, reverse=True), abs=near)


def test_no_log_probabilities_unless_asked_for() -> None:
    rig = Rig("llama")
    assert answer(rig, [1, 2, 3], SamplingParams(), 3).logprobs == ()
    only = answer(rig, [1, 2, 3], SamplingParams(logprobs=0), 3).logprobs
    assert [found.top for found in only] == [(), (), ()]


def test_top_k_of_one_is_greedy_whatever_the_seed() -> None:
    rig = Rig("llama")
    (prompt,) = prompts(40, seed=22)
    greedy = answer(rig, prompt, SamplingParams()).tokens
    for seed in (1, 2):
        params = SamplingParams(temperature=2.0, top_k=1, seed=seed)
        assert answer(rig, prompt, params).tokens == greedy


def test_without_a_seed_two_answers_differ() -> None:
    rig = Rig("llama")
    params = SamplingParams(temperature=1.5)
    answers = {answer(rig, [1, 2, 3], params).tokens for _ in range(3)}
    assert len(answers) == 3


def test_draws_follow_the_distribution() -> None:
    probabilities = [0.5, 0.3, 0.15, 0.05]
    logprobs = mx.log(mx.array([probabilities]))
    sample = make_sampler(SamplingParams(temperature=1.0, seed=5), 0)
    drawn = [cast(int, sample(logprobs).item()) for _ in range(4000)]
    for token, probability in enumerate(probabilities):
        spread = math.sqrt(probability * (1 - probability) / len(drawn))
        assert abs(drawn.count(token) / len(drawn) - probability) < 5 * spread


@pytest.mark.parametrize(
    ("params", "allowed"),
    [
        (SamplingParams(temperature=1.0, top_p=0.7, seed=1), {0, 1}),
        (SamplingParams(temperature=1.0, top_p=1, seed=1), {0, 1, 2, 3}),
        (SamplingParams(temperature=1.0, top_p=1e-4, seed=1), {0}),
        (SamplingParams(temperature=1.0, top_p=1e-9, seed=1), {0}),
        (SamplingParams(temperature=1.0, top_p=0, seed=1), {0}),
        (SamplingParams(temperature=1e-39, seed=1), {0}),
        (SamplingParams(temperature=1.0, min_p=0.25, seed=1), {0, 1, 2}),
        (SamplingParams(temperature=1.0, top_k=3, seed=1), {0, 1, 2}),
    ],
)
def test_filters_leave_out_what_is_unlikely(params: SamplingParams, allowed: set[int]) -> None:
    logprobs = mx.log(mx.array([[0.5, 0.3, 0.15, 0.05]]))
    sample = make_sampler(params, 0)
    assert {cast(int, sample(logprobs).item()) for _ in range(300)} == allowed


def test_a_bias_for_a_token_the_model_lacks_is_refused() -> None:
    from semantic.domain.errors import InvalidRequestError

    rig = Rig("llama")
    with pytest.raises(InvalidRequestError, match="logit_bias: token ids must be below 96"):
        rig.engine.submit("ann", [1], sampling=SamplingParams(logit_bias={96: 1.0}))


# Rows together


FILTERED = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=1.0, top_p=0.8),
    SamplingParams(temperature=1.0, min_p=0.05),
    SamplingParams(temperature=1.0, top_k=5),
    SamplingParams(temperature=1.3, top_p=0.9, top_k=20),
]


def drawn_alone(params: list[SamplingParams], steps: list[mx.array]) -> list[list[int]]:
    samplers = [make_sampler(one, 3) for one in params]
    return [
        [cast(int, sampler(step[i : i + 1]).item()) for i, sampler in enumerate(samplers)]
        for step in steps
    ]


def drawn_together(params: list[SamplingParams], steps: list[mx.array]) -> list[list[int]]:
    samplers = [make_sampler(one, 3) for one in params]
    return [cast("list[int]", draw(samplers, step).tolist()) for step in steps]


def some_logprobs(rows: int, vocab: int, n: int, dtype: mx.Dtype) -> list[mx.array]:
    found = []
    for key in mx.random.split(mx.random.key(7), n):
        logits = 2 * mx.random.normal((rows, vocab), key=key)
        forbidden = mx.random.uniform(shape=(rows, vocab), key=key) < 0.3
        forbidden[:, 1] = False
        logits = mx.where(forbidden, -math.inf, logits).astype(dtype)
        found.append(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
    return found


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("filtered", FILTERED)
def test_rows_sampled_together_get_the_tokens_that_each_gets_alone(
    filtered: SamplingParams, dtype: mx.Dtype
) -> None:
    params = [replace(filtered, seed=seed) for seed in range(6)]
    for vocab in (7, 96, 3000):
        steps = some_logprobs(len(params), vocab, 12, dtype)
        assert drawn_together(params, steps) == drawn_alone(params, steps)


def test_rows_of_several_kinds_keep_their_places() -> None:
    params = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.0, seed=2**62 + 12345),
        SamplingParams(temperature=0.5, top_k=4, seed=2),
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.0, seed=1),
        SamplingParams(temperature=0.5, top_k=4, seed=2),
        SamplingParams(temperature=2.0, seed=9),
    ]
    steps = some_logprobs(len(params), 96, 20, mx.float32)
    together = drawn_together(params, steps)
    assert together == drawn_alone(params, steps)
    assert any(row[2] != row[5] for row in together)


def test_a_row_that_allows_one_token_gets_it_among_others() -> None:
    params = [SamplingParams(temperature=1.0, seed=seed) for seed in range(3)]
    only = mx.full((3, 8), -math.inf)
    for row, token in enumerate((0, 7, 4)):
        only[row, token] = 0.0
    assert drawn_together(params, [only] * 30) == [[0, 7, 4]] * 30


def test_rows_that_are_sampled_alike_are_one_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx.random, "categorical", lambda *_, **__: pytest.fail("a row alone"))
    params = [SamplingParams(temperature=1.0, top_p=0.9, seed=seed) for seed in range(5)]
    (step,) = some_logprobs(5, 50, 1, mx.float32)
    assert len(drawn_together(params, [step])[0]) == 5
