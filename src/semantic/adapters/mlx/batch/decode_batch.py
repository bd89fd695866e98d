"""Continuous batching: the contract of a decode batch, and the batch for our own caches.

Sequences join and leave between steps without a drain: the last prompt token of one that joins is
one more row of the next step, and one that leaves takes its caches along. The next step is computed
while the tokens of the last one are read. Knows caches that can be merged, and samplers; neither
blocks nor requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import TokenBuffer

from semantic.adapters.mlx.arrays import async_eval
from semantic.adapters.mlx.kv_cache.forms import LayerCache
from semantic.adapters.mlx.sampling.sampler import LogitsProcessor, Sampler, draw
from semantic.domain.value_objects import SequenceId

_CLEAR_EVERY = 512
"""Steps between calls of `mx.clear_cache`, as in mlx-lm."""


@dataclass(frozen=True, slots=True)
class NewSequence:
    """A sequence to join: its caches, which hold `history`, and the next input token.

    `logprobs` is true if log-probabilities are requested.
    """

    sequence: SequenceId
    caches: list[LayerCache]
    last_token: int
    history: list[int]
    sampler: Sampler
    processors: list[LogitsProcessor]
    logprobs: bool = True


class Emitted(NamedTuple):
    """A sequence's sampled token, now in its cache, and the log-probabilities (vocab,)."""

    sequence: SequenceId
    token: int
    logprobs: mx.array | None


class DecodeBatch(Protocol):
    """Sequences that decode together."""

    @property
    def stream(self) -> mx.Stream:
        """The stream of all computations."""
        ...

    @property
    def max_joins_per_step(self) -> int | None:
        """Maximum joins per step; None for no limit."""
        ...

    def __contains__(self, sequence: object) -> bool: ...

    def __len__(self) -> int: ...

    def join(self, joining: Sequence[NewSequence]) -> None:
        """Add sequences to the next step."""
        ...

    def leave(self, sequence: SequenceId) -> list[LayerCache]:
        """Take a sequence out; its caches hold all tokens that were emitted."""
        ...

    def step(self) -> list[Emitted]:
        """Run a step: a token of each sequence but those whose first step this was."""
        ...


class _BatchCache(Protocol):
    """One layer of a batch; see `RaggedBatch` and `PagedBatch`."""

    @property
    def n_rows(self) -> int: ...

    def extend(self, other: _BatchCache) -> None: ...

    def filter(self, batch_indices: Sequence[int]) -> None: ...

    def extract(self, idx: int) -> LayerCache: ...


class _Merges(Protocol):
    def merge(self, caches: Sequence[object]) -> _BatchCache: ...


@dataclass(slots=True)
class _Row:
    """A sequence in the batch; `new` until its first step, which emits no token."""

    sequence: SequenceId
    sampler: Sampler
    processors: list[LogitsProcessor]
    context: TokenBuffer | None
    logprobs: bool
    new: bool = True


class ContinuousBatch:
    """Implements `DecodeBatch` for our own caches, which join and leave without copies."""

    max_joins_per_step = None

    def __init__(self, model: Module) -> None:
        self._model = model
        self._rows: list[_Row] = []
        self._caches: list[_BatchCache] = []
        self._tokens: mx.array | None = None  # inputs of the next step, (rows,)
        self._changed = False  # rows, since the last step
        self._logprobs: list[mx.array | None] = []  # of `_tokens`
        self._steps = 0

    @property
    def stream(self) -> mx.Stream:
        """See `DecodeBatch.stream`. It is mlx-lm's, of which each thread has one."""
        return cast(mx.Stream, generation_stream)

    def __contains__(self, sequence: object) -> bool:
        return any(row.sequence == sequence for row in self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def join(self, joining: Sequence[NewSequence]) -> None:
        """See `DecodeBatch.join`."""
        layers = zip(*(one.caches for one in joining), strict=True)
        merged = [cast(_Merges, layer[0]).merge(layer) for layer in layers]
        if self._rows:
            for mine, more in zip(self._caches, merged, strict=True):
                mine.extend(more)
        else:
            self._caches = merged
        self._changed = True
        tokens = mx.array([one.last_token for one in joining], mx.uint32)
        self._tokens = tokens if self._tokens is None else mx.concatenate([self._tokens, tokens])
        self._logprobs += [None] * len(joining)
        self._rows += [
            _Row(
                one.sequence,
                one.sampler,
                one.processors,
                TokenBuffer(one.history) if one.processors else None,
                one.logprobs,
            )
            for one in joining
        ]

    def leave(self, sequence: SequenceId) -> list[LayerCache]:
        """See `DecodeBatch.leave`."""
        at = next(i for i, row in enumerate(self._rows) if row.sequence == sequence)
        caches = [layer.extract(at) for layer in self._caches]
        keep = tuple(i for i in range(len(self._rows)) if i != at)
        self._changed = True
        self._rows = [self._rows[i] for i in keep]
        self._logprobs = [self._logprobs[i] for i in keep]
        if keep:
            for layer in self._caches:
                layer.filter(keep)
            self._tokens = None if self._tokens is None else self._tokens[mx.array(keep)]
        else:
            self._caches, self._tokens = [], None
        return caches

    def step(self) -> list[Emitted]:
        """See `DecodeBatch.step`."""
        inputs, logprobs = self._tokens, self._logprobs
        if inputs is None:
            return []
        if self._changed:
            self._changed = False
            async_eval(inputs)  # separately, so that the step itself stays the same CUDA graph
        contexts = self._advance(inputs)
        async_eval(self._tokens, *(p for p in self._logprobs if p is not None), *contexts)
        self._steps += 1
        if self._steps % _CLEAR_EVERY == 0:
            mx.clear_cache()
        emitted = [
            Emitted(row.sequence, token, scores)
            for row, token, scores in zip(
                self._rows, cast(list[int], inputs.tolist()), logprobs, strict=True
            )
            if not row.new
        ]
        for row in self._rows:
            row.new = False
        return emitted

    def _advance(self, inputs: mx.array) -> list[mx.array]:
        """Build the next step from `inputs`; returns further arrays to evaluate with it.

        Same operations in the same order as mlx-lm's, so that the tokens are the same.
        """
        logits = self._logits(inputs)
        contexts: list[mx.array] = []
        if any(row.processors for row in self._rows):
            rows: list[mx.array] = []
            for i, row in enumerate(self._rows):
                one = logits[i : i + 1]
                if row.context is not None:
                    context = cast(mx.array, row.context.update_and_fetch(inputs[i : i + 1]))
                    contexts.append(context)
                    for processor in row.processors:
                        one = processor(context, one)
                rows.append(one)
            logits = mx.concatenate(rows)
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        self._tokens = draw([row.sampler for row in self._rows], logprobs)
        self._logprobs = [logprobs[i] if row.logprobs else None for i, row in enumerate(self._rows)]
        return contexts

    def _logits(self, inputs: mx.array) -> mx.array:
        """The logits after one more token of each row, without those of padding rows."""
        n = inputs.shape[0]
        n_padding = self._caches[0].n_rows - n
        if n_padding:
            inputs = mx.pad(inputs, (0, n_padding))
        logits = cast(mx.array, self._model(inputs[:, None], cache=self._caches))[:, -1, :]
        return logits[:n] if n_padding else logits
