"""The backend of rank 0, which announces every call to the other ranks.

All ranks make the same calls in the same order. A block's body consists of one part per rank, in
the order of the ranks.
"""

from __future__ import annotations

import errno
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress
from dataclasses import replace
from queue import Empty
from typing import NamedTuple

from semantic.adapters.mlx import device
from semantic.adapters.mlx.backend import MLXBackend
from semantic.adapters.mlx.kv_cache.forms import CacheForm
from semantic.adapters.mlx.ranks.shard import Ranks, require_same
from semantic.adapters.mlx.ranks.shared_memory import (
    LEAST_BYTES,
    GatheredBody,
    Loan,
    Place,
    SharedRoom,
    SharedTarget,
    shared_by,
)
from semantic.adapters.mlx.sampling.grammar_compiler import GrammarCompiler
from semantic.domain.block_hash import Part
from semantic.domain.entities import AgentBlocks, BlockData, KVBlock
from semantic.domain.errors import CacheReconstructionError, SemanticError, UnsupportedModelError
from semantic.domain.identity import digest
from semantic.domain.stored import BlockLayout, Body
from semantic.domain.value_objects import (
    BLOCK_TOKENS,
    Lane,
    SampledToken,
    SamplingParams,
    SequenceId,
    TokenLogprob,
)
from semantic.ports.generation import BodyTarget, Drafter
from semantic.ports.ranks import Data, Frame, Op

PARTS = tuple(Part)
"""The parts of a block, by their number in frames."""
KEY_SHIFT = 24
"""The number of low bits of a key that hold an index. The higher bits hold a call's number."""
NO_KEY = -1
"""The key of a block without data."""
_AGREE_SECONDS = 20.0
"""Seconds that the other ranks have to report a failure, after rank 0 failed."""
_FREE_SECONDS = 1.0
"""After this many seconds without calls, rank 0 tells the other ranks which blocks are free."""
_LENGTH_BYTES = 8


class Held:
    """Rank 0's data of a block. Other ranks keep their data under `key` while this object lives."""

    __slots__ = ("__weakref__", "data", "key")

    def __init__(self, data: BlockData, key: int, freed: deque[int]) -> None:
        self.data = data
        self.key = key
        weakref.finalize(self, freed.append, key).atexit = False


class Outcomes:
    """The failures in each call, by rank. A call must fail on all ranks or none. Thread-safe."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._changed = threading.Condition()
        self._failed: dict[int, dict[int, str]] = {}
        self._done = -1

    def failed_there(self, number: int, rank: int, message: str) -> None:
        """Record that a rank other than 0 failed in call `number`."""
        with self._changed:
            self._failed.setdefault(number, {})[rank] = message
            is_done = number <= self._done
            self._changed.notify_all()
        if is_done:
            self._end(rank, message)

    def succeeded(self, number: int) -> None:
        """Record that rank 0 succeeded in call `number`."""
        with self._changed:
            self._done = number
            failed = self._failed.pop(number, {})
        for rank, message in failed.items():
            self._end(rank, message)

    def failed_here(self, number: int, error: SemanticError) -> None:
        """Record that rank 0 failed in a call. Ends the process unless all other ranks failed."""
        others = self._ranks.size - 1
        with self._changed:
            alike = self._changed.wait_for(
                lambda: len(self._failed.get(number, ())) == others, _AGREE_SECONDS
            )
            self._done = number
            self._failed.pop(number, None)
        if not alike:
            self._ranks.links.end(f"rank 0 failed alone: {error}")

    def _end(self, rank: int, message: str) -> None:
        self._ranks.links.end(f"rank {rank} failed alone: {message}")


class _Arriving(NamedTuple):
    """Another rank's part of a block body. The rank will send the part or write it to `room`."""

    data: Future[Data]
    room: SharedRoom | None

    def take(self, rank: int, frame: Frame) -> None:
        if self.room is not None:
            self.room.arrived(rank, written=frame.op is Op.BODY)
        if frame.op is Op.BODY:
            self.data.set_result(frame.data)
        else:
            self.data.set_exception(OSError(errno.EIO, f"rank {rank}: {frame.text}"))


