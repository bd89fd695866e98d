"""Embeddings: embeds texts in batches between two steps of the engine.

A cache keeps the vectors of each tenant's texts.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from operator import mul
from typing import Protocol, TypeVar

from semantic.application.fair_threads import FairThreads
from semantic.domain.block_hash import pack_tokens
from semantic.domain.errors import ContextOverflowError, InvalidRequestError, OverloadedError
from semantic.domain.fair_share import FairLru, FairRoom
from semantic.domain.identity import digest
from semantic.ports.embedding import Embedded, Embedder, EmbeddingModel, EmbeddingRun, Vector

T = TypeVar("T")

_BATCH_TOKENS = 4096
"""The maximum number of tokens in one batch, including padding."""
_BATCH_TEXTS = 64
_PART_CHARACTERS = 1 << 16
"""The maximum number of characters that a worker tokenizes in one call."""
_CACHE_BYTES = 64 << 20
_ENTRY_BYTES = 200
"""The size of a cached vector in bytes, without its numbers."""
_MOST_WAITING = 512
"""The maximum number of requests at the same time. At most half come from one tenant."""
_RETRY_AFTER = 1

Tokens = tuple[int, ...]
Key = bytes
Row = tuple[Key, Tokens]


class Calls(Protocol):
    """Calls functions on the engine's thread."""

    def __call__(self, function: Callable[[], T]) -> Future[T]:
        """Call `function` on the engine's thread; return the future of its result."""


class Embeddings:
    """Implements `EmbeddingPort` with one model."""

    def __init__(
        self,
        model: EmbeddingModel,
        embedder: Embedder,
        call: Calls,
        workers: FairThreads,
        turns: FairThreads,
    ) -> None:
        """`call` runs a function on the engine's thread. `workers` tokenize, and `turns` wait for
        the model."""
        self.model = model
        self._embedder = embedder
        self._call = call
        self._workers = workers
        self._cache: FairLru[Key, Vector] = FairLru(_CACHE_BYTES)
        self._turns = turns
        self._room = FairRoom(_MOST_WAITING)

    async def embed(
        self,
        texts: Sequence[str],
        tenant: str = "",
        *,
        dimensions: int | None = None,
        truncate: bool = False,
        keep: bool = True,
    ) -> Embedded:
        most = self._embedder.dimensions
        if dimensions is not None and not 1 <= dimensions <= most:
            raise InvalidRequestError(f"dimensions: expected 1 to {most}, got {dimensions}")
        with self._entered(tenant):
            rows = await self._encoded(texts, tenant, truncate=truncate)
            known = {key: self._cache.get(tenant, key) for key, _ in rows}
            found = {key: vector for key, vector in known.items() if vector is not None}
            missing = {key: tokens for key, tokens in rows if key not in found}
            for batch in batches(missing.items()):
                computed = await self._computed(batch, tenant)
                found |= computed
                if keep:
                    self._remember(computed, tenant)
        vectors = [found[key] for key, _ in rows]
        if dimensions is not None and dimensions < most:
            vectors = [first_dimensions(one, dimensions) for one in vectors]
        n_computed = sum(map(len, missing.values()))
        return Embedded(tuple(vectors), sum(len(tokens) for _, tokens in rows), n_computed)

    @contextmanager
    def _entered(self, tenant: str) -> Iterator[None]:
        if not (self._room.fits(1) and self._room.leaves_room(tenant, 1)):
            raise OverloadedError(
                f"{self._room.used} requests for embeddings are waiting", retry_after=_RETRY_AFTER
            )
        self._room.take(tenant, 1)
        try:
            yield
        finally:
            self._room.give(tenant, 1)

    async def _encoded(self, texts: Sequence[str], tenant: str, *, truncate: bool) -> list[Row]:
        found: list[Row] = []
        for part in parts(texts):
            work = partial(self._part, len(found), part, truncate=truncate)
            found += await self._workers.run(tenant, work, is_short=False)
        return found

    def _part(self, first: int, texts: Sequence[str], *, truncate: bool) -> list[Row]:
        numbered = enumerate(texts, first)
        encoded = [self._tokens(number, text, truncate=truncate) for number, text in numbered]
        return [(self._key(tokens), tokens) for tokens in encoded]

    def _tokens(self, number: int, text: str, *, truncate: bool) -> Tokens:
        if not text:
            raise InvalidRequestError(f"input[{number}] must not be empty")
        most = self._embedder.max_tokens
        is_long = len(text) > self._embedder.max_characters
        if is_long and truncate:
            text = text[: self._embedder.max_characters]
        tokens = () if is_long and not truncate else self._embedder.encode(text)
        if tokens and len(tokens) <= most:
            return tokens
        if truncate:
            return self._embedder.shortened(tokens)
        n_tokens = len(tokens) or most + 1
        raise ContextOverflowError(
            f"input[{number}]: expected at most {most} tokens, got {n_tokens} or more",
            prompt_tokens=n_tokens,
            limit=most,
            is_chat=False,
        )

    def _key(self, tokens: Tokens) -> Key:
        model = self._embedder.model_id.encode()
        return digest("embedding-v1", model, pack_tokens(tokens))

    async def _computed(self, batch: Sequence[Row], tenant: str) -> dict[Key, Vector]:
        rows = [tokens for _, tokens in batch]
        run: EmbeddingRun = await self._on_thread(lambda: self._embedder.start(rows), tenant)
        vectors = None
        while vectors is None:
            vectors = await self._on_thread(run.step, tenant)
        return dict(zip((key for key, _ in batch), vectors, strict=True))

    def _remember(self, vectors: Mapping[Key, Vector], tenant: str) -> None:
        for key, vector in vectors.items():
            n_bytes = len(vector) * vector.itemsize + _ENTRY_BYTES
            self._cache.put(tenant, key, vector, n_bytes)

    async def _on_thread(self, function: Callable[[], T], tenant: str) -> T:
        return await self._turns.run(tenant, lambda: self._call(function).result(), is_short=False)


def batches(rows: Iterable[Row]) -> Iterator[list[Row]]:
    """Yield `rows` in batches of texts of similar length."""
    batch: list[Row] = []
    for row in sorted(rows, key=lambda one: len(one[1])):
        longest = len(row[1])  # the rows ascend
        full = len(batch) == _BATCH_TEXTS or longest * (len(batch) + 1) > _BATCH_TOKENS
        if batch and full:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


def parts(texts: Sequence[str]) -> Iterator[list[str]]:
    """Yield `texts` in parts of at most `_PART_CHARACTERS` characters."""
    part: list[str] = []
    n_characters = 0
    for text in texts:
        if part and n_characters + len(text) > _PART_CHARACTERS:
            yield part
            part, n_characters = [], 0
        part.append(text)
        n_characters += len(text)
    if part:
        yield part


def first_dimensions(vector: Vector, n: int) -> Vector:
    """Return the first `n` numbers of `vector`, scaled to length 1."""
    first = vector[:n]
    length = math.sqrt(math.fsum(one * one for one in first)) or 1.0
    return array("f", (one / length for one in first))


def best_first(query: Vector, documents: Iterable[Vector]) -> list[tuple[int, float]]:
    """Return each document's index and cosine similarity to `query`, the most similar first."""
    scores = enumerate(math.fsum(map(mul, query, one)) for one in documents)
    return sorted(scores, key=lambda one: -one[1])  # the sort keeps the order of equal ones
