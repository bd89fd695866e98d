"""Continuous batching: the protocol of a decode batch, and a batch for our own caches."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple, Protocol, cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import TokenBuffer

from semantic.adapters.mlx.arrays import async_eval
from semantic.adapters.mlx.batch.batch_rows import BatchRows
from semantic.adapters.mlx.batch.draft_costs import StepSeconds, Waiting, allotted
from semantic.adapters.mlx.device import on_cpu
from semantic.adapters.mlx.kv_cache.forms import LayerCache
from semantic.adapters.mlx.sampling.sampler import (
    LogitsProcessor,
    Sampler,
    adopt,
    branches,
    draw,
    give_back,
)
from semantic.domain.value_objects import Lane, SequenceId
from semantic.ports.generation import Drafter

Agree = Callable[[mx.array], mx.array]
"""Takes a rank's sampled tokens and returns the tokens that all ranks use. Both are (rows,)."""

_MOST_DRAFTING = 4
"""With more sequences, a step has few drafts for each, and costs the host more than they give."""

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
    drafter: Drafter | None = None
    """Drafts the next tokens, if all caches are in pages."""


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
    drafter: Drafter | None
    next: _Next = _Next.PROMPT
    drafts: Sequence[int] = ()
    """Drafts of the next tokens."""
    ready: deque[Emitted] = field(default_factory=deque)
    """Known tokens that `step` has not returned yet."""

    def read(self, tokens: Sequence[int], n_drafted: int = 0) -> None:
        """Tell the drafter the next tokens. The step that sampled them checked `n_drafted`."""
        if self.drafter is not None:
            self.drafter.read(tokens, n_drafted)


class _Sampled(NamedTuple):
    """A step's rows, None for a row without a token, and their values beside the tokens."""

    rows: list[_Row | None]
    normalizers: mx.array
    logprobs: list[mx.array | None]
    exact: bool


