"""Sessions through replicas and one bucket: what is found where, and what is asked for it.

A store that evicts what was used longest ago keeps what was used within some time; that time
follows from its size. So each session is simulated alone, whatever number of them there is. Knows
blocks of recordings and numbers of requests; neither bytes on a wire nor money.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, takewhile
from typing import Final, Literal

from benchmarks.absence import Recorded
from benchmarks.left_histories import Asked, requests_of
from semantic.domain.value_objects import BLOCK_TOKENS
from semantic_fleet.objects.sealing import CHUNK, READ_CHUNKS

SPILLED: Final = 0.05
"""The part of the requests that do not go to their home, with affinity."""
Routing = Literal["affinity", "random"]
Session = list[Asked]
Gaps = list[tuple[float, int]]
"""Seconds until blocks are used again, infinite if they are not, and how many blocks."""


def sessions(recorded: Sequence[Sequence[Recorded]]) -> list[Session]:
    """The requests of each session, in order; all begin at 0."""
    asked = requests_of(recorded, len(recorded))
    by_session = sorted(asked, key=lambda one: (_number(one), one[0]))
    return [list(own) for _, own in groupby(by_session, key=_number)]


def _number(asked: Asked) -> int:
    return int(asked[1].split("/")[0])


def residence(gaps: Sequence[tuple[float, int]], seconds: float) -> float:
    """Block-seconds in a store that keeps a block for so long after its last use."""
    return sum(min(gap, seconds) * n for gap, n in gaps)


# What the object store is asked for: as `RemoteStore` and `Records` do, which a test compares.


def look_up(n_blocks: int, start: int, n_stored: int) -> Counter[str]:
    """Of a prompt of `n_blocks` full blocks of which `start` are known and `n_stored` stored."""
    heads, low, high, middle = 0, start, n_blocks, start + 1
    while low < high:
        heads += 1
        low, high = (middle, high) if middle <= n_stored else (low, middle - 1)
        middle = (low + high + 1) // 2
    return Counter(HEAD=heads, LIST=1 + (low > 0))


def moved(n_turns: int) -> Counter[str]:
    """Of an agent that another replica has served last: its manifest, the end of its history, and
    its recorded turns."""
    return Counter(GET=2 + n_turns)


def read(n_blocks: int, block_bytes: int) -> Counter[str]:
    """Of the bodies of blocks."""
    return Counter(GET=n_blocks * -(-block_bytes // (CHUNK * READ_CHUNKS)))


def end_of_turn(
    n_new: int, *, has_tail: bool, is_first: bool, replaces_tail: bool = False
) -> Counter[str]:
    """Of a turn's new blocks, its end, its manifest and its record; and of the end of the turn
    before, which it replaces: whether others have it, and its deletion, one call."""
    blocks = n_new + has_tail
    return Counter(
        HEAD=blocks + replaces_tail,
        PUT=blocks + has_tail + 1 + 1,
        LIST=1,
        DELETE=(0 if is_first else 1) + replaces_tail,
    )


@dataclass(slots=True)
class Use:
    """What a simulation counted: blocks of prompts, and requests by their kind."""

    ceiling: int = 0
    """Blocks of prompts that an earlier prompt of the session had."""
    local: int = 0
    read: int = 0
    computed: int = 0
    uploaded: int = 0
    small: int = 0
    """Objects that are no blocks."""
    requests: Counter[str] = field(default_factory=Counter)
    bucket_gaps: Gaps = field(default_factory=list)


@dataclass(slots=True)
class _Session:
    """A session in progress: when each block was last used, and where."""

    home: int
    here: dict[int, dict[int, float]] = field(default_factory=dict)
    """Of each replica."""
    bucket: dict[int, float] = field(default_factory=dict)
    """When each block was last used; later than now while it waits to be uploaded."""
    seen: set[int] = field(default_factory=set)
    served: dict[str, int] = field(default_factory=dict)
    """The replica that served each agent last."""
    visited: dict[int, float] = field(default_factory=dict)
    turns: Counter[str] = field(default_factory=Counter)
    with_tail: set[str] = field(default_factory=set)
    """Agents whose last turn has ended with a partial block."""


@dataclass(frozen=True, slots=True)
class Replicas:
    """A fleet: how requests are routed, how often replicas are lost, and what the bucket keeps."""

    routing: Routing
    n_hosts: int
    losses_per_second: float
    upload_rate: float
    bytes_per_block: int
    bucket_seconds: float
    uploaded: float = 1.0
    """The part of the turns whose blocks are not dropped because the queue is full."""
    seed: int = 0

    def gaps(self, found: Sequence[Session]) -> Gaps:
        """How long after its use at a replica each block is used there again."""
        draw, gaps = random.Random(self.seed), Counter[float]()
        for session in found:
            state = _Session(draw.randrange(self.n_hosts))
            for at, _, chain, _ in session:
                gaps.update(_used(state.here.setdefault(self._host(state, draw), {}), chain, at))
            for blocks in state.here.values():
                gaps[float("inf")] += len(blocks)
        return list(gaps.items())

    def run(self, found: Sequence[Session], kept_seconds: float) -> Use:
        """All sessions, with replicas that keep a block so long after its last use."""
        draw, use, gaps = random.Random(self.seed), Use(), Counter[float]()
        for session in found:
            state = _Session(draw.randrange(self.n_hosts))
            for asked in session:
                host = self._host(state, draw)
                self._lose(state, host, asked[0], draw)
                is_uploaded = draw.random() < self.uploaded
                self._ask(state, host, asked, kept_seconds, use, gaps, is_uploaded=is_uploaded)
            gaps[float("inf")] += len(state.bucket)
        use.bucket_gaps = list(gaps.items())
        return use

    def _host(self, state: _Session, draw: random.Random) -> int:
        if self.routing == "random" or draw.random() < SPILLED:
            return draw.randrange(self.n_hosts)
        return state.home

    def _lose(self, state: _Session, host: int, now: float, draw: random.Random) -> None:
        """Maybe a replica was lost since its last visit, with what it had not uploaded."""
        before = state.visited.get(host)
        state.visited[host] = now
        if before is None or not self.losses_per_second:
            return
        lost = before + draw.expovariate(self.losses_per_second)
        if lost >= now:
            return
        state.here.pop(host, None)
        waiting = [block for block, used in state.bucket.items() if used > lost]
        for block in waiting:
            del state.bucket[block]

    def _ask(
        self,
        state: _Session,
        host: int,
        asked: Asked,
        kept_seconds: float,
        use: Use,
        gaps: Counter[float],
        *,
        is_uploaded: bool,
    ) -> None:
        now, agent, chain, n_tokens = asked
        here = state.here.setdefault(host, {})
        local = _prefix(here, chain, now, kept_seconds)
        stored = _prefix(state.bucket, chain, now, self.bucket_seconds)
        known = len(list(takewhile(state.seen.__contains__, chain)))
        has_moved = state.served.get(agent, host) != host
        reads = max(0, stored - local)
        use.ceiling += known
        use.local += local
        use.read += reads
        use.computed += len(chain) - local - reads
        if local < len(chain):
            use.requests += look_up(len(chain), local, max(local, stored))
        if has_moved:
            use.requests += moved(state.turns[agent])
        use.requests += read(reads, self.bytes_per_block)
        new = chain[max(local, stored) :] if is_uploaded else ()
        has_tail = n_tokens % BLOCK_TOKENS > 0
        is_first = not state.turns[agent]
        use.requests += end_of_turn(
            len(new),
            has_tail=has_tail,
            is_first=is_first,
            replaces_tail=agent in state.with_tail and is_uploaded,
        )
        state.with_tail -= {agent}
        state.with_tail |= {agent} if has_tail else set()
        use.uploaded += len(new)
        use.small += 1 + 2 * has_tail + is_first
        there = now + len(new) * self.bytes_per_block / self.upload_rate
        gaps.update(_used(state.bucket, chain[:stored], now))
        gaps.update(_used(state.bucket, new, there))
        _used(here, chain, now)
        state.seen.update(chain)
        state.served[agent] = host
        state.turns[agent] += 1


def _prefix(blocks: dict[int, float], chain: Sequence[int], now: float, seconds: float) -> int:
    """How many of a chain's first blocks are there and were used within some time."""
    return len(list(takewhile(lambda one: 0 <= now - blocks.get(one, -1e12) <= seconds, chain)))


def _used(blocks: dict[int, float], chain: Sequence[int], now: float) -> Iterator[float]:
    """Note a use; yields the seconds since the one before, of blocks that had one."""
    found = [max(0.0, now - blocks[one]) for one in chain if one in blocks]
    blocks.update(dict.fromkeys(chain, now))
    return iter(found)
