"""BreakEven: whether a stored prefix is read, or computed again because that is faster.

Of each tier it learns what a load costs, a fixed part and a part per byte, from few loads of which
some were slowed down by something else. Knows neither how a body is read nor a clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from math import inf, log
from typing import NamedTuple

from semantic.domain.stored import Tier
from semantic.domain.value_objects import BLOCK_TOKENS

_LOADS = 10
"""Loads by which the cost of a tier is known: the last ones."""
_OLDER = 0.6
"""Weight of a load beside the next one. With `_ABOVE` a tier counts as slow after three slow loads
in a row, and as fast after a single fast one: other work makes a load slower, none faster."""
_ABOVE = 2.0
"""A line above a load is so many times as wrong as one below it."""
_ALIKE = 0.05
"""Lines whose errors differ by so little, as a part of the seconds, are equally likely."""
_TRIALS = 3
"""A local tier is read so often before it may count as slower than computing: it rarely is, and the
first loads of a process often are."""
_MOST_LOST = 1 / 4
"""A load is given up when so much of the time of computing its prefix is lost by it."""
_FIRST_PROBE, _LATER_PROBES = 1 / 8, 1 / 64
"""What measuring a slow tier again may cost, as a part of the time of computing what was skipped:
at first, and at last."""
FEWEST_AT_ONCE = 8
"""Bodies of the first reads of a load, unless little is known: as many as a store reads at once."""

_SLOWEST_FIRST = (Tier.REMOTE, Tier.DISK, Tier.UPLOADS, Tier.QUEUE, Tier.MEMORY)


@dataclass(frozen=True, slots=True)
class Terms:
    """On which a prefix is read.

    Computing it takes `seconds`. Whether reading is overtaken by that is asked after `first`
    bodies, and again after each time as many more as before.
    """

    seconds: float = inf
    first: int = FEWEST_AT_ONCE

    def overtaken(self, seconds: float, part: float, *, divisible: bool) -> bool:
        """Whether it is faster to compute the rest than to read it, and much time is lost already.

        `part` (more than 0) of the prefix was read in `seconds`; of one that is not `divisible`
        nothing can be used until all of it is read.
        """
        saved = part * self.seconds if divisible else 0.0
        rest = seconds * (1 - part) / part
        return seconds - saved > _MOST_LOST * self.seconds and rest > self.seconds - saved


NEVER_GIVEN_UP = Terms()
"""Terms of what is read however long it takes."""


class Line(NamedTuple):
    """What loads cost: seconds whatever their size, and seconds per byte."""

    fixed: float
    per_byte: float

    def seconds(self, n_bytes: float) -> float:
        """Of a load of so many bytes."""
        return self.fixed + n_bytes * self.per_byte


class TierCost:
    """What loads from one tier cost, and what it may cost to measure that again."""

    def __init__(self, trials: int) -> None:
        """It is not known before `trials` loads."""
        self._trials = trials
        self._loads: deque[tuple[float, float]] = deque(maxlen=_LOADS)  # bytes, seconds
        self._lines: list[Line] = []
        self._skipped = 0.0
        self._probe = _FIRST_PROBE

    @property
    def is_measured(self) -> bool:
        """Whether there was a load."""
        return bool(self._loads)

    @property
    def is_known(self) -> bool:
        """Whether there were enough loads to trust what they say."""
        return len(self._loads) >= self._trials

    @property
    def largest(self) -> float:
        """Bytes of the largest read that its cost is known by; 0 before the first."""
        return max((n_bytes for n_bytes, _ in self._loads), default=0.0)

    def observe(self, n_bytes: float, seconds: float) -> None:
        """Learn from a load: what its reads took on average."""
        self._loads.append((n_bytes, seconds))
        self._lines = _likely_lines(list(self._loads))

    def seconds(self, n_bytes: float) -> float:
        """Expected of a load; 0 before the first.

        The least of what is likely: after loads of one size a larger one may cost no more, and is
        tried, since it can be given up.
        """
        return min((line.seconds(n_bytes) for line in self._lines), default=0.0)

    def is_worth_it(self) -> None:
        """Loads are expected to be faster than computing: nothing is to be measured again."""
        self._skipped, self._probe = 0.0, _FIRST_PROBE

    def is_probed(self, loss: float, seconds: float) -> bool:
        """Whether to read for once what takes `seconds` to compute, which is expected to be a
        `loss` of so many seconds: if that is little beside all that was computed instead."""
        if loss > self._probe * self._skipped:
            self._skipped += seconds
            return False
        self._skipped, self._probe = 0.0, max(_LATER_PROBES, self._probe / 2)
        return True


class BreakEven:
    """Compares the time to restore a prefix with the time to compute it.

    Both are measured while running: of a load everything that is done until the sequence has the
    blocks, for each tier.
    """

    def __init__(self, prefill_seconds: Callable[[int], float | None]) -> None:
        """`prefill_seconds` is expected of so many prompt tokens, None before the first chunk."""
        self._prefill_seconds = prefill_seconds
        self._costs = {tier: TierCost(1 if tier is Tier.REMOTE else _TRIALS) for tier in Tier}

    def terms(self, n_bytes: Mapping[Tier, int], n_tokens: int) -> Terms | None:
        """How to load `n_bytes` by tier; None if computing `n_tokens` is expected to be faster.

        A tier that is not known is expected to cost nothing, so that it is measured. One that is
        slower is measured again at times. A network that was never measured is, as that, begun with
        a single body.
        """
        seconds = self._prefill_seconds(n_tokens)
        if seconds is None:
            return NEVER_GIVEN_UP
        costs = {self._costs[tier]: n_bytes[tier] for tier in _SLOWEST_FIRST if n_bytes.get(tier)}
        expected = {cost: cost.seconds(n) for cost, n in costs.items() if cost.is_known}
        slowest = max(expected, key=expected.__getitem__, default=None)
        loss = sum(expected.values()) - seconds
        blocks = max(1, n_tokens / BLOCK_TOKENS)
        if slowest is not None and loss > 0:
            one_block = slowest.seconds(costs[slowest] / blocks)
            loss = min(loss, 2 * _MOST_LOST * seconds + one_block)
            return Terms(seconds, 1) if slowest.is_probed(loss, seconds) else None
        for cost in expected:
            cost.is_worth_it()
        remote = self._costs[Tier.REMOTE]
        if remote in costs and not remote.is_measured:
            return Terms(seconds, 1)
        if len(expected) < len(costs):
            return Terms(seconds)
        # Of what is known no read is split without need: each has a fixed cost.
        tried = min((2 * cost.largest / n for cost, n in costs.items()), default=0.0)
        return Terms(seconds, max(FEWEST_AT_ONCE, int(tried * blocks)))

    def observe(self, n_bytes: Mapping[Tier, int], seconds: float, n_reads: int = 1) -> None:
        """Record a load of `n_bytes` by tier that took `seconds` for so many reads, one after the
        other.

        It measures the tier that it is expected to have taken longest for; the others take their
        usual time.
        """
        costs = {tier: self._costs[tier] for tier in _SLOWEST_FIRST if n_bytes.get(tier)}
        if not costs or seconds <= 0:
            return
        expected = {
            tier: n_reads * cost.seconds(n_bytes[tier] / n_reads) for tier, cost in costs.items()
        }
        slowest = max(costs, key=lambda tier: expected[tier] if costs[tier].is_measured else inf)
        others = sum(expected.values()) - expected[slowest]
        rest = max(seconds - others, seconds * n_bytes[slowest] / total(n_bytes))
        costs[slowest].observe(n_bytes[slowest] / n_reads, rest / n_reads)


def total(n_bytes: Mapping[Tier, int]) -> int:
    """Bytes of all tiers."""
    return sum(n_bytes.values())


def _likely_lines(loads: list[tuple[float, float]]) -> list[Line]:
    """The lines through one or two of `loads`, oldest first, that fit best to all of them.

    By the weighted sum of deviations, not of their squares: it has its least value at such a line,
    and a load that something else has slowed down by far does not move it.
    """
    weights = [_OLDER**age for age in range(len(loads) - 1, -1, -1)]
    errors = [
        (
            sum(
                weight * _deviation(line.seconds(n_bytes) / seconds)
                for (n_bytes, seconds), weight in zip(loads, weights, strict=True)
            ),
            line,
        )
        for line in _lines(loads)
    ]
    most = min(error for error, _ in errors) + _ALIKE * sum(weights)
    return [line for error, line in errors if error <= most]


def _lines(loads: list[tuple[float, float]]) -> Iterator[Line]:
    """All lines through one or two of `loads` on which neither part is negative."""
    for n_bytes, seconds in loads:
        yield Line(seconds, 0.0)
        yield Line(0.0, seconds / n_bytes)
    for (n_bytes, seconds), (more, longer) in combinations(sorted(loads), 2):
        if more > n_bytes and longer > seconds:
            per_byte = (longer - seconds) / (more - n_bytes)
            if (fixed := seconds - n_bytes * per_byte) > 0:
                yield Line(fixed, per_byte)


def _deviation(ratio: float) -> float:
    """How wrong an expectation is that is `ratio` times what was measured."""
    return _ABOVE * log(ratio) if ratio > 1 else -log(ratio)
