"""Which idle caches are still in the pool when their agents return, with and without their hints.

Run: python -m benchmarks.absence FILE [--output DIR]

Recorded sessions of coding agents are replayed with their times on a virtual clock, through the
pool and the eviction order of the engine; no model runs, so the machine's load changes nothing.
What is evicted is read from the store again, or computed. See `trace_sessions` for the file.
"""

from __future__ import annotations

import argparse
import functools
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from pathlib import Path
from typing import Final, TypedDict, cast

from benchmarks.trace_sessions import recorded_sessions
from experiments.harness.document import Json, Scalar
from experiments.harness.record import Run
from experiments.harness.result import Result, Verdict
from semantic.application.cache.idle_caches import IdleCaches
from semantic.application.cache.read_ahead import ToolTimes
from semantic.domain.entities import AgentBlocks
from semantic.domain.identity import LONGEST_ABSENCE, NO_HINTS, Hints
from semantic.domain.services import BlockPool
from semantic.domain.value_objects import (
    BLOCK_TOKENS,
    CacheKey,
    LayerKind,
    LayerSpec,
    ModelCacheSpec,
)

QUESTION: Final = "What do agents gain that tell when they are done and when they will be back?"
CRITERION: Final = (
    "with right hints at a quarter and at half of the working set fewer tokens are evicted before "
    "their agent returns than without"
)
AT_ONCE: Final = (8, 24)
SHARES: Final = (0.25, 0.5)
ORDERS: Final = 3
"""Orders of the sessions that each figure is the mean of."""
PIECE: Final = 64
"""Tokens of a piece in the recording."""
SCALE: Final = 16
"""Tokens of the recording for one of the replay: blocks are as many times coarser."""
PAUSE: Final = 60.0
"""Seconds between the end of a session and the next one."""
DECODE_RATE: Final = 50.0
"""Tokens per second of a last answer, whose end is not recorded."""
SPEC: Final = ModelCacheSpec((LayerSpec(LayerKind.FULL, 1, 1, 1, itemsize=2),))
Row = dict[str, Scalar]


class Recorded(TypedDict):
    """What is read of a recorded request; `t` and `think` are seconds."""

    agent: str
    t: float
    think: float
    keep: int
    stop: str
    out: int


@dataclass(frozen=True, slots=True)
class Visit:
    """A request from `begin` to `end` in seconds, its tokens with the answer, and those that its
    agent's previous prompt had. `back_at` is when the agent returns, None if it does not."""

    agent: str
    begin: float
    end: float
    n_tokens: int
    reusable: int
    new: int
    calls_tool: bool
    back_at: float | None


Teller = Callable[[Visit], Hints]
"""What an agent says at the end of a visit."""


def silent(_: Visit) -> Hints:
    return NO_HINTS


def done(visit: Visit) -> Hints:
    return Hints(done=visit.back_at is None)


@dataclass(slots=True)
class BackIn:
    """After a tool call: the time until the next request, wrong by one of `factors`."""

    factors: Sequence[float] = (1.0,)
    _draw: random.Random = field(default_factory=lambda: random.Random(0))

    def __call__(self, visit: Visit) -> Hints:
        if visit.back_at is None or not visit.calls_tool:
            return NO_HINTS
        seconds = (visit.back_at - visit.end) * self._draw.choice(self.factors)
        return Hints(back_in=min(seconds, LONGEST_ABSENCE))


class Learned:
    """Nothing is said; the server expects a tool to take its usual time. The recording has no names
    of tools: all are one."""

    def __init__(self) -> None:
        self._now = 0.0
        self._times = ToolTimes(lambda: self._now)
        self._away: list[tuple[float, str]] = []  # back at, agent

    def __call__(self, visit: Visit) -> Hints:
        while self._away and self._away[0][0] <= visit.end:
            self._now, agent = heappop(self._away)
            self._times.returned(agent, "")
        self._now = visit.end
        if not visit.calls_tool:
            return NO_HINTS
        if visit.back_at is not None:
            heappush(self._away, (visit.back_at, visit.agent))
        seconds = self._times.called(visit.agent, "", ["tool"])
        return NO_HINTS if seconds is None else Hints(back_in=seconds)


def both(visit: Visit) -> Hints:
    return done(visit) if visit.back_at is None else BackIn()(visit)


