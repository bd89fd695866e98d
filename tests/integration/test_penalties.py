"""OpenAI's penalties: over what the answer has so far, exact in a batch and over a preemption."""

from __future__ import annotations

from collections import Counter
from typing import cast

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step

from semantic import SamplingParams
from semantic.adapters.mlx.sampling.sampler import make_processors
from tests.integration.test_exactness import prompts
from tests.support.rig import Rig

PARAMS = [
    SamplingParams(presence_penalty=1.5),
    SamplingParams(frequency_penalty=0.8),
    SamplingParams(presence_penalty=-0.7, frequency_penalty=2.0),
    SamplingParams(presence_penalty=2.0, frequency_penalty=-0.5, logit_bias={4: 2.0}),
]


def reference(rig: Rig, prompt: list[int], params: SamplingParams, n: int) -> list[int]:
    """The formula of OpenAI's documentation, token by token, on mlx-lm's own loop."""

    def penalize(tokens: mx.array, logits: mx.array) -> mx.array:
        figures = cast("list[float]", logits[0].tolist())
        for token, bias in params.logit_bias.items():
            figures[token] += bias
        for token, count in Counter(cast("list[int]", tokens.tolist())[len(prompt) :]).items():
            figures[token] -= count * params.frequency_penalty + params.presence_penalty
        return mx.array([figures])

    steps = generate_step(mx.array(prompt), rig.model, max_tokens=n, logits_processors=[penalize])
    return [int(token) for token, _ in steps]


@pytest.mark.parametrize("params", PARAMS)
def test_penalties_are_those_of_the_formula(params: SamplingParams) -> None:
    rig = Rig("llama")
    (prompt,) = prompts(40, seed=30)
    expected = reference(rig, prompt, params, 25)
    assert list(rig.answer("ann", prompt, 25, sampling=params).tokens) == expected
    assert list(rig.answer("ben", prompt, 25).tokens) != expected


def test_penalties_are_the_same_in_a_batch_and_over_a_preemption() -> None:
    texts = prompts(240, 250, 245, 248, seed=31)
    alone = [
        Rig("llama", chunk=64).answer("x", text, 30, sampling=params).tokens
        for text, params in zip(texts, PARAMS, strict=True)
    ]
    for columns in (200, 5):
        rig = Rig("llama", chunk=64, columns=columns)
        uids = [
            rig.engine.submit(f"a{i}", text, max_tokens=30, sampling=params)
            for i, (text, params) in enumerate(zip(texts, PARAMS, strict=True))
        ]
        done = rig.run()
        assert [done[uid].tokens for uid in uids] == alone
        assert bool(rig.engine.preemptions) == (columns == 5)


def test_the_prompt_counts_for_nothing_and_the_type_stays() -> None:
    (penalize,) = make_processors(
        SamplingParams(presence_penalty=0.5, frequency_penalty=0.25), n_prompt=2
    )
    logits = mx.zeros((1, 4), mx.bfloat16)
    assert penalize(mx.array([0, 1]), logits).tolist() == [[0, 0, 0, 0]]
    # What was said before a preemption comes at once.
    assert penalize(mx.array([0, 1, 1, 3, 3, 3]), logits).tolist() == [[0, -0.75, 0, -1.25]]
    told = penalize(mx.array([0, 1, 1, 3, 3, 3, 1]), logits)
    assert told.tolist() == [[0, -1.0, 0, -1.25]]
    assert told.dtype == mx.bfloat16


def test_no_penalty_costs_nothing() -> None:
    assert make_processors(SamplingParams(), 3) == []
