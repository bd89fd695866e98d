"""The remote tier: encrypted blocks and manifests that all replicas of a fleet share. A failed,
late or unverified read is a miss."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

from semantic.adapters.stores.disk.block_file import MAX_BODY_BYTES
from semantic.adapters.stores.disk.entries import UnreadableError
from semantic.adapters.stores.memory import data_of
from semantic.domain.block_hash import BlockHash, BlockKey, BlockLink, Part, Scope
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
from semantic_fleet.objects.catalog import CATALOG_BYTES, Catalog, Notices, Tally
from semantic_fleet.objects.janitor import BackgroundJanitor
from semantic_fleet.objects.manifests import Ends, Manifests
from semantic_fleet.objects.names import generation_of, has_tail
from semantic_fleet.objects.objects import Objects
from semantic_fleet.objects.reading import Bodies, LookUp, Reader
from semantic_fleet.objects.sealing import Vault


class Deletions:
    """Deletions of objects in the background. An object's deletion always ends before its next
    write begins. Thread-safe."""

    def __init__(self) -> None:
        self._waiting: dict[Hashable, Callable[[], None]] = {}
        self._busy: set[Hashable] = set()  # objects during a write or a deletion
        self._changed = threading.Condition()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="remote")

    def begin(self, what: Hashable, delete: Callable[[], None]) -> None:
        """Delete the object `what` on another thread. `delete` must not raise."""
        with self._changed:
            self._waiting.setdefault(what, delete)
        self._thread.submit(self._finish, what)

    def is_waiting(self, what: Hashable) -> bool:
        """Return True while a deletion of `what` is pending."""
        with self._changed:
            return what in self._waiting

    @contextmanager
    def writing(self, what: Hashable) -> Iterator[None]:
        """Guard a write of the object `what`. Its pending deletion ends first; later ones wait."""
        with self._alone_with(what):
            self._delete(what)
            yield

    def flush(self) -> None:
        """Wait until all pending deletions have finished."""
        self._thread.submit(lambda: None).result()

    def close(self) -> None:
        """Finish pending deletions and end the thread that deletes."""
        self._thread.shutdown()

    def _finish(self, what: Hashable) -> None:
        with self._alone_with(what):
            self._delete(what)

    def _delete(self, what: Hashable) -> None:
        with self._changed:
            delete = self._waiting.get(what)
        if delete is not None:
            delete()
            with self._changed:
                del self._waiting[what]

    @contextmanager
    def _alone_with(self, what: Hashable) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: what not in self._busy)
            self._busy.add(what)
        try:
            yield
        finally:
            with self._changed:
                self._busy.remove(what)
                self._changed.notify_all()


@dataclass(frozen=True, slots=True)
class RemoteAgents:
    """The fleet's agents that this process saved or looked up."""

    manifests: Manifests
    ends: Ends
    catalog: Catalog
    deletions: Deletions
    notices: Notices
    tally: Tally

    def look_up(self, scope: Scope, agent_id: str) -> None:
        """See `LookUpPort.look_up_agent`."""
        if self.deletions.is_waiting((scope, agent_id)):
            return
        with self.tally.misses():
            self.notices.hear()
            newest = self.manifests.newest(scope, agent_id)
            known = self.catalog.agents.manifest(scope, agent_id)
            if newest is None:
                self.catalog.drop_agent(scope, agent_id)
            elif known is None or known.generation != generation_of(newest):
                try:
                    self.catalog.learn_agent(self.manifests.read(scope, agent_id, newest))
                except FileNotFoundError:
                    return  # another replica replaced the manifest
                except UnreadableError as error:
                    self.tally.count("damaged", f"damaged: {error}")

    def save(self, manifest: Manifest) -> bool:
        agent = manifest.scope, manifest.agent_id
        with self.deletions.writing(agent), self.tally.misses("write_errors"):
            self.notices.hear()  # needed if this process finds everything on its own disk
            known = self.catalog.agents.manifest(*agent)  # the janitor may evict the newest one
            saved = self.manifests.save(manifest, 0 if known is None else known.generation)
            if saved is None:
                self.tally.count("dropped manifests")
                return False
            self._replace(saved, known)
            self.catalog.learn_agent(saved)
            self.notices.record_agent(saved)
            return True
        return False

    def manifest(self, scope: Scope, agent_id: str) -> Manifest | None:
        return self.catalog.agents.manifest(scope, agent_id)

    def scopes(self) -> Sequence[Scope]:
        return self.catalog.agents.scopes()

    def page(self, scope: Scope, limit: int, after: Place | None = None) -> Sequence[Manifest]:
        return self.catalog.agents.page(scope, limit, after)

    def child_agents(self, scope: Scope, parent: str) -> Sequence[str]:
        return self.catalog.agents.child_agents(scope, parent)

    def users(self, hashes: Sequence[BlockHash]) -> Mapping[BlockHash, frozenset[AgentName]]:
        return self.catalog.agents.users(hashes)

    def remove(self, scope: Scope, agent_id: str) -> bool:
        """See `AgentIndexPort.remove`. Returns at once; another thread deletes the manifest.
        Returns False if this process does not know the agent."""
        was_known = self.catalog.drop_agent(scope, agent_id)
        delete = partial(self._delete_agent, scope, agent_id)
        self.deletions.begin((scope, agent_id), delete)
        return was_known

    def pinned(self, tenant: bytes) -> Pinned:  # noqa: ARG002
        """See `AgentIndexPort.pinned`. Returns zero: this tier has no quota."""
        return Pinned(0, None)

    def _replace(self, saved: Manifest, older: Manifest | None) -> None:
        with self.tally.misses("write_errors"):
            n_deleted = self.ends.saved(saved, older)
            self.tally.count(*["superseded"] * n_deleted)

    def _delete_agent(self, scope: Scope, agent_id: str) -> None:
        self.catalog.drop_agent(scope, agent_id)  # the agent may have been saved again meanwhile
        with self.tally.misses("write_errors"):
            self.manifests.delete(scope, agent_id)


