"""StorePort: a store of blocks and of agents' manifests, in memory, on disk or in both.

A store is a cache, never a source of truth: anything that it dropped or cannot verify is a miss.
`TurnsPort` keeps a tenant's turns, and `ResponsesPort` keeps a tenant's responses. If a turn is
missing, the chat template renders the history again. Thread-safe.
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
    """Stores responses by tenant and id, within a budget of bytes; evicts the oldest response of
    the tenant whose responses need most bytes. Thread-safe. Calls may block and may raise
    StoreError, so call none on an event loop. Make no call after `close`."""

    def get(self, tenant: str, response_id: str) -> StoredResponse | None:
        """Return the stored response; None for an unknown, deleted or damaged response, or another
        tenant's."""

    def put(self, tenant: str, response: StoredResponse) -> None:
        """Store `response` in place of an earlier response with the same id; drop a response larger
        than the budget."""

    def delete(self, tenant: str, response_id: str) -> bool:
        """Delete a response. Returns False for a missing response."""

    def close(self) -> None:
        """Release files. Idempotent."""


class DiskResponsesPort(ResponsesPort, Protocol):
    """Stores responses on disk, or in memory if the disk fails."""

    def disable_disk(self) -> None:
        """Stop using the disk; use memory instead."""


MOST_WAIT = 2.0
"""The most seconds that the end of an answer waits until other machines can continue its
conversation."""


class TurnsPort(Protocol):
    """Stores turns by the point at which a turn ends. Thread-safe."""

    def get(self, point: Point) -> Turn | None:
        """Return the turn that ends at `point`; None for an unknown or damaged turn."""

    def put(self, turn: Turn) -> Future[None] | None:
        """Store `turn` in place of an earlier turn at the same point; a turn without tokens
        replaces nothing. Never raises: drops the turn on failure. In a fleet, returns a future that
        is done once other machines can find the turn or the upload has failed. The end of an answer
        waits at most `MOST_WAIT` for this future. Returns None if there is no fleet. Also returns
        None if the last call of the fleet's store failed or is late."""

    def look_up(self, owner: bytes, points: Sequence[Point]) -> None:
        """Load the turns at `points` of one owner's conversation, in order, from the fleet's store,
        so that `get` finds these turns. May wait for the network, up to a deadline; does nothing if
        there is no fleet."""

    def close(self) -> None:
        """Flush and close."""


class SharedTurnsPort(Protocol):
    """Turns that several machines share. Thread-safe; never raises."""

    @property
    def has_failed(self) -> bool:
        """True if the last call failed or a `put` is late. A `put` is late even before `MOST_WAIT`,
        so that only one answer waits for a store that hangs. Returns at once."""

    def put(self, turn: Turn) -> None:
        """Store `turn` and return once other machines can find the turn. On failure, drop the turn.
        A turn without tokens replaces nothing. May wait."""

    def look_up(self, owner: bytes, points: Sequence[Point]) -> Sequence[Turn]:
        """Return the stored turns at `points`; none if the newest points have no turn. May wait."""

    def close(self) -> None:
        """End the threads that send turns."""


