"""Publishes the blocks in this machine's tiers over ZeroMQ, with vLLM's messages.

A message is `topic, number, payload`. Numbers are 8 bytes, big-endian, without gaps. A payload is
the msgpack encoding of `[time, events, rank]`. A second socket repeats missed messages.
"""

from __future__ import annotations

import re
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from typing import Final, TypeAlias

import msgspec
import zmq

from semantic.domain.block_hash import BlockHash, Part
from semantic.domain.errors import InvalidRequestError, OperatorError
from semantic.domain.stored import BlockHeader, Tier
from semantic.domain.value_objects import BLOCK_TOKENS
from semantic.ports.store import ListedTier

_RANK: Final = 0
"""The rank in every message. A server has only one rank."""
_NAME_BITS: Final = 64
_MEDIA: Final = {Tier.MEMORY: "CPU", Tier.DISK: "STORAGE"}
"""vLLM's names for the tiers of one machine."""


class BlockStored(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Stored blocks. Each block is the parent of the next one."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str
    lora_name: str | None


class BlockRemoved(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Blocks that a medium of this machine does not have any more."""

    block_hashes: list[int]
    medium: str


class AllBlocksCleared(msgspec.Struct, frozen=True, gc=False, tag=True):
    """An order to forget all blocks. A list of all stored blocks follows it."""


Event: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """The content of one message. `ts` is Unix time in seconds."""

    ts: float
    events: Sequence[Event]
    data_parallel_rank: int = _RANK


@dataclass(frozen=True, slots=True)
class Stored:
    """A tier now has this block."""

    header: BlockHeader
    tier: Tier


@dataclass(frozen=True, slots=True)
class Removed:
    """A tier does not have this block any more."""

    name: BlockHash
    tier: Tier


Change: TypeAlias = Stored | Removed


def encoded(time: float, events: Sequence[Event]) -> bytes:
    """Return the payload of a message with these events."""
    return msgspec.msgpack.encode(KVEventBatch(time, events))


def events_of(changes: Sequence[Change]) -> list[Event]:
    """Return `changes` as events, in order. Consecutive blocks of one chain become one event."""
    runs: list[list[Change]] = []
    for change in changes:
        if runs and _continues(runs[-1][-1], change):
            runs[-1].append(change)
        else:
            runs.append([change])
    return [_event(run) for run in runs]


def _continues(before: Change, change: Change) -> bool:
    if before.tier is not change.tier:
        return False
    if isinstance(before, Stored) and isinstance(change, Stored):
        return change.header.link.parent == before.header.link.hash
    return isinstance(before, Removed) and isinstance(change, Removed)


def _event(run: Sequence[Change]) -> Event:
    medium = _MEDIA[run[0].tier]
    links = [one.header.link for one in run if isinstance(one, Stored)]
    if not links:
        return BlockRemoved([_named(one.name) for one in run if isinstance(one, Removed)], medium)
    return BlockStored(
        block_hashes=[_named(link.hash) for link in links],
        parent_block_hash=_named(links[0].parent) if links[0].start else None,
        token_ids=[token for link in links for token in link.tokens],
        block_size=BLOCK_TOKENS,
        lora_id=None,
        medium=medium,
        lora_name=None,
    )


def _named(name: BlockHash) -> int:
    """Return the last 64 bits of a block's hash, as vLLM does by default."""
    return int.from_bytes(name, "big") & ((1 << _NAME_BITS) - 1)


MOST_WAITING: Final = 4096
"""The maximum number of changes that wait in the queue."""
_BATCH: Final = 64
"""The maximum number of changes in one message. They cover 16,384 tokens."""
_REPLAYED: Final = 1000
"""The maximum number of messages to keep for replays."""
_REPLAYED_BYTES: Final = 32 << 20
_UNREAD: Final = 1000
"""The maximum number of messages to queue for one subscriber. It misses further messages."""
_LONGEST_REQUEST: Final = 4096
"""The maximum number of bytes in a subscriber's topic or number."""
_NUMBER_BYTES: Final = 8
_END: Final = (-1).to_bytes(_NUMBER_BYTES, "big", signed=True)
"""Sent in place of a message's number at the end of a replay."""
_LISTING_SECONDS: Final = 0.25
"""Seconds between two lists of all stored blocks, which are for new subscribers."""
_LAST_PORT: Final = 65_535
_LINGER_MS: Final = 500
"""Milliseconds in which the closing publisher sends its last messages."""


class KVPublisher:
    """Publishes changes of the tiers. Does nothing before `begin`."""

    def __init__(self, endpoint: str, topic: str = "", *, most_waiting: int = MOST_WAITING) -> None:
        """Bind `endpoint`, and the address `replay_endpoint(endpoint)` for replays. Raises
        InvalidRequestError for an invalid address, and OperatorError if binding fails."""
        self._topic = topic.encode()
        self._most_waiting = most_waiting
        self._changed = threading.Lock()
        self._waiting: deque[Change] = deque()
        self._begins_anew = False
        self._is_awake = False
        self._closing = False
        self._namespace: bytes | None = None
        self._tiers: Mapping[Tier, ListedTier] = {}
        self._is_asked = False  # True if a subscriber has come since `_listed`
        self._listed = -_LISTING_SECONDS
        self._number = 0
        self._sent: deque[tuple[int, zmq.Frame]] = deque()
        self._sent_bytes = 0
        second = replay_endpoint(endpoint)
        self._context = zmq.Context()
        self._publishes = self._bound(zmq.XPUB, endpoint, _UNREAD)
        # Announce every subscriber, not only the first.
        self._publishes.setsockopt(zmq.XPUB_VERBOSE, 1)
        self._replays = self._bound(zmq.ROUTER, second, _REPLAYED + 1)
        self._wakes, self._woken = socket.socketpair()
        self._wakes.setblocking(False)
        self._woken.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="kv events", daemon=True)

    def begin(self, namespace: bytes, tiers: Mapping[Tier, ListedTier]) -> None:
        """Publish the blocks of `tiers` in `namespace`, and then every change of them."""
        self._namespace, self._tiers = namespace, tiers
        self.listed_anew()
        self._thread.start()

    # Reports of the tiers

    def stored(self, header: BlockHeader, tier: Tier) -> bool:
        return header.link.scope.namespace != self._namespace or self._take(Stored(header, tier))

    def removed(self, name: BlockHash, tier: Tier) -> bool:
        return self._namespace is None or self._take(Removed(name, tier))

    def listed_anew(self) -> None:
        if self._namespace is not None:
            with self._changed:
                self._begins_anew = True
                self._wake()

    def close(self) -> None:
        """Send the queued changes, which takes at most half a second. Then free the addresses."""
        with self._changed:
            self._closing = True
            self._wake()
        self._namespace = None
        if self._thread.ident is not None:
            self._thread.join()
        self._context.destroy(linger=_LINGER_MS)
        self._wakes.close()
        self._woken.close()

    def _take(self, change: Change) -> bool:
        with self._changed:
            if self._closing:
                return True
            is_taken = len(self._waiting) < self._most_waiting
            if is_taken:
                self._waiting.append(change)
            else:
                self._begins_anew = True
            self._wake()
        return is_taken

    def _wake(self) -> None:
        """The caller holds the lock `_changed`."""
        if not self._is_awake:
            self._is_awake = True
            self._wakes.send(b"\0")

    def _bound(self, kind: int, endpoint: str, most_unread: int) -> zmq.Socket[bytes]:
        """Return a socket that drops messages for a subscriber with `most_unread` unread ones."""
        found = self._context.socket(kind)
        found.setsockopt(zmq.MAXMSGSIZE, _LONGEST_REQUEST)
        found.setsockopt(zmq.SNDHWM, most_unread)
        found.setsockopt(zmq.IPV6, "[" in endpoint)
        try:
            found.bind(endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise OperatorError(f"kv_events: cannot bind {endpoint}: {error}") from error
        return found

    # The thread

    def _run(self) -> None:
        poller = zmq.Poller()
        for one in (self._publishes, self._replays, self._woken):
            poller.register(one, zmq.POLLIN)
        is_busy = False
        while not self._closing:
            pause = max(0, int(1000 * (self._listed + _LISTING_SECONDS - time.monotonic())))
            wait = 0 if is_busy else pause if self._is_asked else None
            ready = dict(poller.poll(wait))
            if self._publishes in ready:
                self._is_asked |= self._has_new_subscriber()
            if self._replays in ready:
                self._answer_replay()
            is_busy = self._send_some()
            if self._is_asked and not pause:
                self._send_all_stored()
        while self._send_some():
            """Send the changes that came before the end."""

    def _send_some(self) -> bool:
        with suppress(BlockingIOError):
            self._woken.recv(_LONGEST_REQUEST)
        with self._changed:
            begins_anew, self._begins_anew = self._begins_anew, False
            if begins_anew:
                self._waiting.clear()  # the listing includes these changes
            some = [self._waiting.popleft() for _ in range(min(_BATCH, len(self._waiting)))]
            self._is_awake = begins_anew or bool(some)
        if begins_anew:
            self._send([AllBlocksCleared()])
            self._send_all_stored()
        if some:
            self._send(events_of(some))
        return begins_anew or bool(some)

    def _send_all_stored(self) -> None:
        self._is_asked, self._listed = False, time.monotonic()
        some: list[Change] = []
        for change in self._all_stored():
            some.append(change)
            if len(some) == _BATCH:
                self._send(events_of(some))
                some = []
                if self._closing:
                    return
        if some:
            self._send(events_of(some))

    def _all_stored(self) -> Iterator[Change]:
        roots = {root for one in self._tiers.values() for root in one.roots(self._namespace or b"")}
        waiting = [header for root in roots for header in self._after(root)]
        run: list[BlockHeader] = []
        while waiting:
            run.append(waiting.pop())
            following = self._after(run[-1].link.hash)
            waiting += following
            if not following or len(run) == _BATCH:
                yield from self._of_each_tier(run)
                run = []

    def _after(self, parent: BlockHash) -> list[BlockHeader]:
        tiers = self._tiers.values()
        found = (header for one in tiers for header in one.children(parent, Part.FULL))
        return list({one.link.hash: one for one in found if one.is_whole_block}.values())

    def _of_each_tier(self, run: Sequence[BlockHeader]) -> Iterator[Change]:
        keys = [header.key for header in run]
        found = {tier: one.find(keys) for tier, one in self._tiers.items()}

        def tiers_of(header: BlockHeader) -> list[Tier]:
            return [tier for tier, here in found.items() if header.key in here]

        for tiers, some in groupby(run, tiers_of):
            part = list(some)
            yield from (Stored(header, tier) for tier in tiers for header in part)

    def _send(self, events: Sequence[Event]) -> None:
        payload = zmq.Frame(encoded(time.time(), events))
        self._publishes.send_multipart((self._topic, _packed(self._number), payload), copy=False)
        self._sent.append((self._number, payload))
        self._sent_bytes += len(payload)
        while len(self._sent) > _REPLAYED or self._sent_bytes > _REPLAYED_BYTES:
            self._sent_bytes -= len(self._sent.popleft()[1])
        self._number += 1

    def _has_new_subscriber(self) -> bool:
        came = False
        with suppress(zmq.Again):
            while True:
                came |= self._publishes.recv(zmq.NOBLOCK).startswith(b"\1")
        return came

    def _answer_replay(self) -> None:
        asked = self._replays.recv_multipart()
        if len(asked) != len(("client", "", "number")) or len(asked[2]) != _NUMBER_BYTES:
            return
        client, _, first = asked
        for number, payload in self._sent:
            if number >= int.from_bytes(first, "big"):
                self._replays.send_multipart(
                    (client, b"", self._topic, _packed(number), payload), zmq.NOBLOCK, copy=False
                )
        self._replays.send_multipart((client, b"", b"", _END, b""), zmq.NOBLOCK)


def replay_endpoint(endpoint: str) -> str:
    """Return the address for replays: the next port, or a path with the suffix "-replay". Raises
    InvalidRequestError for an `endpoint` of another kind."""
    if re.fullmatch(r"ipc://.+", endpoint):
        return f"{endpoint}-replay"
    found = re.fullmatch(r"(tcp://(?:\*|\[[0-9a-fA-F:.]+\]|[\w.-]+)):(\d{1,5})", endpoint)
    if found is None or not 0 < int(found[2]) < _LAST_PORT:
        raise InvalidRequestError(
            f"kv_events must be tcp://HOST:PORT or ipc://PATH, with a port of 1 to "
            f"{_LAST_PORT - 1} (replays use the next one), got {endpoint}"
        )
    return f"{found[1]}:{int(found[2]) + 1}"


def _packed(number: int) -> bytes:
    return number.to_bytes(_NUMBER_BYTES, "big")
