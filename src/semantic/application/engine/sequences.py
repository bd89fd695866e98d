"""Requests' sequences in the backend: opened, computed, closed, turned into caches.

Knows the backend and which sequence belongs to which request; not who runs next, nor the pool
beyond the ledger's word. What the backend cannot do to one sequence never touches another.
"""

from __future__ import annotations

from semantic.application.cache.block_allocator import BlockAllocator
from semantic.application.cache.prefix_lookup import StoredPrefix
from semantic.application.cache.prefix_store import PrefixStore
from semantic.application.request import Phase, Request
from semantic.domain.entities import AgentBlocks
from semantic.domain.errors import BackendError, CacheReconstructionError
from semantic.domain.value_objects import SampledToken, SequenceId
from semantic.ports.outbound import BatchBackend


class Sequences:
    """The open sequences. Used by the stepping thread alone."""

    def __init__(
        self,
        model: BatchBackend,
        ledger: BlockAllocator,
        archive: PrefixStore | None = None,
    ) -> None:
        self._model = model
        self._ledger = ledger
        self._archive = archive
        self._requests: dict[SequenceId, Request] = {}

    def open(self, request: Request) -> None:
        """Give an admitted request its sequence, restored where it can be.

        What a store has is read beside the running batch: the request is in phase LOAD then.
        Raises BackendError.
        """
        prefix = request.archived.prefix
        sequence = self._restored(request)
        if sequence is None:
            sequence = self._model.open(request.capacity)
        request.sequence = sequence
        self._requests[sequence] = request
        if prefix is not None and not request.computed:
            self._load(request, prefix)

    def finish_load(self, request: Request) -> None:
        """What was read for a request in phase LOAD is its own now. Raises BackendError."""
        if self._archive is not None:
            self._archive.finish_load(request)
        request.phase = Phase.PREFILL

    def reserve(self, request: Request) -> None:
        """Make room for what the request's blocks hold. Raises BackendError."""
        if request.sequence is not None:
            self._model.reserve(request.sequence, request.capacity)

    def prefill(self, request: Request, limit: int) -> int:
        """Compute at most `limit` tokens of an opened request; how many there were.

        A prompt that is scored goes on in chunks of its own, whatever the limit.
        One that has nothing left to compute begins to decode; one whose next blocks somebody
        else has computed meanwhile loads them instead. Raises BackendError.
        """
        if request.sequence is None:
            raise AssertionError("only an opened request is prefilled")
        before = request.computed
        if request.scoring:
            self._score(request, request.sequence)
        elif self._load_next(request):
            return 0
        else:
            self._compute(request, request.sequence, limit)
        if not request.to_prefill:
            *history, last = request.tokens
            drawn = len(request.generated)
            self._model.start(request.sequence, last, history, request.params, drawn)
            request.phase = Phase.DECODE
        return request.computed - before

    def decode(self) -> list[tuple[Request, SampledToken]]:
        """One token for each decoding request. Raises BackendError: then all of them are lost."""
        return [(self._requests[token.sequence], token) for token in self._model.decode()]

    def may_prefill(self, request: Request) -> bool:
        """Whether to compute the request's next tokens now; not while another one does so."""
        if request.sequence is None:
            return False
        return self._archive is None or request.scoring or self._archive.claim(request)

    def preempt(self, request: Request) -> None:
        """Drop the request's sequence; a store keeps what is of use when it comes back."""
        if self._archive is not None and self._archive.resumes_anywhere:
            self._keep(request)
        self.close(request)

    def close(self, request: Request) -> None:
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

    def extract(self, request: Request) -> AgentBlocks | None:
        """Turn the request's sequence into a cache; None when there is nothing to keep.

        The store keeps it too, and the agent's turn if it said something.
        """
        sequence = request.sequence
        if sequence is None:
            return None
        kept = self._keep(request)
        if kept and request.generated and self._archive is not None:
            self._archive.keep_turn(request, kept)
        length = self._model.length(sequence)
        self._forget(request)
        try:
            unused = self._model.extract(sequence, request.blocks)
        except BackendError:
            return None  # the answer is complete; only its cache is lost
        self._ledger.free_unused(request, unused)
        return request.as_cache(length, self._model.model_id) if length else None

    def _restored(self, request: Request) -> SequenceId | None:
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
        request.archived.source = "pool"
        # A request that was preempted may find parts of its answer too; those are no prompt.
        request.cached_tokens = min(restore.length, len(request.prompt) - 1)
        return sequence

    def _score(self, request: Request, sequence: SequenceId) -> None:
        chunk = request.next_scored()
        scores = self._model.score(sequence, chunk, request.params.prompt_logprobs or 0)
        request.scores += scores
        request.computed += len(scores)
        self._publish(request)

    def _compute(self, request: Request, sequence: SequenceId, limit: int) -> None:
        chunk = request.next_chunk(limit)
        if chunk:
            self._model.prefill(sequence, chunk)
            request.computed += len(chunk)
            self._publish(request)

    def _load(self, request: Request, prefix: StoredPrefix) -> None:
        if self._archive is not None:
            self._archive.begin(request, prefix)
            request.phase = Phase.LOAD

    def _load_next(self, request: Request) -> bool:
        prefix = None if self._archive is None else self._archive.next_blocks(request)
        if prefix is None:
            return False
        self._load(request, prefix)
        return True

    def _publish(self, request: Request) -> None:
        if self._archive is None:
            return
        try:
            self._archive.publish(request)
        except BackendError:
            return  # then it is not kept; the request goes on

    def _keep(self, request: Request) -> int:
        """Let the store keep what the sequence holds; how many tokens, 0 when it cannot."""
        if self._archive is None or request.sequence is None or request.archived.load is not None:
            return 0
        try:
            self._model.pause(request.sequence)
            return self._archive.keep_blocks(request)
        except BackendError:
            return 0

    def _forget(self, request: Request) -> SequenceId | None:
        if self._archive is not None:
            self._archive.release(request)
        request.archived.load = None
        sequence, request.sequence = request.sequence, None
        if sequence is not None:
            del self._requests[sequence]
        return sequence