class CacheStorePort(Protocol):
    """Stores immutable block bodies by content hash. A failure of the disk raises nothing: `stats`
    counts the failure, and the read is a miss. A tier that also implements `LookUpPort` has no
    quota. Reads and writes reach such a tier; its last look-up answers all other calls."""

    @property
    def secret(self) -> bytes:
        """32 random bytes from which the tenants' tags derive. These bytes never change during the
        store's life."""

    @property
    def holds_back(self) -> bool:
        """True while the store keeps interim blocks in memory only: the disk has reached its daily
        write limit, or uploads to the fleet's store fail or lag."""

    def put(self, block: StoredBlock) -> bool:
        """Store `block`; does nothing for a stored block. Returns False for a block that it drops:
        pins fill the quota, the write queue is full, or the disk fails. The quota holds at any
        time. To free space, the store evicts blocks of the tenant with most bytes, if this tenant
        has more bytes than the block's tenant. The least recently used blocks go first, and a
        chain's end before its start. So each tenant keeps an equal share of the quota, and pins
        protect at most that share. The store refers to `block` without a copy and never changes it.
        While `holds_back` is true, an interim block stays in memory only."""

    def drop(self, keys: Sequence[BlockKey]) -> None:
        """Delete blocks, even blocks in use or pinned; later blocks of the same chains stay."""

    def find(self, keys: Sequence[BlockKey]) -> Mapping[BlockKey, Found]:
        """Return the index's entry for each known key in `keys`, without reading bodies. Does not
        count as a use."""

    def lacking(self, keys: Sequence[BlockKey]) -> frozenset[BlockKey]:
        """Return the `keys` that at least one tier lacks and that `put` could add. Empty while the
        store refuses puts."""

    def children(self, parent: BlockHash, part: Part) -> Sequence[BlockHeader]:
        """Return the headers of all indexed blocks that follow `parent`, without reading bodies."""

    def nearest(self, parent: BlockHash, part: Part, like: Sequence[int]) -> Sequence[BlockHeader]:
        """Return the `children` worth comparing with the tokens `like`: each child whose tokens are
        the beginning of `like`. Also return the child with the longest common beginning, if
        `begins_like` accepts this child."""

    def resident(self, headers: Sequence[BlockHeader]) -> Mapping[BlockKey, bytes | memoryview]:
        """Return the bodies that are in this process's memory, without copying them; the caller
        reads other bodies from the store. Waits for copies from a device to finish; changes
        nothing."""

    def read_into(self, reads: Sequence[BlockRead]) -> Sequence[bool]:
        """Read bodies into the targets of `reads`, in parallel. Returns True for each read with a
        verified body. Returns False for a failed read, whose targets then have undefined content.
        Quarantines a damaged body."""

    def read(self, header: BlockHeader) -> bytes | None:
        """Return the body of `header`; None for a missing body or a body that fails
        verification."""

    def prefetch(self, header: BlockHeader) -> bool:
        """Verify a body on disk and copy the body to the memory tier, within the quota; return
        whether the body is in memory. Counts as a use. A store with one tier copies nothing."""

    def touch(self, keys: Sequence[BlockKey]) -> None:
        """Record a use of the blocks `keys`, a chain in order. Eviction removes the chain's end
        first."""

    def stats(self) -> Sequence[StoreStats]:
        """Return statistics, one entry per tier."""

    def flush(self) -> None:
        """Return once all accepted data is as durable as this store can make it."""

    def close(self) -> None:
        """Flush, and release files and threads. Make no call after `close`."""


class AgentIndexPort(Protocol):
    """Agents' manifests, by scope and name. Thread-safe; handles failures like `CacheStorePort`."""

    def save(self, manifest: Manifest) -> bool:
        """Store `manifest` as its agent's newest; the manifest becomes durable only after the
        blocks of earlier puts. Assigns its generation and records a use of the agent's blocks.
        Returns False for a dropped manifest."""

    def manifest(self, scope: Scope, agent_id: str) -> Manifest | None:
        """Return the agent's newest manifest; None if the agent has no manifest."""

    def scopes(self) -> Sequence[Scope]:
        """Return the scopes that have agents, in any order."""

    def page(self, scope: Scope, limit: int, after: Place | None = None) -> Sequence[Manifest]:
        """Return at most `limit` manifests of a scope: the next manifests after the place `after`.
        The newest comes first, by `Manifest.place`."""

    def child_agents(self, scope: Scope, parent: str) -> Sequence[str]:
        """Return the sorted names of the scope's agents whose manifests have `parent` as parent."""

    def users(self, hashes: Sequence[BlockHash]) -> Mapping[BlockHash, frozenset[AgentName]]:
        """Return the users of each block: up to two names of agents whose newest manifests need the
        block."""

    def remove(self, scope: Scope, agent_id: str) -> bool:
        """Remove the agent's manifest; the agent's blocks stay until evicted. Returns False for an
        agent without a manifest."""

    def pinned(self, tenant: bytes) -> Pinned:
        """Return how much the tenant with the tag `tenant` has pinned in the most durable tier, and
        the limit of these pins."""


