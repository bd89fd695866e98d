"""A store of blocks and of agents' manifests, in memory, on disk or in both.

A store is a cache: anything that it dropped or cannot verify is a miss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Protocol, TypeAlias, runtime_checkable

from semantic.domain.block_hash import BlockHash, BlockKey, BlockLink, Part, Scope
from semantic.domain.chat import Point, Turn
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

if TYPE_CHECKING:
    from semantic.domain.responses import StoredResponse


class ResponsesPort(Protocol):
    """Stores responses by tenant and id, within a budget of bytes. Thread-safe. Calls may block,
    and may raise StoreError. Make no call after `close`."""

    def get(self, tenant: str, response_id: str) -> StoredResponse | None:
        """Return a tenant's response. Returns None if the response is missing or damaged."""

    def put(self, tenant: str, response: StoredResponse) -> None:
        """Store `response` or replace it. Drops a response larger than the budget."""

    def delete(self, tenant: str, response_id: str) -> bool:
        """Delete a response. Returns False if the response is missing."""

    def close(self) -> None:
        """Release the files. Idempotent."""


class DiskResponsesPort(ResponsesPort, Protocol):
    """Stores responses on disk, or in memory if the disk fails."""

    def disable_disk(self) -> None:
        """Stop using the disk. From now on, use memory instead."""


MOST_WAIT = 2.0
"""The maximum number of seconds that the end of an answer waits for uploads."""


class TurnsPort(Protocol):
    """Stores turns. The key of a turn is the point at which it ends. Thread-safe."""

    def get(self, point: Point) -> Turn | None:
        """Return the turn that ends at `point`. Returns None if the turn is missing or damaged."""

    def put(self, turn: Turn) -> Future[None] | None:
        """Store `turn`. A turn without tokens does not replace another one. Never raises: a failure
        drops the turn. Returns a future for the upload to the fleet, or None without an upload."""

    def look_up(self, owner: bytes, points: Sequence[Point]) -> None:
        """Load the turns at `points` from the fleet's store, so that `get` finds them. May wait for
        the network, but only up to a deadline."""

    def close(self) -> None:
        """Write all turns and close the store."""


class SharedTurnsPort(Protocol):
    """Turns that several machines share. Thread-safe. Methods never raise."""

    @property
    def has_failed(self) -> bool:
        """True if the last call failed or a `put` is late. Does not wait."""

    def put(self, turn: Turn) -> None:
        """Store `turn`. Returns once other machines can find the turn. A failure drops the turn. A
        turn without tokens does not replace another one. May wait."""

    def look_up(self, owner: bytes, points: Sequence[Point]) -> Sequence[Turn]:
        """Return the turns at `points`, or none if the newest points lack a turn. May wait."""

    def close(self) -> None:
        """End the threads that send turns."""


class CacheStorePort(Protocol):
    """Stores immutable block bodies by content hash. A failure of the disk raises nothing, and the
    read is a miss."""

    @property
    def secret(self) -> bytes:
        """A secret of 32 random bytes. The tags of tenants derive from it. It never changes during
        the store's life."""

    @property
    def holds_back(self) -> bool:
        """True while the store keeps interim blocks only in memory."""

    def put(self, block: StoredBlock) -> bool:
        """Store `block`. Returns False if the store drops the block.

        To stay within its quota, the store evicts the least recently used blocks of the largest
        tenant. The store never changes `block`. While `holds_back` is true, an interim block stays
        only in memory.
        """

    def drop(self, keys: Sequence[BlockKey]) -> None:
        """Delete blocks, even if they are in use or pinned. Later blocks of their chains stay."""

    def find(self, keys: Sequence[BlockKey]) -> Mapping[BlockKey, Found]:
        """Return the index's entry for each known key. Does not read bodies, and does not count as
        a use."""

    def lacking(self, keys: Sequence[BlockKey]) -> frozenset[BlockKey]:
        """Return the keys that a tier lacks and that `put` could add to the tier."""

    def children(self, parent: BlockHash, part: Part) -> Sequence[BlockHeader]:
        """Return the headers of all blocks that follow `parent`. Does not read bodies."""

    def nearest(self, parent: BlockHash, part: Part, like: Sequence[int]) -> Sequence[BlockHeader]:
        """Return each of the `children` whose tokens are the beginning of `like`. Also returns the
        child with the longest common beginning, if `begins_like` accepts the child."""

    def resident(self, headers: Sequence[BlockHeader]) -> Mapping[BlockKey, bytes | memoryview]:
        """Return the bodies that are in this process's memory, without copying. Waits for copies
        from a device."""

    def read_into(self, reads: Sequence[BlockRead]) -> Sequence[bool]:
        """Read block bodies into the targets of `reads`, in parallel. Returns True for each
        verified body. After a failed read, the body's targets have undefined content."""

    def read(self, header: BlockHeader) -> bytes | None:
        """Return the body of the block `header`, or None if it is missing or damaged."""

    def prefetch(self, header: BlockHeader) -> bool:
        """Verify a body on disk and copy it to the memory tier. Returns True if the body is then in
        memory. Counts as a use."""

    def touch(self, keys: Sequence[BlockKey]) -> None:
        """Record a use of the blocks `keys`, a chain. Eviction removes a chain's end first."""

    def stats(self) -> Sequence[StoreStats]:
        """Return the store's statistics, with one entry per tier."""

    def flush(self) -> None:
        """Return once all accepted data is as durable as it can become."""

    def close(self) -> None:
        """Flush, and release files and threads. Make no call after `close`."""


