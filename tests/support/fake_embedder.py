"""Fake of the `Embedder` port: one character is one token, and a vector counts its letters."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeVar

from semantic.ports.embedding import EmbeddingModel, Vector

T = TypeVar("T")

END = 0x7F
LETTERS = "abcd"


@dataclass(slots=True)
class FakeEmbedder:
    """Computes one column of a batch in each step; records what was computed, and when."""

    dimensions: int = len(LETTERS)
    max_tokens: int = 20
    model_id: str = "fake"
    max_characters: int = 40
    batches: list[list[str]] = field(default_factory=list)
    steps: list[str] = field(default_factory=list)

    def encode(self, text: str) -> tuple[int, ...]:
        """See `Embedder.encode`."""
        return (*map(ord, text), END)

    def shortened(self, tokens: tuple[int, ...]) -> tuple[int, ...]:
        """See `Embedder.shortened`."""
        return (*tokens[: self.max_tokens - 1], END)

    def start(self, batch: Sequence[tuple[int, ...]]) -> FakeRun:
        """See `Embedder.start`."""
        rows = ["".join(map(chr, row[:-1])) for row in batch]
        self.batches.append(rows)
        return FakeRun(self, rows)


@dataclass(slots=True)
class FakeRun:
    """Implements `EmbeddingRun`."""

    embedder: FakeEmbedder
    rows: list[str]
    column: int = 0

    def step(self) -> tuple[Vector, ...] | None:
        """See `EmbeddingRun.step`."""
        self.embedder.steps.append(self.rows[0])
        self.column += 1
        if self.column < max(map(len, self.rows)):
            return None
        return tuple(counted(row) for row in self.rows)


def counted(text: str) -> Vector:
    """How often each letter is in `text`, made of length 1."""
    counts = [float(text.count(letter)) for letter in LETTERS]
    length = sum(one * one for one in counts) ** 0.5 or 1.0
    return array("f", (one / length for one in counts))


def at_once(function: Callable[[], T]) -> Future[T]:
    """Calls `function` now."""
    result: Future[T] = Future()
    result.set_result(function())
    return result


MODEL = EmbeddingModel(
    ("vectors",), len(LETTERS), 20, 1_700_000_000, frozenset({"default", "/models/vectors"})
)
