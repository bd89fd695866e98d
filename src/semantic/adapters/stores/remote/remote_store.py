"""The remote tier: blocks and manifests as sealed objects that all replicas of a fleet share.

Implements `CacheStorePort` and `LookUpPort`. Only the methods of `LookUpPort`, writes and reads ask
the object store; all others answer from a catalog of what this process has put, read or looked up.
Whatever fails, is late or cannot be verified is a miss. A janitor, here or in another process,
evicts objects: it reads which were used, and lets every process know which are gone.

    NAMESPACE/TENANT/HASH.PART             a body
    NAMESPACE/TENANT/after/PARENT/HASH.PART  the header of a body that no full block names: of a
                                           tail or a checkpoint, found by the block before it
    NAMESPACE/TENANT/agents/KEY/GENERATION  a manifest; the one with the highest generation counts

All names are digests, TENANT as in `vault`. Objects are created, never changed, so that of two
replicas that save one agent at once each gets a generation of its own. Knows no other tier.
"""

from __future__ import annotations

import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, TypeVar

from semantic.adapters.stores.disk.block_file import (
    HEADER_BYTES,
    MAX_BODY_BYTES,
    decode_header,
    encode_header,
    layout_stamp,
)
from semantic.adapters.stores.disk.entries import (
    DamagedError,
    MismatchError,
    NewerFormatError,
    agent_key,
    block_entry,
    manifest_entry,
    parse_block,
    parse_manifest,
)
from semantic.adapters.stores.disk.manifest_file import (
    FiledManifest,
    decode_manifest,
    encode_manifest,
)
from semantic.adapters.stores.memory import MemoryStore, data_of
from semantic.adapters.stores.remote.deletions import Deletions
from semantic.adapters.stores.remote.janitor import BackgroundJanitor
from semantic.adapters.stores.remote.objects import Listed, Objects, UnavailableError
from semantic.adapters.stores.remote.sealing import (
    chunks,
    contents_bytes,
    seal,
    sealed_bytes,
    unsealed,
)
from semantic.adapters.stores.remote.uses import LOG_SECONDS, Evictions, UseLog, name_of
from semantic.adapters.stores.remote.vault import Tenant, Vault
from semantic.application.cache.checkpoint_plan import MOST_TOKENS
from semantic.application.cache.prefix_lookup import window_links
from semantic.domain.block_hash import BlockHash, BlockKey, BlockLink, Part, Scope, pack_tokens
from semantic.domain.digest import digest
from semantic.domain.stored import (
    COUNTERS,
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
from semantic.domain.value_objects import BLOCK_TOKENS

if TYPE_CHECKING:
    from typing_extensions import Buffer

T = TypeVar("T")
R = TypeVar("R")

_SIZE = struct.Struct("<Q")
"""After the header in a tail's object: the bytes of the body."""
CATALOG_BYTES = 128 << 20
"""Memory for what is known of the object store: some ten thousand blocks."""
_THREADS = 8
"""Bodies or parts of them that are read, or objects that are looked up, at a time."""
_MOST_LISTED = 1000
"""Tails and checkpoints after one block whose names are looked at: a page of a listing."""
_MOST_UNLIKE = 8
"""Tails after one block that are looked at although the prompt does not begin with them."""
_BLOCKS_BACK = 16
"""Blocks before the end of a stored chain after each of which a checkpoint is looked for; behind
them where every prompt has some."""
_MOST_BACK = 64
"""Places at which a checkpoint is looked for further back."""
_GENERATIONS = 4
"""Generations of a manifest that are tried while other replicas save the same agent."""


class KnownBody:
    """A body in the object store, of which this process has the size only."""

    __slots__ = ("_n_bytes",)

    def __init__(self, n_bytes: int) -> None:
        self._n_bytes = n_bytes

    def __len__(self) -> int:
        return self._n_bytes

    def wait(self) -> memoryview:
        """See `DeferredBody.wait`: raises OSError, it is read by its header."""
        raise OSError("the body is in the object store")


class RemoteStore:
    """Blocks and manifests of a fleet in one object store. Thread-safe.

    Methods without a docstring: see `CacheStorePort`. None raises for a failing object store. Put a
    write-behind queue in front: `put` and `save` upload.
    """

    def __init__(
        self,
        objects: Objects,
        secret: bytes,
        *,
        catalog_bytes: int = CATALOG_BYTES,
        janitor: BackgroundJanitor | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`secret` is the fleet's, 32 bytes: replicas with another one share nothing. `janitor`
        works for this process, which closes it."""
        self._objects = objects
        self._vault = Vault(objects, secret)
        self._catalog = MemoryStore(catalog_bytes, secret=secret, counts_bodies=False)
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="remote")
        # Of their own: a body that is read in `_pool` waits for its parts.
        self._parts = ThreadPoolExecutor(_THREADS, thread_name_prefix="remote")
        self._deletions = Deletions()
        self._counts: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))
        self._lock = threading.Lock()
        self._janitor = janitor
        self._clock = clock
        self._uses = UseLog(objects, secret, clock=clock)
        self._log_timer: threading.Timer | None = None
        self._evictions = Evictions(objects, secret)
        self._hearing = threading.Lock()
        self._hears_next: float | None = None

    @property
    def secret(self) -> bytes:
        return self._catalog.secret

    @property
    def holds_back(self) -> bool:
        """See `CacheStorePort.holds_back`. Never: no drive wears out."""
        return False

    # What asks the object store before a request is queued

    def look_up_agent(self, scope: Scope, agent_id: str) -> None:
        """See `LookUpPort.look_up_agent`."""
        if self._deletions.is_waiting((scope, agent_id)):
            return
        with self._misses():
            self._hear_of_evictions()
            folder = self._agent_folder(scope, agent_id)
            newest = self._newest(folder)
            known = self._catalog.manifest(scope, agent_id)
            if newest is None:
                self._catalog.remove(scope, agent_id)
            elif known is None or known.generation != _generation(newest):
                found = self._manifest_in(scope, agent_id, newest)
                if found is not None:
                    self._catalog.remember(found)

    def look_up(
        self, scope: Scope, links: Sequence[BlockLink], layout: BlockLayout, start: int = 0
    ) -> None:
        """See `LookUpPort.look_up`. Chains are evicted from their ends, so a binary search finds
        how much of one is stored."""
        with self._misses():
            self._hear_of_evictions()
            found = _Chain(scope, self._vault.tenant(scope.tenant), links, layout)
            n_stored = self._search(found, start)
            tails: list[BlockHeader] = []
            for places in _places(n_stored):
                tails += self._each_tail(found, places)
                if not layout.needs_checkpoint or any(map(found.resumes_at, tails)):
                    break
            self._look_for_windows(found, tails)

    # Blocks

    def put(self, block: StoredBlock) -> bool:
        self._record_uses([block.header])  # before: what it follows is not to be evicted
        with self._deletions.writing(block.header.key):
            return self._put(block)

    def drop(self, keys: Sequence[BlockKey]) -> None:
        """See `CacheStorePort.drop`. Asks nothing: the objects are deleted later."""
        for key in dict.fromkeys(keys):
            self._deletions.begin(key, partial(self._delete_block, key, self._catalog.header(key)))
        self._catalog.drop(keys)

    def find(self, keys: Sequence[BlockKey]) -> Mapping[BlockKey, Found]:
        found = self._catalog.find(keys)
        return {key: replace(one, tier=Tier.REMOTE) for key, one in found.items()}

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
        """See `CacheStorePort.resident`. Always empty."""
        return {}

    def prefetch(self, header: BlockHeader) -> bool:  # noqa: ARG002
        """See `CacheStorePort.prefetch`. Always False."""
        return False

    def read_into(self, reads: Sequence[BlockRead]) -> Sequence[bool]:
        ahead = max(1, _THREADS // max(1, len(reads)))
        return self._each(partial(self._read_into, ahead), reads)

    def read(self, header: BlockHeader) -> bytes | None:
        return self._verified(header, lambda: self._body(header))

    def touch(self, keys: Sequence[BlockKey]) -> None:
        self._catalog.touch(keys)
        headers = [self._catalog.header(key) for key in keys]
        self._record_uses([one for one in headers if one is not None])

    # Agents

    def save(self, manifest: Manifest) -> bool:
        with (
            self._deletions.writing((manifest.scope, manifest.agent_id)),
            self._misses("write_errors"),
        ):
            self._hear_of_evictions()  # all that a process asks for may be on its own disk
            saved = self._save(manifest)
            self._record_manifest(manifest)
            return saved
        return False

    def manifest(self, scope: Scope, agent_id: str) -> Manifest | None:
        return self._catalog.manifest(scope, agent_id)

    def manifests(self) -> Sequence[Manifest]:
        return self._catalog.manifests()

    def scopes(self) -> Sequence[Scope]:
        return self._catalog.scopes()

    def page(self, scope: Scope, limit: int, after: Place | None = None) -> Sequence[Manifest]:
        return self._catalog.page(scope, limit, after)

    def child_agents(self, scope: Scope, parent: str) -> Sequence[str]:
        return self._catalog.child_agents(scope, parent)

    def users(self, hashes: Sequence[BlockHash]) -> Mapping[BlockHash, frozenset[AgentName]]:
        return self._catalog.users(hashes)

    def remove(self, scope: Scope, agent_id: str) -> bool:
        """See `CacheStorePort.remove`. Asks nothing: False for an agent that was not looked up,
        and the manifest is deleted later."""
        was_known = self._catalog.remove(scope, agent_id)
        delete = partial(self._delete_agent, scope, agent_id)
        self._deletions.begin((scope, agent_id), delete)
        return was_known

    def pinned(self, tenant: bytes) -> Pinned:  # noqa: ARG002
        """See `CacheStorePort.pinned`: nothing, this tier has no quota."""
        return Pinned(0, None)

    # Life

    def stats(self) -> Sequence[StoreStats]:
        """See `CacheStorePort.stats`. Numbers and bytes are those of the catalog; "unavailable"
        counts calls that failed, and "breaks" how often the circuit breaker was opened; those of
        the janitor, if it is here, count what it has evicted for the fleet."""
        [known] = self._catalog.stats()
        with self._lock:
            counts = {**self._counts, "breaks": self._objects.breaks}
        counts["evicted"] = 0  # what is forgotten here is still in the object store
        counts |= {} if self._janitor is None else self._janitor.counts()
        return [replace(known, tier=Tier.REMOTE, counts=counts)]

    def flush(self) -> None:
        """See `CacheStorePort.flush`: every upload has ended when its call returns."""
        self._deletions.flush()
        self._write_uses()

    def close(self) -> None:
        if self._janitor is not None:
            self._janitor.close()
        self._write_uses()
        self._deletions.close()
        self._pool.shutdown()
        self._parts.shutdown()
        self._catalog.close()

    # Reading

    def _read_into(self, ahead: int, read: BlockRead) -> bool:
        segments = read.segments

        def fill() -> bool:
            _scatter(self._chunks(read.header, sum(map(len, segments)), ahead), segments)
            return True

        return self._verified(read.header, fill) is not None

    def _body(self, header: BlockHeader) -> bytes:
        [found] = self._catalog.find([header.key]).values() or [None]
        n_bytes = None if found is None else found.n_bytes
        if n_bytes is None:
            sealed = self._objects.size(self._body_path(header))
            if sealed is None:
                raise FileNotFoundError
            n_bytes = contents_bytes(sealed)
        if n_bytes is None:
            raise DamagedError("truncated")
        return b"".join(map(bytes, self._chunks(header, n_bytes, _THREADS)))

    def _chunks(self, header: BlockHeader, n_bytes: int, ahead: int) -> Iterator[memoryview]:
        key = self._vault.tenant(header.link.scope.tenant).key
        read = partial(self._read_parts, self._body_path(header), ahead)
        return chunks(key, _identity(header), n_bytes, read)

    def _read_parts(
        self, path: str, ahead: int, ranges: Iterable[tuple[int, int]]
    ) -> Iterator[Buffer]:
        """Parts of an object in order, of which `ahead` are read at a time."""
        reading: deque[Future[Buffer]] = deque()
        for start, stop in ranges:
            if ahead == 1:
                yield self._objects.read(path, start, stop)
                continue
            reading.append(self._parts.submit(self._objects.read, path, start, stop))
            if len(reading) == ahead:
                yield reading.popleft().result()
        while reading:
            yield reading.popleft().result()

    def _verified(self, header: BlockHeader, read: Callable[[], T]) -> T | None:
        """What `read` returns of a verified body; None when it fails, with the reason counted."""
        if self._deletions.is_waiting(header.key):
            self._count("misses")
            return None
        try:
            found = read()
        except FileNotFoundError:
            self._catalog.drop([header.key])  # evicted
            if _has_tail(header):
                with self._misses("write_errors"):
                    self._objects.delete(self._tail_path(header))
        except DamagedError as damage:
            self._discard(header, damage.kind)
        except NewerFormatError:
            self._count("newer format")
        except MismatchError as error:
            # With the name of a header that is in itself sound, the object is at fault.
            link = header.link
            if str(error) == "header" and link.hash == link.scope.hash_of(link.parent, link.tokens):
                self._discard(header, "identity")
            else:
                self._count("mismatches", str(error))
        except UnavailableError:
            self._count("unavailable")
        else:
            self._count("hits")
            return found
        self._count("misses")
        return None

    def _discard(self, header: BlockHeader, damage: str) -> None:
        """Delete a damaged object: what is not there can be written again."""
        self._count("damaged", f"damaged: {damage}")
        with self._misses("write_errors"):
            self._delete(header)
        self._catalog.drop([header.key])

    # Looking up

    def _search(self, chain: _Chain, start: int) -> int:
        """How many blocks of a chain have their FULL bodies stored; the first `start` are not asked
        for."""
        wanted = [link.key(Part.FULL) for link in chain.links if link.is_full]
        known = self._catalog.find(wanted)
        low = begun = start + sum(1 for _ in takewhile(known.__contains__, wanted[start:]))
        high, middle, n_bytes = len(wanted), low + 1, 0  # first the next: mostly it is not there
        while low < high:
            found = self._body_bytes(chain.path(wanted[middle - 1]))
            low, high = (low, middle - 1) if found is None else (middle, high)
            n_bytes = n_bytes if found is None else found
            middle = (low + high + 1) // 2
        for link in chain.links[begun:low]:
            self._know(BlockHeader(link, Part.FULL, chain.layout.name), n_bytes)
        return low

    def _each_tail(self, chain: _Chain, places: Sequence[int]) -> list[BlockHeader]:
        """What follows the blocks of `chain` at `places` and no full block names: it is known from
        now on."""
        listings = self._each(partial(self._listed_tails, chain), places)
        listed = [one for found in listings for one in found]
        return [one for one in self._each(partial(self._tail, chain), listed) if one is not None]

    def _listed_tails(self, chain: _Chain, place: int) -> list[Listed]:
        """Those that the prompt begins with, and some others, the newest first."""
        listed = self._objects.listed(chain.after(chain.links[place].hash), _MOST_LISTED)
        if len(listed) <= _MOST_UNLIKE:
            return listed
        names = chain.names_after(place)
        alike = [one for one in listed if _name(one).split(".")[0] in names]
        others = (one for one in listed if one not in alike and _name(one).endswith(Part.FULL))
        newest = sorted(others, key=lambda one: one.written, reverse=True)
        return alike + newest[:_MOST_UNLIKE]

    def _tail(self, chain: _Chain, listed: Listed) -> BlockHeader | None:
        """The header in an object below `after`, if it is sound and of the chain's layout."""
        key = parse_block(_name(listed))
        if key is None:
            return None
        known = self._catalog.header(key)
        if known is not None:
            return known
        try:
            data = unsealed(chain.tenant.key, _tail_identity(key), self._objects.get(listed.path))
            (n_bytes,) = _SIZE.unpack(data[HEADER_BYTES:])
            header = decode_header(data[:HEADER_BYTES], key, HEADER_BYTES + n_bytes).header
        except FileNotFoundError:
            return None
        except (DamagedError, MismatchError, NewerFormatError, struct.error) as error:
            self._count("damaged", f"damaged: {error}")
            self._objects.delete(listed.path)
            return None
        own = replace(header, link=replace(header.link, scope=chain.scope))
        if header.link.scope != chain.scope or header.layout != layout_stamp(chain.layout.name):
            return None
        own = replace(own, layout=chain.layout.name)
        self._know(own, n_bytes)
        return own

    def _look_for_windows(self, chain: _Chain, tails: Sequence[BlockHeader]) -> None:
        """Look up the WINDOW bodies that the checkpoints among `tails` need."""
        links: dict[BlockHash, BlockLink] = {}
        for one in tails:
            if one.part is Part.CHECKPOINT:
                before = chain.links[: one.link.start // BLOCK_TOKENS]
                needed = window_links(chain.layout, [*before, one.link])
                links.update((link.hash, link) for link in needed)
        headers = [BlockHeader(one, Part.WINDOW, chain.layout.name) for one in links.values()]
        unknown = [one for one in headers if not self._catalog.find([one.key])]
        sizes = self._each(lambda one: self._body_bytes(chain.path(one.key)), unknown)
        for header, n_bytes in zip(unknown, sizes, strict=True):
            if n_bytes is not None:
                self._know(header, n_bytes)

    def _newest(self, folder: str) -> Listed | None:
        listed = self._objects.listed(folder, _MOST_LISTED)
        return max(listed, key=_generation, default=None)

    def _manifest_in(self, scope: Scope, agent_id: str, listed: Listed) -> Manifest | None:
        key, generation = agent_key(scope, agent_id), _generation(listed)
        tenant = self._vault.tenant(scope.tenant)
        try:
            data = unsealed(
                tenant.key, _manifest_identity(key, generation), self._objects.get(listed.path)
            )
            return decode_manifest(data, key, generation).manifest
        except FileNotFoundError:
            return None  # replaced at this moment
        except (DamagedError, MismatchError, NewerFormatError) as error:
            self._count("damaged", f"damaged: {error}")
            return None

    # Writing

    def _put(self, block: StoredBlock) -> bool:
        key = block.header.key
        if self._catalog.find([key]):
            return True
        data = data_of(block)
        if data is None or len(data) > MAX_BODY_BYTES:
            self._count("dropped")
            return False
        with self._misses("write_errors"):
            self._upload(block, data)
            if self._deletions.is_waiting(key):  # dropped meanwhile
                self._delete(block.header)
            else:
                self._know(block.header, len(data))
            return True
        return False

    def _upload(self, block: StoredBlock, data: bytes | memoryview) -> None:
        """Write a body unless it is there, then what it is found by."""
        header = block.header
        tenant, path = self._vault.tenant(header.link.scope.tenant), self._body_path(header)
        there = self._objects.size(path)
        if there is None:
            self._objects.create(path, seal(tenant.key, _identity(header), data))
            self._count("written")
        elif there != sealed_bytes(len(data)):
            self._objects.replace(path, seal(tenant.key, _identity(header), data))
            self._count("written", "replaced")
        if _has_tail(header):
            contents = encode_header(block) + _SIZE.pack(len(data))
            sealed = seal(tenant.key, _tail_identity(header.key), contents)
            self._objects.create(self._tail_path(header), sealed)

    def _save(self, manifest: Manifest) -> bool:
        """Write the next generation; that of another replica, if it was first, goes before it."""
        folder = self._agent_folder(manifest.scope, manifest.agent_id)
        key = agent_key(manifest.scope, manifest.agent_id)
        tenant = self._vault.tenant(manifest.scope.tenant)
        newest = self._newest(folder)
        known = self._catalog.manifest(manifest.scope, manifest.agent_id)
        before = 0 if known is None else known.generation  # the newest may be evicted
        first = 1 + max(before, 0 if newest is None else _generation(newest))
        for generation in range(first, first + _GENERATIONS):
            own = replace(manifest, generation=generation)
            data = encode_manifest(FiledManifest(own, 0))
            sealed = seal(tenant.key, _manifest_identity(key, generation), data)
            if self._objects.create(f"{folder}/{manifest_entry(key, generation).name}", sealed):
                if not self._deletions.is_waiting((manifest.scope, manifest.agent_id)):
                    self._catalog.remember(own)
                if newest is not None:
                    self._objects.delete(newest.path)
                return True
        self._count("dropped manifests")
        return False

    def _delete_agent(self, scope: Scope, agent_id: str) -> None:
        self._catalog.remove(scope, agent_id)  # it may have been saved meanwhile
        with self._misses("write_errors"):
            for one in self._objects.listed(self._agent_folder(scope, agent_id), _MOST_LISTED):
                self._objects.delete(one.path)

    def _delete_block(self, key: BlockKey, header: BlockHeader | None) -> None:
        self._catalog.drop([key])  # it may have been put meanwhile
        with self._misses("write_errors"):
            if header is not None:
                self._delete(header)

    def _delete(self, header: BlockHeader) -> None:
        if _has_tail(header):
            self._objects.delete(self._tail_path(header))
        self._objects.delete(self._body_path(header))

    # Uses and evictions

    def _record_uses(self, headers: Iterable[BlockHeader]) -> None:
        """Let the janitor know that bodies are used, and all that they follow: so what follows a
        block is never used later than that."""
        with self._misses():
            for header in headers:
                one: BlockHeader | None = header
                while one is not None and (name := name_of(self._body_path(one))) not in self._uses:
                    self._uses.add(name, 2 * one.link.start + (one.part is not Part.FULL))
                    one = self._catalog.header(BlockKey(one.link.parent, Part.FULL))
            self._write_uses_in_time()

    def _record_manifest(self, manifest: Manifest) -> None:
        """Record uses of all that an agent needs; it is itself evicted before any of that."""
        links = manifest.scope.chain(manifest.token_ids)
        known = [self._catalog.header(link.key(part)) for link in links for part in Part]
        saved = self._catalog.manifest(manifest.scope, manifest.agent_id)
        if saved is not None:
            key = agent_key(saved.scope, saved.agent_id)
            folder = self._agent_folder(saved.scope, saved.agent_id)
            path = f"{folder}/{manifest_entry(key, saved.generation).name}"
            self._uses.add(name_of(path), 2 * len(saved.token_ids) + 2)
        self._record_uses([one for one in known if one is not None])

    def _write_uses_in_time(self) -> None:
        """Write the log of uses if that is due, else when it is."""
        left = self._uses.seconds_left
        if left == 0:
            self._uses.write()
        elif left is not None:
            with self._lock:
                if self._log_timer is None:
                    self._log_timer = threading.Timer(left, self._write_uses)
                    self._log_timer.name, self._log_timer.daemon = "remote", True
                    self._log_timer.start()

    def _write_uses(self) -> None:
        with self._lock:
            timer, self._log_timer = self._log_timer, None
        if timer is not None:
            timer.cancel()
        with self._misses("write_errors"):
            self._uses.write()

    def _hear_of_evictions(self) -> None:
        """Forget, from time to time, what the janitor has deleted: it is to be written again."""
        with self._hearing:
            if self._hears_next is not None and self._clock() < self._hears_next:
                return
            evicted = self._evictions.new()
            self._hears_next = self._clock() + LOG_SECONDS
        if evicted is None or evicted:
            headers = self._catalog.headers()
            gone = [
                one.key
                for one in headers
                if evicted is None or name_of(self._body_path(one)) in evicted
            ]
            self._catalog.drop(gone)

    # Inside

    def _know(self, header: BlockHeader, n_bytes: int) -> None:
        if not self._deletions.is_waiting(header.key):
            self._catalog.put(StoredBlock(header, KnownBody(n_bytes)))

    def _body_bytes(self, path: str) -> int | None:
        """Bytes of the body in an object; None if there is none, or one of an impossible size."""
        size = self._objects.size(path)
        return None if size is None else contents_bytes(size)

    def _body_path(self, header: BlockHeader) -> str:
        scope = header.link.scope
        return _path(scope, self._vault.tenant(scope.tenant), block_entry(header.key).name)

    def _tail_path(self, header: BlockHeader) -> str:
        scope = header.link.scope
        name = f"after/{header.link.parent.hex()}/{block_entry(header.key).name}"
        return _path(scope, self._vault.tenant(scope.tenant), name)

    def _agent_folder(self, scope: Scope, agent_id: str) -> str:
        name = f"agents/{agent_key(scope, agent_id).hex()}"
        return _path(scope, self._vault.tenant(scope.tenant), name)

    def _each(self, action: Callable[[T], R], items: Sequence[T]) -> list[R]:
        if len(items) <= 1:
            return [action(item) for item in items]
        return list(self._pool.map(action, items))

    @contextmanager
    def _misses(self, count: str = "unavailable") -> Iterator[None]:
        """Ends what is inside when the object store fails, which is counted."""
        try:
            yield
        except (UnavailableError, FileNotFoundError):
            self._count(count)

    def _count(self, *names: str) -> None:
        with self._lock:
            self._counts.update(names)


@dataclass(frozen=True, slots=True)
class _Chain:
    """The blocks of a prompt, and where its tenant's objects are."""

    scope: Scope
    tenant: Tenant
    links: Sequence[BlockLink]
    layout: BlockLayout

    def path(self, key: BlockKey) -> str:
        return _path(self.scope, self.tenant, block_entry(key).name)

    def after(self, parent: BlockHash) -> str:
        return _path(self.scope, self.tenant, f"after/{parent.hex()}")

    def names_after(self, place: int) -> frozenset[str]:
        """The hashes of all beginnings of what follows the block at `place` in the prompt."""
        parent, tokens = self.links[place].hash, self._tokens_after(place)
        beginnings = (tokens[: n + 1] for n in range(len(tokens)))
        return frozenset(self.scope.hash_of(parent, one).hex() for one in beginnings)

    def resumes_at(self, header: BlockHeader) -> bool:
        """Whether it is a checkpoint whose tokens the prompt has too."""
        own = header.link.tokens
        there = self._tokens_after(header.link.start // BLOCK_TOKENS - 1)
        return header.part is Part.CHECKPOINT and there[: len(own)] == own

    def _tokens_after(self, place: int) -> tuple[int, ...]:
        return self.links[place + 1].tokens if place + 1 < len(self.links) else ()


def _places(n_stored: int) -> Iterator[Sequence[int]]:
    """Which blocks of a stored chain have what follows them looked at: the last; some before it;
    and further back, some at a time, those after which every prompt has a checkpoint."""
    back = range(n_stored - 1, -1, -1)
    yield back[:1]
    yield back[1 : _BLOCKS_BACK + 1]
    # A checkpoint is in the block that ends there, which is found by the one before.
    grid = MOST_TOKENS // BLOCK_TOKENS
    further = [at for at in back[_BLOCKS_BACK + 1 :] if (at + 2) % grid == 0][:_MOST_BACK]
    for first in range(0, len(further), _THREADS):
        yield further[first : first + _THREADS]


def _path(scope: Scope, tenant: Tenant, name: str) -> str:
    return f"{scope.namespace.hex()}/{tenant.folder}/{name}"


def _name(listed: Listed) -> str:
    return listed.path.rsplit("/", 1)[-1]


def _generation(listed: Listed) -> int:
    """The generation of a manifest's object; 0 for any other object."""
    parsed = parse_manifest(_name(listed))
    return 0 if parsed is None else parsed[1]


def _has_tail(header: BlockHeader) -> bool:
    """Whether a body cannot be named by a chain of full blocks."""
    return header.part is Part.CHECKPOINT or (header.part is Part.FULL and not header.link.is_full)


def _identity(header: BlockHeader) -> bytes:
    """What a body is bound to: every field of its header."""
    link = header.link
    return digest(
        "remote-body-v1",
        link.scope.namespace,
        link.scope.tenant,
        link.hash,
        link.parent,
        link.start.to_bytes(8, "little"),
        pack_tokens(link.tokens),
        header.part.encode(),
        layout_stamp(header.layout).encode(),
    )


def _tail_identity(key: BlockKey) -> bytes:
    return digest("remote-tail-v1", key.hash, key.part.encode())


def _manifest_identity(agent: bytes, generation: int) -> bytes:
    return digest("remote-manifest-v1", agent, generation.to_bytes(8, "little"))


def _scatter(pieces: Iterable[memoryview], segments: Sequence[memoryview]) -> None:
    """Copy consecutive pieces into consecutive segments of the same bytes in total."""
    waiting = iter(segments)
    room = memoryview(b"")
    for piece in pieces:
        rest = piece
        while rest:
            room = room or next(waiting)
            n = min(len(rest), len(room))
            room[:n] = rest[:n]
            room, rest = room[n:], rest[n:]
