"""What hints, tool times and reading ahead gain: milliseconds to the first token of a return.

Run: python -m benchmarks.returns FILE [--output DIR]

Recorded sessions of coding agents on a virtual clock, through the pool, the eviction order and the
tool times of the engine; restoring, reading ahead and prefill take the time that was measured on a
GPU. No model runs, so the machine's load changes nothing. See `trace_sessions` for the file.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from pathlib import Path
from typing import Final, NamedTuple, cast

from benchmarks.absence import (
    AT_ONCE,
    SCALE,
    SHARES,
    SPEC,
    BackIn,
    Learned,
    Recorded,
    Row,
    Teller,
    Visit,
    both,
    silent,
    visits,
    working_set,
)
from benchmarks.left_histories import SHARES as LEFT_SHARES
from benchmarks.left_histories import left_histories
from benchmarks.trace_sessions import recorded_sessions
from experiments.harness.document import Json
from experiments.harness.record import Run
from experiments.harness.result import Result, Verdict
from semantic.application.cache.idle_caches import IdleCaches
from semantic.application.cache.read_ahead import LEAD
from semantic.domain.entities import AgentBlocks
from semantic.domain.services import BlockPool
from semantic.domain.value_objects import BLOCK_TOKENS, CacheKey

QUESTION: Final = "What do hints, tool times, reading ahead and histories that are kept gain?"
CRITERION: Final = (
    "no row of what the server does has a mean time to the first token of more than 1.02 of that "
    "of the row without it"
)
MOST: Final = 1.02
RESULTS: Final = Path(__file__).parent / "results"
ORDERS: Final = 3
"""Orders of the sessions that each figure is of."""
TIER: Final = 0.25
"""The memory tier's part of the pool, as by default."""
FIRST_STEP: Final = 0.03
"""Seconds from the end of the prefill to the first token."""


class Speeds(NamedTuple):
    """Tokens per second: computed, and restored from disk and from memory."""

    prefill: float
    disk: float
    memory: float


def measured() -> Speeds:
    """Those of 32,768 tokens on a GPU, in the shape of Llama 3.1 8B."""
    prefill = json.loads((RESULTS / "gpu_prefill.json").read_text("utf-8"))["summary"]["lines"]
    restore = json.loads((RESULTS / "gpu_restore.json").read_text("utf-8"))
    of = {one["what"]: one for one in restore if "gb_s" in one}
    [long] = [one for one in prefill if one["what"] == "alone" and one["tokens"] == 32768][:1]
    bytes_per_token = of["restore from disk"]["tiers"]["disk"] / of["restore from disk"]["cached"]
    disk, memory = (of[f"restore from {tier}"]["gb_s"] * 1e9 for tier in ("disk", "memory"))
    return Speeds(float(long["tok_s"]), disk / bytes_per_token, memory / bytes_per_token)


@dataclass(frozen=True, slots=True)
class Way:
    """What agents tell, and what is read ahead: for them `when_expected`, for their requests
    `when_waiting` for room, and from `on_arrival` seconds before a request is submitted, while
    its body is read, rendered and tokenised."""

    teller: Callable[[], Teller] = lambda: silent
    when_expected: bool = False
    when_waiting: bool = False
    on_arrival: float = 0.0


def halved() -> Teller:
    return BackIn((0.5,))


def doubled() -> Teller:
    return BackIn((2.0,))


WAYS: Final[Mapping[str, Way]] = {
    "nothing": Way(),
    "done and back_in": Way(lambda: both),
    "done and back_in, read ahead": Way(lambda: both, when_expected=True),
    "back_in, halved": Way(halved),
    "back_in, halved, read ahead": Way(halved, when_expected=True),
    "back_in, doubled": Way(doubled),
    "back_in, doubled, read ahead": Way(doubled, when_expected=True),
    "tool times": Way(Learned),
    "tool times, read ahead": Way(Learned, when_expected=True),
    "read ahead while waiting": Way(when_waiting=True),
    "read ahead 20 ms before": Way(on_arrival=0.02),
    "read ahead 100 ms before": Way(on_arrival=0.1),
    "what the server does": Way(Learned, when_expected=True, when_waiting=True),
    "the same, and hints": Way(lambda: both, when_expected=True, when_waiting=True),
}
PAIRS: Final = (
    ("done and back_in, read ahead", "done and back_in"),
    ("back_in, halved, read ahead", "back_in, halved"),
    ("back_in, doubled, read ahead", "back_in, doubled"),
    ("tool times", "nothing"),
    ("tool times, read ahead", "tool times"),
    ("read ahead while waiting", "nothing"),
    ("what the server does", "nothing"),
)
"""What is done, and the same without it."""


class Tier:
    """The memory tier: the beginnings of the agents' histories that were used last."""

    def __init__(self, n_tokens: float) -> None:
        self._room = self.n_tokens = n_tokens
        self._of: OrderedDict[str, float] = OrderedDict()

    def of(self, agent: str) -> float:
        """Tokens of the agent."""
        return self._of.get(agent, 0.0)

    def put(self, agent: str, n_tokens: float) -> None:
        """Replace what there is of an agent; others lose their ends for it."""
        self._room += self._of.pop(agent, 0.0)
        self._of[agent] = min(n_tokens, self.n_tokens)
        self._room -= self._of[agent]
        while self._room < 0:
            oldest = next(iter(self._of))
            lost = min(self._of[oldest], -self._room)
            self._room += lost
            self._of[oldest] -= lost
            if not self._of[oldest]:
                del self._of[oldest]


