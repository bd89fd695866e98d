"""Continuous batching: the protocol of a decode batch, and a batch for our own caches."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple, Protocol, cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import TokenBuffer

from semantic.adapters.mlx.arrays import async_eval
from semantic.adapters.mlx.device import on_cpu
from semantic.adapters.mlx.kv_cache.contiguous.cache import RaggedBatch
from semantic.adapters.mlx.kv_cache.forms import LayerCache
from semantic.adapters.mlx.kv_cache.merged import BatchLayer, merge, pad, state_shapes, states
from semantic.adapters.mlx.sampling.sampler import LogitsProcessor, Sampler, draw
from semantic.domain.value_objects import Lane, SequenceId

_UNLIMITED = 1 << 30


class _Group(NamedTuple):
    n_rows: int
    layers: list[BatchLayer]


class BatchRows:
    """The caches of a batch's rows. `logits` computes the model's next step over them."""

    def __init__(self, model: Module, lane: Lane | None = None) -> None:
        """In a `lane`, attention computes each row apart. If the lane splits steps, a step has at
        most its rows."""
        self.model = model
        self._by_row = lane is not None
        self._most = (lane and lane.splits and lane.most) or _UNLIMITED
        self._groups: list[_Group] = []

    @property
    def layers(self) -> list[BatchLayer]:
        """The batch's cache in each layer. Callers may replace the caches."""
        return self._groups[0].layers if self._groups else []

    @property
    def states(self) -> list[mx.array]:
        """The arrays of all recurrent states after a step. Callers must evaluate them."""
        return states(self.layers)

    def join(self, sequences: Sequence[Sequence[LayerCache]]) -> None:
        """Append `sequences` to the batch, with one row per sequence."""
        most = self._most
        runs = [list(run) for _, run in itertools.groupby(sequences, state_shapes)]
        for members in (run[i : i + most] for run in runs for i in range(0, len(run), most)):
            layers = [merge(layer) for layer in zip(*members, strict=True)]
            for layer in layers:
                if self._by_row and isinstance(layer, RaggedBatch):
                    layer.as_rows()
            self._groups.append(_Group(len(members), layers))
        self._join_groups()

    def leave(self, at: int) -> list[LayerCache]:
        """Remove row number `at` and return its caches."""
        number = 0
        while at >= self._groups[number].n_rows:
            at -= self._groups[number].n_rows
            number += 1
        n_rows, layers = self._groups[number]
        caches = [layer.extract(at) for layer in layers]
        if n_rows == 1:
            del self._groups[number]
        else:
            keep = [i for i in range(n_rows) if i != at]
            for layer in layers:
                layer.filter(keep)
            self._groups[number] = _Group(n_rows - 1, layers)
        return cast(list[LayerCache], caches)

    def logits(self, inputs: mx.array) -> mx.array:
        """Append one token of `inputs` to each row. Return the step's logits, (rows, vocab)."""
        if len(self._groups) == 1:
            return self._group_logits(inputs, self._groups[0].layers)
        found: list[mx.array] = []
        at = 0
        for n_rows, layers in self._groups:
            found.append(self._group_logits(inputs[at : at + n_rows], layers))
            at += n_rows
        self._join_groups()
        return mx.concatenate(found)

    def _join_groups(self) -> None:
        joined: list[_Group] = []
        for group in self._groups:
            fits = joined and joined[-1].n_rows + group.n_rows <= self._most
            if fits and state_shapes(joined[-1].layers) == state_shapes(group.layers):
                first = joined.pop()
                for mine, more in zip(first.layers, group.layers, strict=True):
                    mine.extend(more)
                joined.append(_Group(first.n_rows + group.n_rows, first.layers))
            else:
                joined.append(group)
        self._groups = joined

    def _group_logits(self, inputs: mx.array, layers: Sequence[BatchLayer]) -> mx.array:
        n = inputs.shape[0]
        n_rows = max(layer.n_rows for layer in layers)
        for layer in layers:
            pad(layer, n_rows)
        if n_rows > n:
            inputs = mx.pad(inputs, (0, n_rows - n))
        logits = cast(mx.array, self.model(inputs[:, None], cache=layers))[:, -1, :]
        return logits[:n] if n_rows > n else logits


Agree = Callable[[mx.array], mx.array]
"""Takes a rank's sampled tokens and returns the tokens that all ranks use. Both are (rows,)."""

