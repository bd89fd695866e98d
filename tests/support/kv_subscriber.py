"""A router's side of KV cache events: a fake observer, and a subscriber that decodes vLLM's wire.

The structs are the wire's: what a reader of vLLM's events declares to decode them.
"""

from __future__ import annotations

import msgspec
import zmq

from semantic.domain.block_hash import BlockHash
from semantic.domain.stored import BlockHeader, Tier

_MILLISECONDS = 30_000


class Event(msgspec.Struct, tag=True):
    """Its tag is the name of its class, at "type"."""


class BlockStored(Event):
    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[object] | None = None
    group_idx: int | None = None


class BlockRemoved(Event):
    block_hashes: list[int | bytes]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(Event):
    pass


class Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class Mirror:
    """A `BlockObserver` that knows which blocks each tier has; `is_full` while it takes nothing."""

    def __init__(self) -> None:
        self.names: dict[Tier, set[BlockHash]] = {Tier.MEMORY: set(), Tier.DISK: set()}
        self.listings = 0
        self.is_full = False

    def stored(self, header: BlockHeader, tier: Tier) -> bool:
        assert header.is_whole_block
        if not self.is_full:
            self.names[tier].add(header.link.hash)
        return not self.is_full

    def removed(self, name: BlockHash, tier: Tier) -> bool:
        if not self.is_full:
            self.names[tier].discard(name)
        return not self.is_full

    def listed_anew(self) -> None:
        self.listings += 1


class Subscriber:
    """Reads events at an address, and knows from them what each medium has."""

    def __init__(self, endpoint: str, topic: str = "") -> None:
        self.events: list[BlockStored | BlockRemoved | AllBlocksCleared] = []
        self.held: dict[str, set[int | bytes]] = {"CPU": set(), "STORAGE": set()}
        self.numbers: list[int] = []
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.RCVTIMEO, _MILLISECONDS)
        self._socket.subscribe(topic)
        self._socket.connect(endpoint)

    def close(self) -> None:
        self._context.destroy(linger=0)

    def read(self, *, until: object = None) -> None:
        """Read a message, and all up to one after which the media hold `until`."""
        self._read_one()
        while until is not None and self.held != until:
            self._read_one()

    def replayed(self, endpoint: str, first: int) -> list[tuple[int, Batch]]:
        """The messages from number `first` on, as the second address sends them."""
        found: list[tuple[int, Batch]] = []
        with self._context.socket(zmq.DEALER) as asking:
            asking.setsockopt(zmq.RCVTIMEO, _MILLISECONDS)
            asking.connect(endpoint)
            asking.send_multipart([b"", b"no number"])  # is ignored
            asking.send_multipart([b"", first.to_bytes(8, "big")])
            while True:
                empty, _topic, number, payload = asking.recv_multipart()
                assert empty == b""
                if int.from_bytes(number, "big", signed=True) == -1:
                    return found
                batch = msgspec.msgpack.decode(payload, type=Batch)
                found.append((int.from_bytes(number, "big"), batch))

    def _read_one(self) -> None:
        _topic, number, payload = self._socket.recv_multipart()
        self.numbers.append(int.from_bytes(number, "big"))
        batch = msgspec.msgpack.decode(payload, type=Batch)
        assert batch.data_parallel_rank == 0
        for event in batch.events:
            self.events.append(event)
            self._apply(event)

    def _apply(self, event: BlockStored | BlockRemoved | AllBlocksCleared) -> None:
        match event:
            case BlockStored(medium=str(medium)):
                assert len(event.token_ids) == event.block_size * len(event.block_hashes)
                self.held[medium].update(event.block_hashes)
            case BlockRemoved(medium=str(medium)):
                self.held[medium].difference_update(event.block_hashes)
            case AllBlocksCleared():
                for names in self.held.values():
                    names.clear()
            case _:
                raise AssertionError(f"an event without a medium: {event}")
