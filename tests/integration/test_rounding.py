"""The bound for rounding: above what other orders of summation cost, far below any mistake."""

from __future__ import annotations

from typing import cast

import mlx.core as mx
import pytest

from tests.support.lanes import more
from tests.support.rounding import log_probabilities, most_rounding, varied
from tests.support.tiny_models import VOCAB, tiny_model

MODELS = ["llama", "gemma3", "gpt_oss", "quantized", *more("qwen3", "moe", "stablelm", "windows")]


def largest(change: mx.array) -> float:
    return cast(float, mx.abs(change).max().item())


@pytest.mark.parametrize("model", MODELS)
def test_chunks_of_any_size_differ_by_less(model: str) -> None:
    built = tiny_model(model)
    tokens = varied(VOCAB, 260)
    whole = log_probabilities(built, tokens, len(tokens))
    for chunk in (9, 60, 128):
        change = largest(log_probabilities(built, tokens, chunk) - whole)
        assert change < most_rounding(built)


@pytest.mark.parametrize("model", MODELS)
def test_one_other_token_changes_what_follows_by_far_more(model: str) -> None:
    built = tiny_model(model)
    tokens = varied(VOCAB, 260)
    edited = [*tokens[:250], (tokens[250] + 1) % VOCAB, *tokens[251:]]
    change = log_probabilities(built, tokens, 128) - log_probabilities(built, edited, 128)
    assert largest(change[:250]) == 0
    assert largest(change[251:]) > 20 * most_rounding(built)