class AgentIndexPort(Protocol):
    """Agents' manifests, by scope and name. Thread-safe. Handles failures like `CacheStorePort`."""

    def save(self, manifest: Manifest) -> bool:
        """Store `manifest` as the newest one of its agent. It becomes durable only after all blocks
        that were put before. Returns False if the store drops the manifest."""

    def manifest(self, scope: Scope, agent_id: str) -> Manifest | None:
        """Return the agent's newest manifest, or None."""

    def scopes(self) -> Sequence[Scope]:
        """Return the scopes that have agents."""

    def page(self, scope: Scope, limit: int, after: Place | None = None) -> Sequence[Manifest]:
        """Return at most `limit` manifests of a scope, newest first by `Manifest.place`. They
        follow the place `after`."""

    def child_agents(self, scope: Scope, parent: str) -> Sequence[str]:
        """Return the sorted names of the agents whose parent is `parent`."""

    def users(self, hashes: Sequence[BlockHash]) -> Mapping[BlockHash, frozenset[AgentName]]:
        """Return the users of each block: the names of at most two agents that need the block."""

    def remove(self, scope: Scope, agent_id: str) -> bool:
        """Remove the agent's manifest. The agent's blocks stay until eviction. Returns False if the
        manifest is missing."""

    def pinned(self, tenant: bytes) -> Pinned:
        """Return how much a tenant has pinned in the most durable tier, and the tenant's limit."""


class StorePort(CacheStorePort, Protocol):
    """A store of blocks and of agents' manifests."""

    @property
    def agents(self) -> AgentIndexPort:
        """The index of the agents' manifests. It closes with the store."""


class BlockObserver(Protocol):
    """Receives the changes of a tier's whole blocks, in order. The tier calls a method from any
    thread, under its locks: the method must return at once and must not call a store. The method
    returns False if it could not record the change."""

    def stored(self, header: BlockHeader, tier: Tier) -> bool:
        """Record that requests can find the block. The same block may be recorded again."""

    def removed(self, name: BlockHash, tier: Tier) -> bool:
        """Record that requests cannot find the block any more."""

    def listed_anew(self) -> None:
        """Record that a tier may have changed in any way. The observer then lists it again."""


class ListedTier(Protocol):
    """A tier that can list the hash chains that it stores."""

    def roots(self, namespace: bytes) -> frozenset[BlockHash]:
        """Return the parent hashes of the first blocks of all chains in `namespace`."""

    def children(self, parent: BlockHash, part: Part) -> Sequence[BlockHeader]: ...

    def find(self, keys: Sequence[BlockKey]) -> Mapping[BlockKey, Found]: ...


class EventsPort(BlockObserver, Protocol):
    """Publishes changes of the blocks in this machine's tiers. Sends nothing before `begin`."""

    def begin(self, namespace: bytes, tiers: Mapping[Tier, ListedTier]) -> None:
        """Publish the blocks of `tiers` in `namespace`, and every later change of them."""

    def close(self) -> None:
        """Try for a moment to send pending changes, then free the addresses."""


OpensEvents: TypeAlias = Callable[[str, str], EventsPort]
"""Called with an address and a topic of a publisher. Raises InvalidRequestError for a malformed
address, and OperatorError for an unusable one."""


class SharedStorePort(Protocol):
    """Blocks, turns and responses of a fleet under one URL. Opening the store sends no request."""

    def blocks(self) -> StorePort:
        """Return the tier of blocks and agents, which is also a `LookUpPort`. A budget limits the
        size of the tier."""

    def turns(self) -> SharedTurnsPort:
        """Return the store of past turns."""

    def responses(self, own: DiskResponsesPort) -> DiskResponsesPort:
        """Return a store of responses. It asks the fleet for those that the store `own` lacks."""

    def try_out(self) -> tuple[float, bool]:
        """Write, read, list and delete an object. Returns the seconds that this took, and True if
        the bucket keeps old versions of objects. Raises StoreError."""

    def last_pass(self) -> tuple[str, Mapping[str, object]] | None:
        """Return a report on the last eviction, or None. The report is a text and fields. Raises
        StoreError."""


OpensShared: TypeAlias = Callable[[str, bytes, int | None], SharedStorePort]
"""Called with a URL, the fleet's secret, and a limit in bytes or None. Raises InvalidRequestError
for a malformed URL, and OperatorError for missing packages."""


@runtime_checkable
class LookUpPort(Protocol):
    """A tier that is too slow for the engine's thread. Another thread looks up blocks in advance.
    Failures raise nothing."""

    def look_up_agent(self, scope: Scope, agent_id: str) -> None:
        """Fetch the newest manifest of an agent."""

    def look_up(
        self, scope: Scope, links: Sequence[BlockLink], layout: BlockLayout, start: int = 0
    ) -> None:
        """Find the stored blocks of the chain `links`, and everything else needed to resume. Later
        calls answer from memory. Other tiers have the first `start` blocks."""
