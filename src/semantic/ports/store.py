"""StorePort: a store of blocks and of agents' manifests, in memory, on disk or both.

A store is a cache, never a source of truth: whatever it dropped or cannot verify is a miss.
Beside it `TurnsPort` and `ResponsesPort`: the turns and responses of conversations, found only by
the tenant that stored them; a history whose turn is missing is rendered anew. Thread-safe.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Protocol, TypeAlias, runtime_checkable

from semantic.domain.block_hash import BlockHash, BlockKey, BlockLink, Part, Scope
from semantic.domain.history import Point, Turn
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
    """Responses by tenant and id, within a budget of bytes; the oldest are evicted, those of the
    tenant that has most first.

    Thread-safe; calls may block and must not be made on an event loop. Each raises StoreError if it
    cannot be done now. Nothing may be called after `close`.
    """

    def get(self, tenant: str, response_id: str) -> StoredResponse | None:
        """The response as it was put, or None: unknown, another tenant's, deleted or damaged."""
        ...

    def put(self, tenant: str, response: StoredResponse) -> None:
        """Store `response`, replacing one with its id. One larger than the budget is dropped."""
        ...

    def delete(self, tenant: str, response_id: str) -> bool:
        """Delete a response; returns whether there was one."""
        ...

    def close(self) -> None:
        """Release files. Idempotent."""
        ...


class DiskResponsesPort(ResponsesPort, Protocol):
    """Responses on disk, and in memory where that cannot be used."""

    def disable_disk(self) -> None:
        """Use memory only from now on."""
        ...


MOST_WAIT = 2.0
"""Seconds that the end of an answer waits at most for what another machine needs to continue it."""


class TurnsPort(Protocol):
    """Turns by their points. Thread-safe."""

    def get(self, point: Point) -> Turn | None:
        """The turn that ends at `point`; None if it is unknown or damaged."""
        ...

    def put(self, turn: Turn) -> Future[None] | None:
        """Store `turn`, replacing an earlier one at its point; one without tokens replaces none.

        Never raises: a turn that cannot be stored is dropped. The future ends when other machines
        of a fleet find the turn, or never will; the end of an answer waits for it, `MOST_WAIT` at
        most. None if there is no fleet, or if its store failed last or is late.
        """
        ...

    def look_up(self, owner: bytes, points: Sequence[Point]) -> None:
        """Let `get` know what a fleet has of the turns at `points`, of one conversation in order,
        and of one owner. May wait for a network, one deadline at most; nothing without a fleet."""
        ...

    def close(self) -> None:
        """Flush and close."""
        ...


class SharedTurnsPort(Protocol):
    """Turns that several machines share. Thread-safe; raises nothing."""

    @property
    def has_failed(self) -> bool:
        """True if the last call failed or a `put` is late. Late is sooner than `MOST_WAIT`, so that
        one answer waits for a store that hangs, and the next does not. Does not wait."""
        ...

    def put(self, turn: Turn) -> None:
        """Store `turn`, and return when other machines find it; it is dropped if that fails. One
        without tokens replaces none. May wait."""
        ...

    def look_up(self, owner: bytes, points: Sequence[Point]) -> Sequence[Turn]:
        """Those of the turns at `points` that are there; none if the newest are not. May wait."""
        ...

    def close(self) -> None:
        """End its threads."""
        ...


