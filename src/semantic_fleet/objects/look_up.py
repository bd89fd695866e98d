"""Look-up: how much of a prompt an object store has, asked with few requests.

Chains are evicted from their ends, so a binary search finds how much of one is stored. What follows
it and no full block names is listed by the block before. Knows not what becomes of what it finds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile

from semantic.adapters.stores.disk.entries import (
    DamagedError,
    MismatchError,
    NewerFormatError,
    parse_block,
)
from semantic.application.cache.checkpoint_plan import MOST_TOKENS
from semantic.application.cache.prefix_lookup import window_links
from semantic.domain.block_hash import BlockHash, BlockLink, Part, Scope
from semantic.domain.stored import BlockHeader, BlockLayout
from semantic.domain.value_objects import BLOCK_TOKENS
from semantic_fleet.objects.bodies import THREADS, Bodies, Parallel
from semantic_fleet.objects.catalog import Catalog, Tally
from semantic_fleet.objects.names import Folder, last_name
from semantic_fleet.objects.objects import PAGE, Listed, Objects

_MOST_UNLIKE = 8
"""Tails after one block that are looked at although the prompt does not begin with them."""
_BLOCKS_BACK = 16
"""Blocks before the end of a stored chain after each of which a checkpoint is looked for; behind
them where every prompt has some."""
_MOST_BACK = 64
"""Places at which a checkpoint is looked for further back."""


class LookUp:
    """Looks up chains of blocks for one process: the catalog has them then. Thread-safe.

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
