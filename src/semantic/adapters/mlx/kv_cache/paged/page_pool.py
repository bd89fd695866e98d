"""The page pool of one kind of layers, and the page tables of sequences.

The pool is an array of pages with a free list and reference counts. A page becomes free when its
last `PageRef` is dropped, in any thread.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx

from semantic.adapters.mlx.arrays import on_device
from semantic.adapters.mlx.device import memory_kept, memory_to_spare
from semantic.adapters.mlx.kv_cache.spec_reader import LayerShape
from semantic.domain.value_objects import BLOCK_TOKENS, LayerKind, ModelCacheSpec


@dataclass(frozen=True, slots=True)
class PageKind:
    """Layers of one shape and one window. A page holds 256 tokens of all these layers.

    `ring` is the number of a sequence's pages if there is a window, else None.
    """

    layers: tuple[int, ...]
    shape: LayerShape
    window: int | None = None
    ring: int | None = None

    @property
    def head_sizes(self) -> tuple[int, int]:
        """The number of elements in one head's 256 keys, and in its 256 values."""
        return BLOCK_TOKENS * self.shape.k_head_dim, BLOCK_TOKENS * self.shape.v_head_dim

    @property
    def page_shape(self) -> tuple[int, int]:
        """The shape of a page, (layers, numbers per layer)."""
        return len(self.layers), self.shape.kv_heads * sum(self.head_sizes)

    def keys_and_values(self, pages: mx.array) -> tuple[mx.array, mx.array]:
        """Return views of the keys and the values in `pages`, (..., kv_heads, 256, head_dim)."""
        shape, before = self.shape, pages.shape[:-1]
        n_keys = shape.kv_heads * self.head_sizes[0]
        keys = pages[..., :n_keys].reshape(*before, shape.kv_heads, BLOCK_TOKENS, shape.k_head_dim)
        values = pages[..., n_keys:].reshape(
            *before, shape.kv_heads, BLOCK_TOKENS, shape.v_head_dim
        )
        return keys, values

    def first_kept(self, first: int, length: int) -> int:
        """Return the first position that pages still hold after `length` tokens."""
        return first if self.ring is None else max(first, length - self.ring * BLOCK_TOKENS)

    def turn(self, block: int) -> int:
        """Return the index of block number `block` in a page table."""
        return block if self.ring is None else block % self.ring

    @property
    def page_bytes(self) -> int:
        layers, numbers = self.page_shape
        return layers * numbers * self.shape.dtype.size


def page_kinds(
    spec: ModelCacheSpec, shapes: Sequence[LayerShape | None]
) -> tuple[PageKind, ...] | None:
    """Return the kinds of a model's layers; None if a layer cannot use pages."""
    groups: dict[tuple[LayerShape, int | None, int | None], list[int]] = {}
    for number, (layer, shape) in enumerate(zip(spec.layers, shapes, strict=True)):
        if layer.kind is LayerKind.STATE:
            continue
        if shape is None:
            return None
        groups.setdefault((shape, layer.window, layer.max_blocks), []).append(number)
    kinds = tuple(
        PageKind(tuple(layers), shape, window, ring)
        for (shape, window, ring), layers in groups.items()
    )
    return kinds or None


_INITIAL_PAGES = 4
"""The first size of a pool, in pages."""


@dataclass(slots=True)
class _Page:
    index: int
    users: int = 0


class PageRef:
    """A counted reference to a page, for as long as this object lives."""

    __slots__ = ("_page", "_pool")

    def __init__(self, pool: PagePool, page: _Page) -> None:
        self._pool = pool
        self._page = page
        page.users += 1

    def __del__(self) -> None:
        self._pool.give_back(self._page)

    @property
    def index(self) -> int:
        return self._page.index

    @property
    def is_shared(self) -> bool:
        """True if there are other references to the page. A shared page must not be written to."""
        return self._page.users > 1

    def of(self, pool: PagePool) -> bool:
        return self._pool is pool


class Loan:
    """A page in use by a copy outside MLX. The page stays allocated until `end`."""

    __slots__ = ("_number", "_page", "_pool")

    def __init__(self, pool: PagePool, number: int, page: int) -> None:
        self._pool = pool
        self._number = number
        self._page = page

    def __del__(self) -> None:
        self.end()

    @contextmanager
    def address(self) -> Iterator[int | None]:
        with self._pool.still() as first:
            yield None if first is None else first + self._page * self._pool.kind.page_bytes

    def end(self) -> None:
        self._pool.end_loan(self._number)


