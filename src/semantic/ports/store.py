"""StorePort: a store of blocks and of agents' manifests, in memory, on disk or both.

A store is a cache, never a source of truth: anything that it dropped or cannot verify is a miss.
`TurnsPort` and `ResponsesPort` keep turns and responses of conversations, only for the tenant that
stored them; a history whose turn is missing is rendered again. Thread-safe.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Protocol, TypeAlias, runtime_checkable

from semantic.domain.block_hash import BlockHash, BlockKey, BlockLink, Part, Scope
from semantic.domain.chat import Point, Turn
from semantic.domain.responses import StoredResponse
from semantic.domain.stored import (
    AgentName,
    BlockHeader,
    BlockLayout,
    BlockRead,
    Found,
    Manifest,
    Pinned,
    Place,
    StoredBlock,
    StoreStats,
    Tier,
)


class ResponsesPort(Protocol):
    """Responses by tenant and id, within a budget of bytes; evicts the oldest response of the
    tenant that has most. Thread-safe. Calls may block and may raise StoreError, so do not call it
    on an event loop, nor after `close`."""

    def get(self, tenant: str, response_id: str) -> StoredResponse | None:
        """The stored response; None if it is unknown, another tenant's, deleted or damaged."""

    def put(self, tenant: str, response: StoredResponse) -> None:
        """Store `response`, replacing any with the same id; drop it if it is larger than the
        budget."""

    def delete(self, tenant: str, response_id: str) -> bool:
        """Delete a response. Returns False if it does not exist."""

    def close(self) -> None:
        """Release files. Idempotent."""


class DiskResponsesPort(ResponsesPort, Protocol):
    """Responses on disk; in memory if the disk fails."""

    def disable_disk(self) -> None:
        """From now on, use memory only."""


MOST_WAIT = 2.0
"""Seconds that the end of an answer waits at most for other machines to be able to continue the
answer's conversation."""


class TurnsPort(Protocol):
    """Turns by the point at which they end. Thread-safe."""

    def get(self, point: Point) -> Turn | None:
        """Return the turn that ends at `point`; None if it is unknown or damaged."""

    def put(self, turn: Turn) -> Future[None] | None:
        """Store `turn`, replacing an earlier turn at the same point, except that a turn without
        tokens replaces nothing. Never raises: drops the turn on failure. In a fleet, returns a
        future that is done once other machines can find the turn, or never will; the end of an
        answer waits for it, for at most `MOST_WAIT`. Returns None without a fleet, or if the
        fleet's store failed last time or is late."""

    def look_up(self, owner: bytes, points: Sequence[Point]) -> None:
        """Load a fleet's turns at `points` of one owner's conversation, in order, so that `get`
        finds them. May wait for the network, up to one deadline; does nothing without a fleet."""

    def close(self) -> None:
        """Flush and close."""


class SharedTurnsPort(Protocol):
    """Turns that several machines share. Thread-safe; never raises."""

    @property
    def has_failed(self) -> bool:
        """True if the last call failed or a `put` is late. A `put` is late before `MOST_WAIT` has
        passed, so that only one answer waits for a hanging store, and the next does not. Does not
        wait."""

    def put(self, turn: Turn) -> None:
        """Store `turn` and return once other machines can find it; drop it on failure. A turn
        without tokens replaces nothing. May wait."""

    def look_up(self, owner: bytes, points: Sequence[Point]) -> Sequence[Turn]:
        """Return the stored turns at `points`; empty if the newest ones are missing. May wait."""

    def close(self) -> None:
        """End the threads."""


