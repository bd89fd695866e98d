"""A store of blocks and of agents' manifests, in memory, on disk or in both.

A store is a cache: anything that it dropped or cannot verify is a miss.
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
    """Stores responses by tenant and id, within a budget of bytes. Thread-safe. Calls may block and
    may raise StoreError. Make no call after `close`."""

    def get(self, tenant: str, response_id: str) -> StoredResponse | None:
        """Return a tenant's response, or None if it is missing or damaged."""

    def put(self, tenant: str, response: StoredResponse) -> None:
        """Store `response`, new or not. Drops a response larger than the budget."""

    def delete(self, tenant: str, response_id: str) -> bool:
        """Delete a response. Returns False for a missing response."""

    def close(self) -> None:
        """Release files. Idempotent."""


class DiskResponsesPort(ResponsesPort, Protocol):
    """Stores responses on disk, or in memory if the disk fails."""

    def disable_disk(self) -> None:
        """Stop using the disk; use memory instead."""


MOST_WAIT = 2.0
"""Most seconds that the end of an answer waits until other machines can continue."""


class TurnsPort(Protocol):
    """Stores turns by the point at which a turn ends. Thread-safe."""

    def get(self, point: Point) -> Turn | None:
        """Return the turn that ends at `point`; None if it is missing or damaged."""

    def put(self, turn: Turn) -> Future[None] | None:
        """Store `turn`; a turn without tokens replaces nothing. Never raises: drops the turn on
        failure. Returns a future for the upload to the fleet, or None without an upload."""

    def look_up(self, owner: bytes, points: Sequence[Point]) -> None:
        """Load the turns at `points` from the fleet's store, so that `get` finds them. May wait for
        the network, up to a deadline."""

    def close(self) -> None:
        """Flush and close."""


class SharedTurnsPort(Protocol):
    """Turns that several machines share. Thread-safe; never raises."""

    @property
    def has_failed(self) -> bool:
        """True if the last call failed or a `put` is late. Returns at once."""

    def put(self, turn: Turn) -> None:
        """Store `turn`; return once other machines can find it. Drops the turn on failure. A turn
        without tokens replaces nothing. May wait."""

    def look_up(self, owner: bytes, points: Sequence[Point]) -> Sequence[Turn]:
        """Return the stored turns at `points`; none if the newest points lack a turn. May wait."""

    def close(self) -> None:
        """End the threads that send turns."""


class CacheStorePort(Protocol):
    """Stores immutable block bodies by content hash. A failure of the disk raises nothing: the read
    is a miss."""

    @property
    def secret(self) -> bytes:
        """32 random bytes from which the tenants' tags derive. They never change during the store's
        life."""

    @property
    def holds_back(self) -> bool:
        """True while the store keeps interim blocks in memory only."""

    def put(self, block: StoredBlock) -> bool:
        """Store `block`. Returns False if the store drops it.

        To stay within the quota, the store evicts blocks of the tenant with most bytes, least
        recently used first. The store never changes `block`. While `holds_back` is true, an interim
        block stays in memory only.
        """

    def drop(self, keys: Sequence[BlockKey]) -> None:
        """Delete blocks, even used or pinned ones. Later blocks of their chains stay."""

    def find(self, keys: Sequence[BlockKey]) -> Mapping[BlockKey, Found]:
        """Return the index's entry for each known key, without reading bodies. Does not count as a
        use."""

    def lacking(self, keys: Sequence[BlockKey]) -> frozenset[BlockKey]:
        """Return the `keys` that a tier lacks and that `put` could add."""

    def children(self, parent: BlockHash, part: Part) -> Sequence[BlockHeader]:
        """Return the headers of all blocks that follow `parent`, without reading bodies."""

    def nearest(self, parent: BlockHash, part: Part, like: Sequence[int]) -> Sequence[BlockHeader]:
        """Return each of the `children` whose tokens `like` begins with. Also returns the child
        with the longest common beginning, if `begins_like` accepts it."""

    def resident(self, headers: Sequence[BlockHeader]) -> Mapping[BlockKey, bytes | memoryview]:
        """Return the bodies in this process's memory without copying them. Waits for copies from a
        device."""

    def read_into(self, reads: Sequence[BlockRead]) -> Sequence[bool]:
        """Read bodies into the targets of `reads`, in parallel. Returns True for each verified
        body. After a failed read, its targets have undefined content."""

    def read(self, header: BlockHeader) -> bytes | None:
        """Return the body of `header`, or None if it is missing or damaged."""

    def prefetch(self, header: BlockHeader) -> bool:
        """Verify a body on disk and copy it to the memory tier; return True if it is in memory.
        Counts as a use."""

    def touch(self, keys: Sequence[BlockKey]) -> None:
        """Record a use of the blocks `keys`, a chain in order. Eviction removes its end first."""

    def stats(self) -> Sequence[StoreStats]:
        """Return statistics, one entry per tier."""

    def flush(self) -> None:
        """Return once all accepted data is as durable as possible."""

    def close(self) -> None:
        """Flush, and release files and threads. Make no call afterwards."""


