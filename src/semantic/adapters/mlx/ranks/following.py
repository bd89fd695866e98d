"""Every rank except rank 0 makes the calls that rank 0 announces, on its own shard."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from queue import Empty

from semantic.adapters.mlx.backend import MLXBackend
from semantic.adapters.mlx.cuda.copies import transfers_here
from semantic.adapters.mlx.device import give_memory_back
from semantic.adapters.mlx.ranks.leading import KEY_SHIFT, NO_KEY, PARTS
from semantic.adapters.mlx.ranks.shard import Ranks
from semantic.adapters.mlx.transfers import Room
from semantic.domain.entities import AgentBlocks, BlockData, BlockId, KVBlock
from semantic.domain.errors import BackendError, SemanticError
from semantic.domain.stored import Body
from semantic.domain.value_objects import SamplingParams, SequenceId
from semantic.ports.generation import BodyTarget
from semantic.ports.ranks import ChannelPort, Frame, Op

_END_SECONDS = 5.0
_NO_ID = BlockId(0)
"""A placeholder, because only rank 0 counts blocks."""


def follow(backend: MLXBackend, ranks: Ranks) -> None:
    """Make rank 0's calls until rank 0 ends normally. Losing rank 0 ends this process."""
    follower = Follower(backend, ranks.links.channels[0])
    while (frame := ranks.links.received.get()[1]).op is not Op.END:
        with ranks.links.computing(frame.op.name):
            follower.take(frame)


def wait_for_end(ranks: Ranks) -> bool:
    """Return whether rank 0 ends normally in the next seconds."""
    with suppress(Empty):
        return ranks.links.received.get(timeout=_END_SECONDS)[1].op is Op.END
    return False