class LeadingBackend(MLXBackend):
    """A `BatchBackend` for all ranks together."""

    def __init__(
        self,
        form: CacheForm,
        model_id: str,
        vocab_size: int,
        grammars: GrammarCompiler | None,
        ranks: Ranks,
    ) -> None:
        """See `MLXBackend`. `form` is rank 0's cache form. The other ranks must run `follow`."""
        super().__init__(form, model_id, vocab_size, grammars, None, ranks.from_first)
        self.ranks = ranks
        self._outcomes = Outcomes(ranks)
        self._number = 0
        self._most: dict[int, int] = {}  # by rank: rank 0's use when that rank is full
        self._freed: deque[int] = deque()
        self._unused = {Op.FREE: self._freed}
        self._arriving: dict[tuple[int, int], _Arriving] = {}
        own = super().layout()
        self._layout = replace(
            own,
            name=f"{own.name} of {ranks.size} ranks",
            full=own.full * ranks.size,
            window=own.window * ranks.size,
        )
        self._memory = shared_by(ranks.links.channels)
        if self._memory is not None:
            self._unused[Op.DROP] = self._memory.dropped
            self._memory.prepare(own.body_bytes(Part.FULL, BLOCK_TOKENS))
        ranks.links.before_end.append(self._give_up)
        threading.Thread(target=self._receive, name="ranks", daemon=True).start()

    def before_end(self, call: Callable[[], object]) -> None:
        """Register a function to call before this process ends because of a lost rank."""
        self.ranks.links.before_end.append(call)

    def abandon(self) -> None:
        """See `MLXBackend.abandon`. Also ends the process."""
        self.ranks.links.end("the engine failed")

    def set_aside(self, n_bytes: int) -> None:
        with self._announced(Op.SET_ASIDE, n_bytes):
            super().set_aside(n_bytes)

    def open(self, capacity: int) -> SequenceId:
        with self._announced(Op.OPEN, capacity):
            return super().open(capacity)

    def restore(
        self, blocks: AgentBlocks, length: int, capacity: int, *, exclusive: bool
    ) -> SequenceId:
        mine = AgentBlocks(blocks.agent_id, model_id=blocks.model_id)
        described: list[int] = []
        for layer in range(self._spec.n_layers):
            held = blocks.blocks_for_layer(layer)
            described.append(len(held))
            for block in held:
                data = block.layer_data
                key = data.key if isinstance(data, Held) else NO_KEY
                described += (block.start, block.token_count, key)
                own = data.data if isinstance(data, Held) else data
                mine.add_block(replace(block, layer_data=own))
        with self._announced(Op.RESTORE, length, capacity, int(exclusive), *described):
            return super().restore(mine, length, capacity, exclusive=exclusive)

    def reserve(self, sequence: SequenceId, capacity: int) -> None:
        with self._announced(Op.RESERVE, sequence, capacity):
            super().reserve(sequence, capacity)

    def return_memory(self, room: int) -> bool:
        with self._announced(Op.RETURN_MEMORY, room):
            return super().return_memory(room)

    def memory_to_spare(self) -> int | None:
        """Return how many more bytes every rank can use; see `device.memory_to_spare`."""
        used = device.memory_in_use()  # on every rank, because shards have equal size
        spare = [most - used for most in tuple(self._most.values())]
        own = device.memory_to_spare()
        return min(spare if own is None else [own, *spare], default=None)

    def give_memory_back(self) -> None:
        """Call `device.give_memory_back` on every rank."""
        with self._announced(Op.GIVE_BACK):
            device.give_memory_back()

    def prefill(self, sequence: SequenceId, tokens: Sequence[int]) -> None:
        with self._announced(Op.PREFILL, sequence, *tokens):
            super().prefill(sequence, tokens)

    def prefill_together(self, chunks: Sequence[tuple[SequenceId, Sequence[int]]]) -> None:
        ints = [one for sequence, tokens in chunks for one in (sequence, len(tokens), *tokens)]
        with self._announced(Op.PREFILL_TOGETHER, *ints):
            super().prefill_together(chunks)

    def score(self, sequence: SequenceId, tokens: Sequence[int], n_top: int) -> list[TokenLogprob]:
        with self._announced(Op.SCORE, sequence, n_top, *tokens):
            return super().score(sequence, tokens, n_top)

    def start(
        self,
        sequence: SequenceId,
        last_token: int,
        history: Sequence[int],
        params: SamplingParams,
        drawn: int,
        drafter: Drafter | None = None,  # noqa: ARG002  other ranks have no drafts
    ) -> None:
        """See `BatchBackend.start`. Announces the call only once the grammar is compiled."""
        super().start(sequence, last_token, history, params, drawn)
        with self._announced(Op.START, sequence, last_token):
            pass

    def decode(self) -> list[SampledToken]:
        with self._announced(Op.DECODE):
            return super().decode()

    def extract(self, sequence: SequenceId, blocks: Sequence[Sequence[KVBlock]]) -> list[KVBlock]:
        with self._announced(Op.EXTRACT, sequence, *map(len, blocks)) as number:
            unused = super().extract(sequence, blocks)
        filled = [one for layer in blocks for one in layer if _is_filled(one)]
        for key, block in enumerate(filled, number << KEY_SHIFT):
            block.layer_data = Held(block.layer_data, key, self._freed)
        return unused

    def close(self, sequence: SequenceId) -> None:
        with self._announced(Op.CLOSE, sequence):
            super().close(sequence)

    def layout(self) -> BlockLayout:
        """See `BatchBackend.layout`. Rank 0's segments come first."""
        return self._layout

    def pause(self, sequence: SequenceId) -> SampledToken | None:
        with self._announced(Op.PAUSE, sequence):
            return super().pause(sequence)

    def export_block(self, sequence: SequenceId, part: Part, start: int, stop: int) -> Body:
        shared: SharedRoom | None = None
        if self._memory and self._layout.body_bytes(part, stop - start) >= LEAST_BYTES:
            shared = SharedRoom(self._memory, self.ranks.links.channels, self._number)
        arriving = self._expect(shared)
        ints = (sequence, PARTS.index(part), start, stop, int(shared is not None))
        with self._announced(Op.EXPORT, *ints):
            room = None if shared is None else shared.take
            own = self.export_to(room, sequence, part, range(start, stop))
            if room and isinstance(own, bytes) and (taken := room(len(own))):
                taken[:] = own
            return GatheredBody(own, arriving, shared)

    def is_finite(self, part: Part, body: bytes) -> bool:
        size = len(body) // self.ranks.size
        parts = (body[at : at + size] for at in range(0, len(body), size or 1))
        return all(super(LeadingBackend, self).is_finite(part, one) for one in parts)

    def export_checkpoint(self, sequence: SequenceId) -> bytes:
        arriving = self._expect()
        with self._announced(Op.CHECKPOINT, sequence):
            parts = [super().export_checkpoint(sequence), *(one.result() for one in arriving)]
        return b"".join(len(one).to_bytes(_LENGTH_BYTES, "little") + one for one in parts)

    def loading(self, sequence: SequenceId, part: Part, start: int, stop: int) -> list[BodyTarget]:
        with self._announced(Op.LOADING, sequence, PARTS.index(part), start, stop) as number:
            own = super().loading(sequence, part, start, stop)
        per_token = sum(super().layout().bytes_per_token(part))
        channels = self.ranks.links.channels
        return [
            SharedTarget(one, Place(channels, number, index), per_token, self._memory)
            for index, one in enumerate(own)
        ]

    def loaded(self, sequence: SequenceId, length: int, checkpoint: bytes | None = None) -> None:
        parts = None if checkpoint is None else self._split(checkpoint)
        ints = (sequence, length, int(parts is not None))
        with self._announced(Op.LOADED, *ints, data=(parts or [])[1:]):
            super().loaded(sequence, length, None if parts is None else parts[0])

    # Inside

    @contextmanager
    def _announced(self, op: Op, *ints: int, data: Sequence[bytes] = ()) -> Iterator[int]:
        """Announce a call to the other ranks, and make it in the `with` block."""
        number, self._number = self._number, self._number + 1
        self._send_freed()
        for at, channel in enumerate(self.ranks.links.channels):
            channel.send(Frame(op, number, ints, data[at] if data else b""))
        with self.ranks.links.computing(op.name):
            try:
                yield number
            except SemanticError as error:
                self._outcomes.failed_here(number, error)
                raise
            self._outcomes.succeeded(number)

    def _send_freed(self) -> None:
        """Let the other ranks free the data that rank 0 no longer uses. Thread-safe."""
        for op, numbers in self._unused.items():
            freed: list[int] = []
            with suppress(IndexError):
                while True:
                    freed.append(numbers.popleft())
            if freed:
                for channel in self.ranks.links.channels:
                    channel.send(Frame(op, 0, freed))

    def _expect(self, room: SharedRoom | None = None) -> list[Future[Data]]:
        """Return one future per other rank, for its part of the body that the next call exports."""
        arriving: list[Future[Data]] = []
        for channel in self.ranks.links.channels:
            future: Future[Data] = Future()
            self._arriving[self._number, channel.peer] = _Arriving(future, room)
            arriving.append(future)
        return arriving

    def _receive(self) -> None:
        while True:
            try:
                rank, frame = self.ranks.links.received.get(timeout=_FREE_SECONDS)
            except Empty:
                self._send_freed()
                continue
            if frame.op is Op.MEMORY:
                self._most[rank] = device.memory_in_use() + frame.ints[0]
                self._send_freed()
                continue
            if frame.op is Op.TAKEN and self._memory is not None:
                self._memory.taken(Loan(rank, frame.number, frame.ints[0]))
                continue
            arriving = self._arriving.pop((frame.number, rank), None)
            if arriving is not None:
                arriving.take(rank, frame)
            if frame.op is Op.FAILED:
                self._outcomes.failed_there(frame.number, rank, frame.text)

    def _give_up(self) -> None:
        for arriving in list(self._arriving.values()):
            with suppress(InvalidStateError):
                arriving.data.set_exception(OSError(errno.EIO, "lost a rank"))

    def _split(self, checkpoint: bytes) -> list[bytes]:
        """Return the parts of a checkpoint, by rank. Raises CacheReconstructionError."""
        parts: list[bytes] = []
        at = 0
        while at < len(checkpoint):
            start = at + _LENGTH_BYTES
            at = start + int.from_bytes(checkpoint[at:start], "little")
            parts.append(checkpoint[start:at])
        if at != len(checkpoint) or len(parts) != self.ranks.size:
            raise CacheReconstructionError(f"the checkpoint must come from {self.ranks.size} ranks")
        return parts


def shard_backend(
    form: CacheForm, model_id: str, vocab_size: int, grammars: GrammarCompiler | None, ranks: Ranks
) -> MLXBackend:
    """Return the backend of this rank. Raises UnsupportedModelError if the model does not support
    ranks, and BackendError if the ranks' caches differ."""
    if form.spec.reusable_tokens is not None:
        raise UnsupportedModelError(
            "the keys of this model depend on prefill's chunks: start it on one device"
        )
    layers = form.layers
    kind = f"{type(layers).__name__} {layers.ragged} {layers.together}"
    form_here = f"{kind} {form.codec.layout} {form.spec}"
    require_same(ranks.gather(digest("form-v1", form_here.encode())), "form of caches")
    if ranks.rank == 0:
        backend: MLXBackend = LeadingBackend(form, model_id, vocab_size, grammars, ranks)
    else:
        backend = MLXBackend(form, model_id, vocab_size, grammars, None, ranks.from_first)
    backend.lane = Lane(problem="several devices compute this model")
    return backend


def _is_filled(block: KVBlock) -> bool:
    return block.layer_data is not None and not isinstance(block.layer_data, Held)