@dataclass(slots=True)
class Reading:
    """What is read ahead of an agent: from `begin` on, `have` tokens being there already."""

    begin: float
    have: float
    n_tokens: float


class Replay:
    """Visits through a pool, a memory tier and a disk that takes one load after the other."""

    def __init__(self, found: Sequence[Visit], n_tokens: int, way: Way, speeds: Speeds) -> None:
        """`n_tokens` is the size of the pool, in tokens of the replay."""
        self.now = 0.0
        self.pool = BlockPool(SPEC, -(-n_tokens // BLOCK_TOKENS))
        self.idle = IdleCaches(self.pool, lambda: self.now)
        self.tier = Tier(TIER * n_tokens * SCALE)
        self.way, self.teller, self.speeds = way, way.teller(), speeds
        self.seconds: list[float] = []
        self.waited = 0.0
        self.evicted = 0
        self._disk = self._ahead = self._model = 0.0  # when each is free
        self._reading: dict[str, Reading] = {}
        self._waiting: deque[tuple[Visit, float]] = deque()
        self._running: dict[str, AgentBlocks] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._next: dict[str, deque[Visit]] = {}
        for visit in found:
            self._next.setdefault(visit.agent, deque()).append(visit)

    def run(self) -> None:
        """All visits; an agent returns as long after its answer as it did in the recording."""
        for agent in self._next:
            first = self._next[agent].popleft()
            self._at(first.begin, self._begin, first)
        while self._events:
            self.now, _, happens = heappop(self._events)
            happens()

    def _at(self, when: float, what: Callable[[Visit], None], visit: Visit) -> None:
        heappush(self._events, (when, next(self._numbers), lambda: what(visit)))

    def _begin(self, visit: Visit) -> None:
        if self._admit(visit, self.now):
            return
        self._waiting.append((visit, self.now))
        if self.way.when_waiting and visit.reusable:
            self._read_ahead(visit, visit.reusable)

    def _admit(self, visit: Visit, asked: float) -> bool:
        """Give a request its blocks, and account for the time to its first token."""
        key = CacheKey("", visit.agent)
        cache = self.idle.take(key)
        n_blocks = -(-visit.n_tokens // BLOCK_TOKENS)
        kept = 0 if cache is None else self.pool.view(visit.agent).n_blocks
        if not self._make_room(n_blocks - kept):
            if cache is not None:
                self.idle.put(key, cache)
            return False
        if cache is not None:
            self.pool.free(cache.all_blocks(), visit.agent)
        mine = self._running[visit.agent] = AgentBlocks(visit.agent, visit.n_tokens)
        for block in self.pool.allocate(n_blocks, 0, visit.agent):
            mine.add_block(block)
        first = self._first_token(visit, visit.reusable if cache is None else 0)
        self.seconds.append(first - self.now)
        self.waited += self.now - asked
        self._at(max(first, self.now + visit.end - visit.begin), self._end, visit)
        return True

    def _make_room(self, n_blocks: int) -> bool:
        if not self.pool.can_allocate([max(0, n_blocks)], after_eviction=True):
            return False
        while not self.pool.can_allocate([max(0, n_blocks)]):
            if not self.idle.evict():
                return False
        return True

    def _first_token(self, visit: Visit, missing: int) -> float:
        """When it comes. One load and one prompt go after the other."""
        loaded = self.now
        self.evicted += missing
        self._stop_reading(visit.agent)
        if missing:
            near = min(missing, self.tier.of(visit.agent))
            seconds = (missing - near) / self.speeds.disk
            seconds -= min(seconds, self.way.on_arrival)
            loaded = self._disk = max(self.now, self._disk) + seconds
            for one in self._reading.values():  # loads go first
                one.begin += seconds
            loaded += near / self.speeds.memory
        self._model = max(loaded, self._model) + visit.new / self.speeds.prefill
        return self._model + FIRST_STEP

    def _end(self, visit: Visit) -> None:
        cache = self._running.pop(visit.agent)
        key = CacheKey("", visit.agent)
        self.idle.put(key, cache)
        self.tier.put(visit.agent, visit.n_tokens * SCALE)
        back_at = None
        if visit.back_at is not None:
            back_at = self.now + max(0.0, visit.back_at - visit.end)
            self._at(back_at, self._begin, self._next[visit.agent].popleft())
        hints = self.teller(replace(visit, end=self.now, back_at=back_at))
        self.idle.heed(key, hints)
        if self.way.when_expected and hints.back_in is not None and back_at is not None:
            due = self.now + max(0.0, hints.back_in - LEAD)
            if due < back_at:
                self._at(due, self._expected, visit)
        waiting, self._waiting = self._waiting, deque()
        while waiting:
            one = waiting.popleft()
            if not self._admit(*one):
                self._waiting.extend([one, *waiting])
                return

    def _expected(self, visit: Visit) -> None:
        if self.idle.get(CacheKey("", visit.agent)) is None:
            self._read_ahead(visit, visit.n_tokens * SCALE)

    def _read_ahead(self, visit: Visit, n_tokens: float) -> None:
        held = sum(one.n_tokens for agent, one in self._reading.items() if agent != visit.agent)
        have = self.tier.of(visit.agent)
        n_tokens = min(n_tokens, self.tier.n_tokens / 2 - held)
        if n_tokens <= have:
            return
        begin = max(self.now, self._ahead, self._disk)
        self._ahead = begin + (n_tokens - have) / self.speeds.disk
        self._reading[visit.agent] = Reading(begin, have, n_tokens)

    def _stop_reading(self, agent: str) -> None:
        """What was read ahead until now is in memory."""
        one = self._reading.pop(agent, None)
        if one is not None:
            read = max(0.0, self.now - one.begin) * self.speeds.disk
            self.tier.put(agent, min(one.n_tokens, one.have + read))


def run(sessions: Sequence[Sequence[Recorded]]) -> Result:
    """Every way at every share, so many sessions at once; and histories that are left."""
    speeds = measured()
    started = Run.start(
        "returns",
        QUESTION,
        model="none: lengths and times of the recording, speeds of gpu_restore and gpu_prefill",
        parameters={
            "sessions": len(sessions),
            "orders": ORDERS,
            **{f"{name}_tok_s": round(n) for name, n in speeds._asdict().items()},
        },
        seed=0,
    )
    rows = [one for at_once in AT_ONCE for one in _rows(sessions, at_once, speeds)]
    left = list(left_histories(sessions, speeds.prefill))
    worst = max(_ratios(rows))
    summary: dict[str, Json] = {
        "rows": [{**one} for one in rows],
        "left": [{**one} for one in left],
        "worst": round(worst, 3),
        "left_more_lost": max(_left_more_lost(left)),
    }
    return started.finish(rows, summary, Verdict(CRITERION, MOST, round(worst, 3), worst <= MOST))


def _left_more_lost(rows: Sequence[Row]) -> Iterator[float]:
    """For each size of the store, by how much more is lost in the order of our stores than in that
    of last use."""
    lost = {(row["share"], row["order"]): float(str(row["lost"])) for row in rows}
    for share in LEFT_SHARES:
        yield round(lost[share, "left sooner"] - lost[share, "last used"], 5)


def _ratios(rows: Sequence[Row]) -> Iterator[float]:
    mean = {(row["at_once"], row["share"], row["way"]): float(str(row["mean"])) for row in rows}
    for at_once in AT_ONCE:
        for share in SHARES:
            for with_it, without in PAIRS:
                yield mean[at_once, share, with_it] / mean[at_once, share, without]


def _rows(sessions: Sequence[Sequence[Recorded]], at_once: int, speeds: Speeds) -> Iterator[Row]:
    orders = [
        visits(random.Random(seed).sample(list(sessions), len(sessions)), at_once)
        for seed in range(ORDERS)
    ]
    for share in SHARES:
        for name, way in WAYS.items():
            yield row(orders, at_once, share, name, way, speeds)


def row(
    orders: Sequence[Sequence[Visit]],
    at_once: int,
    share: float,
    name: str,
    way: Way,
    speeds: Speeds,
) -> Row:
    """One line of the table: milliseconds from the moment that the pool has room for a request to
    its first token.

    `evicted` is the share of the reusable tokens that were no longer in the pool, `waited` the mean
    time in milliseconds until there was room.
    """
    replays = []
    for found in orders:
        longest = max(visit.n_tokens for visit in found) + BLOCK_TOKENS  # each must fit alone
        size = max(int(share * working_set(found)), longest)
        replays.append(Replay(found, size, way, speeds))
        replays[-1].run()
    reusable = sum(visit.reusable for found in orders for visit in found)
    times = sorted(1e3 * seconds for replay in replays for seconds in replay.seconds)
    percentiles = {f"p{n}": round(times[int(n / 100 * len(times))]) for n in (50, 90, 95, 99)}
    return {
        "at_once": at_once,
        "share": share,
        "way": name,
        "evicted": round(sum(one.evicted for one in replays) / reusable, 4),
        **percentiles,
        "mean": round(statistics.fmean(times)),
        "waited": round(1e3 * sum(one.waited for one in replays) / len(times)),
    }


def main() -> int:
    """1 if something that the server does makes first tokens later."""
    parser = argparse.ArgumentParser(prog="benchmarks.returns", description=__doc__)
    parser.add_argument("file", type=Path, help="recorded sessions")
    parser.add_argument("--output", type=Path, default=RESULTS)
    given = parser.parse_args()
    recorded = [cast(Sequence[Recorded], one["requests"]) for one in recorded_sessions(given.file)]
    result = run(recorded)
    result.write(given.output / "returns.json")
    return int(not result.verdict.passed)


if __name__ == "__main__":
    raise SystemExit(main())
