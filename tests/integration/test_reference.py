"""What other tests compare answers with: one pass over an answer finds what decoding finds."""

from __future__ import annotations

import functools

import pytest

from tests.support.durable import EVERY_ARCHITECTURE, text
from tests.support.reference import generate, is_greedy
from tests.support.tiny_models import VOCAB, tiny_model

N_PROMPT, N_NEW = 290, 24
"""The prompt is longer than one chunk, and the answer crosses the windows of 300 tokens."""

PROMPT = text(N_PROMPT, seed=3)


@functools.cache
def answer(architecture: str) -> tuple[int, ...]:
    """The answer of mlx-lm, decoded once in a process."""
    return tuple(generate(tiny_model(architecture), PROMPT, N_NEW))


@pytest.mark.parametrize("architecture", EVERY_ARCHITECTURE)
def test_the_answer_that_is_decoded_is_the_likeliest_token_by_token(architecture: str) -> None:
    assert is_greedy(tiny_model(architecture), PROMPT, answer(architecture))


@pytest.mark.parametrize("architecture", EVERY_ARCHITECTURE)
@pytest.mark.parametrize("at", [0, N_NEW // 2, N_NEW - 1])
def test_any_other_token_is_noticed(architecture: str, at: int) -> None:
    right = answer(architecture)
    other = [*right[:at], (right[at] + 1) % VOCAB, *right[at + 1 :]]
    assert not is_greedy(tiny_model(architecture), PROMPT, other)


def test_an_answer_to_another_prompt_is_noticed() -> None:
    edited = [*PROMPT[:100], (PROMPT[100] + 1) % VOCAB, *PROMPT[101:]]
    assert not is_greedy(tiny_model("llama"), edited, answer("llama"))


def test_no_answer_needs_no_computation() -> None:
    assert is_greedy(tiny_model("llama"), PROMPT[:5], [])