class CacheStorePort(Protocol):
    """Stores immutable block bodies by content hash.

    No call raises for a failure of the disk: it is counted in `stats` and is a miss. A tier that
    implements `LookUpPort` besides has no quota of its own, and answers all that does not read or
    write from what it has looked up.
    """

    @property
    def secret(self) -> bytes:
        """32 random bytes from which tenants' tags are derived; constant over the store's life."""
        ...

    @property
    def holds_back(self) -> bool:
        """Whether interim blocks are not written to disk now, as the day's limit is reached, or not
        to other machines, as uploads fail or are behind."""
        ...

    def put(self, block: StoredBlock) -> bool:
        """Store `block`; does nothing if it is stored already.

        False if it is not stored: the quota is taken by pins, backpressure, a failing disk. The
        quota holds at any time; least recently used blocks are evicted for it, of a chain the tail
        first. They are those of the tenant that has most, as long as that has more than this one:
        of several none loses an equal part of the quota to others, and none keeps more by pins.
        `block` is shared, never changed. While `holds_back`, an interim one stays in memory alone.
        """
        ...

    def drop(self, keys: Sequence[BlockKey]) -> None:
        """Delete blocks, so that none of `keys` is found any more; what follows them stays.

        Also those that are used or pinned: their content is not to be used again.
        """
        ...

    def find(self, keys: Sequence[BlockKey]) -> Mapping[BlockKey, Found]:
        """The indexed ones of `keys`, without reading them. Does not count as a use."""
        ...

    def lacking(self, keys: Sequence[BlockKey]) -> frozenset[BlockKey]:
        """Which of `keys` to `put`, possibly again, so that they are stored in every tier.

        Empty while puts would be refused.
        """
        ...

    def children(self, parent: BlockHash, part: Part) -> Sequence[BlockHeader]:
        """The headers of all indexed blocks that follow `parent`, without reading them."""
        ...

    def nearest(self, parent: BlockHash, part: Part, like: Sequence[int]) -> Sequence[BlockHeader]:
        """Those of `children` that are worth comparing with the tokens `like`, however many follow.

        All whose tokens `like` begins with, and one that shares most tokens with it, if
        `begins_like` holds.
        """
        ...

    def resident(self, headers: Sequence[BlockHeader]) -> Mapping[BlockKey, bytes | memoryview]:
        """The bodies of those `headers` that are in this process's memory, as they lie there.

        Not copied and never changed; waits for those that are on their way. The others are read.
        """
        ...

    def read_into(self, reads: Sequence[BlockRead]) -> Sequence[bool]:
        """Fill the targets of each read; True for each body that was verified.

        Reads in parallel. False leaves the targets undefined. A damaged body is quarantined.
        """
        ...

    def read(self, header: BlockHeader) -> bytes | None:
        """The body, verified as in `read_into`, or None."""
        ...

    def prefetch(self, header: BlockHeader) -> bool:
        """Copy a body that is only on disk to memory, verified, within the quota; whether it is in
        memory then. A hint, which counts as a use: a store without two tiers copies nothing.
        """
        ...

    def touch(self, keys: Sequence[BlockKey]) -> None:
        """Record a use of `keys`, a chain in order; its root is evicted last."""
        ...

    def stats(self) -> Sequence[StoreStats]:
        """One entry per tier."""
        ...

    def flush(self) -> None:
        """Return when everything accepted is as durable as this store can make it."""
        ...

    def close(self) -> None:
        """Flush, and release files and threads. Nothing may be called afterwards."""
        ...


class AgentIndexPort(Protocol):
    """Agents' manifests, by scope and name. Thread-safe; fails as `CacheStorePort`."""

    def save(self, manifest: Manifest) -> bool:
        """Store `manifest` as its agent's newest, after all blocks that were put before it.

        Assigns the generation and records a use of the agent's blocks. False if it is not stored.
        """
        ...

    def manifest(self, scope: Scope, agent_id: str) -> Manifest | None:
        """The agent's newest manifest, or None."""
        ...

    def scopes(self) -> Sequence[Scope]:
        """The scopes that have agents, in any order."""
        ...

    def page(self, scope: Scope, limit: int, after: Place | None = None) -> Sequence[Manifest]:
        """At most `limit` manifests of a scope by `Manifest.place`, newest first.

        Those that come after `after`. Fewer than `limit` only if there are no more.
        """
        ...

    def child_agents(self, scope: Scope, parent: str) -> Sequence[str]:
        """The names of a scope's agents whose manifest has this `parent`, sorted."""
        ...

    def users(self, hashes: Sequence[BlockHash]) -> Mapping[BlockHash, frozenset[AgentName]]:
        """Two at most of the agents whose newest manifest needs each of the blocks."""
        ...

    def remove(self, scope: Scope, agent_id: str) -> bool:
        """Remove the agent's manifest; False if there is none. Its blocks stay until evicted."""
        ...

    def pinned(self, tenant: bytes) -> Pinned:
        """What a tenant with this tag has pinned in the most durable tier, and its part of it."""
        ...