_CLEAR_EVERY = 512
"""The number of steps between two calls of `mx.clear_cache`, as in mlx-lm."""


@dataclass(frozen=True, slots=True)
class NewSequence:
    """A sequence to join a batch. Its caches contain the tokens in `history`."""

    sequence: SequenceId
    caches: list[LayerCache]
    last_token: int
    history: list[int]
    sampler: Sampler
    processors: list[LogitsProcessor]
    logprobs: bool = True


class Emitted(NamedTuple):
    """A token that a step sampled for a sequence. Log-probabilities are (vocab,).

    If the model's logits contain NaN or infinity, `finite` is False and `token` is arbitrary. If
    the step was outside the lane, `exact` is False.
    """

    sequence: SequenceId
    token: int
    logprobs: mx.array | None
    finite: bool = True
    exact: bool = True


class DecodeBatch(Protocol):
    """A batch of sequences that decode together."""

    @property
    def stream(self) -> mx.Stream:
        """The MLX stream on which the batch computes."""

    @property
    def max_joins_per_step(self) -> int | None:
        """The maximum number of sequences that may join per step; None for any number."""

    def __contains__(self, sequence: object) -> bool: ...

    def __len__(self) -> int: ...

    def join(self, joining: Sequence[NewSequence]) -> None:
        """Add the sequences in `joining` to the next step."""

    def settle(self) -> None:
        """Make the caches contain all tokens that `step` has returned. After an error the batch
        must not be used."""

    def in_flight(self, sequence: SequenceId) -> Emitted | None:
        """Return the sequence's token that `step` has not returned yet; None if it is unknown."""

    def leave(self, sequence: SequenceId) -> list[LayerCache]:
        """Remove a sequence and return its caches, with all tokens that `step` has returned."""

    def step(self) -> list[Emitted]:
        """Launch a step and return the tokens of the previous step, if any."""


class _Next(Enum):
    PROMPT = auto()
    """The row's token is the last prompt token. `step` does not return it."""
    FIRST = auto()
    """The row's token is the first sampled token."""
    LATER = auto()


@dataclass(slots=True)
class _Row:
    sequence: SequenceId
    sampler: Sampler
    processors: list[LogitsProcessor]
    context: TokenBuffer | None
    logprobs: bool
    next: _Next = _Next.PROMPT


class _Sampled(NamedTuple):
    """A step's rows, None for a row without a token, and their values beside the tokens."""

    rows: list[_Row | None]
    normalizers: mx.array
    logprobs: list[mx.array | None]
    exact: bool


