"""MLXBackend: an mlx-lm model behind the `BatchBackend` port.

Prefills sequences one by one in chunks, and decodes them together in an unmodified mlx-lm
`BatchGenerator` whose caches are ours. Knows neither requests nor when something should run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.generate import BatchGenerator, GenerationBatch

from semantic.adapters.mlx import ragged_attention
from semantic.adapters.mlx.kv_buffer import LayerShape
from semantic.adapters.mlx.layer_caches import LayerCache, LayerCaches, LayerData
from semantic.adapters.mlx.sampling import make_processors, make_sampler, read_logprob
from semantic.domain.entities import AgentBlocks, KVBlock
from semantic.domain.errors import BackendError, SemanticError
from semantic.domain.value_objects import (
    ModelCacheSpec,
    SampledToken,
    SamplingParams,
    SequenceId,
)

_UNLIMITED = 1 << 30
"""How many sequences, and tokens of each, the BatchGenerator may take: the engine decides."""


@dataclass(slots=True)
class _Sequence:
    """A sequence: its caches, how many tokens they hold, and its place in the batch."""

    caches: list[LayerCache]
    length: int = 0
    uid: int | None = None
    joined: bool = False
    n_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class _Start:
    """How a sequence begins to decode."""

    last_token: int
    history: list[int]
    params: SamplingParams
    drawn: int


class MLXBackend:
    """Runs one mlx-lm model for many sequences. See `BatchBackend` for the contract."""

    def __init__(
        self,
        model: Module,
        model_id: str,
        spec: ModelCacheSpec,
        shapes: Sequence[LayerShape | None],
        ragged: Sequence[bool],
        vocab_size: int,
    ) -> None:
        """`ragged[i]` says whether layer i uses our cache; see `probe.choose_layers`."""
        self.model = model
        self._model_id = model_id
        self._spec = spec
        self._vocab_size = vocab_size
        self._layers = LayerCaches(model, spec, shapes, ragged)
        self._sequences: dict[SequenceId, _Sequence] = {}
        self._by_uid: dict[int, SequenceId] = {}
        self._starting: dict[SequenceId, _Start] = {}
        self._next_id = 0
        self._generator = self._new_generator()
        ragged_attention.install(model)

    @property
    def model_id(self) -> str:
        """See `BatchBackend.model_id`."""
        return self._model_id

    @property
    def vocab_size(self) -> int:
        """See `BatchBackend.vocab_size`."""
        return self._vocab_size

    @property
    def ragged_layers(self) -> tuple[bool, ...]:
        """Which layers use our caches; the others use mlx-lm's own."""
        return self._layers.ragged

    @property
    def best_chunk(self) -> int:
        """See `BatchBackend.best_chunk`. Measured on a CPU, whose attention writes out all scores
        of a chunk: 512 tokens are twice as fast as 2,048. The latter is mlx-lm's own for GPUs."""
        return 512 if mx.default_device() == mx.Device(mx.cpu) else 2048

    @property
    def stream(self) -> mx.Stream:
        """Where everything is computed; `mx.synchronize` it to wait for what is under way."""
        return cast(mx.Stream, self._generator.stream)

    def cache_spec(self) -> ModelCacheSpec:
        """See `BatchBackend.cache_spec`."""
        return self._spec

    def open(self, capacity: int) -> SequenceId:
        """See `BatchBackend.open`."""
        return self._add(_Sequence(self._layers.empty(capacity)))

    def restore(
        self, blocks: AgentBlocks[LayerData], length: int, capacity: int, *, exclusive: bool
    ) -> SequenceId:
        """See `BatchBackend.restore`."""
        with self._computing():
            caches = self._layers.restored(blocks, length, capacity, exclusive=exclusive)
        return self._add(_Sequence(caches, length))

    def reserve(self, sequence: SequenceId, capacity: int) -> None:
        """See `BatchBackend.reserve`."""
        with self._computing():
            self._layers.reserve(self._sequences[sequence].caches, capacity)

    def length(self, sequence: SequenceId) -> int:
        """See `BatchBackend.length`."""
        return self._sequences[sequence].length

    def prefill(self, sequence: SequenceId, tokens: Sequence[int]) -> None:
        """See `BatchBackend.prefill`."""
        state = self._sequences[sequence]
        with self._computing():
            self.model(mx.array([list(tokens)]), cache=state.caches)
            # Only the caches: of the last layer no more is computed than its keys and values.
            mx.eval([cache.state for cache in state.caches])
        state.length += len(tokens)

    def start(
        self,
        sequence: SequenceId,
        last_token: int,
        history: Sequence[int],
        params: SamplingParams,
        drawn: int,
    ) -> None:
        """See `BatchBackend.start`."""
        start = _Start(last_token, list(history), params, drawn)
        self._starting[sequence] = start

    def decode(self) -> list[SampledToken]:
        """See `BatchBackend.decode`."""
        if not self._by_uid and not self._starting:
            return []
        try:
            with self._computing():
                self._insert_starting()
                responses = self._advance() or self._advance()
                return [self._read(response) for response in responses]
        except BackendError:
            # A step that failed half-way leaves the batch in no known state; its sequences are
            # lost, all others were never part of it.
            self._generator = self._new_generator()
            self._by_uid.clear()
            self._starting.clear()
            raise

    def extract(
        self, sequence: SequenceId, blocks: Sequence[Sequence[KVBlock[LayerData]]]
    ) -> list[KVBlock[LayerData]]:
        """See `BatchBackend.extract`."""
        state = self._sequences.pop(sequence)
        with self._computing():
            caches = self._leave(sequence, state)
            if not state.length:
                return [block for layer in blocks for block in layer]
            return self._layers.fill(caches, blocks, state.length)

    def close(self, sequence: SequenceId) -> None:
        """See `BatchBackend.close`."""
        with self._computing():
            self._leave(sequence, self._sequences.pop(sequence))

    def cache_nbytes(self) -> int:
        """Bytes of the caches of all open sequences, as their arrays say."""
        return sum(cache.nbytes for state in self._sequences.values() for cache in state.caches)

    def sequences(self) -> list[list[LayerCache]]:
        """The caches of all open sequences, per layer, the one opened first at the front."""
        return [state.caches for state in self._sequences.values()]

    # Inside

    def _new_generator(self) -> BatchGenerator:
        return BatchGenerator(
            self.model,
            max_tokens=_UNLIMITED,
            completion_batch_size=_UNLIMITED,
            prefill_batch_size=_UNLIMITED,
        )

    @contextmanager
    def _computing(self) -> Iterator[None]:
        """On the generator's stream; the framework's errors become BackendError."""
        try:
            with mx.stream(self._generator.stream):
                yield
        except SemanticError:
            raise
        except (RuntimeError, ValueError, MemoryError) as error:
            raise BackendError(str(error)) from error

    def _add(self, state: _Sequence) -> SequenceId:
        sequence = SequenceId(self._next_id)
        self._next_id += 1
        self._sequences[sequence] = state
        return sequence

    def _advance(self) -> list[GenerationBatch.Response]:
        """One step of the generator: a token from each member, then newcomers take their place."""
        responses = cast(list[GenerationBatch.Response], self._generator.next()[1])
        for sequence in self._by_uid.values():
            state = self._sequences[sequence]
            if not state.joined:
                state.joined = True
                state.length += 1
        return responses

    def _read(self, response: GenerationBatch.Response) -> SampledToken:
        sequence = self._by_uid[response.uid]
        state = self._sequences[sequence]
        state.length += 1
        if state.n_logprobs is None:
            return SampledToken(sequence, response.token)
        logprob = read_logprob(response.logprobs, response.token, state.n_logprobs)
        return SampledToken(sequence, response.token, logprob)

    def _insert_starting(self) -> None:
        """Let those who wait for it join the batch.

        All at once where every cache is ours. mlx-lm's own give a sequence without tokens the
        zeros of a neighbour instead of no state when both join together, so then one by one.
        """
        waiting = list(self._starting)
        for sequence in waiting if all(self.ragged_layers) else waiting[:1]:
            start, state = self._starting.pop(sequence), self._sequences[sequence]
            (uid,) = self._generator.insert(
                [[start.last_token]],
                max_tokens=[_UNLIMITED],
                caches=[state.caches],
                all_tokens=[start.history],
                samplers=[make_sampler(start.params, start.drawn)],
                logits_processors=[make_processors(start.params)],
            )
            state.uid = uid
            state.n_logprobs = start.params.logprobs
            self._by_uid[uid] = sequence

    def _leave(self, sequence: SequenceId, state: _Sequence) -> list[LayerCache]:
        """Take a sequence out of the batch, if it is in it; its caches as they are then."""
        self._starting.pop(sequence, None)
        if state.uid is None or self._by_uid.pop(state.uid, None) is None:
            return state.caches
        removed = self._generator.remove([state.uid], return_prompt_caches=True)
        caches, _ = removed[state.uid]
        return cast(list[LayerCache], caches)