class StorePort(CacheStorePort, Protocol):
    """A store of blocks, and of the agents that need them."""

    @property
    def agents(self) -> AgentIndexPort:
        """Its agents; closed with it."""
        ...


class BlockObserver(Protocol):
    """Learns which whole blocks (`BlockHeader.is_whole_block`) a tier of a store has.

    Called in the order of the changes, under the tier's locks and from any thread: returns at once,
    and calls no store. False if a change could not be taken; it is then forgotten.
    """

    def stored(self, header: BlockHeader, tier: Tier) -> bool:
        """The block can be found from now on; it may have been before."""
        ...

    def removed(self, name: BlockHash, tier: Tier) -> bool:
        """The block can not be found any more."""
        ...

    def listed_anew(self) -> None:
        """What a tier has may have changed in any way."""
        ...


class ListedTier(Protocol):
    """A tier whose chains can be walked."""

    def roots(self, namespace: bytes) -> frozenset[BlockHash]:
        """The parents of the first blocks of all chains in `namespace`."""
        ...

    def children(self, parent: BlockHash, part: Part) -> Sequence[BlockHeader]: ...

    def find(self, keys: Sequence[BlockKey]) -> Mapping[BlockKey, Found]: ...


class EventsPort(BlockObserver, Protocol):
    """Publishes which blocks the tiers of this machine have. Sends nothing before `begin`."""

    def begin(self, namespace: bytes, tiers: Mapping[Tier, ListedTier]) -> None:
        """Publish what `tiers` have in `namespace`, and from now on what changes."""
        ...

    def close(self) -> None:
        """Send what waits, for a moment, and free its addresses."""
        ...


OpensEvents: TypeAlias = Callable[[str, str], EventsPort]
"""Takes an address and a topic. Raises InvalidRequestError for what is no address, and
OperatorError for one that cannot be used or if packages are missing."""


class SharedStorePort(Protocol):
    """What the processes of a fleet share: blocks, turns and responses under one URL.

    Opening it asks it nothing.
    """

    def blocks(self) -> StorePort:
        """The tier of blocks and agents, a `LookUpPort` besides. With a budget it is kept to it."""
        ...

    def turns(self) -> SharedTurnsPort:
        """Past turns."""
        ...

    def responses(self, own: DiskResponsesPort) -> DiskResponsesPort:
        """Responses: those of the fleet behind the ones that `own` has."""
        ...

    def try_out(self) -> tuple[float, bool]:
        """Write, read, list and delete an object: the seconds that it took, and whether old
        versions of what is deleted are kept. Raises StoreError if that fails."""
        ...

    def last_pass(self) -> tuple[str, Mapping[str, object]] | None:
        """What was evicted last, in words and as fields; None before. Raises StoreError."""
        ...


OpensShared: TypeAlias = Callable[[str, bytes, int | None], SharedStorePort]
"""Takes a URL, the fleet's secret, and the bytes that this process keeps it to. Raises
InvalidRequestError for a URL that is none, and OperatorError if packages are missing."""


@runtime_checkable
class LookUpPort(Protocol):
    """A tier that is too slow to be asked between two steps: it is asked before a request is
    queued, from a thread that may wait.

    No call raises for a failure, and one request that is late ends it. A call makes some requests,
    one after the other.
    """

    def look_up_agent(self, scope: Scope, agent_id: str) -> None:
        """Learn the agent's newest manifest."""
        ...

    def look_up(
        self, scope: Scope, links: Sequence[BlockLink], layout: BlockLayout, start: int = 0
    ) -> None:
        """Learn how much is stored of a chain of blocks, the last of which may be partial, what
        follows that, and what is needed to resume there. Other tiers have the first `start`."""
        ...
