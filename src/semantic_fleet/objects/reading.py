"""Reading: what an object store has of a prompt, asked with few requests, and bodies into memory.

What fails is a miss and is known no more: a body that is gone or damaged can be written again.
Knows not how an object is verified.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import TypeVar

from semantic.adapters.stores.disk.entries import (
    DamagedError,
    MismatchError,
    NewerFormatError,
    parse_block,
)
from semantic.application.cache.checkpoint_plan import MOST_TOKENS
from semantic.application.cache.prefix_lookup import window_links
from semantic.domain.block_hash import BlockHash, BlockLink, Part, Scope
from semantic.domain.stored import BlockHeader, BlockLayout, BlockRead
from semantic.domain.value_objects import BLOCK_TOKENS
from semantic_fleet.objects.bodies import THREADS, Bodies, Parallel
from semantic_fleet.objects.catalog import Catalog, Notices, Tally
from semantic_fleet.objects.names import Folder, has_tail, last_name
from semantic_fleet.objects.objects import PAGE, Listed, Objects, UnavailableError

T = TypeVar("T")

_HEARD = 1.0
"""Seconds within which several bodies that are gone let the janitor be heard once."""


class Reader:
    """Reads bodies for one process. Thread-safe."""

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
        """What `read` returns of a verified body; None when it fails, with the reason counted."""
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
            # With the name of a header that is in itself sound, the object is at fault.
            link = header.link
            if str(error) == "header" and link.hash == link.scope.hash_of(link.parent, link.tokens):
                self._discard(header, "identity")
            else:
                self._tally.count("mismatches", str(error))
            if str(error) == "size":  # as it was known, or as it is asked for
                self._catalog.drop([header.key])
        except UnavailableError:
            self._tally.count("unavailable")
        else:
            self._tally.count("hits")
            return found
        self._tally.count("misses")
        return None

    def _is_gone(self, header: BlockHeader) -> None:
        """It was evicted, and most likely what follows it too: that is to be written again with
        it, by the request that misses it."""
        self._catalog.drop([header.key])
        if has_tail(header):
            with self._tally.misses("write_errors"):
                self._bodies.delete_tail(header.link.scope, header.key, header.link.parent)
        with self._tally.misses():
            self._notices.hear(_HEARD)

    def _discard(self, header: BlockHeader, damage: str) -> None:
        """Delete a damaged object: what is not there can be written again."""
        self._tally.count("damaged", f"damaged: {damage}")
        tail_of = header.link.parent if has_tail(header) else None
        with self._tally.misses("write_errors"):
            self._bodies.delete(header.link.scope, header.key, tail_of)
        self._catalog.drop([header.key])


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


_MOST_UNLIKE = 8
"""Tails after one block that are looked at although the prompt does not begin with them."""
_BLOCKS_BACK = 16
"""Blocks before the end of a stored chain after each of which a checkpoint is looked for; behind
them where every prompt has some."""
_MOST_BACK = 64
"""Places at which a checkpoint is looked for further back."""


class LookUp:
    """Looks up chains of blocks for one process: the catalog has them then. Thread-safe.

    Chains are evicted from their ends, so a binary search finds how much of one is stored. What
    follows it and no full block names is listed by the block before.

    Of the tails and checkpoints after one block a page of a listing is looked at.
    """

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
        """How many blocks of a chain have their FULL bodies stored; the first `start` are not asked
        for. What was known further back is known no more."""
        full = [chain.header(link, Part.FULL) for link in chain.links if link.is_full]
        known = self._catalog.find([one.key for one in full])
        n_known = sum(1 for _ in takewhile(lambda one: one.key in known, full[start:]))
        low = begun = start + n_known
        high, middle = len(full), low + 1  # first the next: mostly it is not there
        while low < high:
            is_there = self._is_stored(chain, full[middle - 1])
            low, high = (middle, high) if is_there else (low, middle - 1)
            middle = (low + high + 1) // 2
        for header in full[begun:low]:
            self._catalog.learn(header, chain.n_bytes(header))
        self._catalog.drop([one.key for one in full[low:] if one.key in known])
        return low

    def _is_stored(self, chain: _Chain, header: BlockHeader) -> bool:
        """Whether there is a body; one of another size is damaged, and will be replaced."""
        return self._bodies.n_bytes(chain.folder, header.key) == chain.n_bytes(header)

    def _each_tail(self, chain: _Chain, places: Sequence[int]) -> list[BlockHeader]:
        """What follows the blocks of `chain` at `places` and no full block names: it is known from
        now on."""
        listings = self._threads.each(partial(self._listed_tails, chain), places)
        listed = [one for found in listings for one in found]
        tails = self._threads.each(partial(self._tail, chain), listed)
        return [one for one in tails if one is not None]

    def _listed_tails(self, chain: _Chain, place: int) -> list[Listed]:
        """Those that the prompt begins with, and some others, the newest first."""
        listed = self._objects.listed(chain.folder.after(chain.links[place].hash), PAGE)
        if len(listed) <= _MOST_UNLIKE:
            return listed
        names = chain.names_after(place)
        alike = [one for one in listed if last_name(one).split(".")[0] in names]
        others = (one for one in listed if one not in alike and last_name(one).endswith(Part.FULL))
        newest = sorted(others, key=lambda one: one.written, reverse=True)
        return alike + newest[:_MOST_UNLIKE]

    def _tail(self, chain: _Chain, listed: Listed) -> BlockHeader | None:
        """The header in an object of a tail, if it is sound and of the chain's layout."""
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
        except (DamagedError, MismatchError, NewerFormatError) as error:
            self._tally.count("damaged", f"damaged: {error}")
            self._objects.delete(listed.path)
            return None
        if found is None:
            return None
        header, n_bytes = found
        self._catalog.learn(header, n_bytes)
        return header

    def _look_for_windows(self, chain: _Chain, tails: Sequence[BlockHeader]) -> None:
        """Look up the WINDOW bodies that the checkpoints among `tails` need."""
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
    """The blocks of a prompt, and where the objects of its scope are."""

    folder: Folder
    links: Sequence[BlockLink]
    layout: BlockLayout

    def header(self, link: BlockLink, part: Part) -> BlockHeader:
        return BlockHeader(link, part, self.layout.name)

    def n_bytes(self, header: BlockHeader) -> int:
        """Bytes of a body that is no checkpoint."""
        return self.layout.body_bytes(header.part, len(header.link.tokens))

    def names_after(self, place: int) -> frozenset[str]:
        """The hashes of all beginnings of what follows the block at `place` in the prompt."""
        parent, tokens = self.links[place].hash, self._tokens_after(place)
        beginnings = (tokens[: n + 1] for n in range(len(tokens)))
        return frozenset(self.folder.scope.hash_of(parent, one).hex() for one in beginnings)

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
    for first in range(0, len(further), THREADS):
        yield further[first : first + THREADS]