TELLERS: Final[Mapping[str, Callable[[], Teller]]] = {
    "nothing": lambda: silent,
    "done": lambda: done,
    "back_in": BackIn,
    "done and back_in": lambda: both,
    "back_in, doubled": lambda: BackIn((2.0,)),
    "back_in, halved": lambda: BackIn((0.5,)),
    "back_in, halved or doubled": lambda: BackIn((0.5, 2.0)),
    "learned by the server": Learned,
}
BELIEVED: Final[Mapping[str, Callable[[], Teller]]] = {
    "back_in, believed for an hour": BackIn,
    "the same, halved": lambda: BackIn((0.5,)),
}


def visits(sessions: Sequence[Sequence[Recorded]], at_once: int) -> list[Visit]:
    """The requests of `sessions` in their order, so many sessions at once."""
    found: list[Visit] = []
    free = [0.0] * at_once
    for number, session in enumerate(sessions):
        start = heappop(free)
        by_agent: defaultdict[str, list[Recorded]] = defaultdict(list)
        for request in session:
            by_agent[request["agent"]].append(request)
        own = [
            visit
            for agent, requests in by_agent.items()
            for visit in _visits(f"{number}/{agent}", requests, start)
        ]
        heappush(free, max(visit.end for visit in own) + PAUSE)
        found += own
    return found