class _Checked(NamedTuple):
    """A step in flight that checks `drafts[i]` of row i, and samples a token after each and after
    the row's last token."""

    drafts: list[Sequence[int]]
    tokens: mx.array
    normalizers: mx.array
    logprobs: list[mx.array | None]
    processors: list[list[list[LogitsProcessor]]]
    """Each row's processors after each of its tokens."""

    @property
    def starts(self) -> list[int]:
        """The index of each row's first token."""
        return [0, *itertools.accumulate(1 + len(one) for one in self.drafts)][:-1]


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
        seconds: StepSeconds | None = None,
    ) -> None:
        """`lane` is None if a row's bits may depend on other rows. `launch_blocks` is true if a
        launch waits for the previous step to end; None selects the default device's value. `agree`
        makes all ranks use the same tokens."""
        self._launch_blocks = on_cpu() if launch_blocks is None else launch_blocks
        self._agree = agree
        self._rows: list[_Row] = []
        self._caches = BatchRows(model, lane)
        self._lane = Lane() if lane is None else lane
        self._checked: _Checked | None = None
        self._seconds = StepSeconds() if seconds is None else seconds
        self._waiting = Waiting(self._seconds)
        self._waits = False  # whether the next step waits for the tokens of the step in flight
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
        self._stop_checking()
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
                one.drafter,
            )
            for one in joining
        ]
        self._draft()

    def settle(self) -> None:
        self._stop_checking()
        if self._emitted and self._tokens is not None:
            self._launch(self._tokens)

    def in_flight(self, sequence: SequenceId) -> Emitted | None:
        at = self._row_of(sequence)
        if ready := self._rows[at].ready:
            return ready[0]
        if self._tokens is None or self._emitted or self._rows[at].next is _Next.PROMPT:
            return None
        token = cast(int, self._tokens[at : at + 1].item())
        normalizer = cast(float, self._normalizers[at : at + 1].item())
        return Emitted(sequence, token, self._logprobs[at], math.isfinite(normalizer), self._exact)

    def leave(self, sequence: SequenceId) -> list[LayerCache]:
        self.settle()
        at = self._row_of(sequence)
        caches = self._caches.leave(at, len(self._rows[at].ready))
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
        if ready := self._take_ready():
            return ready
        inputs = self._tokens
        if inputs is None:
            return []
        if self._checked is not None or self._waits or any(row.drafts for row in self._rows):
            return self._step_with_drafts(inputs)
        if not self._emitted and self._reads_first():
            self._emitted = True
            return self._read(inputs, self._sampled())
        was_emitted, sampled = self._emitted, self._sampled()
        self._launch(inputs)
        return [] if was_emitted else self._read(inputs, sampled)

    # Drafts

    def _step_with_drafts(self, inputs: mx.array) -> list[Emitted]:
        """Read the step in flight, and launch a step that checks the drafts of what follows. If the
        first token of an answer was in flight, return at once."""
        found: list[Emitted] = []
        if self._checked is not None:
            has_first = any(row.next is _Next.PROMPT for row in self._rows)
            if not has_first:
                self._caches.prepare()
            self._accept(self._checked)
            if has_first:
                return self._take_ready()
        elif not self._emitted:
            found, self._emitted = self._read(inputs, self._sampled()), True
        tokens = cast(mx.array, self._tokens)
        if self._waits or any(row.drafts for row in self._rows):
            self._check(cast(list[int], tokens.tolist()))
        else:
            self._launch(tokens)
        return found or self._take_ready()

    def _take_ready(self) -> list[Emitted]:
        return [row.ready.popleft() for row in self._rows if row.ready]

    def _draft(self, *, after_none: bool = False) -> None:
        """Draft the tokens after each row's last known token, as many as pay in one step of the
        lane. Call this whenever rows or their tokens change: older drafts are void. `after_none` is
        true after a step that checked no drafts."""
        self._waits = False
        for row in self._rows:
            row.drafts = ()
        most = (self._lane.most or 0) - len(self._rows)
        drafting = [(row, row.drafter) for row in self._rows if row.drafter is not None]
        if most <= 0 or not drafting or len(self._rows) > _MOST_DRAFTING:
            return
        drafts = [drafter.propose(most) for _, drafter in drafting]
        counts = allotted(drafts, len(self._rows), most, self._seconds)
        for (row, _), draft, n in zip(drafting, drafts, counts, strict=True):
            row.drafts = draft.tokens[:n]
        if after_none:
            self._waiting.learn(drafts, counts)
        self._waits = self._waiting.pays(len(self._rows))

    def _check(self, tokens: Sequence[int]) -> None:
        """Launch a step that follows `tokens`, the rows' last tokens, with the rows' drafts."""
        given = [[token, *row.drafts] for row, token in zip(self._rows, tokens, strict=True)]
        counts = [len(one) for one in given]
        logits = self._caches.drafted_logits([*itertools.chain(*given)], counts)
        normalizers = mx.logsumexp(logits, axis=-1, keepdims=True)
        normalized, after = normalizers, [[row.processors] for row in self._rows]
        if any(row.processors for row in self._rows):
            logits, after = self._processed(logits, given)
            normalized = mx.logsumexp(logits, axis=-1, keepdims=True)
        logprobs = logits - normalized
        rows = [row for row, n in zip(self._rows, counts, strict=True) for _ in range(n)]
        drawn = draw([row.sampler for row in rows], logprobs)
        kept = [logprobs[i] if row.logprobs else None for i, row in enumerate(rows)]
        async_eval(drawn, normalizers, *(one for one in kept if one is not None))
        drafts = [row.drafts for row in self._rows]
        self._checked = _Checked(drafts, drawn, normalizers, kept, after)
        for row in self._rows:
            row.drafts = ()
        self._count_step()

    def _processed(
        self, logits: mx.array, given: Sequence[Sequence[int]]
    ) -> tuple[mx.array, list[list[list[LogitsProcessor]]]]:
        """Return the logits after each token of `given`, and the processors of each row after each
        of its tokens."""
        found: list[mx.array] = []
        after: list[list[list[LogitsProcessor]]] = []
        context = mx.zeros((0,), mx.int32)
        for row, tokens in zip(self._rows, given, strict=True):
            after.append([row.processors])
            for number, token in enumerate(tokens):
                one = logits[len(found) : len(found) + 1]
                if number and row.context is not None:
                    context = mx.concatenate([context, mx.array([token], context.dtype)])
                    after[-1].append(branches(after[-1][-1]))
                elif row.context is not None:
                    last = mx.array([token], mx.int32)
                    context = cast(mx.array, row.context.update_and_fetch(last))
                for processor in after[-1][-1]:
                    one = processor(context, one)
                found.append(one)
        return mx.concatenate(found), after

    def _accept(self, checked: _Checked) -> None:
        """Read a step. Keep each row's drafts that equal the tokens sampled before them."""
        self._checked = None
        tokens = cast(list[int], checked.tokens.tolist())
        self._seconds.stepped(len(tokens), drafted=True)
        finite = _finite(checked.normalizers)
        kept: list[int] = []
        for number, (row, at) in enumerate(zip(self._rows, checked.starts, strict=True)):
            drafts, n = checked.drafts[number], 1
            while n <= len(drafts) and finite[at + n - 1] and tokens[at + n - 1] == drafts[n - 1]:
                n += 1
            kept.append(n)
            row.ready.extend(
                Emitted(row.sequence, tokens[i], checked.logprobs[i], finite[i])
                for i in range(at, at + n)
            )
            row.read(tokens[at : at + n], len(drafts))
        self._keep(checked, kept)
        self._tokens = mx.array(
            [tokens[at + n - 1] for at, n in zip(checked.starts, kept, strict=True)], mx.uint32
        )
        self._emitted, self._changed = True, True
        self._draft(after_none=not any(checked.drafts))

    def _stop_checking(self) -> None:
        """Make a step in flight that checks drafts one that only follows the rows' last tokens."""
        checked, self._checked = self._checked, None
        if checked is None:
            return
        self._keep(checked, [1] * len(self._rows))
        starts = checked.starts
        self._tokens = mx.concatenate([checked.tokens[at : at + 1] for at in starts])
        self._normalizers = mx.concatenate([checked.normalizers[at : at + 1] for at in starts])
        self._logprobs = [checked.logprobs[at] for at in starts]
        self._emitted, self._exact, self._changed = False, True, True

    def _keep(self, checked: _Checked, counts: Sequence[int]) -> None:
        """Keep only the first `counts[i]` tokens that row i got in a step."""
        self._caches.keep(counts)
        for row, drafts, n, after in zip(
            self._rows, checked.drafts, counts, checked.processors, strict=True
        ):
            row.next = _Next.LATER
            give_back(row.sampler, 1 + len(drafts) - n)
            if row.context is not None and n > 1:
                row.context.update_and_fetch(mx.array([*drafts[: n - 1]], mx.int32))
                adopt(row.processors, after[n - 1])

    # Inside

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
        self._count_step()

    def _count_step(self) -> None:
        self._steps += 1
        if self._steps % _CLEAR_EVERY == 0:
            mx.clear_cache()

    def _read(self, inputs: mx.array, sampled: _Sampled) -> list[Emitted]:
        rows, normalizers, logprobs, exact = sampled
        tokens = cast(list[int], inputs.tolist())
        if has_tokens := any(rows):
            self._seconds.stepped(len(tokens), drafted=False)
        finite = _finite(normalizers)
        found: list[Emitted] = []
        for row, token, scores, is_finite in zip(rows, tokens, logprobs, finite, strict=True):
            if row is not None:
                found.append(Emitted(row.sequence, token, scores, is_finite, exact))
                row.read([token])
        self._draft(after_none=has_tokens)
        return found

    def _advance(self, inputs: mx.array) -> list[mx.array]:
        """Build the next step from `inputs`. Return more arrays to evaluate with the step. It runs
        mlx-lm's operations in mlx-lm's order, so that the sampled tokens are the same."""
        logits = self._caches.logits(inputs)
        self._exact = self._lane.holds(len(self._rows))
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


def _finite(normalizers: mx.array) -> list[bool]:
    """Return whether each of `normalizers`, (rows, 1), is finite."""
    return [math.isfinite(one) for (one,) in cast(list[list[float]], normalizers.tolist())]
