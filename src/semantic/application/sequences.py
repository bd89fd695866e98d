"""Requests' sequences in the backend: opened, computed, closed, turned into caches.

Knows the backend and which sequence belongs to which request; not who runs next, nor the pool
beyond the ledger's word. What the backend cannot do to one sequence never touches another.
"""

from __future__ import annotations

from typing import Generic, TypeVar

from semantic.application.block_ledger import BlockLedger
from semantic.application.request import Phase, Request
from semantic.domain.entities import AgentBlocks
from semantic.domain.errors import BackendError, CacheReconstructionError
from semantic.domain.value_objects import SampledToken, SequenceId
from semantic.ports.outbound import BatchBackend

KV = TypeVar("KV")


class Sequences(Generic[KV]):
    """The open sequences. Used by the stepping thread alone."""

    def __init__(self, model: BatchBackend[KV], ledger: BlockLedger[KV]) -> None:
        self._model = model
        self._ledger = ledger
        self._requests: dict[SequenceId, Request[KV]] = {}

    def open(self, request: Request[KV]) -> None:
        """Give an admitted request its sequence, restored where it can be.

        Raises BackendError.
        """
        sequence = self._restored(request)
        if sequence is None:
            sequence = self._model.open(request.capacity)
        request.sequence = sequence
        self._requests[sequence] = request

    def reserve(self, request: Request[KV]) -> None:
        """Make room for what the request's blocks hold. Raises BackendError."""
        if request.sequence is not None:
            self._model.reserve(request.sequence, request.capacity)

    def prefill(self, request: Request[KV], limit: int) -> int:
        """Compute at most `limit` tokens of an opened request; how many there were.

        One that has nothing left to compute begins to decode. Raises BackendError.
        """
        if request.sequence is None:
            raise AssertionError("only an opened request is prefilled")
        chunk = request.next_chunk(limit)
        if chunk:
            self._model.prefill(request.sequence, chunk)
            request.computed += len(chunk)
        if not request.to_prefill:
            *history, last = request.tokens
            drawn = len(request.generated)
            self._model.start(request.sequence, last, history, request.params, drawn)
            request.phase = Phase.DECODE
        return len(chunk)

    def decode(self) -> list[tuple[Request[KV], SampledToken]]:
        """One token for each decoding request. Raises BackendError: then all of them are lost."""
        return [(self._requests[token.sequence], token) for token in self._model.decode()]

    def close(self, request: Request[KV]) -> None:
        """Drop the request's sequence, if it has one."""
        sequence = self._forget(request)
        if sequence is None:
            return
        try:
            self._model.close(sequence)
        except BackendError:
            # It is out of every batch for us. What memory the backend could not free is lost,
            # and no reason to lose more.
            return

    def extract(self, request: Request[KV]) -> AgentBlocks[KV] | None:
        """Turn the request's sequence into a cache; None when there is nothing to keep."""
        sequence = request.sequence
        if sequence is None:
            return None
        length = self._model.length(sequence)
        self._forget(request)
        try:
            unused = self._model.extract(sequence, request.blocks)
        except BackendError:
            return None  # the answer is complete; only its cache is lost
        self._ledger.free_unused(request, unused)
        return request.as_cache(length, self._model.model_id) if length else None

    def _restored(self, request: Request[KV]) -> SequenceId | None:
        restore = request.restore
        if restore is None:
            return None
        try:
            sequence = self._model.restore(
                restore.blocks, restore.length, request.capacity, exclusive=restore.exclusive
            )
        except CacheReconstructionError:
            return None  # then it is computed: a cache may cost time, never an answer
        finally:
            self._ledger.unpin(request)
        request.computed = restore.length
        # A request that was suspended may find parts of its answer too; those are no prompt.
        request.cached_tokens = min(restore.length, len(request.prompt) - 1)
        return sequence

    def _forget(self, request: Request[KV]) -> SequenceId | None:
        sequence, request.sequence = request.sequence, None
        if sequence is not None:
            del self._requests[sequence]
        return sequence