def _visits(agent: str, requests: Sequence[Recorded], start: float) -> Iterator[Visit]:
    for i, request in enumerate(requests):
        after = requests[i + 1] if i + 1 < len(requests) else None
        if after is None:
            seconds = request["out"] / DECODE_RATE
        else:
            seconds = max(0.0, after["t"] - after["think"] - request["t"])
        n_prompt = int(cast(Mapping[str, int], request)["in"])
        reusable = min(request["keep"] * PIECE, n_prompt) if i else 0
        yield Visit(
            agent,
            start + request["t"],
            start + request["t"] + seconds,
            -(-(n_prompt + request["out"]) // SCALE),
            reusable,
            n_prompt - reusable,
            request["stop"] == "tool_use",
            None if after is None else start + after["t"],
        )


def working_set(found: Sequence[Visit]) -> int:
    """The most tokens, at one time, of agents that have begun and will return."""
    changes: list[tuple[float, int]] = []
    held: dict[str, int] = {}
    for visit in sorted(found, key=lambda one: one.begin):
        changes.append((visit.begin, visit.n_tokens - held.get(visit.agent, 0)))
        held[visit.agent] = visit.n_tokens
        if visit.back_at is None:
            changes.append((visit.end, -visit.n_tokens))
    most = now = 0
    for _, change in sorted(changes):
        now += change
        most = max(most, now)
    return most


class Replay:
    """Visits through a pool and the engine's idle caches; `now` is their clock."""

    def __init__(
        self, n_tokens: int, teller: Teller, longest_expected: float | None = None
    ) -> None:
        self.now = 0.0
        self.pool = BlockPool(SPEC, -(-n_tokens // BLOCK_TOKENS))
        make = functools.partial(IdleCaches, self.pool, lambda: self.now)
        self.idle = make() if longest_expected is None else make(longest_expected=longest_expected)
        self.teller = teller
        self.missed: list[int] = []
        self.to_compute: list[int] = []
        self.unfit = 0

    def run(self, found: Sequence[Visit]) -> None:
        """All visits, in the order of their begins and ends; an end comes first."""
        events = [(visit.end, False, i) for i, visit in enumerate(found)]
        events += [(visit.begin, True, i) for i, visit in enumerate(found)]
        running: dict[int, AgentBlocks] = {}
        # A visit of no seconds would end before it begins.
        for at, begins, i in sorted(events, key=lambda one: (one[0], one[1], one[2])):
            self.now = max(self.now, at)
            if begins:
                cache = self._begin(found[i])
                if cache is not None:
                    running[i] = cache
                if cache is not None and found[i].end <= found[i].begin:
                    self._end(found[i], running.pop(i))
            elif i in running:
                self._end(found[i], running.pop(i))

    def _begin(self, visit: Visit) -> AgentBlocks | None:
        key = CacheKey("", visit.agent)
        cache = self.idle.take(key)
        missed = visit.reusable if cache is None else 0
        self.missed.append(missed)
        self.to_compute.append(visit.new + missed)
        if cache is not None:
            self.pool.free(cache.all_blocks(), visit.agent)
        n_blocks = -(-visit.n_tokens // BLOCK_TOKENS)
        while not self.pool.can_allocate([n_blocks]):
            if not self.idle.evict():
                self.unfit += 1
                return None
        cache = AgentBlocks(visit.agent, visit.n_tokens)
        for block in self.pool.allocate(n_blocks, 0, visit.agent):
            cache.add_block(block)
        return cache

    def _end(self, visit: Visit, cache: AgentBlocks) -> None:
        key = CacheKey("", visit.agent)
        self.idle.put(key, cache)
        self.idle.heed(key, self.teller(visit))


def run(sessions: Sequence[Sequence[Recorded]]) -> Result:
    """Every teller at every share, so many sessions at once."""
    started = Run.start(
        "absence",
        QUESTION,
        model="none: lengths and times of the recording",
        parameters={"sessions": len(sessions), "orders": ORDERS, "tokens_per_token": SCALE},
        seed=0,
    )
    rows = [one for at_once in AT_ONCE for one in _rows(sessions, at_once)]
    left, left_learned = _left(rows, "done and back_in"), _left(rows, "learned by the server")
    summary: dict[str, Json] = {
        "rows": [{**one} for one in rows],
        "fewer_evicted": [round(1 - max(left), 3), round(1 - min(left), 3)],
        "fewer_evicted_learned": [round(1 - max(left_learned), 3), round(1 - min(left_learned), 3)],
    }
    fewest = round(1 - max(left), 3)
    return started.finish(rows, summary, Verdict(CRITERION, 0.0, fewest, fewest > 0))


def _rows(sessions: Sequence[Sequence[Recorded]], at_once: int) -> Iterator[Row]:
    orders = [visits(_shuffled(sessions, seed), at_once) for seed in range(ORDERS)]
    for share in SHARES:
        for name, teller in TELLERS.items():
            yield row(orders, at_once, share, name, teller)
        for name, teller in BELIEVED.items():
            yield row(orders, at_once, share, name, teller, longest_expected=3600.0)


def _left(rows: Sequence[Row], told: str) -> list[float]:
    """What is evicted of what is without hints, at each share."""
    evicted = {
        (one["at_once"], one["share"], one["told"]): float(str(one["evicted"])) for one in rows
    }
    return [
        evicted[at_once, share, told] / evicted[at_once, share, "nothing"]
        for at_once in AT_ONCE
        for share in SHARES
    ]


def row(
    orders: Sequence[Sequence[Visit]],
    at_once: int,
    share: float,
    name: str,
    teller: Callable[[], Teller],
    *,
    longest_expected: float | None = None,
) -> Row:
    """One line of the table.

    `evicted` is the share of the reusable tokens that were no longer in the pool, `returns` that of
    the returns without their cache; `p50` and `p99` are a request's tokens that had to be computed
    or read, in thousands, and `unfit` the requests for which the running ones left no room.
    """
    replays = []
    for found in orders:
        replay = Replay(int(share * working_set(found)), teller(), longest_expected)
        replay.run(found)
        replays.append(replay)
    reusable = sum(visit.reusable for found in orders for visit in found)
    returns = sum(visit.reusable > 0 for found in orders for visit in found)
    loads = sorted(tokens for replay in replays for tokens in replay.to_compute)
    return {
        "at_once": at_once,
        "share": share,
        "told": name,
        "evicted": round(sum(sum(one.missed) for one in replays) / reusable, 4),
        "returns": round(sum(n > 0 for one in replays for n in one.missed) / returns, 4),
        "p50": round(loads[len(loads) // 2] / 1e3, 1),
        "p99": round(loads[int(0.99 * len(loads))] / 1e3, 1),
        "unfit": sum(one.unfit for one in replays),
    }


def _shuffled(sessions: Sequence[Sequence[Recorded]], seed: int) -> list[Sequence[Recorded]]:
    return random.Random(seed).sample(list(sessions), len(sessions))


def main() -> int:
    """1 if hints gain nothing."""
    parser = argparse.ArgumentParser(prog="benchmarks.absence", description=__doc__)
    parser.add_argument("file", type=Path, help="recorded sessions")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    given = parser.parse_args()
    recorded = [cast(Sequence[Recorded], one["requests"]) for one in recorded_sessions(given.file)]
    result = run(recorded)
    result.write(given.output / "absence.json")
    return int(not result.verdict.passed)


if __name__ == "__main__":
    raise SystemExit(main())