class AgentIndexPort(Protocol):
    """Agents' manifests, by scope and name. Thread-safe. Handles failures like `CacheStorePort`."""

    def save(self, manifest: Manifest) -> bool:
        """Store `manifest` as its agent's newest. It becomes durable only after the blocks of
        earlier puts. Returns False if the store drops it."""

    def manifest(self, scope: Scope, agent_id: str) -> Manifest | None:
        """Return the agent's newest manifest, or None."""

    def scopes(self) -> Sequence[Scope]:
        """Return the scopes that have agents."""

    def page(self, scope: Scope, limit: int, after: Place | None = None) -> Sequence[Manifest]:
        """Return at most `limit` manifests of a scope after the place `after`, newest first by
        `Manifest.place`."""

    def child_agents(self, scope: Scope, parent: str) -> Sequence[str]:
        """Return the sorted names of the agents with `parent` as parent."""

    def users(self, hashes: Sequence[BlockHash]) -> Mapping[BlockHash, frozenset[AgentName]]:
        """Return the users of each block: up to two names of agents that need it."""

    def remove(self, scope: Scope, agent_id: str) -> bool:
        """Remove the agent's manifest; its blocks stay until evicted. Returns False if there is
        none."""

    def pinned(self, tenant: bytes) -> Pinned:
        """Return how much a tenant has pinned in the most durable tier, and its limit."""


class StorePort(CacheStorePort, Protocol):
    """A store of blocks and of agents' manifests."""

    @property
    def agents(self) -> AgentIndexPort:
        """The index of the agents' manifests. It closes with the store."""


class BlockObserver(Protocol):
    """Receives the changes of a tier's whole blocks, in order. A method must return at once and
    must not call a store. It returns False if it could not record the change."""

    def stored(self, header: BlockHeader, tier: Tier) -> bool:
        """Record that requests can find the block. May be called again for the same block."""

    def removed(self, name: BlockHash, tier: Tier) -> bool:
        """Record that requests no longer find the block."""

    def listed_anew(self) -> None:
        """Record that a tier may have changed in any way. The observer lists it again."""


class ListedTier(Protocol):
    """A tier that can list the hash chains that it stores."""

    def roots(self, namespace: bytes) -> frozenset[BlockHash]:
        """Return the parent hashes of the first blocks of all chains in `namespace`."""

    def children(self, parent: BlockHash, part: Part) -> Sequence[BlockHeader]: ...

    def find(self, keys: Sequence[BlockKey]) -> Mapping[BlockKey, Found]: ...


class EventsPort(BlockObserver, Protocol):
    """Publishes changes of the blocks in this machine's tiers. Sends nothing before `begin`."""

    def begin(self, namespace: bytes, tiers: Mapping[Tier, ListedTier]) -> None:
        """Publish the blocks of `tiers` in `namespace`, and every later change."""

    def close(self) -> None:
        """Try for a moment to send pending events, then free the addresses."""


OpensEvents: TypeAlias = Callable[[str, str], EventsPort]
"""Called with an address and a topic. Raises InvalidRequestError for a malformed address, and
OperatorError for an unusable one."""


class SharedStorePort(Protocol):
    """Blocks, turns and responses of a fleet under one URL. Opening sends no request."""

    def blocks(self) -> StorePort:
        """Return the tier of blocks and agents, which is also a `LookUpPort`. A budget limits its
        size."""

    def turns(self) -> SharedTurnsPort:
        """Return the store of past turns."""

    def responses(self, own: DiskResponsesPort) -> DiskResponsesPort:
        """Return a store of responses, which asks the fleet for those that `own` lacks."""

    def try_out(self) -> tuple[float, bool]:
        """Write, read, list and delete an object. Returns the seconds that this took, and True if
        the bucket keeps old versions. Raises StoreError."""

    def last_pass(self) -> tuple[str, Mapping[str, object]] | None:
        """Return a report on the last eviction, as text and as fields, or None. Raises
        StoreError."""


OpensShared: TypeAlias = Callable[[str, bytes, int | None], SharedStorePort]
"""Called with a URL, the fleet's secret, and a limit in bytes or None. Raises InvalidRequestError
for a malformed URL, and OperatorError if packages are missing."""


@runtime_checkable
class LookUpPort(Protocol):
    """A tier too slow for the engine's thread: another thread looks up blocks in advance. Failures
    raise nothing."""

    def look_up_agent(self, scope: Scope, agent_id: str) -> None:
        """Fetch the agent's newest manifest."""

    def look_up(
        self, scope: Scope, links: Sequence[BlockLink], layout: BlockLayout, start: int = 0
    ) -> None:
        """Find the stored blocks of the chain `links`, and all that resuming needs. Later calls
        answer from memory. Other tiers have the first `start` blocks."""
