"""The ports of embeddings: `EmbeddingPort` for the APIs, `Embedder` for a backend."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from semantic.ports.serving import ModelDetails

Vector: TypeAlias = "array[float]"
"""A vector of 32-bit floats with length 1."""


@dataclass(frozen=True, slots=True)
class EmbeddingModel:
    """The embedding model of a server. Lists show its `names`, the id first; requests may also use
    its `aliases`. A text may have `max_tokens` tokens. `created` is Unix time in seconds."""

    names: tuple[str, ...]
    dimensions: int
    max_tokens: int
    created: int
    aliases: frozenset[str] = frozenset()
    details: ModelDetails | None = None

    def accepts(self, name: str) -> bool:
        """Return True if a request may use `name` for this model."""
        return name in self.names or name in self.aliases

    @property
    def id(self) -> str:
        return self.names[0]


@dataclass(frozen=True, slots=True)
class Embedded:
    """The vectors of texts, in order, and the number of tokens. `computed` of them were not in the
    cache."""

    vectors: tuple[Vector, ...]
    tokens: int
    computed: int


class EmbeddingPort(Protocol):
    """An embedding model. Tasks of one event loop may use it concurrently."""

    @property
    def model(self) -> EmbeddingModel:
        """The model's names, dimensions and limits."""

    async def embed(
        self,
        texts: Sequence[str],
        tenant: str = "",
        *,
        dimensions: int | None = None,
        truncate: bool = False,
        keep: bool = True,
    ) -> Embedded:
        """Return the vectors of `texts`, cut to `dimensions` numbers and scaled to length 1.
        `truncate` cuts a text that is too long. Raises InvalidRequestError for an empty text or too
        many dimensions, ContextOverflowError for a text that is too long, and OverloadedError."""


class EmbeddingRun(Protocol):
    """The computation of one batch, on the computing thread."""

    def step(self) -> tuple[Vector, ...] | None:
        """Compute one chunk. Returns all vectors after the last chunk, and None before. Raises
        BackendError."""


class Embedder(Protocol):
    """A loaded embedding model."""

    @property
    def dimensions(self) -> int:
        """The length of the model's vectors."""

    @property
    def max_tokens(self) -> int:
        """Most tokens of a text, with special tokens."""

    @property
    def model_id(self) -> str:
        """An id of the model: other vectors mean another id."""

    @property
    def max_characters(self) -> int:
        """A longer text always exceeds `max_tokens`."""

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the tokens of `text` with special tokens. Thread-safe."""

    def shortened(self, tokens: tuple[int, ...]) -> tuple[int, ...]:
        """Return `tokens`, cut at the end to `max_tokens`. The special tokens stay."""

    def start(self, batch: Sequence[tuple[int, ...]]) -> EmbeddingRun:
        """Begin to compute a batch of texts, given as tokens. Call this on the computing thread."""
