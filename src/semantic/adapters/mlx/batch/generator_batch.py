"""Decode batches over mlx-lm's own caches."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.generate import BatchGenerator, GenerationBatch

from semantic.adapters.mlx.arrays import depends
from semantic.adapters.mlx.batch.batch_rows import BatchRows
from semantic.adapters.mlx.batch.decode_batch import Agree, ContinuousBatch, Emitted, NewSequence
from semantic.adapters.mlx.kv_cache.forms import LayerCache
from semantic.adapters.mlx.sampling.sampler import LogitsProcessor, Sampler
from semantic.domain.value_objects import SequenceId


class OneByOne(ContinuousBatch):
    """A `DecodeBatch` that computes each sequence alone. It accepts caches of any kind."""

    def __init__(self, model: Module, agree: Agree | None = None) -> None:
        super().__init__(model, agree=agree)
        self._caches = _RowsApart(model)


class _RowsApart(BatchRows):
    def __init__(self, model: Module) -> None:
        super().__init__(model)
        self._sequences: list[list[LayerCache]] = []

    def join(self, sequences: Sequence[Sequence[LayerCache]]) -> None:
        self._sequences += map(list, sequences)

    def leave(self, at: int, n_unread: int = 0) -> list[LayerCache]:  # noqa: ARG002  always 0
        return self._sequences.pop(at)

    def logits(self, inputs: mx.array) -> mx.array:
        tokens = mx.split(inputs[:, None], inputs.shape[0])
        return mx.concatenate(
            [
                cast(mx.array, self.model(token, cache=caches))[:, -1, :]
                for token, caches in zip(tokens, self._sequences, strict=True)
            ]
        )


_UNLIMITED = 1 << 30
"""No limit on sequences and tokens: the engine limits both."""


class _Watch:
    """Samples a sequence's tokens, and records whether the logits for each token were finite."""

    def __init__(self, sampler: Sampler, processors: Sequence[LogitsProcessor]) -> None:
        self._sampler = sampler
        self.processors = [self._see, *processors] if processors else []
        self._raw: mx.array | None = None
        self._drawn: deque[mx.array] = deque()  # for tokens not read yet

    def __call__(self, logprobs: mx.array) -> mx.array:
        # If a logit is not finite, all log-probabilities are NaN except those at minus infinity.
        seen, self._raw = self._raw, None
        seen = mx.max(logprobs) if seen is None else seen
        self._drawn.append(seen)
        return depends(self._sampler(logprobs), seen)

    def next_is_finite(self) -> bool:
        return math.isfinite(cast(float, self._drawn[0].item())) if self._drawn else True

    def read(self) -> bool:
        finite = self.next_is_finite()
        self._drawn.popleft()
        return finite

    def _see(self, _tokens: mx.array, logits: mx.array) -> mx.array:
        self._raw = mx.logsumexp(logits)
        return logits


class GeneratorBatch:
    """A `DecodeBatch` over mlx-lm's BatchGenerator."""

    max_joins_per_step = 1
    """If several sequences join together, mlx-lm gives an empty sequence a state of zeros."""

    def __init__(self, model: Module) -> None:
        self._generator = BatchGenerator(
            model,
            max_tokens=_UNLIMITED,
            completion_batch_size=_UNLIMITED,
            prefill_batch_size=_UNLIMITED,
        )
        self._uids: dict[SequenceId, int] = {}
        self._sequences: dict[int, SequenceId] = {}
        self._watches: dict[SequenceId, _Watch] = {}

    @property
    def stream(self) -> mx.Stream:
        return cast(mx.Stream, self._generator.stream)

    def __contains__(self, sequence: object) -> bool:
        return sequence in self._uids

    def __len__(self) -> int:
        return len(self._uids)

    def join(self, joining: Sequence[NewSequence]) -> None:
        for one in joining:
            watch = self._watches[one.sequence] = _Watch(one.sampler, one.processors)
            (uid,) = self._generator.insert(
                [[one.last_token]],
                max_tokens=[_UNLIMITED],
                caches=[one.caches],
                all_tokens=[one.history],
                samplers=[watch],
                logits_processors=[watch.processors],
            )
            self._uids[one.sequence] = uid
            self._sequences[uid] = one.sequence

    def settle(self) -> None:
        """See `DecodeBatch.settle`. Does nothing."""

    def in_flight(self, sequence: SequenceId) -> Emitted | None:
        """See `DecodeBatch.in_flight`. mlx-lm does not reveal this token."""
        if self._watches[sequence].next_is_finite():
            return None
        return Emitted(sequence, 0, None, finite=False)

    def leave(self, sequence: SequenceId) -> list[LayerCache]:
        uid = self._uids.pop(sequence)
        del self._sequences[uid], self._watches[sequence]
        removed = self._generator.remove([uid], return_prompt_caches=True)
        return cast(list[LayerCache], removed[uid][0])

    def step(self) -> list[Emitted]:
        responses = cast(list[GenerationBatch.Response], self._generator.next()[1])
        found: list[Emitted] = []
        for one in responses:
            sequence = self._sequences[one.uid]
            finite = self._watches[sequence].read()
            found.append(Emitted(sequence, one.token, one.logprobs, finite))
        return found