class CacheStorePort(Protocol):
    """Stores immutable block bodies by content hash. A disk failure raises nothing: it counts in
    `stats` and as a miss. A tier that also implements `LookUpPort` has no quota of its own; apart
    from reads and writes, it answers from its last look-up."""

    @property
    def secret(self) -> bytes:
        """32 random bytes from which tenants' tags are derived; they never change during the
        store's life."""

    @property
    def holds_back(self) -> bool:
        """True while interim blocks are not written to disk (the daily write limit is reached) or
        not sent to other machines (uploads fail or lag)."""

    def put(self, block: StoredBlock) -> bool:
        """Store `block`; does nothing if it is stored already.

        Returns False if it stores nothing: pins fill the quota, writes back up, or the disk fails.
        The quota holds at any time. To make room, the store evicts blocks of the tenant that has
        most, while that tenant has more than this one: least recently used first, the end of a
        chain first. Tenants cannot take an equal part of the quota from each other, nor keep more
        by pinning. The store shares `block` and never changes it. While `holds_back` is true, an
        interim block stays in memory only.
        """

    def drop(self, keys: Sequence[BlockKey]) -> None:
        """Delete blocks, even if they are in use or pinned; blocks that follow them stay."""

    def find(self, keys: Sequence[BlockKey]) -> Mapping[BlockKey, Found]:
        """Return those of `keys` that are in the index, without reading bodies. Does not count as a
        use."""

    def lacking(self, keys: Sequence[BlockKey]) -> frozenset[BlockKey]:
        """Return those of `keys` that some tier lacks and another `put` could add; empty while the
        store refuses puts."""

    def children(self, parent: BlockHash, part: Part) -> Sequence[BlockHeader]:
        """Return the headers of all indexed blocks that follow `parent`, without reading bodies."""

    def nearest(self, parent: BlockHash, part: Part, like: Sequence[int]) -> Sequence[BlockHeader]:
        """The `children` worth comparing with the tokens `like`: every child whose tokens `like`
        begins with, and the child that shares most tokens with `like` if `begins_like` holds."""

    def resident(self, headers: Sequence[BlockHeader]) -> Mapping[BlockKey, bytes | memoryview]:
        """Return the bodies of `headers` that are in this process's memory, without copying them.
        Waits for bodies still being copied from a device; changes nothing. The caller reads the
        others."""

    def read_into(self, reads: Sequence[BlockRead]) -> Sequence[bool]:
        """Fill the targets of each read, in parallel; return True for each verified body. False
        means that the content of the targets is undefined. Quarantines a damaged body."""

    def read(self, header: BlockHeader) -> bytes | None:
        """Return the body, verified as in `read_into`, or None."""

    def prefetch(self, header: BlockHeader) -> bool:
        """Copy a body from disk to memory, verified and within the quota; return whether it is in
        memory. Counts as a use. A store without two tiers copies nothing."""

    def touch(self, keys: Sequence[BlockKey]) -> None:
        """Record a use of `keys`, a chain in order, so that the start of the chain is evicted
        last."""

    def stats(self) -> Sequence[StoreStats]:
        """Return statistics, one entry per tier."""

    def flush(self) -> None:
        """Return once everything accepted is as durable as this store can make it."""

    def close(self) -> None:
        """Flush, and release files and threads. Do not call the store afterwards."""


class AgentIndexPort(Protocol):
    """Agents' manifests, by scope and name. Thread-safe; handles failures like `CacheStorePort`."""

    def save(self, manifest: Manifest) -> bool:
        """Store `manifest` as its agent's newest, after all blocks put before it. Assigns the
        generation and records a use of the agent's blocks. Returns False if nothing was stored."""

    def manifest(self, scope: Scope, agent_id: str) -> Manifest | None:
        """Return the agent's newest manifest, or None."""

    def scopes(self) -> Sequence[Scope]:
        """Return the scopes that have agents, in any order."""

    def page(self, scope: Scope, limit: int, after: Place | None = None) -> Sequence[Manifest]:
        """Return at most `limit` manifests of a scope, newest first by `Manifest.place`, that come
        after the place `after`; fewer only at the end."""

    def child_agents(self, scope: Scope, parent: str) -> Sequence[str]:
        """Return the names of the agents in a scope whose manifest names this `parent`, sorted."""

    def users(self, hashes: Sequence[BlockHash]) -> Mapping[BlockHash, frozenset[AgentName]]:
        """Return, for each block, up to two of the agents whose newest manifest needs it."""

    def remove(self, scope: Scope, agent_id: str) -> bool:
        """Remove the agent's manifest. False if it has none. Its blocks stay until evicted."""

    def pinned(self, tenant: bytes) -> Pinned:
        """Return the pins of the tenant with the tag `tenant` in the most durable tier, and the
        tenant's part of that tier."""


