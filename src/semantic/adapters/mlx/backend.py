"""MLXBackend: runs one mlx-lm model for many sequences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import mlx.core as mx

from semantic.adapters.mlx.arrays import token_ids
from semantic.adapters.mlx.batch.decode_batch import Agree, DecodeBatch, Emitted, NewSequence
from semantic.adapters.mlx.batch.draft_costs import StepSeconds
from semantic.adapters.mlx.batch.padded_batch import Pads, new_batch
from semantic.adapters.mlx.device import on_cpu
from semantic.adapters.mlx.kv_cache import attention_hook
from semantic.adapters.mlx.kv_cache.forms import CacheForm, LayerCache, Memory
from semantic.adapters.mlx.kv_cache.paged.layers import PagedLayers
from semantic.adapters.mlx.kv_cache.staging import Staging
from semantic.adapters.mlx.prefill import Prompt, prefill_for
from semantic.adapters.mlx.sampling.grammar_compiler import GrammarCompiler
from semantic.adapters.mlx.sampling.sampler import (
    make_processors,
    make_sampler,
    read_logprob,
    score_tokens,
)
from semantic.adapters.mlx.sampling.token_mask import GrammarMask
from semantic.adapters.mlx.transfers import Room
from semantic.domain.block_hash import Part
from semantic.domain.entities import AgentBlocks, KVBlock
from semantic.domain.errors import (
    BackendError,
    CacheReconstructionError,
    InvalidRequestError,
    SemanticError,
    UncheckedGrammarError,
)
from semantic.domain.grammar import Grammar
from semantic.domain.stored import BlockLayout, Body
from semantic.domain.value_objects import (
    Lane,
    ModelCacheSpec,
    SampledToken,
    SamplingParams,
    SequenceId,
    TokenLogprob,
)
from semantic.ports.generation import BodyTarget, Draft, Drafter

_NO_LANE = Lane(problem="--exact-batch is off")


@dataclass(slots=True)
class _Sequence(Prompt):
    capacity: int = 0
    decoding: bool = False
    params: SamplingParams = field(default_factory=SamplingParams)
    mask: GrammarMask | None = None
    staging: Staging[Memory] | None = None


class _InRoom:
    """Limits a sequence's drafts to its memory. Lets the drafter read only when it must propose."""

    def __init__(self, drafter: Drafter, state: _Sequence, n_tokens: int, most: int) -> None:
        self._drafter, self._state, self._n_tokens, self._most = drafter, state, n_tokens, most
        self._unread: list[tuple[Sequence[int], int]] = []

    def propose(self, most: int) -> Draft:
        for one in self._unread:
            self._drafter.read(*one)
        self._unread.clear()
        most = min(most, self._most, self._state.capacity - self._n_tokens - 1)
        return self._drafter.propose(most) if most > 0 else Draft((), 0.0)

    def read(self, tokens: Sequence[int], n_drafted: int, /) -> None:
        self._n_tokens += len(tokens)
        self._unread.append((tokens, n_drafted))


