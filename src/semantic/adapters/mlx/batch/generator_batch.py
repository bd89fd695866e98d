"""Decode batch on mlx-lm's BatchGenerator, for models that need some of mlx-lm's own caches.

The generator pads those. Only its public interface is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.generate import BatchGenerator, GenerationBatch

from semantic.adapters.mlx.batch.decode_batch import Emitted, NewSequence
from semantic.adapters.mlx.kv_cache.forms import LayerCache
from semantic.domain.value_objects import SequenceId

_UNLIMITED = 1 << 30
"""Limit of sequences and tokens given to the BatchGenerator: the engine limits both."""


class GeneratorBatch:
    """Implements `DecodeBatch`."""

    max_joins_per_step = 1
    """When an empty sequence and another join together, mlx-lm's caches give the empty one a state
    of zeros instead of none."""

    def __init__(self, model: Module) -> None:
        self._generator = BatchGenerator(
            model,
            max_tokens=_UNLIMITED,
            completion_batch_size=_UNLIMITED,
            prefill_batch_size=_UNLIMITED,
        )
        self._uids: dict[SequenceId, int] = {}
        self._sequences: dict[int, SequenceId] = {}

    @property
    def stream(self) -> mx.Stream:
        """See `DecodeBatch.stream`."""
        return cast(mx.Stream, self._generator.stream)

    def __contains__(self, sequence: object) -> bool:
        return sequence in self._uids

    def __len__(self) -> int:
        return len(self._uids)

    def join(self, joining: Sequence[NewSequence]) -> None:
        """See `DecodeBatch.join`."""
        for one in joining:
            (uid,) = self._generator.insert(
                [[one.last_token]],
                max_tokens=[_UNLIMITED],
                caches=[one.caches],
                all_tokens=[one.history],
                samplers=[one.sampler],
                logits_processors=[one.processors],
            )
            self._uids[one.sequence] = uid
            self._sequences[uid] = one.sequence

    def settle(self) -> None:
        """See `DecodeBatch.settle`. The generator launches a step before it reads the last one."""

    def in_flight(self, sequence: SequenceId) -> Emitted | None:  # noqa: ARG002
        """See `DecodeBatch.in_flight`. The generator does not tell."""
        return None

    def leave(self, sequence: SequenceId) -> list[LayerCache]:
        """See `DecodeBatch.leave`."""
        uid = self._uids.pop(sequence)
        del self._sequences[uid]
        removed = self._generator.remove([uid], return_prompt_caches=True)
        return cast(list[LayerCache], removed[uid][0])

    def step(self) -> list[Emitted]:
        """See `DecodeBatch.step`."""
        responses = cast(list[GenerationBatch.Response], self._generator.next()[1])
        return [Emitted(self._sequences[one.uid], one.token, one.logprobs) for one in responses]