class ContinuousBatch:
    """A `DecodeBatch` for our own caches. Sequences join and leave it without copies."""

    max_joins_per_step = None

    def __init__(
        self,
        model: Module,
        *,
        lane: Lane | None = None,
        launch_blocks: bool | None = None,
        agree: Agree | None = None,
    ) -> None:
        """`lane` is None if a row's bits may depend on other rows. `launch_blocks` is true if a
        launch waits for the previous step to end; None selects the default device's value. `agree`
        makes all ranks use the same tokens."""
        self._launch_blocks = on_cpu() if launch_blocks is None else launch_blocks
        self._agree = agree
        self._rows: list[_Row] = []
        self._caches = BatchRows(model, lane)
        self._most = (lane and not lane.splits and lane.most) or _UNLIMITED
        self._exact = True  # whether the step that sampled `_tokens` was in the lane
        self._tokens: mx.array | None = None  # inputs of the next step, (rows,)
        self._emitted = False  # whether `_tokens` has been emitted
        self._changed = False  # whether rows changed since the last step
        self._logprobs: list[mx.array | None] = []  # for `_tokens`
        self._normalizers = mx.zeros((0, 1))  # for `_tokens`; see `_advance`
        self._steps = 0

    @property
    def stream(self) -> mx.Stream:
        """See `DecodeBatch.stream`."""
        return cast(mx.Stream, generation_stream)

    def __contains__(self, sequence: object) -> bool:
        return any(row.sequence == sequence for row in self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def join(self, joining: Sequence[NewSequence]) -> None:
        self._caches.join([one.caches for one in joining])
        self._changed = True
        tokens = mx.array([one.last_token for one in joining], mx.uint32)
        self._tokens = tokens if self._tokens is None else mx.concatenate([self._tokens, tokens])
        self._logprobs += [None] * len(joining)
        known = mx.zeros((len(joining), 1), self._normalizers.dtype)
        self._normalizers = mx.concatenate([self._normalizers, known]) if self._rows else known
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

    def settle(self) -> None:
        if self._emitted and self._tokens is not None:
            self._launch(self._tokens)

    def in_flight(self, sequence: SequenceId) -> Emitted | None:
        at = self._row_of(sequence)
        if self._tokens is None or self._emitted or self._rows[at].next is _Next.PROMPT:
            return None
        token = cast(int, self._tokens[at : at + 1].item())
        normalizer = cast(float, self._normalizers[at : at + 1].item())
        return Emitted(sequence, token, self._logprobs[at], math.isfinite(normalizer), self._exact)

    def leave(self, sequence: SequenceId) -> list[LayerCache]:
        self.settle()
        at = self._row_of(sequence)
        caches = self._caches.leave(at)
        keep = tuple(i for i in range(len(self._rows)) if i != at)
        self._changed = True
        self._rows = [self._rows[i] for i in keep]
        self._logprobs = [self._logprobs[i] for i in keep]
        if not keep:
            self._tokens = None
        elif self._tokens is not None:  # slices, because a GPU would have to compile a gather
            self._tokens = mx.concatenate([self._tokens[:at], self._tokens[at + 1 :]])
            left = [self._normalizers[:at], self._normalizers[at + 1 :]]
            self._normalizers = mx.concatenate(left)
        return caches

    def step(self) -> list[Emitted]:
        inputs = self._tokens
        if inputs is None:
            return []
        if not self._emitted and self._reads_first():
            self._emitted = True
            return self._read(inputs, self._sampled())
        was_emitted, sampled = self._emitted, self._sampled()
        self._launch(inputs)
        return [] if was_emitted else self._read(inputs, sampled)

    def _row_of(self, sequence: SequenceId) -> int:
        return next(i for i, row in enumerate(self._rows) if row.sequence == sequence)

    def _reads_first(self) -> bool:
        after = {row.next for row in self._rows}
        return _Next.FIRST in after and (self._launch_blocks or _Next.LATER not in after)

    def _sampled(self) -> _Sampled:
        rows = [None if row.next is _Next.PROMPT else row for row in self._rows]
        return _Sampled(rows, self._normalizers, self._logprobs, self._exact)

    def _launch(self, inputs: mx.array) -> None:
        if self._changed:
            self._changed = False
            # Evaluate these separately, so that the CUDA graph of the step does not change.
            async_eval(inputs, self._normalizers)
        contexts = self._advance(inputs)
        contexts.append(self._normalizers)
        async_eval(self._tokens, *(p for p in self._logprobs if p is not None), *contexts)
        self._emitted = False
        for row in self._rows:
            row.next = _Next.FIRST if row.next is _Next.PROMPT else _Next.LATER
        self._steps += 1
        if self._steps % _CLEAR_EVERY == 0:
            mx.clear_cache()

    @staticmethod
    def _read(inputs: mx.array, sampled: _Sampled) -> list[Emitted]:
        rows, normalizers, logprobs, exact = sampled
        tokens = cast(list[int], inputs.tolist())
        finite = [math.isfinite(one) for (one,) in cast(list[list[float]], normalizers.tolist())]
        return [
            Emitted(row.sequence, token, scores, is_finite, exact)
            for row, token, scores, is_finite in zip(rows, tokens, logprobs, finite, strict=True)
            if row is not None
        ]

    def _advance(self, inputs: mx.array) -> list[mx.array]:
        """Build the next step from `inputs`. Return more arrays to evaluate with the step. It runs
        mlx-lm's operations in mlx-lm's order, so that the sampled tokens are the same."""
        logits = self._caches.logits(inputs)
        self._exact = len(self._rows) <= self._most
        # Tests the model's own logits: later, a mask may rightly add minus infinity.
        normalizers = self._normalizers = mx.logsumexp(logits, axis=-1, keepdims=True)
        contexts = self._caches.states
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
            normalizers = mx.logsumexp(logits, axis=-1, keepdims=True)
        logprobs = logits - normalizers
        tokens = draw([row.sampler for row in self._rows], logprobs)
        self._tokens = tokens if self._agree is None else self._agree(tokens)
        self._logprobs = [logprobs[i] if row.logprobs else None for i, row in enumerate(self._rows)]
        return contexts
