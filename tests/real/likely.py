"""The answers that are right: mlx-lm's own, and those that only rounding tells from it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

import mlx.core as mx
from mlx_lm.generate import generate_step

from experiments.subjects import Subject
from semantic.adapters.mlx.text.tokenizer import MLXTokenizer
from tests.support.rounding import most_rounding


def tokenizer_of(subject: Subject) -> MLXTokenizer:
    """Of a subject that has one."""
    assert subject.tokenizer is not None
    return subject.tokenizer


def answers(subject: Subject, prompt: Sequence[int], n: int) -> Iterator[tuple[int, ...]]:
    """Greedy answers of plain mlx-lm of at most `n` tokens, without the end token.

    More than one if two tokens are so close that the order of a sum decides between them.
    """
    eos, given = tokenizer_of(subject).eos_token_ids, list(prompt)
    found: list[int] = []
    for token, likely in generate_step(mx.array(given), subject.model, max_tokens=n):
        second, first = cast("list[int]", mx.argpartition(likely, -2)[-2:].tolist())
        other = second if first == token else first
        gap = cast("float", (likely[token] - likely[other]).item())
        if gap < most_rounding(subject.model):
            head = (*found, other)
            for rest in [()] if other in eos else answers(subject, [*given, *head], n - len(head)):
                yield (*(found if other in eos else head), *rest)
        if token in eos:
            break
        found.append(int(token))
    yield tuple(found)


def texts(subject: Subject, messages: Sequence[dict[str, str]], n: int) -> list[str]:
    """What a client may read of an answer to `messages` of at most `n` tokens."""
    tokenizer = tokenizer_of(subject)
    prompt = tokenizer.render_chat(messages)
    return [tokenizer.decode(tokens) for tokens in answers(subject, prompt, n)]