class Follower:
    """Makes the calls that rank 0 announces, on the backend of another rank."""

    def __init__(self, backend: MLXBackend, channel: ChannelPort) -> None:
        self._backend = backend
        self._channel = channel
        transfers = transfers_here()
        channel.mapped.driver = None if transfers is None else transfers.driver
        self._sender = ThreadPoolExecutor(1, thread_name_prefix="ranks")
        self._held: dict[int, BlockData] = {}
        self._targets: dict[int, Sequence[BodyTarget]] = {}
        self._loads: dict[SequenceId, list[int]] = {}
        self._calls: dict[Op, Callable[[Frame], object]] = {
            Op.FREE: self._free,
            Op.BODY: self._take_body,
            Op.OPEN: lambda frame: backend.open(*frame.ints),
            Op.RESTORE: self._restore,
            Op.RESERVE: lambda frame: backend.reserve(SequenceId(frame.ints[0]), frame.ints[1]),
            Op.SET_ASIDE: lambda frame: backend.set_aside(*frame.ints),
            Op.PREFILL: lambda frame: backend.prefill(SequenceId(frame.ints[0]), frame.ints[1:]),
            Op.PREFILL_TOGETHER: self._prefill_together,
            Op.RETURN_MEMORY: lambda frame: backend.return_memory(*frame.ints),
            Op.GIVE_BACK: lambda _: give_memory_back(),
            Op.SCORE: lambda frame: backend.score(
                SequenceId(frame.ints[0]), frame.ints[2:], frame.ints[1]
            ),
            Op.START: lambda frame: backend.start(
                SequenceId(frame.ints[0]), frame.ints[1], (), SamplingParams(), 0
            ),
            Op.DECODE: lambda _: backend.decode(),
            Op.EXTRACT: self._extract,
            Op.CLOSE: self._close,
            Op.PAUSE: lambda frame: backend.pause(SequenceId(*frame.ints)),
            Op.EXPORT: self._export,
            Op.CHECKPOINT: self._export_checkpoint,
            Op.LOADING: self._load,
            Op.LOADED: self._finish_load,
        }

    def take(self, frame: Frame) -> None:
        """Make the call in `frame`, and report an error to rank 0."""
        try:
            self._calls[frame.op](frame)
        except SemanticError as error:
            self._channel.send(Frame(Op.FAILED, frame.number, data=str(error).encode()))

    def _free(self, frame: Frame) -> None:
        for key in frame.ints:
            del self._held[key]

    def _restore(self, frame: Frame) -> None:
        length, capacity, exclusive, *described = frame.ints
        blocks, layer, at = AgentBlocks(""), 0, 0
        while at < len(described):
            n_blocks, at = described[at], at + 1
            for _ in range(n_blocks):
                start, n_tokens, key = described[at : at + 3]
                data = None if key == NO_KEY else self._held[key]
                blocks.add_block(KVBlock(_NO_ID, layer, n_tokens, data, start))
                at += 3
            layer += 1
        self._backend.restore(blocks, length, capacity, exclusive=bool(exclusive))

    def _prefill_together(self, frame: Frame) -> None:
        chunks: list[tuple[SequenceId, Sequence[int]]] = []
        at = 0
        while at < len(frame.ints):
            sequence, n_tokens = frame.ints[at : at + 2]
            at += 2 + n_tokens
            chunks.append((SequenceId(sequence), frame.ints[at - n_tokens : at]))
        self._backend.prefill_together(chunks)

    def _extract(self, frame: Frame) -> None:
        sequence, *sizes = frame.ints
        blocks = [[KVBlock(_NO_ID, i) for _ in range(n)] for i, n in enumerate(sizes)]
        self._backend.extract(SequenceId(sequence), blocks)
        filled = (one for layer in blocks for one in layer if one.layer_data is not None)
        for key, block in enumerate(filled, frame.number << KEY_SHIFT):
            self._held[key] = block.layer_data

    def _close(self, frame: Frame) -> None:
        sequence = SequenceId(*frame.ints)
        self._drop_targets(sequence)
        self._backend.close(sequence)

    def _export(self, frame: Frame) -> None:
        sequence, part, start, stop, has_room = frame.ints
        room = partial(self._channel.mapped.room, frame.number) if has_room else None
        tokens = range(start, stop)
        body = self._backend.export_to(room, SequenceId(sequence), PARTS[part], tokens)
        self._sender.submit(self._send, frame, body, room)

    def _export_checkpoint(self, frame: Frame) -> None:
        body = self._backend.export_checkpoint(SequenceId(*frame.ints))
        self._sender.submit(self._send, frame, body)

    def _send(self, frame: Frame, body: Body, room: Room | None = None) -> None:
        """Send `body` to rank 0, or write it to `room`. Waits for the body on another thread."""
        try:
            data = body if isinstance(body, bytes) else body.wait()
            shared = None if room is None else room(len(body))
        except (OSError, RuntimeError) as error:
            self._channel.send(Frame(Op.NO_BODY, frame.number, data=str(error).encode()))
        else:
            if shared is not None:
                if isinstance(data, bytes):
                    shared[:] = data
                data = b""
            self._channel.send(Frame(Op.BODY, frame.number, data=data))
        self._channel.mapped.leave(frame.number)

    def _load(self, frame: Frame) -> None:
        number, part, start, stop = frame.ints
        sequence = SequenceId(number)
        self._targets[frame.number] = self._backend.loading(sequence, PARTS[part], start, stop)
        self._loads.setdefault(sequence, []).append(frame.number)

    def _take_body(self, frame: Frame) -> None:
        target, *where = frame.ints
        try:
            if frame.number in self._targets:
                data = self._channel.mapped.view(*where) if where else memoryview(frame.data)
                self._targets[frame.number][target].put(data)
        except RuntimeError as error:
            raise BackendError(str(error)) from error
        finally:
            if where:
                self._channel.send(Frame(Op.TAKEN, frame.number, (target,)))

    def _finish_load(self, frame: Frame) -> None:
        number, length, has_checkpoint = frame.ints
        sequence = SequenceId(number)
        self._drop_targets(sequence)
        checkpoint = bytes(frame.data) if has_checkpoint else None
        self._backend.loaded(sequence, length, checkpoint)

    def _drop_targets(self, sequence: SequenceId) -> None:
        for number in self._loads.pop(sequence, ()):
            for target in self._targets.pop(number):
                target.close()
