"""Looks up the stored blocks of a prompt in an object store, and reads their verified bodies. A
failed read is a miss."""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from typing import TypeVar

from semantic.adapters.stores.disk.block_file import (
    HEADER_BYTES,
    decode_header,
    encode_header,
    layout_stamp,
)
from semantic.adapters.stores.disk.entries import (
    DamagedError,
    MismatchError,
    NewerFormatError,
    UnreadableError,
    parse_block,
)
from semantic.application.cache.checkpoint_plan import MOST_TOKENS
from semantic.application.cache.prefix_lookup import window_links
from semantic.domain.block_hash import BlockHash, BlockKey, BlockLink, Part, Scope
from semantic.domain.stored import BlockHeader, BlockLayout, BlockRead, StoredBlock
from semantic.domain.value_objects import BLOCK_TOKENS
from semantic_fleet.objects.catalog import Catalog, Notices, Tally
from semantic_fleet.objects.names import Folder, body_identity, has_tail, last_name, tail_identity
from semantic_fleet.objects.objects import PAGE, Listed, Objects, UnavailableError
from semantic_fleet.objects.sealing import (
    SealingMemory,
    Vault,
    chunks,
    contents_bytes,
    seal,
    sealed_bytes,
    unsealed,
)

T = TypeVar("T")
R = TypeVar("R")

THREADS = 8
"""The maximum number of concurrent calls of one kind."""


