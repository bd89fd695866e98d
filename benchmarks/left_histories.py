"""What is lost of histories that agents left, as after a compaction, by the order of eviction.

Chains of blocks of a recording go through one store of a limited size in memory: either every
block that was used longest ago is evicted first, or those that no agent goes on from count as used
longer ago, as in our stores, or they go first, or are dropped at once. Knows recordings; it is part
of `benchmarks.returns`.
"""

from __future__ import annotations

import random
import statistics
from collections import Counter, OrderedDict
from collections.abc import Container, Iterator, Mapping, Sequence
from heapq import heappop, heappush
from typing import Final, Literal, cast

from benchmarks.absence import PAUSE, PIECE, Recorded, Row, visits, working_set
from benchmarks.absence import SCALE as TOKENS_PER_TOKEN
from semantic.domain.stored import left_at
from semantic.domain.value_objects import BLOCK_TOKENS

AT_ONCE: Final = 8
SHARES: Final = (0.25, 0.5, 1.0, 2.0, 4.0)
ORDERS: Final = 5
_PIECES: Final = BLOCK_TOKENS // PIECE
Order = Literal["last used", "left sooner", "left first", "dropped"]
EVICTED: Final[tuple[Order, ...]] = ("last used", "left sooner", "left first", "dropped")
Asked = tuple[float, str, tuple[int, ...], int]
"""A request: when, of which agent, the hashes of its blocks, and its tokens."""


def left_histories(sessions: Sequence[Sequence[Recorded]], prefill: float) -> Iterator[Row]:
    """A line for each size of the store, as a share of the working set, and each order.

    `lost` is the share of the blocks that an earlier prompt of the session had and the store had
    no more; `returned` the number of requests that continue a history which was left, and `p99`
    milliseconds to compute what is not stored, at `prefill` tokens per second.
    """
    orders = [random.Random(seed).sample(list(sessions), len(sessions)) for seed in range(ORDERS)]
    asked = [requests_of(one, AT_ONCE) for one in orders]
    sizes = [working_set(visits(one, AT_ONCE)) * TOKENS_PER_TOKEN for one in orders]
    for share in SHARES:
        for order in EVICTED:
            stores = [_Store(int(share * size / BLOCK_TOKENS), order) for size in sizes]
            for store, requests in zip(stores, asked, strict=True):
                for request in requests:
                    store.ask(request)
            times = sorted(1e3 * n / prefill for store in stores for n in store.computed)
            yield {
                "share": share,
                "order": order,
                "lost": round(sum(s.lost for s in stores) / sum(s.known for s in stores), 5),
                "lost_blocks": sum(store.lost for store in stores),
                "returned": sum(store.returned for store in stores),
                "p99": round(times[int(0.99 * len(times))]),
                "mean": round(statistics.fmean(times), 1),
            }


class _Store:
    """Blocks by the order of eviction; of a chain the end comes before the beginning."""

    def __init__(self, most: int, order: Order) -> None:
        self._most = most
        self._order = order
        self._blocks: dict[int, int] = {}  # when each was used last, by a counter of uses
        self._used: OrderedDict[int, None] = OrderedDict()
        self._left: OrderedDict[int, None] = OrderedDict()
        self._uses = 0
        self._seen: set[int] = set()
        self._users: Counter[int] = Counter()
        self._latest: dict[str, tuple[int, ...]] = {}
        self.lost = self.known = self.returned = 0
        self.computed: list[int] = []

    def ask(self, asked: Asked) -> None:
        """A prompt, with its answer's agent."""
        _, agent, chain, n_tokens = asked
        there, known = _beginning(chain, self._blocks), _beginning(chain, self._seen)
        self.lost += known - there
        self.known += known
        self.computed.append(n_tokens - there * BLOCK_TOKENS)
        before = self._latest.get(agent, ())
        self.returned += known > max(_common(chain, one) for one in [*self._latest.values(), ()])
        for block in reversed(chain):
            self._uses += 1
            self._blocks[block] = self._uses
            self._left.pop(block, None)
            self._used[block] = None
            self._used.move_to_end(block)
        self._seen.update(chain)
        self._users.update(chain)
        self._users.subtract(before)
        self._latest[agent] = chain
        self._leave(before)
        while len(self._blocks) > self._most:
            self._drop(self._first())

    def _leave(self, chain: tuple[int, ...]) -> None:
        """`chain` is not its agent's any more."""
        if self._order == "last used" or not chain:
            return
        at = 0
        if self._order == "left sooner":
            at = left_at(self._blocks[self._first()], self._uses)
        for block in reversed(chain):
            if self._users[block] or self._blocks.get(block, 0) <= at:
                continue
            if self._order == "dropped":
                self._drop(block)
                continue
            self._blocks[block] = at
            self._used.pop(block, None)
            self._left[block] = None

    def _first(self) -> int:
        """The block to evict."""
        firsts = [next(iter(one)) for one in (self._left, self._used) if one]
        return min(firsts, key=self._blocks.__getitem__)

    def _drop(self, block: int) -> None:
        del self._blocks[block]
        self._left.pop(block, None)
        self._used.pop(block, None)


def requests_of(sessions: Sequence[Sequence[Recorded]], at_once: int) -> list[Asked]:
    """All requests in their order, so many sessions at once."""
    free = [0.0] * at_once
    found: list[Asked] = []
    for number, session in enumerate(sessions):
        start = heappop(free)
        pieces: dict[str, list[int]] = {}
        for request in session:
            prompt = cast(Mapping[str, list[int]], request)["new"]
            own = pieces.get(request["agent"], [])[: request["keep"]] + prompt
            pieces[request["agent"]] = own
            n_tokens = int(cast(Mapping[str, int], request)["in"])
            agent = f"{number}/{request['agent']}"
            found.append((start + request["t"], agent, _chain(number, own), n_tokens))
        heappush(free, start + session[-1]["t"] + PAUSE)
    return sorted(found, key=lambda one: one[:2])


def _chain(session: int, pieces: Sequence[int]) -> tuple[int, ...]:
    """The hashes of a prompt's full blocks; sessions share none."""
    chain: list[int] = []
    before = session
    for at in range(0, len(pieces) - len(pieces) % _PIECES, _PIECES):
        before = hash((before, *pieces[at : at + _PIECES]))
        chain.append(before)
    return tuple(chain)


def _beginning(chain: Sequence[int], blocks: Container[int]) -> int:
    """How many blocks at the beginning of `chain` are among `blocks`."""
    return next((n for n, block in enumerate(chain) if block not in blocks), len(chain))


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(one), len(other)))
