"""Compares the texts of a tokenizer, mlx-lm's streaming detokenizer and ours for the same tokens.

Knows no model.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol, TypeAlias

from experiments.harness.document import Scalar
from semantic.application.request import StreamingDetokenizer

Row: TypeAlias = dict[str, Scalar]


class Incremental(Protocol):
    """mlx-lm's streaming detokenizers, as used here."""

    text: str

    def reset(self) -> None: ...

    def add_token(self, token: int) -> None: ...

    def finalize(self) -> None: ...


class Texts(Protocol):
    """A tokenizer with mlx-lm's detokenizer for it."""

    @property
    def detokenizer(self) -> Incremental: ...

    def decode(self, token_ids: list[int]) -> str: ...


def theirs(tokenizer: Texts, tokens: Sequence[int]) -> str:
    """What mlx-lm's detokenizer makes of the tokens: the text of `mlx_lm.generate`."""
    detokenizer = tokenizer.detokenizer
    detokenizer.reset()
    for token in tokens:
        detokenizer.add_token(token)
    detokenizer.finalize()
    return detokenizer.text


def ours(tokenizer: Texts, tokens: Sequence[int]) -> str:
    """What our detokenizer gives out, piece by piece."""
    detokenizer = StreamingDetokenizer(lambda ids: tokenizer.decode(list(ids)))
    return "".join([*(detokenizer.push(token) for token in tokens), detokenizer.flush()])


def difference(left: str, right: str) -> str:
    """How `left` differs from `right`, in words that can be counted."""
    if left == right:
        return "none"
    if " " + left == right:
        return "a leading space is missing"
    return "other"


def sequences(vocab: Sequence[int], length: int, count: int, seed: int) -> Iterator[list[int]]:
    """Every token of `vocab` as the first of a short answer, then random answers."""
    draw = random.Random(seed)
    for token in vocab:
        yield [token, *draw.choices(vocab, k=2)]
    for _ in range(count):
        yield draw.choices(vocab, k=length)


def sweep(name: str, tokenizer: Texts, answers: Iterable[list[int]]) -> list[Row]:
    """How often each detokenizer differs from the tokenizer's own decode, and how.

    One row for answers that are text, one for those whose bytes are no text (U+FFFD).
    """
    rows = {
        broken: {
            "tokenizer": name,
            "mlx_lm_class": type(tokenizer.detokenizer).__name__,
            "bytes": "broken" if broken else "text",
            **dict.fromkeys(COUNTS, 0),
        }
        for broken in (False, True)
    }
    for tokens in answers:
        whole = tokenizer.decode(tokens)
        found = difference(theirs(tokenizer, tokens), whole)
        row = rows["\ufffd" in whole]
        seen = (
            True,
            whole.startswith(" "),
            found == "a leading space is missing",
            found == "other",
            ours(tokenizer, tokens) != whole,
        )
        for key, counts in zip(COUNTS, seen, strict=True):
            row[key] = int(str(row[key])) + counts
    return [{**row} for row in rows.values()]


COUNTS = (
    "answers",
    "begin_with_space",
    "mlx_lm_drops_the_space",
    "mlx_lm_differs_otherwise",
    "ours_differs",
)