class Parallel:
    """Threads for calls of one kind. A call must not wait for another call of the same kind."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="remote")

    def each(self, action: Callable[[T], R], items: Sequence[T]) -> list[R]:
        """Return the results of `action` for all `items`, in order."""
        if len(items) <= 1:
            return [action(item) for item in items]
        return list(self._pool.map(action, items))

    def ahead(self, action: Callable[[T], R], items: Iterable[T], n: int) -> Iterator[R]:
        """Yield the results of `action` in order. Works on up to `n` items at once."""
        if n == 1:
            yield from map(action, items)
            return
        waiting: deque[Future[R]] = deque()
        for item in items:
            waiting.append(self._pool.submit(action, item))
            if len(waiting) == n:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()

    def close(self) -> None:
        self._pool.shutdown()


_SIZE = struct.Struct("<Q")
"""The form of a body's size, which follows the header in a tail's object."""


class Bodies:
    """The bodies and headers in an object store. Methods may raise UnavailableError."""

    def __init__(self, objects: Objects, vault: Vault) -> None:
        self._objects = objects
        self._vault = vault
        # Not shared with other calls: a body that another thread reads waits for its parts.
        self._parts = Parallel()
        self._sealing = SealingMemory()

    def folder(self, scope: Scope) -> Folder:
        """Return the folder of a scope and its tenant."""
        return Folder(scope, self._vault.tenant(scope.tenant))

    def n_bytes(self, folder: Folder, key: BlockKey) -> int | None:
        """Return a body's size in bytes. Returns None for a missing body or an impossible size."""
        size = self._objects.size(folder.body(key))
        return None if size is None else contents_bytes(size)

    def size(self, header: BlockHeader) -> int:
        """Return the size of a body in bytes. Raises FileNotFoundError, and DamagedError for an
        impossible size."""
        size = self._objects.size(self.folder(header.link.scope).body(header.key))
        if size is None:
            raise FileNotFoundError
        n_bytes = contents_bytes(size)
        if n_bytes is None:
            raise DamagedError("truncated")
        return n_bytes

    def read(self, header: BlockHeader, n_bytes: int, ahead: int) -> Iterator[memoryview]:
        """Yield the verified body in pieces. Reads `ahead` pieces in advance. Raises the same
        errors as `chunks`, and FileNotFoundError."""
        folder = self.folder(header.link.scope)
        path = folder.body(header.key)
        fetch = partial(
            self._parts.ahead, lambda part: self._objects.read(path, part[0], part[1]), n=ahead
        )
        return chunks(folder.tenant.key, body_identity(header), n_bytes, fetch)

    def write(self, block: StoredBlock, data: bytes | memoryview) -> tuple[str, ...]:
        """Write a body unless it exists, and its header. Return the names of events to count."""
        header = block.header
        done: tuple[str, ...] = ()
        folder = self.folder(header.link.scope)
        path, key = folder.body(header.key), folder.tenant.key
        there = self._objects.size(path)
        n_sealed = sealed_bytes(len(data))
        if there != n_sealed:
            with self._sealing.piece(n_sealed) as piece:
                sealed = seal(key, body_identity(header), data, piece)
                if there is None:
                    self._objects.create(path, sealed)
                else:
                    self._objects.replace(path, sealed)
            done = ("written",) if there is None else ("written", "replaced")
        if has_tail(header):
            contents = encode_header(block) + _SIZE.pack(len(data))
            self._objects.create(
                folder.tail(header.key, header.link.parent),
                seal(key, tail_identity(header.key), contents),
            )
        return done

    def tail(
        self, folder: Folder, path: str, key: BlockKey, layout: str
    ) -> tuple[BlockHeader, int] | None:
        """Return a header and the size of its body. Returns None for another scope or layout.
        Raises FileNotFoundError, DamagedError, MismatchError and NewerFormatError."""
        data = unsealed(folder.tenant.key, tail_identity(key), self._objects.get(path))
        if len(data) != HEADER_BYTES + _SIZE.size:
            raise DamagedError("truncated")
        (n_bytes,) = _SIZE.unpack(data[HEADER_BYTES:])
        header = decode_header(data[:HEADER_BYTES], key, HEADER_BYTES + n_bytes).header
        if header.link.scope != folder.scope or header.layout != layout_stamp(layout):
            return None
        link = replace(header.link, scope=folder.scope)
        return replace(header, link=link, layout=layout), n_bytes

    def delete(self, scope: Scope, key: BlockKey, tail_of: BlockHash | None) -> None:
        """Delete a body. If the body has a separate header, `tail_of` is the block before it."""
        if tail_of is not None:
            self.delete_tail(scope, key, tail_of)
        self._objects.delete(self.folder(scope).body(key))

    def delete_tail(self, scope: Scope, key: BlockKey, parent: BlockHash) -> None:
        """Delete the separate header of a body."""
        self._objects.delete(self.folder(scope).tail(key, parent))

    def share(self, link: BlockLink) -> None:
        """Mark a block as shared by several agents. All processes see the mark."""
        self._objects.create(self.folder(link.scope).shared(link), b"")

    def is_shared(self, link: BlockLink) -> bool:
        """Return True if any process marked the block as shared."""
        return self._objects.size(self.folder(link.scope).shared(link)) is not None

    def delete_parts(self, link: BlockLink, parts: Sequence[Part]) -> None:
        """Delete the `parts` of a partial block in one call."""
        folder, keys = self.folder(link.scope), [link.key(part) for part in parts]
        tails = [folder.tail(key, link.parent) for key in keys if key.part is not Part.WINDOW]
        self._objects.delete_all([*tails, *map(folder.body, keys)])

    def close(self) -> None:
        self._parts.close()
        self._sealing.close()


_HEARD = 1.0
"""Seconds in which all readers together fetch the evictions only once."""