class PagePool:
    """Pages of one kind, (pages, *PageKind.page_shape).

    Any thread may drop a reference. Only the thread that runs MLX may do anything else.
    """

    def __init__(self, kind: PageKind) -> None:
        self.kind = kind
        self._data: mx.array | None = None
        self._free: list[int] = []
        self._used: dict[int, _Page] = {}  # by index
        self.moves = 0
        """The number of times that pages moved in the array. A move invalidates all indices."""
        self._enough: int | None = None
        self._lent: dict[int, PageRef] = {}
        self._loans = 0
        # Reentrant, because garbage collection may drop a reference during `take`.
        self._lock = threading.Condition(threading.RLock())
        self._moving = threading.Lock()  # held while the array moves or a copy uses its address
        self.locate: Callable[[mx.array], int] | None = None
        """Returns an array's device address; None on devices without copies outside MLX."""
        self._address: int | None = None

    @property
    def data(self) -> mx.array:
        """The array of all pages. Kernels write to it in place; growing replaces it."""
        if self._data is None:
            self.grow(_INITIAL_PAGES)
        if self._data is None:
            raise AssertionError("a page pool without an array")
        return self._data

    @data.setter
    def data(self, data: mx.array) -> None:
        with self._moving:
            self._data, self._address = data, None

    @property
    def n_pages(self) -> int:
        """The number of pages in the array, including free pages."""
        return 0 if self._data is None else self._data.shape[0]

    @property
    def n_used(self) -> int:
        """The number of pages that have references."""
        return self.n_pages - len(self._free)

    @property
    def nbytes(self) -> int:
        return self.n_pages * self.kind.page_bytes

    def take(self) -> PageRef:
        """Allocate a page. May wait for a copy to end, or grow the pool."""
        with self._lock:
            self._lock.wait_for(lambda: self._free or not self._any_returns())
        if not self._free:
            self.grow(self._next_size())
        with self._lock:
            page = _Page(self._free.pop())
            self._used[page.index] = page
            return PageRef(self, page)

    def share(self, ref: PageRef) -> PageRef:
        with self._lock:
            return PageRef(self, ref._page)  # noqa: SLF001  # same module

    def lend(self, ref: PageRef) -> Loan:
        """Lend the page to a copy on another thread."""
        if self._address is None and self.locate is not None:
            self._address = self.locate(self.data)
        with self._lock:
            self._loans += 1
            self._lent[self._loans] = self.share(ref)
            return Loan(self, self._loans, ref.index)

    def await_loan(self, ref: PageRef, n_promised: int) -> None:
        """Wait until the page has no loan, or until more than `n_promised` pages are free."""
        with self._lock:
            self._lock.wait_for(
                lambda: (
                    len(self._free) > n_promised
                    or all(one.index != ref.index for one in self._lent.values())
                )
            )

    def end_loan(self, number: int) -> None:
        """Drop the page reference that a loan holds, if it holds one."""
        with self._lock:
            self._lent.pop(number, None)
            self._lock.notify_all()

    def give_back(self, page: _Page) -> None:
        """Drop one reference to `page`."""
        with self._lock:
            page.users -= 1
            if not page.users:
                self._used.pop(page.index, None)
                self._free.append(page.index)

    @contextmanager
    def still(self) -> Iterator[int | None]:
        """Yield the pages' device address; None after `abandon`. The address is valid in the `with`
        block. Any thread may call this method."""
        with self._moving:
            yield self._address

    def expect(self, n_pages: int) -> None:
        """Expect to need `n_pages` pages. The pool doubles up to this size, and then grows by an
        eighth, as it does if memory is short."""
        self._enough = n_pages

    def abandon(self) -> None:
        """Free the array. The pool must not be used afterwards."""
        with self._moving:
            self._data = self._address = None
        with self._lock:
            self._free.clear()
            self._used.clear()

    def shrink(self, room: int) -> int:
        """Free the memory of unused pages; return the freed bytes.

        Copies the used pages, and does nothing if they take more than `room` bytes.
        """
        mx.synchronize()
        with self._moving, self._lock:
            kept = [self._used[at] for at in sorted(self._used)]
            n_bytes = self.nbytes - len(kept) * self.kind.page_bytes
            if self._data is None or self._lent or not n_bytes or self.nbytes - n_bytes > room:
                return 0
            moved = None
            if kept:
                moved = mx.take(self._data, mx.array([page.index for page in kept]), axis=0)
                mx.eval(moved)
            self._data = moved
            for at, page in enumerate(kept):
                page.index = at
            # This thread may have dropped a reference meanwhile.
            self._used = {page.index: page for page in kept if page.users}
            self._free[:] = [page.index for page in kept if not page.users]
            self.moves += 1
            self._address = None  # the next loan looks it up again
        mx.clear_cache()  # frees the old array
        return n_bytes

    def grow(self, n_pages: int) -> None:
        """Grow to at least `n_pages`. Copies the existing pages unless all are free."""
        if n_pages <= self.n_pages:
            return
        # Launched work may still write to the old array, which MLX treats as an input, so nothing
        # else makes the copy wait for that work.
        mx.synchronize()
        with self._moving:
            if not self.n_used:
                self._data = None  # first: memory may not hold both the old and the new array
                with self._lock:
                    self._free.clear()
            first = self.n_pages
            if self._data is None:
                grown = mx.zeros((n_pages, *self.kind.page_shape), self.kind.shape.dtype)
            else:
                grown = mx.pad(self._data, [(0, n_pages - first), (0, 0), (0, 0)])
            mx.eval(grown)
            self._data = grown
            if self._address is not None and self.locate is not None:
                self._address = self.locate(grown)
        with self._lock:
            # `take` uses the lowest index next. Change the list in place: a reference dropped
            # meanwhile, in the same thread, appends to the same list.
            self._free[:0] = range(n_pages - 1, first - 1, -1)

    def _any_returns(self) -> bool:
        loans = Counter(ref.index for ref in self._lent.values())
        return any(self._used[index].users == n for index, n in loans.items())

    def _next_size(self) -> int:
        larger = self.n_pages + max(_INITIAL_PAGES, self.n_pages // 8)
        if self._enough is not None and self.n_pages >= self._enough:
            return larger
        size = max(_INITIAL_PAGES, 2 * self.n_pages)
        size = size if self._enough is None else min(size, self._enough)
        spare = memory_to_spare()  # growing copies
        fits = spare is None or size * self.kind.page_bytes <= spare + memory_kept()
        return size if fits else min(size, larger)


class PageTable:
    """A sequence's pages of one kind. Block i is in page i, or in page i modulo the ring's size."""

    __slots__ = ("_array", "_moves", "pool", "refs")

    def __init__(self, pool: PagePool, refs: Sequence[PageRef] = ()) -> None:
        self.pool = pool
        self.refs = list(refs)
        self._array: mx.array | None = None
        self._moves = pool.moves

    @property
    def pages(self) -> list[int]:
        return [ref.index for ref in self.refs]

    def array(self) -> mx.array:
        """Return `pages` as an int32 array. There must be at least one page."""
        if self._array is None or self._moves != self.pool.moves:
            self._array, self._moves = on_device(self.pages), self.pool.moves
        return self._array

    def pages_for(self, n_tokens: int) -> int:
        """Return how many pages a sequence of `n_tokens` needs."""
        needed = -(-n_tokens // BLOCK_TOKENS)
        ring = self.pool.kind.ring
        return needed if ring is None else min(needed, ring)

    def has_capacity(self, n_tokens: int) -> bool:
        """Return whether the table has the pages for a sequence of `n_tokens`."""
        return len(self.refs) >= self.pages_for(n_tokens)

    def reserve(self, n_tokens: int) -> None:
        """Allocate the missing pages for a sequence of `n_tokens`."""
        if not self.has_capacity(n_tokens):
            while not self.has_capacity(n_tokens):
                self.refs.append(self.pool.take())
            self._array = None


class PagedSequence:
    """One sequence's page tables, one per kind. The current chunk ends with `padding` tokens."""

    __slots__ = ("__weakref__", "padding", "tables")

    def __init__(self, tables: Sequence[PageTable]) -> None:
        self.tables = tuple(tables)
        self.padding = 0

    def reserve(self, n_tokens: int) -> None:
        """Allocate pages for `n_tokens` in every kind."""
        for table in self.tables:
            table.reserve(n_tokens)


class PagedBlock(NamedTuple):
    """The content of a preempted sequence's block: page `refs[at]` of a page table.

    The whole table covers the positions `first` to `stop`. `nbytes` is one layer's part of a page.
    """

    refs: tuple[PageRef, ...]
    at: int
    first: int
    stop: int
    nbytes: int
