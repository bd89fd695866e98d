"""The remote tier: blocks and manifests as sealed objects that all replicas of a fleet share.

Implements `CacheStorePort` and `LookUpPort`. Only the methods of `LookUpPort`, writes and reads ask
the object store; all others answer from a catalog of what this process has put, read or looked up.
Whatever fails, is late or cannot be verified is a miss. No object is evicted here.

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
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from typing import TypeVar

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
from semantic.adapters.stores.remote.objects import Listed, Objects, UnavailableError
from semantic.adapters.stores.remote.sealing import (
    chunks,
    contents_bytes,
    seal,
    sealed_bytes,
    unsealed,
)
from semantic.adapters.stores.remote.vault import Tenant, Vault
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

T = TypeVar("T")
R = TypeVar("R")

_SIZE = struct.Struct("<Q")
"""After the header in a tail's object: the bytes of the body."""
CATALOG_BYTES = 128 << 20
"""Memory for what is known of the object store: some ten thousand blocks."""
_THREADS = 8
"""Bodies that are read, or objects that are looked up, at a time."""
_MOST_TAILS = 64
"""Tails and checkpoints that are looked at after one block."""
_BLOCKS_BACK = 16
"""Blocks before the end of a stored chain after which a checkpoint is looked for."""
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
        self, objects: Objects, secret: bytes, *, catalog_bytes: int = CATALOG_BYTES
    ) -> None:
        """`secret` is the fleet's, 32 bytes: replicas with another one share nothing."""
        self._objects = objects
        self._vault = Vault(objects, secret)
        self._catalog = MemoryStore(catalog_bytes, secret=secret, counts_bodies=False)
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="remote")
        self._counts: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))
        self._lock = threading.Lock()

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
        with self._misses():
            folder = self._agent_folder(scope, agent_id)
            newest = self._newest(folder)
            known = self._catalog.manifest(scope, agent_id)
            if newest is None:
                self._catalog.remove(scope, agent_id)
            elif known is None or known.generation < _generation(newest):
                found = self._manifest_in(scope, agent_id, newest)
                if found is not None:
                    self._catalog.remember(found)

    def look_up(
        self, scope: Scope, links: Sequence[BlockLink], layout: BlockLayout, start: int = 0
    ) -> None:
        """See `LookUpPort.look_up`. Chains are evicted from their ends, so a binary search finds
        how much of one is stored."""
        with self._misses():
            found = _Chain(scope, self._vault.tenant(scope.tenant), links, layout)
            n_stored = self._search(found, start)
            parents = [link.hash for link in links[:n_stored]][: -_BLOCKS_BACK - 1 : -1]
            tails = self._tails(found, parents[:1])
            if layout.needs_checkpoint and not any(one.part is Part.CHECKPOINT for one in tails):
                tails += self._tails(found, parents[1:])
            self._look_for_windows(found, tails)

    # Blocks

    def put(self, block: StoredBlock) -> bool:
        key = block.header.key
        if self._catalog.find([key]):
            return True
        data = data_of(block)
        if data is None or len(data) > MAX_BODY_BYTES:
            self._count("dropped")
            return False
        with self._misses("write_errors"):
            self._upload(block, data)
            self._know(block.header, len(data))
            return True
        return False

    def drop(self, keys: Sequence[BlockKey]) -> None:
        for key in dict.fromkeys(keys):
            header = self._catalog.header(key)
            if header is not None:
                with self._misses("write_errors"):
                    self._delete(header)
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
        return self._each(self._read_into, reads)

    def read(self, header: BlockHeader) -> bytes | None:
        return self._verified(header, lambda: self._body(header))

    def touch(self, keys: Sequence[BlockKey]) -> None:
        self._catalog.touch(keys)

    # Agents

    def save(self, manifest: Manifest) -> bool:
        with self._misses("write_errors"):
            return self._save(manifest)
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
        was_known = self._catalog.remove(scope, agent_id)
        with self._misses("write_errors"):
            listed = self._objects.listed(self._agent_folder(scope, agent_id), _MOST_TAILS)
            for one in listed:
                self._objects.delete(one.path)
            return was_known or bool(listed)
        return was_known

    def pinned(self, tenant: bytes) -> Pinned:  # noqa: ARG002
        """See `CacheStorePort.pinned`: nothing, this tier has no quota."""
        return Pinned(0, None)

    def forget_tenant(self, tag: bytes) -> bool:
        """Delete the key of the tenant with this tag: what it has stored cannot be read any more.
        False if the object store fails."""
        with self._misses("write_errors"):
            self._vault.forget(tag)
            return True
        return False

    # Life

    def stats(self) -> Sequence[StoreStats]:
        """See `CacheStorePort.stats`. Numbers and bytes are those of the catalog; "unavailable"
        counts calls that failed, and "breaks" how often the circuit breaker was opened."""
        [known] = self._catalog.stats()
        with self._lock:
            counts = {**self._counts, "breaks": self._objects.breaks}
        counts["evicted"] = 0  # what is forgotten here is still in the object store
        return [replace(known, tier=Tier.REMOTE, counts=counts)]

    def flush(self) -> None:
        """See `CacheStorePort.flush`: every upload has ended when its call returns."""

    def close(self) -> None:
        self._pool.shutdown()
        self._catalog.close()

    # Reading

    def _read_into(self, read: BlockRead) -> bool:
        n_tokens = len(read.header.link.tokens)
        segments = [
            target.cast("B")[: target.nbytes // BLOCK_TOKENS * n_tokens]
            for target in read.targets
            if target.nbytes
        ]

        def fill() -> bool:
            _scatter(self._chunks(read.header, sum(map(len, segments))), segments)
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
        return b"".join(map(bytes, self._chunks(header, n_bytes)))

    def _chunks(self, header: BlockHeader, n_bytes: int) -> Iterator[memoryview]:
        key = self._vault.tenant(header.link.scope.tenant).key
        path = self._body_path(header)
        return chunks(key, _identity(header), n_bytes, partial(self._objects.read, path))

    def _verified(self, header: BlockHeader, read: Callable[[], T]) -> T | None:
        """What `read` returns of a verified body; None when it fails, with the reason counted."""
        try:
            found = read()
        except FileNotFoundError:
            self._catalog.drop([header.key])  # evicted by another process
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
        wanted = [link.key(Part.FULL) for link in chain.links]
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

    def _tails(self, chain: _Chain, parents: Sequence[BlockHash]) -> list[BlockHeader]:
        """What follows `parents` and has no full block: it is known from now on."""
        listings = self._each(lambda one: self._listed_tails(chain.after(one)), parents)
        listed = [one for found in listings for one in found]
        return [one for one in self._each(partial(self._tail, chain), listed) if one is not None]

    def _listed_tails(self, folder: str) -> list[Listed]:
        return self._objects.listed(folder, _MOST_TAILS)

    def _tail(self, chain: _Chain, listed: Listed) -> BlockHeader | None:
        """The header in an object below `after`, if it is sound and of the chain's layout."""
        key = parse_block(listed.path.rsplit("/", 1)[-1])
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
        listed = self._objects.listed(folder, _MOST_TAILS)
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
        first = 1 + (0 if newest is None else _generation(newest))
        for generation in range(first, first + _GENERATIONS):
            own = replace(manifest, generation=generation)
            data = encode_manifest(FiledManifest(own, 0))
            sealed = seal(tenant.key, _manifest_identity(key, generation), data)
            if self._objects.create(f"{folder}/{manifest_entry(key, generation).name}", sealed):
                self._catalog.remember(own)
                if newest is not None:
                    self._objects.delete(newest.path)
                return True
        self._count("dropped manifests")
        return False

    def _delete(self, header: BlockHeader) -> None:
        if _has_tail(header):
            self._objects.delete(self._tail_path(header))
        self._objects.delete(self._body_path(header))

    # Inside

    def _know(self, header: BlockHeader, n_bytes: int) -> None:
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
    """The full blocks of a prompt, and where its tenant's objects are."""

    scope: Scope
    tenant: Tenant
    links: Sequence[BlockLink]
    layout: BlockLayout

    def path(self, key: BlockKey) -> str:
        return _path(self.scope, self.tenant, block_entry(key).name)

    def after(self, parent: BlockHash) -> str:
        return _path(self.scope, self.tenant, f"after/{parent.hex()}")


def _path(scope: Scope, tenant: Tenant, name: str) -> str:
    return f"{scope.namespace.hex()}/{tenant.folder}/{name}"


def _generation(listed: Listed) -> int:
    """The generation of a manifest's object; 0 for any other object."""
    parsed = parse_manifest(listed.path.rsplit("/", 1)[-1])
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