class Reader:
    def __init__(self, bodies: Bodies, catalog: Catalog, notices: Notices, tally: Tally) -> None:
        self._bodies = bodies
        self._catalog = catalog
        self._notices = notices
        self._tally = tally
        self._threads = Parallel()

    def read_into(self, reads: Sequence[BlockRead]) -> Sequence[bool]:
        ahead = max(1, THREADS // max(1, len(reads)))
        return self._threads.each(partial(self._read_into, ahead), reads)

    def read(self, header: BlockHeader) -> bytes | None:
        return self._verified(header, lambda: self._body(header))

    def close(self) -> None:
        self._threads.close()

    def _read_into(self, ahead: int, read: BlockRead) -> bool:
        segments = read.segments

        def fill() -> bool:
            n_bytes = sum(map(len, segments))
            _scatter(self._bodies.read(read.header, n_bytes, ahead), segments)
            return True

        return self._verified(read.header, fill) is not None

    def _body(self, header: BlockHeader) -> bytes:
        known = self._catalog.n_bytes(header.key)
        n_bytes = self._bodies.size(header) if known is None else known
        return b"".join(map(bytes, self._bodies.read(header, n_bytes, THREADS)))

    def _verified(self, header: BlockHeader, read: Callable[[], T]) -> T | None:
        if self._catalog.is_forgotten(header.key):
            self._tally.count("misses")
            return None
        try:
            found = read()
        except FileNotFoundError:
            self._is_gone(header)
        except DamagedError as damage:
            self._discard(header, damage.kind)
        except NewerFormatError:
            self._tally.count("newer format")
        except MismatchError as error:
            # The header's hash matches its tokens, so the object must be at fault.
            link = header.link
            if str(error) == "header" and link.hash == link.scope.hash_of(link.parent, link.tokens):
                self._discard(header, "identity")
            else:
                self._tally.count("mismatches", str(error))
            if str(error) == "size":  # either the known size or the requested one is wrong
                self._catalog.drop([header.key])
        except UnavailableError:
            self._tally.count("unavailable")
        else:
            self._tally.count("hits")
            return found
        self._tally.count("misses")
        return None

    def _is_gone(self, header: BlockHeader) -> None:
        """Forget a missing body. The request that needs it can then write it again."""
        self._catalog.drop([header.key])
        if has_tail(header):
            with self._tally.misses("write_errors"):
                self._bodies.delete_tail(header.link.scope, header.key, header.link.parent)
        with self._tally.misses():
            self._notices.hear(_HEARD)

    def _discard(self, header: BlockHeader, damage: str) -> None:
        self._tally.count("damaged", f"damaged: {damage}")
        tail_of = header.link.parent if has_tail(header) else None
        with self._tally.misses("write_errors"):
            self._bodies.delete(header.link.scope, header.key, tail_of)
        self._catalog.drop([header.key])


def _scatter(pieces: Iterable[memoryview], segments: Sequence[memoryview]) -> None:
    waiting = iter(segments)
    room = memoryview(b"")
    for piece in pieces:
        rest = piece
        while rest:
            room = room or next(waiting)
            n = min(len(rest), len(room))
            room[:n] = rest[:n]
            room, rest = room[n:], rest[n:]


_MOST_UNLIKE = 8
"""The maximum number of partial blocks after one block that are examined in vain."""
_BLOCKS_BACK = 16
"""The number of blocks before the end of a chain in which to look for checkpoints."""
_MOST_BACK = 64
"""The maximum number of other places in which to look for a checkpoint."""


class LookUp:
    """Finds stored chains of blocks, and adds them to the catalog. Thread-safe. A binary search
    finds a chain's end, because the janitor evicts from the end."""

    def __init__(self, objects: Objects, bodies: Bodies, catalog: Catalog, tally: Tally) -> None:
        self._objects = objects
        self._bodies = bodies
        self._catalog = catalog
        self._tally = tally
        self._threads = Parallel()

    def chain(
        self, scope: Scope, links: Sequence[BlockLink], layout: BlockLayout, start: int
    ) -> None:
        """See `LookUpPort.look_up`. Raises UnavailableError."""
        chain = _Chain(self._bodies.folder(scope), links, layout)
        n_stored = self._search(chain, start)
        tails: list[BlockHeader] = []
        for places in _places(n_stored):
            tails += self._each_tail(chain, places)
            if not layout.needs_checkpoint or any(map(chain.resumes_at, tails)):
                break
        self._look_for_windows(chain, tails)

    def close(self) -> None:
        self._threads.close()

    def _search(self, chain: _Chain, start: int) -> int:
        """Return the number of stored blocks of a chain. It is at least `start`."""
        full = [chain.header(link, Part.FULL) for link in chain.links if link.is_full]
        known = self._catalog.find([one.key for one in full])
        n_known = sum(1 for _ in takewhile(lambda one: one.key in known, full[start:]))
        low = begun = start + n_known
        high, middle = len(full), low + 1  # try the next block first: mostly it is missing
        while low < high:
            is_there = self._is_stored(chain, full[middle - 1])
            low, high = (middle, high) if is_there else (low, middle - 1)
            middle = (low + high + 1) // 2
        for header in full[begun:low]:
            self._catalog.learn(header, chain.n_bytes(header))
        self._catalog.drop([one.key for one in full[low:] if one.key in known])
        return low

    def _is_stored(self, chain: _Chain, header: BlockHeader) -> bool:
        """Return True if the body has the right size. A writer replaces a body of another size."""
        return self._bodies.n_bytes(chain.folder, header.key) == chain.n_bytes(header)

    def _each_tail(self, chain: _Chain, places: Sequence[int]) -> list[BlockHeader]:
        listings = self._threads.each(partial(self._listed_tails, chain), places)
        listed = [one for found in listings for one in found]
        tails = self._threads.each(partial(self._tail, chain), listed)
        return [one for one in tails if one is not None]

    def _listed_tails(self, chain: _Chain, place: int) -> list[Listed]:
        listed = self._objects.listed(chain.folder.after(chain.links[place].hash), PAGE)
        if len(listed) <= _MOST_UNLIKE:
            return listed
        names = chain.names_after(place)
        alike = [one for one in listed if last_name(one).split(".")[0] in names]
        others = (one for one in listed if one not in alike and last_name(one).endswith(Part.FULL))
        newest = sorted(others, key=lambda one: one.written, reverse=True)
        return alike + newest[:_MOST_UNLIKE]

    def _tail(self, chain: _Chain, listed: Listed) -> BlockHeader | None:
        key = parse_block(last_name(listed))
        if key is None:
            return None
        known = self._catalog.tail(key)
        if known is not None:
            return known
        try:
            found = self._bodies.tail(chain.folder, listed.path, key, chain.layout.name)
        except FileNotFoundError:
            return None
        except UnreadableError as error:
            self._tally.count("damaged", f"damaged: {error}")
            self._objects.delete(listed.path)
            return None
        if found is None:
            return None
        header, n_bytes = found
        self._catalog.learn(header, n_bytes)
        return header

    def _look_for_windows(self, chain: _Chain, tails: Sequence[BlockHeader]) -> None:
        links: dict[BlockHash, BlockLink] = {}
        for one in tails:
            if one.part is Part.CHECKPOINT:
                before = chain.links[: one.link.start // BLOCK_TOKENS]
                needed = window_links(chain.layout, [*before, one.link])
                links.update((link.hash, link) for link in needed)
        headers = [chain.header(one, Part.WINDOW) for one in links.values()]
        known = self._catalog.find([one.key for one in headers])
        unknown = [one for one in headers if one.key not in known]
        stored = self._threads.each(partial(self._is_stored, chain), unknown)
        for header, is_there in zip(unknown, stored, strict=True):
            if is_there:
                self._catalog.learn(header, chain.n_bytes(header))


@dataclass(frozen=True, slots=True)
class _Chain:
    folder: Folder
    links: Sequence[BlockLink]
    layout: BlockLayout

    def header(self, link: BlockLink, part: Part) -> BlockHeader:
        return BlockHeader(link, part, self.layout.name)

    def n_bytes(self, header: BlockHeader) -> int:
        return self.layout.body_bytes(header.part, len(header.link.tokens))

    def names_after(self, place: int) -> frozenset[str]:
        """Return the hashes of all possible partial blocks after the block `place`."""
        parent, tokens = self.links[place].hash, self._tokens_after(place)
        beginnings = (tokens[: n + 1] for n in range(len(tokens)))
        return frozenset(self.folder.scope.hash_of(parent, one).hex() for one in beginnings)

    def resumes_at(self, header: BlockHeader) -> bool:
        """Return True if `header` is a checkpoint at a place within the prompt."""
        own = header.link.tokens
        there = self._tokens_after(header.link.start // BLOCK_TOKENS - 1)
        return header.part is Part.CHECKPOINT and there[: len(own)] == own

    def _tokens_after(self, place: int) -> tuple[int, ...]:
        return self.links[place + 1].tokens if place + 1 < len(self.links) else ()


def _places(n_stored: int) -> Iterator[Sequence[int]]:
    """Yield groups of blocks, last blocks first. Partial blocks may follow each of them."""
    back = range(n_stored - 1, -1, -1)
    yield back[:1]
    yield back[1 : _BLOCKS_BACK + 1]
    # A checkpoint belongs to the block in which it ends; the block before that lists it.
    grid = MOST_TOKENS // BLOCK_TOKENS
    further = [at for at in back[_BLOCKS_BACK + 1 :] if (at + 2) % grid == 0][:_MOST_BACK]
    for first in range(0, len(further), THREADS):
        yield further[first : first + THREADS]