class RemoteStore:
    """Blocks and manifests of a fleet in one object store. Thread-safe. No method raises an error
    if the store fails. `put` and `save` return after the upload."""

    def __init__(
        self,
        objects: Objects,
        secret: bytes,
        *,
        catalog_bytes: int = CATALOG_BYTES,
        janitor: BackgroundJanitor | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`secret` is the fleet's secret of 32 bytes. Closing the store also closes `janitor`."""
        self._objects = objects
        self.secret = secret
        self._janitor = janitor
        self._tally = Tally()
        self._deletions = Deletions()
        self._catalog = Catalog(catalog_bytes, secret, self._deletions.is_waiting)
        vault = Vault(objects, secret, clock=clock, renewed=self._catalog.drop_tenant)
        self._bodies = Bodies(objects, vault)
        self._ends = Ends(self._bodies, self._catalog)
        self._look_up = LookUp(objects, self._bodies, self._catalog, self._tally)
        self._notices = Notices(objects, secret, self._catalog, self._tally, clock)
        self.agents = RemoteAgents(
            Manifests(objects, vault),
            self._ends,
            self._catalog,
            self._deletions,
            self._notices,
            self._tally,
        )
        self._reader = Reader(self._bodies, self._catalog, self._notices, self._tally)

    @property
    def holds_back(self) -> bool:
        """See `CacheStorePort.holds_back`. Returns False, because uploads wear out no drive."""
        return False

    # Object store calls before a request is queued

    def look_up_agent(self, scope: Scope, agent_id: str) -> None:
        self.agents.look_up(scope, agent_id)

    def look_up(
        self, scope: Scope, links: Sequence[BlockLink], layout: BlockLayout, start: int = 0
    ) -> None:
        with self._tally.misses():
            self._notices.hear()
            self._look_up.chain(scope, links, layout, start)

    # Blocks

    def put(self, block: StoredBlock) -> bool:
        self._notices.record_new(block.header)  # first, so that the janitor spares its chain
        with self._deletions.writing(block.header.key):
            return self._put(block)

    def drop(self, keys: Sequence[BlockKey]) -> None:
        """See `CacheStorePort.drop`. Returns at once, and a thread deletes the blocks."""
        for key in dict.fromkeys(keys):
            place = self._catalog.place(key)
            self._deletions.begin(key, partial(self._delete_block, key, place))
        self._catalog.drop(keys)

    def find(self, keys: Sequence[BlockKey]) -> Mapping[BlockKey, Found]:
        return self._catalog.find(keys)

    def lacking(self, keys: Sequence[BlockKey]) -> frozenset[BlockKey]:
        return frozenset() if self._objects.is_open else self._catalog.lacking(keys)

    def children(self, parent: BlockHash, part: Part) -> Sequence[BlockHeader]:
        return self._catalog.children(parent, part)

    def nearest(self, parent: BlockHash, part: Part, like: Sequence[int]) -> Sequence[BlockHeader]:
        return self._catalog.nearest(parent, part, like)

    def resident(
        self,
        headers: Sequence[BlockHeader],  # noqa: ARG002
    ) -> Mapping[BlockKey, bytes | memoryview]:
        """See `CacheStorePort.resident`. Returns an empty mapping."""
        return {}

    def prefetch(self, header: BlockHeader) -> bool:  # noqa: ARG002
        """See `CacheStorePort.prefetch`. Does nothing and returns False."""
        return False

    def read_into(self, reads: Sequence[BlockRead]) -> Sequence[bool]:
        return self._reader.read_into(reads)

    def read(self, header: BlockHeader) -> bytes | None:
        return self._reader.read(header)

    def touch(self, keys: Sequence[BlockKey]) -> None:
        self._catalog.touch(keys)
        self._notices.record(keys)

    # Life

    def stats(self) -> Sequence[StoreStats]:
        """See `CacheStorePort.stats`. The count "unavailable" is of failed calls. The count
        "breaks" is of openings of the circuit breaker."""
        counts = {**self._tally.snapshot(), "breaks": self._objects.breaks}
        counts |= {} if self._janitor is None else self._janitor.counts()
        return [replace(self._catalog.stats(), tier=Tier.REMOTE, counts=counts)]

    def flush(self) -> None:
        """See `CacheStorePort.flush`. Finishes deletions and writes the log of uses."""
        self._deletions.flush()
        self._notices.write()

    def close(self) -> None:
        if self._janitor is not None:
            self._janitor.close()
        self._notices.write()
        self._deletions.close()
        self._reader.close()
        self._look_up.close()
        self._bodies.close()
        self._catalog.close()

    def _put(self, block: StoredBlock) -> bool:
        header = block.header
        if self._catalog.find([header.key]):
            return True
        data = data_of(block, header)
        if data is None or len(data) > MAX_BODY_BYTES:
            self._tally.count("dropped")
            return False
        with self._tally.misses("write_errors"):
            done = self._bodies.write(block, data)
            self._tally.count(*done)
            if done == ("written",):
                self._ends.written(header)
            if self._deletions.is_waiting(header.key):  # dropped during the upload
                tail_of = header.link.parent if has_tail(header) else None
                self._bodies.delete(header.link.scope, header.key, tail_of)
            else:
                self._catalog.learn(header, len(data))
            return True
        return False

    def _delete_block(self, key: BlockKey, place: tuple[Scope, BlockHash | None] | None) -> None:
        self._catalog.drop([key])  # the block may have been put again meanwhile
        with self._tally.misses("write_errors"):
            if place is not None:
                self._bodies.delete(place[0], key, place[1])
