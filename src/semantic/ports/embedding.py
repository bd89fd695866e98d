"""Embeddings: the ports of APIs that ask for vectors, and of a backend that computes them.
`Embeddings` batches and caches; a backend computes in chunks, so that running answers go on."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from semantic.ports.serving import ModelDetails

Vector: TypeAlias = "array[float]"
"""Numbers of 32 bits, of length 1 together."""


@dataclass(frozen=True, slots=True)
class EmbeddingModel:
    """The embedding model of a server. Lists show `names`, its own id first; requests may also use
    `aliases`. `dimensions` is the length of its vectors, `max_tokens` that of the longest text.
    `created` is Unix time in seconds."""

    names: tuple[str, ...]
    dimensions: int
    max_tokens: int
    created: int
    aliases: frozenset[str] = frozenset()
    details: ModelDetails | None = None

    def accepts(self, name: str) -> bool:
        """Return whether requests may call the model `name`."""
        return name in self.names or name in self.aliases

    @property
    def id(self) -> str:
        return self.names[0]


@dataclass(frozen=True, slots=True)
class Embedded:
    """The vectors of some texts in their order, and how many tokens these have. `computed` of them
    were not in the cache."""

    vectors: tuple[Vector, ...]
    tokens: int
    computed: int


class EmbeddingPort(Protocol):
    """An embedding model. Any number of tasks of one event loop may call it concurrently."""

    @property
    def model(self) -> EmbeddingModel:
        """The model."""

    async def embed(
        self,
        texts: Sequence[str],
        tenant: str = "",
        *,
        dimensions: int | None = None,
        truncate: bool = False,
        keep: bool = True,
    ) -> Embedded:
        """Return the vectors of `texts`, the first `dimensions` of each, scaled to length 1. With
        `truncate` a text that is too long loses its end. Without `keep` the cache stays as it is.
        Raises InvalidRequestError for an empty text and too many dimensions, ContextOverflowError
        for a text that is too long, and OverloadedError if too many requests wait."""


class EmbeddingRun(Protocol):
    """The computation of one batch. Called by the thread that computes."""

    def step(self) -> tuple[Vector, ...] | None:
        """Compute one chunk; the vectors of all rows with the last one. Raises BackendError."""


class Embedder(Protocol):
    """A loaded embedding model."""

    @property
    def dimensions(self) -> int:
        """The length of its vectors."""

    @property
    def max_tokens(self) -> int:
        """The length of the longest text."""

    @property
    def model_id(self) -> str:
        """Changes with everything that may change a vector."""

    @property
    def max_characters(self) -> int:
        """A text of more characters has more than `max_tokens` tokens."""

    def encode(self, text: str) -> tuple[int, ...]:
        """The tokens of `text` with those that the model wants around it. Thread-safe."""

    def shortened(self, tokens: tuple[int, ...]) -> tuple[int, ...]:
        """`tokens` of a text without its end: at most `max_tokens`, with those around it."""

    def start(self, batch: Sequence[tuple[int, ...]]) -> EmbeddingRun:
        """Begin to compute texts of tokens. Called by the thread that computes."""
