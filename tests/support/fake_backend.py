"""Fake of the `BatchBackend` port: a model in plain Python.

The next token depends on every number in its caches, and each number on those before it: a
missing, stale or foreign token anywhere changes the answer. A violation of the port's contract
raises `ContractViolationError`. Memory is counted while referenced, as with real arrays.
"""

from __future__ import annotations

import itertools
import zlib
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from weakref import WeakSet

from semantic.domain.block_hash import Part
from semantic.domain.entities import AgentBlocks, KVBlock
from semantic.domain.errors import BackendError, CacheReconstructionError, InvalidRequestError
from semantic.domain.grammar import Grammar
from semantic.domain.stored import BlockLayout
from semantic.domain.value_objects import (
    BLOCK_TOKENS,
    LayerKind,
    LayerSpec,
    ModelCacheSpec,
    SampledToken,
    SamplingParams,
    SequenceId,
    TokenLogprob,
    whole_blocks,
)
from semantic.ports.generation import BodyTarget, Drafter
from tests.support.bodies import Segments
from tests.support.fake_clock import FakeClock

VOCAB = 96

FULL = LayerSpec(LayerKind.FULL, kv_heads=1, k_head_dim=1, v_head_dim=1, itemsize=2)
STATE = LayerSpec(LayerKind.STATE, state_bytes=100)
GROWING_STATE = LayerSpec(LayerKind.STATE, state_bytes=30, state_grows=True)


def window(size: int) -> LayerSpec:
    """A layer that sees the last `size` tokens; its blocks are half as large as those of FULL."""
    return LayerSpec(
        LayerKind.SLIDING_WINDOW, kv_heads=1, k_head_dim=1, v_head_dim=1, itemsize=1, window=size
    )


class ContractViolationError(AssertionError):
    """A caller broke the port's contract."""


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise ContractViolationError(message)


# The model: numbers from numbers


def _digest(numbers: Sequence[int]) -> int:
    return zlib.crc32(array("q", numbers).tobytes())


def _sees_past(layer: LayerSpec) -> bool:
    return layer.window is None or layer.window > 1


def _choose(seen: Sequence[int], history: Sequence[int], params: SamplingParams, drawn: int) -> int:
    """A large number that determines the next token."""
    numbers = [*seen]
    if not params.greedy:
        _require(params.seed is not None, "a sampled request was started without a seed")
        numbers += [params.seed or 0, drawn]
    if params.repetition_penalty is not None:
        numbers += history[-params.repetition_context :]
    if params.presence_penalty or params.frequency_penalty:
        numbers += history[len(history) - drawn :]
    numbers += [token for token, bias in params.logit_bias.items() if bias > 0]
    return _digest(numbers)


def solo_answer(
    spec: ModelCacheSpec,
    prompt: Sequence[int],
    max_tokens: int,
    params: SamplingParams | None = None,
    *,
    vocab_size: int = VOCAB,
    eos: frozenset[int] = frozenset(),
) -> list[int]:
    """What the model answers to `prompt` alone and without any cache, the EOS included."""
    params = params or SamplingParams()
    tokens: list[int] = []
    values: list[int] = []
    for token in prompt:
        _solo_append(spec, tokens, values, token)
    for drawn in range(max_tokens):
        seen = [_solo_seen(layer, values) for layer in spec.layers]
        token = _choose(seen, tokens, params, drawn) % vocab_size
        _solo_append(spec, tokens, values, token)
        if token in eos:
            break
    return tokens[len(prompt) :]


def _solo_append(spec: ModelCacheSpec, tokens: list[int], values: list[int], token: int) -> None:
    before = values[-1] if values else 0
    past = [before if _sees_past(layer) else 0 for layer in spec.layers]
    values.append(_digest([*past, token, len(tokens)]))
    tokens.append(token)


def _solo_seen(layer: LayerSpec, values: Sequence[int]) -> int:
    if layer.kind is LayerKind.STATE:
        return values[-1]
    return _digest(values if layer.window is None else values[-layer.window :])


