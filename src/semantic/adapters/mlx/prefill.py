"""Prefill of sequences, with one strategy for each form of caches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import mlx.core as mx
from mlx.nn.layers.base import Module

from semantic.adapters.mlx.arrays import token_ids
from semantic.adapters.mlx.device import on_cuda
from semantic.adapters.mlx.kv_cache.forms import CacheLayers, LayerCache
from semantic.adapters.mlx.kv_cache.model_spec import PROMPT_CHUNK
from semantic.adapters.mlx.kv_cache.paged.cache import PagedCache
from semantic.adapters.mlx.kv_cache.paged.layers import PagedLayers
from semantic.adapters.mlx.kv_cache.paged.side_by_side import compute_side_by_side
from semantic.domain.errors import BackendError
from semantic.domain.value_objects import whole_blocks
from semantic.ports.generation import Slices

_MOST_ROWS = 512
"""The maximum number of prompt tokens of a sequence to compute as rows."""


@dataclass(slots=True)
class Prompt:
    """The caches of a sequence. The prompt tokens in `late` do not fill a chunk yet."""

    caches: list[LayerCache]
    length: int = 0
    late: list[int] = field(default_factory=list)


Chunk = tuple[Prompt, Sequence[int]]
"""A sequence and its next tokens."""


class Prefill:
    """Prefill of contiguous caches, chunk by chunk. The other strategies derive from it."""

    def __init__(self, model: Module, reusable: int | None) -> None:
        """The keys of the first `reusable` tokens do not depend on chunks; None means all keys."""
        self._model = model
        self._reusable = reusable

    @property
    def pads_chunks(self) -> bool:
        return False

    def joins(self, _prompt: Prompt, _n_tokens: int) -> bool:
        return False

    def side_by_side(self, _prompt: Prompt, _n_tokens: int) -> bool:
        return False

    def compute(self, prompt: Prompt, tokens: Sequence[int]) -> None:
        if self._reusable is None:
            self._compute_chunk(prompt, tokens)
        else:
            self._compute_whole_chunks(prompt, tokens, self._reusable)
        prompt.length += len(tokens)

    def compute_together(self, chunks: Sequence[Chunk]) -> None:
        """Append all sequences' tokens in one pass. Raises BackendError if that is impossible."""
        self._compute_shared(chunks)
        for prompt, tokens in chunks:
            prompt.length += len(tokens)

    def compute_late(self, prompt: Prompt) -> None:
        """Compute the tokens in `late` now, although they do not fill a chunk."""
        late, prompt.late = prompt.late, []
        if late:
            self._pass(prompt, late)

    def _compute_chunk(self, prompt: Prompt, tokens: Sequence[int]) -> None:
        self._pass(prompt, tokens)

    def _compute_shared(self, _chunks: Sequence[Chunk]) -> None:
        raise BackendError("contiguous caches cannot share a prefill pass")

    def _pass(self, prompt: Prompt, tokens: Sequence[int]) -> None:
        self._model(token_ids([tokens]), cache=prompt.caches)
        # Evaluate only the caches: then the last layer computes nothing but its keys and values.
        mx.eval([cache.state for cache in prompt.caches])

    def _compute_whole_chunks(self, prompt: Prompt, tokens: Sequence[int], reusable: int) -> None:
        start = prompt.length - len(prompt.late)
        waiting = [*prompt.late, *tokens]
        while waiting:
            if start < reusable:
                n = min(len(waiting), reusable - start)
            else:
                n = PROMPT_CHUNK - start % PROMPT_CHUNK
            if n > len(waiting):
                break
            self._pass(prompt, waiting[:n])
            start, waiting = start + n, waiting[n:]
        prompt.late = waiting


class _PagedPrefill(Prefill):
    def __init__(self, model: Module, reusable: int | None, pages: PagedLayers) -> None:
        super().__init__(model, reusable)
        self._pages = pages

    def _are_rows(self, prompt: Prompt, n_tokens: int, n_bytes: int) -> bool:
        few = n_tokens <= _MOST_ROWS
        return few and self._pages.reads_as_rows(_paged(prompt), n_tokens, n_bytes)


class RowPrefill(_PagedPrefill):
    """Prefill that computes few tokens as rows of a batch, and pads longer chunks."""

    def joins(self, prompt: Prompt, n_tokens: int) -> bool:
        return self._are_rows(prompt, n_tokens, self._pages.costs.joined)

    def _compute_chunk(self, prompt: Prompt, tokens: Sequence[int]) -> None:
        if self._are_rows(prompt, len(tokens), self._pages.costs.alone):
            self._compute_shared([(prompt, tokens)])
        else:
            self._compute_padded(prompt, tokens)

    def _compute_shared(self, chunks: Sequence[Chunk]) -> None:
        caches = [_paged(prompt) for prompt, _ in chunks]
        sizes = [len(tokens) for _, tokens in chunks]
        batch = self._pages.rows(list(zip(caches, sizes, strict=True)))
        rows = [[token] for _, tokens in chunks for token in tokens]
        rows += [[0]] * (batch[0].n_rows - len(rows))
        self._model(token_ids(rows), cache=batch)
        mx.eval([layer.state for layer in batch])
        for mine, n_tokens in zip(caches, sizes, strict=True):
            for cache in mine:
                cache.advance(n_tokens)

    def _compute_padded(self, prompt: Prompt, tokens: Sequence[int]) -> None:
        padding = -len(tokens) % self._pages.costs.pad_to
        sequence = _paged(prompt)[0].sequence
        sequence.padding = padding
        try:
            self._pass(prompt, [*tokens, *[tokens[-1]] * padding])
        finally:
            sequence.padding = 0


class SidePrefill(_PagedPrefill):
    """Prefill for models with states: chunks of several sequences can share a pass."""

    @property
    def pads_chunks(self) -> bool:
        return self._pages.beside == "padded"

    def side_by_side(self, prompt: Prompt, n_tokens: int) -> bool:
        if self._pages.beside == "alone" or self._reusable is not None:
            return False
        return self._are_rows(prompt, n_tokens, self._pages.costs.joined)

    def _compute_shared(self, chunks: Sequence[Chunk]) -> None:
        given = [(_paged(prompt), tokens) for prompt, tokens in chunks]
        compute_side_by_side(self._model, self._pages.chunk_layers, given)


def first_chunks(model: Module, layers: CacheLayers, most: int) -> Slices[None]:
    """On CUDA, compute a chunk of each padded length up to `most` tokens, as far as the first layer
    of each kind. A prompt's first chunk of a new length would take some 90 ms longer."""
    if not (on_cuda() and isinstance(layers, PagedLayers) and layers.takes_rows):
        return
    n_layers = max(pool.kind.layers[0] for pool in layers.pools) + 2
    step = layers.costs.pad_to
    for n_tokens in range(_MOST_ROWS + step, most + 1, step):
        caches = layers.empty(whole_blocks(n_tokens))
        model(token_ids([[0] * n_tokens]), cache=caches)
        mx.eval([cache.state for cache in caches[:n_layers]])
        yield None


def prefill_for(model: Module, layers: CacheLayers, reusable: int | None) -> Prefill:
    """Return the prefill strategy for caches that `layers` created."""
    if not isinstance(layers, PagedLayers):
        return Prefill(model, reusable)
    return (RowPrefill if layers.takes_rows else SidePrefill)(model, reusable, layers)


def _paged(prompt: Prompt) -> list[PagedCache]:
    return cast(list[PagedCache], prompt.caches)
