"""Sequences: opens, prefills, decodes and closes the backend's sequences of running requests.

A failure in one sequence never affects another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from semantic.application.cache.block_allocator import BlockAllocator
from semantic.application.cache.prefix_store import PrefixStore
from semantic.application.engine.scheduler import Chunk
from semantic.application.request import Phase, Request
from semantic.domain.entities import AgentBlocks
from semantic.domain.errors import BackendError, CacheReconstructionError, NotFiniteError
from semantic.domain.value_objects import SampledToken, SequenceId
from semantic.ports.generation import BatchBackend, Draft, Drafter, DraftSource


class Prefilled(NamedTuple):
    """The tokens of a request that a pass computed, and the error of a failed pass."""

    request: Request
    n_tokens: int
    error: str | None


class _Counting:
    """Counts the drafts of a request, and drafts no token behind the longest answer."""

    def __init__(self, drafter: Drafter, request: Request) -> None:
        self._drafter, self._request = drafter, request
        self._at = len(request.generated)  # of the next token in the answer

    def propose(self, most: int) -> Draft:
        # A step samples one token more than it checks.
        left = self._request.max_tokens - self._at - 1
        return self._drafter.propose(max(0, min(most, left)))

    def read(self, tokens: Sequence[int], n_drafted: int, /) -> None:
        self._request.drafted += n_drafted
        n_accepted = min(n_drafted, len(tokens) - 1)
        self._request.accepted_at.update(range(self._at, self._at + n_accepted))
        self._at += len(tokens)
        self._drafter.read(tokens, n_drafted)


class Sequences:
    """The open sequences. Only the stepping thread calls the methods."""

    def __init__(
        self, model: BatchBackend, allocator: BlockAllocator, prefixes: PrefixStore | None = None
    ) -> None:
        self._model = model
        self._allocator = allocator
        self._prefixes = prefixes
        self.drafts: DraftSource | None = None
        self._requests: dict[SequenceId, Request] = {}

    def open(self, request: Request) -> None:
        """Open an admitted request's sequence, from the request's cache if there is a cache. A
        request with a stored prefix begins in phase LOAD. Raises BackendError."""
        sequence = self._restored(request)
        if sequence is None:
            sequence = self._model.open(request.capacity)
        request.sequence = sequence
        self._requests[sequence] = request
        if (
            self._prefixes is not None
            and not request.computed
            and self._prefixes.begin_load(request)
        ):
            request.phase = Phase.LOAD

    def wait_for_load(self, requests: Sequence[Request], seconds: float) -> None:
        """Wait until the load of one of `requests` ends, at most `seconds`."""
        if self._prefixes is not None:
            self._prefixes.wait_for_load(requests, seconds)

    def is_loaded(self, request: Request) -> bool:
        return self._prefixes is None or self._prefixes.is_loaded(request)

    def finish_load(self, request: Request) -> None:
        """Restore the loaded prefix of a request. Raises BackendError."""
        if self._prefixes is not None:
            self._prefixes.finish_load(request)
        request.phase = Phase.PREFILL
        self._loads_checkpoint(request)  # a checkpoint taken while it was reading

    def reserve(self, request: Request) -> None:
        """Reserve memory for the request's blocks. Raises BackendError."""
        if request.sequence is not None:
            self._model.reserve(request.sequence, request.capacity)

    def prefill(self, chunks: Sequence[Chunk]) -> list[Prefilled]:
        """Compute chunks of opened requests together. A request whose prompt is computed begins to
        decode."""
        before = [chunk.request.computed for chunk in chunks]
        if len(chunks) > 1:
            self._compute_together(chunks)
        results: list[Prefilled] = []
        for (request, limit), n_tokens in zip(chunks, before, strict=True):
            error = None
            try:
                if request.computed <= n_tokens or not request.to_prefill:
                    self._prefill_one(request, limit)
            except BackendError as failure:
                # Keep only the text: the error's frames refer to the memory of the failed sequence.
                error = str(failure)
            # A sequence that loads again holds fewer tokens than before.
            results.append(Prefilled(request, max(0, request.computed - n_tokens), error))
        return results

    def decode(self) -> list[tuple[Request, SampledToken]]:
        """Decode one token for each decoding request. A BackendError fails all these requests."""
        return [(self._requests[token.sequence], token) for token in self._model.decode()]

    def pause(self, request: Request) -> int:
        """Take a decoding request out of the batch; return the number of tokens in its sequence.
        Raises BackendError if the backend fails, or for NaN or infinite values."""
        if request.sequence is None:
            raise AssertionError("cannot decode a request that is not open")
        sampled = self._model.pause(request.sequence)
        if sampled is not None and not sampled.finite:
            raise NotFiniteError
        return self._model.length(request.sequence)

    def resume(self, request: Request) -> None:
        """Compute a paused request's new tokens, and continue decoding. Raises BackendError."""
        if request.sequence is None:
            raise AssertionError("a paused request must have an open sequence")
        if given := request.tokens[request.computed : -1]:
            self._model.prefill(request.sequence, given)
            request.computed += len(given)
        self._start(request, request.sequence)

    def may_prefill(self, request: Request) -> bool:
        """Return whether to compute the request's next tokens."""
        if request.sequence is None:
            return False
        return self._prefixes is None or request.scoring or self._prefixes.shared.claim(request)

    def waits_for(self, request: Request) -> Request | None:
        """Return the request that this one waits for, or None."""
        return None if self._prefixes is None else self._prefixes.shared.waits_for(request)

    def may_join(self, request: Request) -> bool:
        """Return whether one pass can compute the rest of the prompt with other prompts."""
        return (
            request.sequence is not None
            and not request.scoring
            and self._model.joins(request.sequence, request.to_prefill)
        )

    @property
    def pads_chunks(self) -> bool:
        """True if chunks in one pass may have different numbers of tokens."""
        return self._model.pads_chunks

    def side_by_side(self, request: Request, limit: int) -> int:
        """Return the next chunk's size in tokens if other prompts can share the pass, else 0."""
        if request.sequence is None or request.scoring:
            return 0
        n_tokens = request.next_stop(limit, self._checkpoint_at(request)) - request.computed
        return n_tokens if self._model.side_by_side(request.sequence, n_tokens) else 0

    def preempt(self, request: Request) -> SampledToken | None:
        """Close the request's sequence, and save its blocks. Returns the next token if a restore
        needs it, else None."""
        sampled = None
        saving = self._prefixes if request.keep else None  # without `keep` it is computed again
        if saving is not None and saving.resumes(request):
            self._save(request)  # if values are not finite, the request fails when it runs again
        elif saving is not None:
            sampled = self._save_with_next(saving, request)
        self.close(request)
        if self._prefixes is not None:
            self._prefixes.preempt(request)
        return sampled

    def close(self, request: Request) -> None:
        sequence = self._forget(request)
        if sequence is None:
            return
        try:
            self._model.close(sequence)
        except BackendError:
            # The sequence is in no batch any more; memory that the backend could not free is
            # leaked.
            return

    def discard(self, request: Request) -> None:
        """Close the request's sequence, and drop its stored blocks."""
        self.close(request)
        if self._prefixes is not None:
            self._prefixes.discard(request)

    def extract(self, request: Request) -> AgentBlocks | None:
        """Turn the request's sequence into an idle cache, and save it. Returns None if the sequence
        is empty or `keep` is off. Saves no sequence with NaN or infinite values."""
        sequence = request.sequence
        if sequence is None:
            return None
        if not request.keep:
            self.close(request)
            return None
        if self.drafts is not None and request.generated:
            self.drafts.add(request.tenant, request.tokens)
        saved = self._save(request, ends_turn=bool(request.generated))
        if saved is None:
            self.discard(request)
            return None
        if saved and request.generated and self._prefixes is not None:
            self._prefixes.save_turn(request, saved)
        length = self._model.length(sequence)
        self._forget(request)
        try:
            unused = self._model.extract(sequence, request.blocks)
        except BackendError:
            return None  # the answer is complete; only its cache is lost
        self._allocator.free_unused(request, unused)
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
            self._allocator.readmit(request)
            return None  # the engine computes the tokens instead
        finally:
            self._allocator.unpin(request)
        request.computed = restore.length
        request.reuse.source = "pool"
        # A preempted request may find parts of its answer in the cache; they do not count.
        request.cached_tokens = min(restore.length, len(request.prompt) - 1)
        return sequence

    def _score(self, request: Request, sequence: SequenceId) -> None:
        chunk = request.next_scored()
        scores = self._model.score(sequence, chunk, request.params.prompt_logprobs or 0)
        request.scores += scores
        request.computed += len(scores)
        self._publish(request)

    def _prefill_one(self, request: Request, limit: int) -> None:
        if not request.scoring and self._loads_next_blocks(request):
            return
        sequence = request.sequence
        if sequence is None:  # the joint pass could not reopen it
            sequence = self._reopen(request)
        if request.scoring:
            self._score(request, sequence)
        elif chunk := self._next_tokens(request, limit):
            self._model.prefill(sequence, chunk)
            self._computed(request, len(chunk))
        if not request.to_prefill:
            self._start(request, sequence)

    def _start(self, request: Request, sequence: SequenceId) -> None:
        *history, last = request.tokens
        drawn = len(request.generated)
        self._model.start(sequence, last, history, request.params, drawn, self._drafter(request))
        request.phase = Phase.DECODE
        if self._prefixes is not None:
            # The prompt is complete: requests that begin alike need not wait for the answer.
            self._prefixes.shared.release(request)

    def _drafter(self, request: Request) -> Drafter | None:
        if self.drafts is None or not request.hints.drafts:
            return None
        if request.keep and not request.generated:
            self.drafts.add(request.tenant, request.tokens)
        drafter = self.drafts.drafter(request.tenant, request.tokens, request.predicted)
        return _Counting(drafter, request)

    def _compute_together(self, chunks: Sequence[Chunk]) -> None:
        # After a failure, each request computes alone, so that only the request at fault fails.
        try:
            together = [
                (request, request.sequence, self._next_tokens(request, limit))
                for request, limit in chunks
                if request.sequence is not None and not self._loads_next_blocks(request)
            ]
            passed = [(sequence, tokens) for _, sequence, tokens in together if tokens]
            if passed:  # empty if caches hold every prompt up to its last token
                self._model.prefill_together(passed)
        except BackendError:
            return
        for request, _, tokens in together:
            self._computed(request, len(tokens))

    def _loads_next_blocks(self, request: Request) -> bool:
        if request.phase is not Phase.PREFILL:
            return request.phase is Phase.LOAD
        return self._loads_checkpoint(request) or self._loads_blocks(request)

    def _loads_checkpoint(self, request: Request) -> bool:
        prefixes = self._prefixes
        if prefixes is None or not request.to_prefill or not prefixes.has_next_checkpoint(request):
            return False
        if request.computed:
            self._reopen(request)
        if prefixes.begin_load(request):
            request.phase = Phase.LOAD
        return request.phase is Phase.LOAD

    def _loads_blocks(self, request: Request) -> bool:
        prefixes = self._prefixes
        if prefixes is None or not request.to_prefill or not prefixes.load_next_blocks(request):
            return False
        request.phase = Phase.LOAD
        return True

    def _reopen(self, request: Request) -> SequenceId:
        self.close(request)
        self._allocator.readmit(request)
        request.computed = request.cached_tokens = 0
        request.reuse.source = "none"
        sequence = self._model.open(request.capacity)
        request.sequence = sequence
        self._requests[sequence] = request
        return sequence

    def _next_tokens(self, request: Request, limit: int) -> tuple[int, ...]:
        return request.next_chunk(limit, self._checkpoint_at(request))

    def _checkpoint_at(self, request: Request) -> int | None:
        return None if self._prefixes is None else self._prefixes.shared.checkpoint_at(request)

    def _computed(self, request: Request, n_tokens: int) -> None:
        request.computed += n_tokens
        if n_tokens:
            self._publish(request)

    def _publish(self, request: Request) -> None:
        if self._prefixes is None:
            return
        try:
            self._prefixes.publish(request)
        except BackendError:
            return  # not saved; the request continues

    def _save(self, request: Request, *, ends_turn: bool = False) -> int | None:
        """Save the sequence; return its length in tokens, or None for NaN or infinite values."""
        prefixes = self._prefixes
        if request.sequence is None or (prefixes is not None and prefixes.is_loading(request)):
            return 0
        try:
            sampled = self._model.pause(request.sequence)
            if sampled is not None and not sampled.finite:
                return None
            return 0 if prefixes is None else prefixes.save_blocks(request, interim=not ends_turn)
        except BackendError:
            return 0

    def _save_with_next(self, prefixes: PrefixStore, request: Request) -> SampledToken | None:
        # Saves nothing if the next token is unknown or may end the answer: the agent's cache would
        # then have to contain it.
        if request.sequence is None:
            return None
        try:
            sampled = self._model.pause(request.sequence)
            if sampled is None or not sampled.finite or request.may_end_with(sampled):
                return None
            prefixes.save_blocks(request, interim=True)
        except BackendError:
            return None
        return sampled

    def _forget(self, request: Request) -> SequenceId | None:
        if self._prefixes is not None:
            self._prefixes.close_sequence(request)
        sequence, request.sequence = request.sequence, None
        if sequence is not None:
            del self._requests[sequence]
        return sequence
