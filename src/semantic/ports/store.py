"""StorePort: a store of blocks and of agents' manifests, in memory, on disk or both.

A store is a cache, never a source of truth: whatever it dropped or cannot verify is a miss.
`TurnsPort` and `ResponsesPort` keep the turns and responses of conversations for the tenant that
stored them alone; a history whose turn is missing renders anew. Thread-safe.
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
    """Responses by tenant and id, within a budget of bytes; evicts the oldest of the tenant that
    has most. Thread-safe. Calls may block, so no event loop makes them, and raise StoreError.
    Nothing calls it after `close`."""

    def get(self, tenant: str, response_id: str) -> StoredResponse | None:
        """The response as stored; None if unknown, another tenant's, deleted or damaged."""

    def put(self, tenant: str, response: StoredResponse) -> None:
        """Store `response`, replacing one with its id; drop one larger than the budget."""

    def delete(self, tenant: str, response_id: str) -> bool:
        """Delete a response; returns whether there was one."""

    def close(self) -> None:
        """Release files. Idempotent."""


class DiskResponsesPort(ResponsesPort, Protocol):
    """Responses on disk, and in memory where the disk fails."""

    def disable_disk(self) -> None:
        """Use memory only from now on."""


MOST_WAIT = 2.0
"""Seconds that the end of an answer waits at most until another machine can continue it."""


class TurnsPort(Protocol):
    """Turns by their points. Thread-safe."""

    def get(self, point: Point) -> Turn | None:
        """The turn that ends at `point`; None if it is unknown or damaged."""

    def put(self, turn: Turn) -> Future[None] | None:
        """Store `turn`, replacing an earlier one at its point; one without tokens replaces none.
        Never raises: drops a turn on failure. The future ends when other machines of a fleet find
        the turn, or never will; the end of an answer waits for it, `MOST_WAIT` at most. None
        without a fleet, or if its store failed last or is late."""

    def look_up(self, owner: bytes, points: Sequence[Point]) -> None:
        """Let `get` know a fleet's turns at `points`, of one owner's conversation, in order. May
        wait for a network, one deadline at most; does nothing without a fleet."""

    def close(self) -> None:
        """Flush and close."""


class SharedTurnsPort(Protocol):
    """Turns that several machines share. Thread-safe; raises nothing."""

    @property
    def has_failed(self) -> bool:
        """True if the last call failed or a `put` is late. Late is sooner than `MOST_WAIT`, so that
        one answer waits for a store that hangs, and the next does not. Does not wait."""

    def put(self, turn: Turn) -> None:
        """Store `turn`, and return when other machines find it; drop it on failure. One without
        tokens replaces none. May wait."""

    def look_up(self, owner: bytes, points: Sequence[Point]) -> Sequence[Turn]:
        """Return the stored turns at `points`; none if the newest are missing. May wait."""

    def close(self) -> None:
        """End its threads."""


class CacheStorePort(Protocol):
    """Stores immutable block bodies by content hash. No call raises for a failure of the disk:
    `stats` counts it, and it is a miss. A tier that also implements `LookUpPort` has no quota of
    its own, and answers all but reads and writes from its last look-up."""

    @property
    def secret(self) -> bytes:
        """32 random bytes that tenants' tags derive from; constant over the store's life."""

    @property
    def holds_back(self) -> bool:
        """True while interim blocks go neither to disk (past the day's limit) nor to other machines
        (uploads fail or are behind)."""

    def put(self, block: StoredBlock) -> bool:
        """Store `block`; does nothing if it is stored already.

        Returns False if it stores nothing: pins fill the quota, backpressure, a failing disk. The
        quota holds at any time: it evicts least recently used blocks, a chain's tail first, of the
        tenant that has most while that has more than this one. No tenant loses an equal part of the
        quota to others, and none keeps more by pins. The store shares `block` and never changes it.
        While `holds_back`, an interim one stays in memory alone.
        """

    def drop(self, keys: Sequence[BlockKey]) -> None:
        """Delete blocks, used and pinned ones too; blocks that follow them stay."""

    def find(self, keys: Sequence[BlockKey]) -> Mapping[BlockKey, Found]:
        """The indexed ones of `keys`, without reading them. Does not count as a use."""

    def lacking(self, keys: Sequence[BlockKey]) -> frozenset[BlockKey]:
        """Return the `keys` that some tier lacks, for another `put`; none while it refuses puts."""

    def children(self, parent: BlockHash, part: Part) -> Sequence[BlockHeader]:
        """The headers of all indexed blocks that follow `parent`, without reading them."""

    def nearest(self, parent: BlockHash, part: Part, like: Sequence[int]) -> Sequence[BlockHeader]:
        """Return the `children` worth comparing with the tokens `like`, of any number: all whose
        tokens `like` begins with, and the one that shares most with it, if `begins_like` holds."""

    def resident(self, headers: Sequence[BlockHeader]) -> Mapping[BlockKey, bytes | memoryview]:
        """The bodies of `headers` in this process's memory, without copies. Changes nothing, and
        waits for bodies on their way. The caller reads others."""

    def read_into(self, reads: Sequence[BlockRead]) -> Sequence[bool]:
        """Fill the targets of each read, in parallel; True for each verified body. False leaves the
        targets undefined. Quarantines a damaged body."""

    def read(self, header: BlockHeader) -> bytes | None:
        """The body, verified as in `read_into`, or None."""

    def prefetch(self, header: BlockHeader) -> bool:
        """Copy a body from disk to memory, verified, within the quota; return whether memory has
        it. Counts as a use. A store without two tiers copies nothing."""

    def touch(self, keys: Sequence[BlockKey]) -> None:
        """Record a use of `keys`, a chain in order, so that its root goes last."""

    def stats(self) -> Sequence[StoreStats]:
        """One entry per tier."""

    def flush(self) -> None:
        """Return when all accepted is as durable as this store can make it."""

    def close(self) -> None:
        """Flush, and release files and threads. Nothing calls the store afterwards."""