class MLXBackend:
    """A `BatchBackend` over an mlx-lm model, with chunked prefill and continuous batching."""

    def __init__(
        self,
        form: CacheForm,
        model_id: str,
        vocab_size: int,
        grammars: GrammarCompiler | None = None,
        pads: Pads | None = None,
        agree: Agree | None = None,
        lane: Lane = _NO_LANE,
    ) -> None:
        """`form` contains the model and creates its caches. `lane` holds for its decode steps.

        If `grammars` is None, constrained decoding is unavailable. `agree` makes all ranks of a
        sharded model use the same tokens.
        """
        self.model = form.model
        self.model_id = model_id
        self._spec = form.spec
        self.vocab_size = vocab_size
        self.grammars = grammars or GrammarCompiler(None, (), vocab_size)
        self._layers, self._codec = form.layers, form.codec
        self.in_pages = isinstance(form.layers, PagedLayers)
        """True if caches are in pages, which sequences may share."""
        self.ragged_layers = form.layers.ragged
        """`ragged_layers[i]` is True if layer i uses our cache instead of mlx-lm's own cache."""
        self.together = form.layers.together
        """True if several sequences form one batch; otherwise they run one after the other."""
        self._prefill = prefill_for(self.model, form.layers, self._spec.reusable_tokens)
        self.pads = pads
        """Decides which batches have padding. None means that no batch has padding."""
        self._agree = agree
        self.lane = lane
        self._sequences: dict[SequenceId, _Sequence] = {}
        self._starting: dict[SequenceId, NewSequence] = {}
        self._joined: list[_Sequence] = []
        self.peak_bytes = 0
        self._lost_batch = False  # through a failure outside `decode`
        self._next_id = 0
        self._seconds = StepSeconds()
        self._batch = self._new_batch()
        attention_hook.install(self.model)

    @property
    def unused_bytes(self) -> int | None:
        return self._layers.unused_bytes

    def return_memory(self, room: int) -> bool:
        with self._computing():
            self._finish_launched()
            return self._layers.shrink(room)

    @property
    def best_chunk(self) -> int:
        """See `BatchBackend.best_chunk`. On a CPU, 512 tokens are faster than 2,048."""
        return 512 if on_cpu() else 2048

    @property
    def stream(self) -> mx.Stream:
        """The MLX stream on which this backend computes."""
        return self._batch.stream

    def cache_spec(self) -> ModelCacheSpec:
        return self._spec

    @property
    def shared_layers(self) -> Sequence[bool]:
        return self._layers.shared

    def set_aside(self, n_bytes: int) -> None:
        with self._computing():
            self._layers.set_aside(n_bytes)

    def abandon(self) -> None:
        """Free everything except the model's weights. The backend must not be used afterwards."""
        self._sequences.clear()
        self._starting.clear()
        self._batch = self._new_batch()
        self._layers.abandon()

    def open(self, capacity: int) -> SequenceId:
        with self._computing():
            self._finish_launched()
            caches = self._layers.empty(capacity)
        return self._add(_Sequence(caches, capacity=capacity))

    def restore(
        self, blocks: AgentBlocks, length: int, capacity: int, *, exclusive: bool
    ) -> SequenceId:
        with self._computing():
            self._finish_launched()
            caches = self._layers.restored(blocks, length, capacity, exclusive=exclusive)
        return self._add(_Sequence(caches, length, capacity=capacity))

    def reserve(self, sequence: SequenceId, capacity: int) -> None:
        state = self._sequences[sequence]
        if state.staging is not None:
            raise BackendError("cannot move a sequence that is still loading")
        with self._computing():
            if not state.decoding:
                self._finish_launched()
            self._layers.reserve(state.caches, capacity)
        state.capacity = max(state.capacity, capacity)

    def length(self, sequence: SequenceId) -> int:
        return self._sequences[sequence].length

    def prefill(self, sequence: SequenceId, tokens: Sequence[int]) -> None:
        state = self._resting(sequence)
        with self._measured():
            self._prefill.compute(state, tokens)

    def joins(self, sequence: SequenceId, n_tokens: int) -> bool:
        return self._prefill.joins(self._sequences[sequence], n_tokens)

    @property
    def pads_chunks(self) -> bool:
        return self._prefill.pads_chunks

    def side_by_side(self, sequence: SequenceId, n_tokens: int) -> bool:
        return self._prefill.side_by_side(self._sequences[sequence], n_tokens)

    def prefill_together(self, chunks: Sequence[tuple[SequenceId, Sequence[int]]]) -> None:
        states = [(self._resting(sequence), tokens) for sequence, tokens in chunks]
        with self._measured():
            self._prefill.compute_together(states)

    def score(self, sequence: SequenceId, tokens: Sequence[int], n_top: int) -> list[TokenLogprob]:
        state = self._resting(sequence)
        given = list(tokens[:-1])
        with self._measured():
            self._prefill.compute_late(state)
            logits = self.model(token_ids([given]), cache=state.caches).squeeze(0)
            scores = score_tokens(logits, tokens[1:], n_top)
            mx.eval([cache.state for cache in state.caches])
        state.length += len(given)
        return scores

    def check_grammar(self, grammar: Grammar) -> None:
        self.grammars.check(grammar)

    def start(
        self,
        sequence: SequenceId,
        last_token: int,
        history: Sequence[int],
        params: SamplingParams,
        drawn: int,
        drafter: Drafter | None = None,
    ) -> None:
        state = self._resting(sequence)
        n_prompt = len(history) + 1 - drawn
        with self._computing():
            self._prefill.compute_late(state)
            sampler, processors = make_sampler(params, drawn), make_processors(params, n_prompt)
        mask = None
        if params.grammar is not None:
            try:
                mask = self.grammars.mask(params.grammar, n_prompt)
            except (InvalidRequestError, UncheckedGrammarError) as error:
                raise BackendError(str(error)) from error
            processors.append(mask)  # after all others
        state.params, state.mask = params, mask
        logprobs = params.logprobs is not None
        if drafter is not None:
            n_most = self._most_drafts()
            drafter = _InRoom(drafter, state, len(history) + 1, n_most) if n_most else None
        self._starting[sequence] = NewSequence(
            sequence, state.caches, last_token, list(history), sampler, processors, logprobs,
            drafter,
        )  # fmt: skip

    def decode(self) -> list[SampledToken]:
        if self._lost_batch:
            self._lost_batch = False
            self._drop_batch()
            raise BackendError("the batch failed when a sequence left it")
        if not self._batch and not self._starting:
            return []
        try:
            with self._computing():
                self._join_starting()
                return self._advance() or self._advance()
        except BackendError:
            self._drop_batch()
            raise

    def extract(self, sequence: SequenceId, blocks: Sequence[Sequence[KVBlock]]) -> list[KVBlock]:
        state = self._sequences.pop(sequence)
        with self._computing():
            self._leave(sequence, state)
            if not state.length:
                return [block for layer in blocks for block in layer]
            self._prefill.compute_late(state)
            return self._layers.fill(state.caches, blocks, state.length)

    def close(self, sequence: SequenceId) -> None:
        with self._computing():
            self._leave(sequence, self._sequences.pop(sequence))

    def layout(self) -> BlockLayout:
        return self._codec.layout

    def pause(self, sequence: SequenceId) -> SampledToken | None:
        state = self._sequences[sequence]
        if state.decoding and sequence not in self._batch:
            raise BackendError("a step that failed left the sequence half written")
        with self._computing():
            in_flight = self._leave(sequence, state, read=True)
            mx.eval([cache.state for cache in state.caches])
            return None if in_flight is None else self._read(in_flight)

    def export_block(self, sequence: SequenceId, part: Part, start: int, stop: int) -> Body:
        return self.export_to(None, sequence, part, range(start, stop))

    def export_to(self, room: Room | None, sequence: SequenceId, part: Part, tokens: range) -> Body:
        """Like `export_block`, but copy into memory that `room` returns."""
        state = self._resting(sequence)
        with self._computing():
            self._prefill.compute_late(state)
            return self._codec.export_block(state.caches, state.length, part, tokens, room)

    def is_finite(self, part: Part, body: bytes) -> bool:
        with self._computing():
            return self._codec.is_finite(part, body)

    def export_checkpoint(self, sequence: SequenceId) -> bytes:
        state = self._resting(sequence)
        if not state.length:
            raise BackendError("an empty sequence has no checkpoint")
        with self._computing():
            self._prefill.compute_late(state)
            return self._codec.export_checkpoint(state.caches, state.length)

    def loading(self, sequence: SequenceId, part: Part, start: int, stop: int) -> list[BodyTarget]:
        state = self._sequences[sequence]
        staging = state.staging
        if staging is None:
            staging = Staging(self._resting(sequence).length)
        with self._computing():
            targets = self._codec.loading(state.caches, staging, part, start, stop)
        state.staging = staging
        return targets

    def loaded(self, sequence: SequenceId, length: int, checkpoint: bytes | None = None) -> None:
        state = self._sequences[sequence]
        staging, state.staging = state.staging, None
        if staging is None:
            raise CacheReconstructionError("the sequence has no loaded blocks")
        with self._computing():
            if not length:
                state.caches.clear()  # first, because there may be few pages
                state.caches = self._layers.empty(state.capacity)
            elif length > staging.length or checkpoint is not None:
                state.caches = self._codec.loaded(state.caches, staging, length, checkpoint)
        state.length = length

    def sequences(self) -> list[list[LayerCache]]:
        """Return the caches of each open sequence by layer, from the oldest sequence on."""
        return [state.caches for state in self._sequences.values()]

    @property
    def drafts_problem(self) -> str:
        """The reason why `start` ignores drafters, or ""."""
        layers: object = self._layers
        if not isinstance(layers, PagedLayers):
            return "the model's caches are not in pages"
        if not layers.takes_rows:
            return "a recurrent state cannot return to an earlier token"
        return self.lane.problem or ("" if self._agree is None else "several devices compute")

    # Inside

    def _most_drafts(self) -> int:
        layers: object = self._layers
        if self.drafts_problem or not isinstance(layers, PagedLayers):
            return 0
        return layers.spare

    def _new_batch(self) -> DecodeBatch:
        lane = None if self.lane.problem else self.lane
        return new_batch(self.model, self._layers, self.pads, self._agree, lane, self._seconds)

    @contextmanager
    def _computing(self) -> Iterator[None]:
        try:
            with mx.stream(self._batch.stream):
                yield
        except SemanticError:
            raise
        except (RuntimeError, ValueError, MemoryError) as error:
            raise BackendError(str(error)) from error

    @contextmanager
    def _measured(self) -> Iterator[None]:
        self._seconds.pause()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        with self._computing():
            yield
        self.peak_bytes = max(0, mx.get_peak_memory() - before)

    def _finish_launched(self) -> None:
        """Wait for the step in flight. It may still write to pages that sequences have freed."""
        if self.in_pages:
            mx.synchronize(self._batch.stream)

    def _add(self, state: _Sequence) -> SequenceId:
        sequence = SequenceId(self._next_id)
        self._next_id += 1
        self._sequences[sequence] = state
        return sequence

    def _advance(self) -> list[SampledToken]:
        sampled: list[SampledToken] = []
        for one in self._batch.step():
            sampled.append(self._read(one))
            self._sequences[one.sequence].length += 1
        for state in self._joined:
            state.length += 1
        self._joined.clear()
        return sampled

    def _read(self, emitted: Emitted) -> SampledToken:
        sequence, token, logprobs, finite, exact = emitted
        if not finite:
            return SampledToken(sequence, token, finite=False)
        state = self._sequences[sequence]
        error = None if state.mask is None else state.mask.failure_at(state.length)
        n_logprobs = state.params.logprobs
        found = None
        if n_logprobs is not None and logprobs is not None:
            found = read_logprob(logprobs, token, n_logprobs)
        return SampledToken(sequence, token, found, error, exact=exact)

    def _join_starting(self) -> None:
        joining: list[NewSequence] = []
        for sequence in list(self._starting)[: self._batch.max_joins_per_step]:
            joining.append(self._starting.pop(sequence))
            state = self._sequences[sequence]
            state.decoding = True
            self._joined.append(state)
        if joining:
            self._batch.join(joining)

    def _leave(
        self, sequence: SequenceId, state: _Sequence, *, read: bool = False
    ) -> Emitted | None:
        """Remove a sequence from the batch. If `read`, return the sequence's token in flight."""
        self._starting.pop(sequence, None)
        state.decoding = False
        if sequence not in self._batch:
            return None
        try:
            self._batch.settle()
        except (RuntimeError, ValueError, MemoryError):
            self._drop_batch()
            self._lost_batch = True
            raise
        in_flight = self._batch.in_flight(sequence) if read else None
        state.caches = self._batch.leave(sequence)
        return in_flight

    def _drop_batch(self) -> None:
        """Drop all sequences in the batch: a failed step leaves them in an unknown state."""
        self._batch = self._new_batch()
        self._joined.clear()
        self._starting.clear()

    def _resting(self, sequence: SequenceId) -> _Sequence:
        state = self._sequences[sequence]
        if state.decoding or sequence in self._starting:
            raise BackendError("the sequence is decoding; pause it first")
        if state.staging is not None:
            raise BackendError("the sequence is still loading")
        return state
