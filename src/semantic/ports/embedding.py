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
    """The embedding model of a server. Lists show its `names`, the id first. Requests may also use
    its `aliases`. `max_tokens` is the limit of a text. `created` is Unix time in seconds."""

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
    """The vectors of texts, in the order of the texts, and the number of tokens. `computed` of the
    tokens were not in the cache."""

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
        """Return the vectors of `texts`, cut to `dimensions` numbers and scaled to length 1. With
        `truncate`, cuts long texts. Raises InvalidRequestError for an empty text or too many
        dimensions, ContextOverflowError for a long text, and OverloadedError."""


class EmbeddingRun(Protocol):
    """The computation of one batch of texts. Runs on the computing thread."""

    def step(self) -> tuple[Vector, ...] | None:
        """Compute one chunk of the batch. Returns all vectors after the last chunk, and None after
        any other chunk. Raises BackendError."""


class Embedder(Protocol):
    """A loaded embedding model."""

    @property
    def dimensions(self) -> int:
        """The number of dimensions of the model's vectors."""

    @property
    def max_tokens(self) -> int:
        """The maximum number of tokens in a text, including special tokens."""

    @property
    def model_id(self) -> str:
        """An id of the model. Models with different vectors have different ids."""

    @property
    def max_characters(self) -> int:
        """The number of characters above which a text always exceeds `max_tokens`."""

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the tokens of `text` with special tokens. Thread-safe."""

    def shortened(self, tokens: tuple[int, ...]) -> tuple[int, ...]:
        """Return `tokens` without its end, if it exceeds `max_tokens`. The special tokens stay."""

    def start(self, batch: Sequence[tuple[int, ...]]) -> EmbeddingRun:
        """Begin to compute a batch of texts, given as tokens. Call this on the computing thread."""