class StorePort(CacheStorePort, Protocol):
    """A store of blocks, and of the agents that need them."""

    @property
    def agents(self) -> AgentIndexPort:
        """The manifests of the agents, closed together with the store."""


class BlockObserver(Protocol):
    """Learns which whole blocks (`BlockHeader.is_whole_block`) a tier has. The tier calls it in the
    order of the changes, under its locks and from any thread: a method must return at once and must
    not call a store. It returns False for a change that it lost."""

    def stored(self, header: BlockHeader, tier: Tier) -> bool:
        """From now on, and perhaps earlier, requests find the block."""

    def removed(self, name: BlockHash, tier: Tier) -> bool:
        """Requests no longer find the block."""

    def listed_anew(self) -> None:
        """A tier's contents may have changed in any way: list them again."""


class ListedTier(Protocol):
    """A tier that can list its chains."""

    def roots(self, namespace: bytes) -> frozenset[BlockHash]:
        """Return the parents of the first blocks of all chains in `namespace`."""

    def children(self, parent: BlockHash, part: Part) -> Sequence[BlockHeader]: ...

    def find(self, keys: Sequence[BlockKey]) -> Mapping[BlockKey, Found]: ...


class EventsPort(BlockObserver, Protocol):
    """Publishes which blocks the tiers of this machine have. Sends nothing before `begin`."""

    def begin(self, namespace: bytes, tiers: Mapping[Tier, ListedTier]) -> None:
        """Publish the blocks that `tiers` have in `namespace`, and every later change."""

    def close(self) -> None:
        """Try for a moment to send pending events, then free the addresses."""


OpensEvents: TypeAlias = Callable[[str, str], EventsPort]
"""Called with an address and a topic. Raises InvalidRequestError for a malformed address, and
OperatorError for an unusable one or if packages are missing."""


class SharedStorePort(Protocol):
    """Blocks, turns and responses of a fleet under one URL. Opening it sends no request."""

    def blocks(self) -> StorePort:
        """Return the tier of blocks and agents, which is also a `LookUpPort` and keeps to its
        budget, if any."""

    def turns(self) -> SharedTurnsPort:
        """Return the store of past turns."""

    def responses(self, own: DiskResponsesPort) -> DiskResponsesPort:
        """Return a store of responses that reads the fleet's where `own` lacks a response."""

    def try_out(self) -> tuple[float, bool]:
        """Write, read, list and delete an object. Return the seconds that took, and whether the
        bucket keeps old versions of deleted objects. Raises StoreError."""

    def last_pass(self) -> tuple[str, Mapping[str, object]] | None:
        """Return the last eviction run, as text and as fields; None if there was none. Raises
        StoreError."""


OpensShared: TypeAlias = Callable[[str, bytes, int | None], SharedStorePort]
"""Called with a URL, the fleet's secret, and the limit in bytes that this process enforces, if any.
Raises InvalidRequestError for a malformed URL, and OperatorError if packages are missing."""


@runtime_checkable
class LookUpPort(Protocol):
    """A tier that is too slow to ask between two steps: another thread asks it before the engine
    queues a request. Failures raise nothing. A call makes a few requests one after another and
    stops when one is late."""

    def look_up_agent(self, scope: Scope, agent_id: str) -> None:
        """Fetch the agent's newest manifest."""

    def look_up(
        self, scope: Scope, links: Sequence[BlockLink], layout: BlockLayout, start: int = 0
    ) -> None:
        """Fetch how much of a chain of blocks the tier stores, the blocks that follow the chain,
        and everything needed to resume. The last block may be partial; other tiers have the first
        `start` blocks."""