class StorePort(CacheStorePort, Protocol):
    """A store of blocks and of the manifests of agents, which use the blocks."""

    @property
    def agents(self) -> AgentIndexPort:
        """The index of the agents' manifests. Closing the store also closes this index."""


class BlockObserver(Protocol):
    """Receives the changes of a tier's whole blocks (`BlockHeader.is_whole_block`). The tier calls
    in the order of the changes, under its locks and from any thread: a method must return at once
    and must not call a store. A method returns False if it could not record the change."""

    def stored(self, header: BlockHeader, tier: Tier) -> bool:
        """Record that requests can now find the block. Repeated calls for a block are possible."""

    def removed(self, name: BlockHash, tier: Tier) -> bool:
        """Record that requests no longer find the block."""

    def listed_anew(self) -> None:
        """Record that a tier may have changed in any way: the observer lists the tier again."""


class ListedTier(Protocol):
    """A tier that can list the hash chains that it stores."""

    def roots(self, namespace: bytes) -> frozenset[BlockHash]:
        """Return the parent hashes of the first blocks of all chains in `namespace`."""

    def children(self, parent: BlockHash, part: Part) -> Sequence[BlockHeader]: ...

    def find(self, keys: Sequence[BlockKey]) -> Mapping[BlockKey, Found]: ...


class EventsPort(BlockObserver, Protocol):
    """Publishes changes of the blocks in this machine's tiers. Sends nothing before `begin`."""

    def begin(self, namespace: bytes, tiers: Mapping[Tier, ListedTier]) -> None:
        """Publish the blocks that `tiers` have in `namespace`, and every later change."""

    def close(self) -> None:
        """Try for a moment to send pending events, then free the addresses of the publisher."""


OpensEvents: TypeAlias = Callable[[str, str], EventsPort]
"""Called with an address and a topic. Raises InvalidRequestError for a malformed address, and
OperatorError for an unusable one or if packages are missing."""


class SharedStorePort(Protocol):
    """Blocks, turns and responses of a fleet under one URL. Opening the store sends no request."""

    def blocks(self) -> StorePort:
        """Return the tier of blocks and agents, which is also a `LookUpPort`. With a budget, this
        tier evicts objects beyond the budget."""

    def turns(self) -> SharedTurnsPort:
        """Return the store of past turns."""

    def responses(self, own: DiskResponsesPort) -> DiskResponsesPort:
        """Return a store of responses, which asks the fleet for a response that `own` lacks."""

    def try_out(self) -> tuple[float, bool]:
        """Write, read, list and delete an object. Return the duration in seconds, and whether the
        bucket keeps old versions of deleted objects. Raises StoreError."""

    def last_pass(self) -> tuple[str, Mapping[str, object]] | None:
        """Return a report on the last eviction, as text and as fields; None before the first
        eviction. Raises StoreError."""


OpensShared: TypeAlias = Callable[[str, bytes, int | None], SharedStorePort]
"""Called with a URL, the fleet's secret, and the limit in bytes that this process enforces, or
None. Raises InvalidRequestError for a malformed URL, and OperatorError if packages are missing."""


@runtime_checkable
class LookUpPort(Protocol):
    """A tier too slow for the engine's thread: another thread looks up a request's blocks and agent
    in this tier before the engine queues the request. Failures raise nothing. A call sends a few
    requests one after another, and stops when a request is late."""

    def look_up_agent(self, scope: Scope, agent_id: str) -> None:
        """Fetch the agent's newest manifest."""

    def look_up(
        self, scope: Scope, links: Sequence[BlockLink], layout: BlockLayout, start: int = 0
    ) -> None:
        """Find the stored blocks of the chain `links`, the stored blocks after them, and everything
        needed to resume, so that later calls answer from memory. The last link may be partial;
        other tiers have the first `start` blocks."""