# Its caches


@dataclass(slots=True, eq=False, weakref_slot=True)
class FakeMemory:
    """What one layer of one sequence keeps: a number for each token held, or one state."""

    layer: LayerSpec
    n_blocks: int
    values: array[int] = field(default_factory=lambda: array("q"))
    owner: SequenceId | None = None

    @property
    def nbytes(self) -> int:
        return self.n_blocks * self.layer.bytes_per_block


@dataclass(frozen=True, slots=True)
class FakeData:
    """What a block holds: numbers `start` to `stop` of a memory, or its state as a whole."""

    memory: FakeMemory
    start: int
    stop: int


class _LayerCache:
    """One layer of one sequence, after `offset` tokens."""

    def __init__(self, memory: FakeMemory, offset: int = 0) -> None:
        self.memory = memory
        self.layer = memory.layer
        self.offset = offset

    @property
    def held(self) -> range:
        if self.layer.kind is LayerKind.STATE:
            return range(self.offset)
        return range(self.offset - len(self.memory.values), self.offset)

    def past(self) -> int:
        """What the next token depends on of the one before it."""
        values = self.memory.values
        return values[-1] if self.offset and _sees_past(self.layer) else 0

    def seen(self) -> int:
        """What the last token sees."""
        values = self.memory.values
        if self.layer.kind is LayerKind.STATE:
            return values[-1]
        _require(
            len(values) >= min(self.offset, self.layer.window or self.offset),
            f"a {self.layer.kind} layer holds {len(values)} of {self.offset} tokens",
        )
        return _digest(values if self.layer.window is None else values[-self.layer.window :])

    def append(self, value: int) -> None:
        values = self.memory.values
        if self.layer.kind is LayerKind.STATE:
            del values[:]
        elif len(values) == self.memory.n_blocks * BLOCK_TOKENS:
            _require(self.layer.window is not None, "no room for a token")
            del values[: len(values) - (self.layer.window or 0)]
        values.append(value)
        self.offset += 1

    def reserve(self, capacity: int) -> None:
        self.memory.n_blocks = max(self.memory.n_blocks, self.layer.blocks_for(capacity))

    def fill(self, blocks: Sequence[KVBlock]) -> int:
        """Put it into the first of `blocks`; returns how many it took."""
        if self.layer.kind is LayerKind.STATE:
            needed = self.layer.blocks_for(self.offset)
        else:
            needed = -(-len(self.memory.values) // BLOCK_TOKENS)
        _require(
            needed <= self.memory.n_blocks <= len(blocks),
            f"{len(blocks)} blocks given for a {self.layer.kind} layer that takes {needed} "
            f"and has memory for {self.memory.n_blocks}",
        )
        first = self.held.start
        for i, block in enumerate(blocks[:needed]):
            stop = len(self.held) if i == needed - 1 else (i + 1) * BLOCK_TOKENS
            start = i * BLOCK_TOKENS
            block.start, block.token_count = first + start, stop - start
            block.layer_data = FakeData(self.memory, start, stop)
        self.memory.n_blocks = needed
        self.memory.owner = None
        return needed


# Its bodies

_NUMBER = array("q").itemsize
"""Bytes of one token in each segment."""
_UNKNOWN = -1
"""A token restored from a body, which does not contain its id."""


class _Layers:
    """Which layers belong to which part."""

    def __init__(self, spec: ModelCacheSpec) -> None:
        sizes = Counter(layer.window for layer in spec.layers if layer.window is not None)
        self.window_tokens = sizes.most_common(1)[0][0] if sizes else None
        kinds = list(enumerate(spec.layers))
        self.full = [i for i, layer in kinds if layer.kind is LayerKind.FULL]
        self.window = [
            i
            for i, layer in kinds
            if layer.window is not None and layer.window == self.window_tokens
        ]
        self.others = [i for i, _ in kinds if i not in (*self.full, *self.window)]
        self.layout = BlockLayout(
            name=f"fake {spec.layers}",
            full=(_NUMBER,) * len(self.full),
            window=(_NUMBER,) * len(self.window),
            window_tokens=self.window_tokens,
            needs_checkpoint=bool(self.window or self.others),
        )
        self.number = zlib.crc32(self.layout.name.encode())

    def of(self, part: Part) -> list[int]:
        _require(part is not Part.CHECKPOINT, "a checkpoint is not a block")
        return self.full if part is Part.FULL else self.window

    def edge(self, length: int) -> range:
        """Tokens at the start of the window that do not fill a block."""
        first = max(0, length - (self.window_tokens or 1) + 1)
        return range(first, min(whole_blocks(first), length))


@dataclass(slots=True)
class _Landing:
    """Staging buffers of a restore: bytes per layer, from position `start`."""

    start: int
    stop: int
    data: dict[int, bytearray]

    def numbers(self, layer: int, tokens: range) -> array[int]:
        at = _NUMBER * (tokens.start - self.start)
        found = array("q")
        found.frombytes(self.data[layer][at : at + _NUMBER * len(tokens)])
        return found

    def check_released(self) -> None:
        for data in self.data.values():
            try:
                data.append(0)
            except BufferError:
                _require(False, "a view of the staging buffer is still referenced")


@dataclass(slots=True, eq=False)
class _Sequence:
    caches: list[_LayerCache]
    capacity: int
    tokens: list[int]
    started: bool = False
    joined: bool = False
    silent: int = 0
    lost: bool = False
    last_token: int = -1
    params: SamplingParams = field(default_factory=SamplingParams)
    drawn: int = 0
    landings: dict[Part, _Landing] = field(default_factory=dict)

    @property
    def length(self) -> int:
        return len(self.tokens)

    def run(self, token: int) -> None:
        """Compute one token into every layer's cache."""
        _require(self.length < self.capacity, f"token {self.length} does not fit its capacity")
        value = _digest([*(cache.past() for cache in self.caches), token, self.length])
        for cache in self.caches:
            cache.append(value)
        self.tokens.append(token)

    def knows(self, history: Sequence[int]) -> bool:
        """Whether `history` may be what was computed or loaded."""
        return len(history) == self.length and all(
            known in (_UNKNOWN, token) for known, token in zip(self.tokens, history, strict=True)
        )


class FakeBackend:
    """Implements `BatchBackend`.

    `fail_next` makes the next call of a method raise. With a `clock`, computing takes time:
    `seconds_per_token` of prefill and `seconds_per_step` of decoding; a pass of prefill costs
    `seconds_per_pass` besides, and `seconds_per_shape` more if no pass had its length at its
    position, or for as many sequences, before. Prompts of at most `joint_chunk` tokens share a
    pass; with `cost_beside` chunks of equally many tokens do instead, where a token beside the
    first sequence's costs as much of one alone. A sequence that was just started yields nothing for
    `silent_steps` extra steps, while others decode.
    """

    def __init__(
        self,
        spec: ModelCacheSpec,
        *,
        vocab_size: int = VOCAB,
        model_id: str = "fake",
        clock: FakeClock | None = None,
        seconds_per_token: float = 0.001,
        seconds_per_step: float = 0.02,
        seconds_per_pass: float = 0.0,
        seconds_per_shape: float = 0.0,
        joint_chunk: int = 64,
        cost_beside: float | None = None,
        pads_chunks: bool = True,
        best_chunk: int = 512,
        silent_steps: int = 0,
        shares: bool = False,
    ) -> None:
        self.calls: Counter[str] = Counter()
        self.prefilled_tokens = 0
        self.failures = 0
        self._spec = spec
        self._layers = _Layers(spec)
        self._vocab_size = vocab_size
        self._model_id = model_id
        self._clock = clock
        self._seconds_per_token = seconds_per_token
        self._seconds_per_step = seconds_per_step
        self._seconds_per_pass = seconds_per_pass
        self._seconds_per_shape = seconds_per_shape
        self.shapes: set[tuple[int, int]] = set()
        self._joint_chunk = joint_chunk if cost_beside is None else 0
        self._cost_beside = cost_beside
        self._pads_chunks = pads_chunks
        self._best_chunk = best_chunk
        self._silent_steps = silent_steps
        self._shares = shares
        self._sequences: dict[SequenceId, _Sequence] = {}
        self._memories: WeakSet[FakeMemory] = WeakSet()
        self._next_id = 0
        self._broken: dict[str, type[BackendError | CacheReconstructionError]] = {}

    # Beyond the port

    def fail_next(
        self, method: str, kind: type[BackendError | CacheReconstructionError] = BackendError
    ) -> None:
        """Let the next call of `method` raise, half-way through its work."""
        self._broken[method] = kind

    @property
    def held_bytes(self) -> int:
        """Bytes of every cache that is still referenced, running or idle."""
        return sum(memory.nbytes for memory in self._memories)

    @property
    def n_open(self) -> int:
        """Sequences that were neither extracted nor closed."""
        return len(self._sequences)

    # The port

    @property
    def model_id(self) -> str:
        return self._model_id

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def best_chunk(self) -> int:
        return self._best_chunk

    @property
    def peak_bytes(self) -> int:
        return 0

    @property
    def unused_bytes(self) -> None:
        return None

    def return_memory(self, room: int) -> bool:
        assert room >= 0
        return False

    def cache_spec(self) -> ModelCacheSpec:
        return self._spec

    def set_aside(self, n_bytes: int) -> None:
        self._enter("set_aside")
        assert n_bytes > 0

    def open(self, capacity: int) -> SequenceId:
        self._enter("open")
        self._check_capacity(capacity)
        memories = [self._memory(layer, capacity) for layer in self._spec.layers]
        return self._add([_LayerCache(memory) for memory in memories], capacity, [])

    def restore(
        self, blocks: AgentBlocks, length: int, capacity: int, *, exclusive: bool
    ) -> SequenceId:
        self._check_capacity(capacity)
        _require(0 < length <= capacity, f"restoring {length} tokens into room for {capacity}")
        self._enter("restore")
        for i, layer in enumerate(self._spec.layers):
            _check_layer(layer, blocks.blocks_for_layer(i), length, blocks.total_tokens)
        make = self._take_over if exclusive else self._copy
        caches = [
            make(layer, blocks.blocks_for_layer(i), length, capacity)
            for i, layer in enumerate(self._spec.layers)
        ]
        return self._add(caches, capacity, list(blocks.token_ids[:length]))

    def reserve(self, sequence: SequenceId, capacity: int) -> None:
        self._enter("reserve")
        self._check_capacity(capacity)
        state = self._get(sequence)
        _require(not state.landings, "cannot move a sequence that is still loading")
        for cache in state.caches:
            cache.reserve(capacity)
        state.capacity = max(state.capacity, capacity)

    def length(self, sequence: SequenceId) -> int:
        return self._get(sequence).length

    def prefill(self, sequence: SequenceId, tokens: Sequence[int]) -> None:
        state = self._resting(sequence)
        _require(len(tokens) > 0, "prefill of no tokens")
        shape = len(tokens), state.length
        for token in tokens[: len(tokens) // 2]:
            state.run(token)
        self._enter("prefill")
        for token in tokens[len(tokens) // 2 :]:
            state.run(token)
        self.prefilled_tokens += len(tokens)
        self._spend(len(tokens) * self._seconds_per_token + self._seconds_per_pass)
        if shape not in self.shapes:
            self.shapes.add(shape)
            self._spend(self._seconds_per_shape)

    def joins(self, sequence: SequenceId, n_tokens: int) -> bool:
        self._get(sequence)
        return n_tokens <= self._joint_chunk

    @property
    def shared_layers(self) -> Sequence[bool]:
        return [self._shares and layer.max_blocks is None for layer in self._spec.layers]

    @property
    def pads_chunks(self) -> bool:
        return self._pads_chunks

    def side_by_side(self, sequence: SequenceId, n_tokens: int) -> bool:
        self._get(sequence)
        return self._cost_beside is not None and n_tokens > 0

    def prefill_together(self, chunks: Sequence[tuple[SequenceId, Sequence[int]]]) -> None:
        states = [(self._resting(sequence), tokens) for sequence, tokens in chunks]
        _require(len({sequence for sequence, _ in chunks}) == len(chunks), "a sequence twice")
        alike = self._pads_chunks or len({len(tokens) for _, tokens in chunks}) == 1
        for sequence, tokens in chunks:
            _require(len(tokens) > 0, "prefill of no tokens")
            beside = alike and self.side_by_side(sequence, len(tokens))
            _require(beside or self.joins(sequence, len(tokens)), "a chunk that cannot be joined")
        self._enter("prefill_together")
        for state, tokens in states:
            for token in tokens:
                state.run(token)
        n_tokens = sum(len(tokens) for _, tokens in states)
        self.prefilled_tokens += n_tokens
        width, cost = n_tokens, 0.0
        if self._cost_beside is not None:
            width = max(len(tokens) for _, tokens in states)  # others are padded
            cost = self._cost_beside * width * (len(states) - 1)
        self._spend((width + cost) * self._seconds_per_token + self._seconds_per_pass)
        if self._cost_beside is not None and (width, len(states)) not in self.shapes:
            self.shapes.add((width, len(states)))
            self._spend(self._seconds_per_shape)

    def score(self, sequence: SequenceId, tokens: Sequence[int], n_top: int) -> list[TokenLogprob]:
        state = self._resting(sequence)
        _require(len(tokens) > 1, "scoring of no tokens")
        self._enter("score")
        scores = []
        for token, following in itertools.pairwise(tokens):
            state.run(token)
            number = _digest([cache.seen() for cache in state.caches])
            scores.append(self._logprob(following, number, n_top))
        self.prefilled_tokens += len(scores)
        self._spend(len(scores) * self._seconds_per_token)
        return scores

    def check_grammar(self, grammar: Grammar) -> None:
        raise InvalidRequestError(f"grammar: tokens here have no text to be {grammar.kind}")

    @property
    def drafts_problem(self) -> str:
        """A reason, always."""
        return "a fake has no drafts"

    def start(
        self,
        sequence: SequenceId,
        last_token: int,
        history: Sequence[int],
        params: SamplingParams,
        drawn: int,
        drafter: Drafter | None = None,  # noqa: ARG002  allowed by the port
    ) -> None:
        state = self._resting(sequence)
        _require(state.knows(history), "history differs from what was computed")
        _require(params.greedy or params.seed is not None, "sampled, but without a seed")
        _require(params.grammar is None, "started with a grammar that was refused")
        self._enter("start")
        state.tokens = list(history)
        state.started = True
        state.joined = False
        state.silent = self._silent_steps
        state.last_token, state.params, state.drawn = last_token, params, drawn

    def decode(self) -> list[SampledToken]:
        running = [(i, s) for i, s in self._sequences.items() if s.started and not s.lost]
        for i, state in running:
            needed = state.length + (1 if state.joined else 2)
            _require(needed <= state.capacity, f"sequence {i} has no room for its next token")
        if not running:
            return []
        try:
            self._enter("decode")
        except BackendError:
            for _, state in running:
                state.lost = True
            raise
        self._spend(self._seconds_per_step)
        sampled: list[SampledToken] = []
        while not sampled:
            sampled = self._advance(running)
        return sampled

    def extract(self, sequence: SequenceId, blocks: Sequence[Sequence[KVBlock]]) -> list[KVBlock]:
        state = self._get(sequence)
        del self._sequences[sequence]
        self._enter("extract")
        _require(not state.lost, "extracting a sequence that a failed step left half written")
        _require(len(blocks) == self._spec.n_layers, f"blocks of {len(blocks)} layers")
        unused: list[KVBlock] = []
        for cache, mine in zip(state.caches, blocks, strict=True):
            unused += mine[cache.fill(mine) :]
        return unused

    def close(self, sequence: SequenceId) -> None:
        self._get(sequence)
        del self._sequences[sequence]
        self._enter("close")

    def layout(self) -> BlockLayout:
        return self._layers.layout

    def pause(self, sequence: SequenceId) -> SampledToken | None:
        state = self._get(sequence)
        _require(not state.lost, "pausing a sequence that a failed step left half written")
        self._enter("pause")
        in_flight = self._next_token(sequence, state) if state.joined else None
        state.started = state.joined = False
        return in_flight

    def export_block(self, sequence: SequenceId, part: Part, start: int, stop: int) -> bytes:
        state = self._resting(sequence)
        if not 0 <= start < stop <= min(whole_blocks(start + 1), state.length):
            raise BackendError(f"no tokens {start} to {stop} of one block")
        self._enter("export_block")
        tokens = range(start, stop)
        return b"".join(_export(state.caches[i], tokens) for i in self._layers.of(part))

    def is_finite(self, part: Part, body: bytes) -> bool:  # noqa: ARG002
        return True

    def export_checkpoint(self, sequence: SequenceId) -> bytes:
        state = self._resting(sequence)
        if not state.length:
            raise BackendError("an empty sequence has no checkpoint")
        self._enter("export_checkpoint")
        numbers = array("q", [self._layers.number, state.length])
        edge = self._layers.edge(state.length)
        parts = [_export(state.caches[i], edge) for i in self._layers.window]
        parts += [_export_state(state.caches[i]) for i in self._layers.others]
        numbers.extend(len(part) // _NUMBER for part in parts)
        return b"".join([numbers.tobytes(), *parts])

    def loading(self, sequence: SequenceId, part: Part, start: int, stop: int) -> list[BodyTarget]:
        state = self._get(sequence) if self._get(sequence).landings else self._resting(sequence)
        if start % BLOCK_TOKENS or not 0 <= start < stop or part in state.landings:
            raise BackendError(f"cannot load {part} tokens {start} to {stop}")
        if whole_blocks(stop) > state.capacity:
            raise BackendError(f"cannot load {stop} tokens into a buffer for {state.capacity}")
        if part is Part.FULL and start != state.length:
            raise BackendError(f"loading from {start} into a sequence of {state.length}")
        if state.length and self._layers.layout.needs_checkpoint:
            raise BackendError("this model's caches load only into an empty sequence")
        self._enter("loading")
        size = _NUMBER * (whole_blocks(stop) - start)
        landing = _Landing(start, stop, {i: bytearray(size) for i in self._layers.of(part)})
        state.landings[part] = landing
        block = _NUMBER * BLOCK_TOKENS
        return [
            Segments([memoryview(data)[at : at + block] for data in landing.data.values()])
            for at in range(0, size, block)
        ]

    def loaded(self, sequence: SequenceId, length: int, checkpoint: bytes | None = None) -> None:
        state = self._get(sequence)
        landings, state.landings = state.landings, {}
        for landing in landings.values():
            landing.check_released()
        if not length:
            for cache in state.caches:
                del cache.memory.values[:]
                cache.offset = 0
            state.tokens = []
            return
        full = landings.get(Part.FULL)
        if full is None or not state.length <= length <= full.stop:
            raise CacheReconstructionError(f"{length} tokens were not loaded")
        if checkpoint is None and self._layers.layout.needs_checkpoint and length > state.length:
            raise CacheReconstructionError(f"cannot use {length} tokens without a checkpoint")
        self._enter("loaded")
        values = {i: full.numbers(i, range(full.start, length)) for i in self._layers.full}
        if checkpoint is not None:
            values |= self._checkpointed(landings.get(Part.WINDOW), length, checkpoint)
        for i, numbers in values.items():
            state.caches[i].memory.values.extend(numbers)
            state.caches[i].offset = length
        state.tokens += [_UNKNOWN] * (length - state.length)

    # Inside

    def _enter(self, method: str) -> None:
        self.calls[method] += 1
        if method in self._broken:
            self.failures += 1
            # No variable holds the error: its traceback would keep caches alive in a cycle.
            raise self._broken.pop(method)(f"injected into {method}")

    def _spend(self, seconds: float) -> None:
        if self._clock is not None:
            self._clock.advance(seconds)

    def _get(self, sequence: SequenceId) -> _Sequence:
        _require(sequence in self._sequences, f"sequence {sequence} is not open")
        return self._sequences[sequence]

    def _resting(self, sequence: SequenceId) -> _Sequence:
        """A sequence that neither decodes nor is being loaded."""
        state = self._get(sequence)
        if state.started:
            raise BackendError("the sequence is decoding; pause it first")
        if state.landings:
            raise BackendError("the sequence is still loading")
        return state

    def _checkpointed(
        self, window: _Landing | None, length: int, checkpoint: bytes
    ) -> dict[int, array[int]]:
        """The layers' content from a checkpoint and the bodies of its window."""
        layers = [*self._layers.window, *self._layers.others]
        edge = self._layers.edge(length)
        sizes = [len(edge)] * len(self._layers.window)
        sizes += [len(_kept(self._spec.layers[i], length)) for i in self._layers.others]
        head = [self._layers.number, length, *sizes]
        numbers = array("q")
        if len(checkpoint) != _NUMBER * (len(head) + sum(sizes)):
            raise CacheReconstructionError("checkpoint: has another size")
        numbers.frombytes(checkpoint)
        if list(numbers[: len(head)]) != head:
            raise CacheReconstructionError("checkpoint: has another model or position")
        values: dict[int, array[int]] = {}
        at = len(head)
        for i, size in zip(layers, sizes, strict=True):
            values[i] = numbers[at : at + size]
            at += size
        if edge.stop < length:
            if window is None or not window.start <= edge.stop < length <= window.stop:
                raise CacheReconstructionError(f"the window needs {edge.stop} to {length}")
            for i in self._layers.window:
                values[i] += window.numbers(i, range(edge.stop, length))
        return values

    @staticmethod
    def _check_capacity(capacity: int) -> None:
        _require(
            capacity > 0 and capacity % BLOCK_TOKENS == 0,
            f"capacity {capacity} is not a multiple of {BLOCK_TOKENS}",
        )

    def _memory(self, layer: LayerSpec, capacity: int) -> FakeMemory:
        memory = FakeMemory(layer, layer.blocks_for(capacity))
        self._memories.add(memory)
        return memory

    def _add(self, caches: list[_LayerCache], capacity: int, tokens: list[int]) -> SequenceId:
        sequence = SequenceId(self._next_id)
        self._next_id += 1
        for cache in caches:
            cache.memory.owner = sequence
        self._sequences[sequence] = _Sequence(caches, capacity, tokens)
        return sequence

    def _advance(self, running: Sequence[tuple[SequenceId, _Sequence]]) -> list[SampledToken]:
        """A token from each running sequence; then new ones join."""
        sampled = [self._sample(i, state) for i, state in running if state.joined]
        for _, state in running:
            if state.silent:
                state.silent -= 1
            elif not state.joined:
                state.run(state.last_token)
                state.joined = True
        return sampled

    def _sample(self, sequence: SequenceId, state: _Sequence) -> SampledToken:
        sampled = self._next_token(sequence, state)
        state.run(sampled.token)
        state.drawn += 1
        return sampled

    def _next_token(self, sequence: SequenceId, state: _Sequence) -> SampledToken:
        seen = [cache.seen() for cache in state.caches]
        number = _choose(seen, state.tokens, state.params, state.drawn)
        token = number % self._vocab_size
        if state.params.logprobs is None:
            return SampledToken(sequence, token)
        return SampledToken(sequence, token, self._logprob(token, token, state.params.logprobs))

    def _logprob(self, token: int, number: int, n_top: int) -> TokenLogprob:
        """Log-probabilities that depend on `token` and on all that `number` depends on."""
        likeliest = [(number + i) % self._vocab_size for i in range(n_top)]
        top = tuple((other, -0.5 - i) for i, other in enumerate(likeliest))
        return TokenLogprob(token, -0.5 - (token + number) % 1000, top)

    def _take_over(
        self, layer: LayerSpec, chain: Sequence[KVBlock], length: int, capacity: int
    ) -> _LayerCache:
        memory = _data(chain[0]).memory
        if any(_data(block).memory is not memory for block in chain):
            cache = self._copy(layer, chain, length, capacity)
            for block in chain:
                block.layer_data = None
            return cache
        cache = _LayerCache(memory, chain[-1].stop)
        surplus = cache.offset - length
        if surplus:
            del memory.values[len(memory.values) - surplus :]
            cache.offset = length
        cache.reserve(capacity)
        return cache

    def _copy(
        self, layer: LayerSpec, chain: Sequence[KVBlock], length: int, capacity: int
    ) -> _LayerCache:
        memory = self._memory(layer, capacity)
        if layer.kind is LayerKind.STATE:
            memory.values.extend(_data(chain[0]).memory.values)
            return _LayerCache(memory, length)
        numbers = array("q")
        for block in chain:
            data = _data(block)
            numbers.extend(data.memory.values[data.start : data.stop])
        del numbers[len(numbers) - (chain[-1].stop - length) :]
        room = memory.n_blocks * BLOCK_TOKENS
        memory.values.extend(numbers if len(numbers) <= room else numbers[-(layer.window or 0) :])
        return _LayerCache(memory, length)


def _export(cache: _LayerCache, tokens: range) -> bytes:
    held = cache.held
    if tokens and not held.start <= tokens.start < tokens.stop <= held.stop:
        raise BackendError(f"{held} does not hold {tokens}")
    at = tokens.start - held.start
    return cache.memory.values[at : at + len(tokens)].tobytes()


def _kept(layer: LayerSpec, length: int) -> range:
    """The tokens whose numbers a checkpoint holds; of a state, that after the last one."""
    first = length - 1 if layer.window is None else max(0, length - layer.window + 1)
    return range(first, length)


def _export_state(cache: _LayerCache) -> bytes:
    if cache.layer.kind is LayerKind.STATE:
        return cache.memory.values.tobytes()
    return _export(cache, _kept(cache.layer, cache.offset))


def _data(block: KVBlock) -> FakeData:
    if not isinstance(block.layer_data, FakeData):
        raise CacheReconstructionError(f"block {block.block_id} is empty")
    return block.layer_data


def _check_layer(layer: LayerSpec, chain: Sequence[KVBlock], length: int, total: int) -> None:
    """Raise unless `chain` can give the first `length` of `total` tokens."""
    if not chain:
        raise CacheReconstructionError(f"a {layer.kind} layer has no blocks")
    for block in chain:
        data = _data(block)
        if data.memory.layer != layer:
            raise CacheReconstructionError(f"expected {layer}, got {data.memory.layer}")
        _require(data.memory.owner is None, "these blocks belong to a running sequence")
        _require(
            layer.kind is LayerKind.STATE or data.stop <= len(data.memory.values),
            "stale blocks: their memory was cut or used again",
        )
    for left, right in itertools.pairwise(chain):
        if left.stop != right.start:
            raise CacheReconstructionError(f"tokens {left.stop} to {right.start} are missing")
    held = range(chain[0].start, chain[-1].stop)
    first = 0 if layer.window is None else max(0, length - layer.window + 1)
    if layer.kind is LayerKind.STATE and not length == held.stop == total:
        raise CacheReconstructionError(f"a state after {held.stop} tokens cannot give {length}")
    if held.stop < length or (held.start > first and first < length):
        raise CacheReconstructionError(f"{held} cannot give tokens {first} to {length}")