class AgentIndexPort(Protocol):
    """Agents' manifests, by scope and name. Thread-safe; fails as `CacheStorePort`."""

    def save(self, manifest: Manifest) -> bool:
        """Store `manifest` as its agent's newest, after all blocks put before it. Assigns the
        generation and records a use of the agent's blocks. False if it stores nothing."""

    def manifest(self, scope: Scope, agent_id: str) -> Manifest | None:
        """The agent's newest manifest, or None."""

    def scopes(self) -> Sequence[Scope]:
        """The scopes that have agents, in any order."""

    def page(self, scope: Scope, limit: int, after: Place | None = None) -> Sequence[Manifest]:
        """Return at most `limit` manifests of a scope by `Manifest.place`, newest first, that come
        after `after`; fewer only at the end."""

    def child_agents(self, scope: Scope, parent: str) -> Sequence[str]:
        """The names of a scope's agents whose manifest has this `parent`, sorted."""

    def users(self, hashes: Sequence[BlockHash]) -> Mapping[BlockHash, frozenset[AgentName]]:
        """For each block, two at most of the agents whose newest manifest needs it."""

    def remove(self, scope: Scope, agent_id: str) -> bool:
        """Remove the agent's manifest; False if there is none. Its blocks stay until evicted."""

    def pinned(self, tenant: bytes) -> Pinned:
        """Return a tenant's pins in the most durable tier, and its part of it, by its tag."""


class StorePort(CacheStorePort, Protocol):
    """A store of blocks, and of the agents that need them."""

    @property
    def agents(self) -> AgentIndexPort:
        """Its agents; closed with it."""


class BlockObserver(Protocol):
    """Learns which whole blocks (`BlockHeader.is_whole_block`) a tier has. The tier calls it in the
    order of the changes, under its locks and from any thread: it returns at once and calls no
    store. False for a change that it lost."""

    def stored(self, header: BlockHeader, tier: Tier) -> bool:
        """Requests find the block from now on, perhaps also before."""

    def removed(self, name: BlockHash, tier: Tier) -> bool:
        """No request finds the block any more."""

    def listed_anew(self) -> None:
        """A tier's contents may have changed in any way."""


class ListedTier(Protocol):
    """A tier that lists its chains."""

    def roots(self, namespace: bytes) -> frozenset[BlockHash]:
        """The parents of the first blocks of all chains in `namespace`."""

    def children(self, parent: BlockHash, part: Part) -> Sequence[BlockHeader]: ...

    def find(self, keys: Sequence[BlockKey]) -> Mapping[BlockKey, Found]: ...


class EventsPort(BlockObserver, Protocol):
    """Publishes which blocks the tiers of this machine have. Sends nothing before `begin`."""

    def begin(self, namespace: bytes, tiers: Mapping[Tier, ListedTier]) -> None:
        """Publish what `tiers` have in `namespace`, and from now on what changes."""

    def close(self) -> None:
        """Send what waits, for a moment, and free its addresses."""


OpensEvents: TypeAlias = Callable[[str, str], EventsPort]
"""Takes an address and a topic. Raises InvalidRequestError for a malformed address, and
OperatorError for an unusable one or if packages are missing."""


class SharedStorePort(Protocol):
    """Blocks, turns and responses of a fleet under one URL. Opening it sends no request."""

    def blocks(self) -> StorePort:
        """The tier of blocks and agents, also a `LookUpPort`, which keeps to its budget, if any."""

    def turns(self) -> SharedTurnsPort:
        """Past turns."""

    def responses(self, own: DiskResponsesPort) -> DiskResponsesPort:
        """Responses: those of the fleet behind the ones that `own` has."""

    def try_out(self) -> tuple[float, bool]:
        """Write, read, list and delete an object. Return the seconds taken, and whether the bucket
        keeps versions of deleted objects. Raises StoreError."""

    def last_pass(self) -> tuple[str, Mapping[str, object]] | None:
        """Return the last eviction, in words and as fields; None before. Raises StoreError."""


OpensShared: TypeAlias = Callable[[str, bytes, int | None], SharedStorePort]
"""Takes a URL, the fleet's secret, and the bytes that this process keeps it to. Raises
InvalidRequestError for a malformed URL, and OperatorError if packages are missing."""


@runtime_checkable
class LookUpPort(Protocol):
    """A tier too slow to ask between two steps: another thread asks it before the engine queues a
    request. Failures raise nothing. A call makes a few requests in turn; a late one ends it."""

    def look_up_agent(self, scope: Scope, agent_id: str) -> None:
        """Learn the agent's newest manifest."""

    def look_up(
        self, scope: Scope, links: Sequence[BlockLink], layout: BlockLayout, start: int = 0
    ) -> None:
        """Learn how much of a chain of blocks, the last possibly partial, the tier stores, the
        blocks that follow, and all that resuming needs. Other tiers have the first `start`."""
