"""Engines whose steps check drafts: "llama in pages drafted" is "llama in pages" with them.

The drafts are mlx-lm's own answers with mistakes, so that steps accept many and refuse many.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator, Sequence

from mlx.nn.layers.base import Module

from semantic.adapters.mlx.backend import MLXBackend
from semantic.adapters.mlx.kv_cache.paged.attention import PortableAttention
from semantic.adapters.mlx.model.provider import wrap_model
from semantic.adapters.mlx.text.tokenizer import MLXTokenizer
from semantic.ports.generation import Draft, Drafter
from tests.support.eight_bits import EIGHT
from tests.support.tiny_models import VOCAB, build, randomize

DRAFTED = " in pages drafted"
COUNTS = (0, 1, 3, 8)
"""How many tokens a draft may have. Without a kernel each costs as much as a step."""
RIGHT = 0.6
"""The chance that a draft has no mistake."""


class Oracle:
    """Knows a sequence's answer and drafts it, with mistakes."""

    def __init__(self, answer: Sequence[int], draw: random.Random) -> None:
        self._answer, self._draw = list(answer), draw
        self.n_checked = self.n_accepted = 0

    def propose(self, most: int) -> Draft:
        """See `Drafter.propose`."""
        n = min(most, self._draw.choice(COUNTS))
        drafts = self._answer[:n]
        if drafts and self._draw.random() > RIGHT:
            drafts[self._draw.randrange(len(drafts))] = self._draw.randrange(VOCAB)
        return Draft(drafts, 1.0)

    def read(self, tokens: Sequence[int], n_drafted: int, /) -> None:
        """See `Drafter.read`."""
        self.n_checked += n_drafted
        self.n_accepted += min(n_drafted, len(tokens) - 1)
        known = self._answer[: len(tokens)]
        self._answer = self._answer[len(tokens) :] if known == list(tokens[: len(known)]) else []


class OracleSource:
    """A `DraftSource` of oracles."""

    def __init__(self, answer: Callable[[Sequence[int]], Sequence[int]], seed: int = 0) -> None:
        """`answer` returns the tokens that follow others."""
        self._answer, self._draw = answer, random.Random(seed)
        self.oracles: list[Oracle] = []

    def drafter(
        self, _tenant: str, tokens: Sequence[int], _predicted: Sequence[int] = ()
    ) -> Drafter:
        """See `DraftSource.drafter`."""
        self.oracles.append(Oracle(self._answer(tokens), self._draw))
        return self.oracles[-1]

    def add(self, tenant: str, tokens: Sequence[int]) -> None:
        """See `DraftSource.add`."""

    def recall(self, saved: Callable[[str], Iterator[Sequence[int]]]) -> None:
        """See `DraftSource.recall`."""

    def forget(self, tenant: str) -> None:
        """See `DraftSource.forget`."""

    def close(self) -> None:
        """See `DraftSource.close`."""


def drafted_backend(
    name: str, model_id: str | None = None, texts: MLXTokenizer | None = None
) -> MLXBackend:
    """The tiny model in pages and in a lane."""
    backend = wrap_model(
        _model(name.removesuffix(DRAFTED)), model_id, texts,
        attention=lambda _: PortableAttention(), exact_batch="on",
        kv_bits=8 if EIGHT in name else 16,
    )  # fmt: skip
    assert not backend.drafts_problem
    return backend


@functools.cache
def _model(name: str) -> Module:
    """A model of its own, as a lane changes its layers."""
    model = build(name)
    randomize(model)
    model.eval()
    return model
