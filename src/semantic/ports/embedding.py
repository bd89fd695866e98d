"""The ports of embeddings: `EmbeddingPort` for the APIs, which ask for vectors, and `Embedder` for
a backend that computes vectors. `Embeddings` batches and caches; a backend computes in chunks, so
that running answers can continue."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from semantic.ports.serving import ModelDetails

Vector: TypeAlias = "array[float]"
"""A vector of 32-bit floats, scaled to length 1."""


@dataclass(frozen=True, slots=True)
class EmbeddingModel:
    """The embedding model of a server. Lists of models show its `names`, the id first; requests may
    also use the `aliases`. Its vectors have `dimensions` numbers, and a text may have at most
    `max_tokens` tokens. `created` is Unix time in seconds."""

    names: tuple[str, ...]
    dimensions: int
    max_tokens: int
    created: int
    aliases: frozenset[str] = frozenset()
    details: ModelDetails | None = None

    def accepts(self, name: str) -> bool:
        """Return whether a request may use `name` for this model."""
        return name in self.names or name in self.aliases

    @property
    def id(self) -> str:
        return self.names[0]


@dataclass(frozen=True, slots=True)
class Embedded:
    """The vectors of some texts, in order, and the number of tokens in the texts; `computed` counts
    the tokens that were not in the cache."""

    vectors: tuple[Vector, ...]
    tokens: int
    computed: int


class EmbeddingPort(Protocol):
    """An embedding model. Any number of tasks of one event loop may use it concurrently."""

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
        """Return the vectors of `texts`. Cuts each vector to its first `dimensions` numbers and
        scales it to length 1. With `truncate`, a text that is too long loses its end. Without
        `keep`, the cache stores nothing. Raises InvalidRequestError for an empty text and for too
        many dimensions, ContextOverflowError for a text that is too long, and OverloadedError if
        too many requests are waiting."""


class EmbeddingRun(Protocol):
    """The computation of one batch, for the computing thread only."""

    def step(self) -> tuple[Vector, ...] | None:
        """Compute one chunk. Returns the vectors of all texts after the last chunk, and None after
        earlier chunks. Raises BackendError."""


class Embedder(Protocol):
    """A loaded embedding model."""

    @property
    def dimensions(self) -> int:
        """The length of the model's vectors."""

    @property
    def max_tokens(self) -> int:
        """The most tokens that a text may have, special tokens included."""

    @property
    def model_id(self) -> str:
        """An id of the model: two models with different vectors have different ids."""

    @property
    def max_characters(self) -> int:
        """A number of characters; a longer text always exceeds `max_tokens`."""

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the tokens of `text`, with the special tokens that the model expects around a
        text. Thread-safe."""

    def shortened(self, tokens: tuple[int, ...]) -> tuple[int, ...]:
        """Return a text's `tokens`, cut at the end to `max_tokens`. The special tokens at both ends
        stay and count."""

    def start(self, batch: Sequence[tuple[int, ...]]) -> EmbeddingRun:
        """Begin to compute a batch of texts, given as tokens, on the computing thread."""
