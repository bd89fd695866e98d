"""Restores prefixes: reads block bodies into a sequence's memory while other sequences decode.

The stepping thread says where they go and takes the result; reading, verifying and copying run in
threads of their own, and end when computing overtakes them. BreakEven decides whether a prefix is
read at all: of each tier it learns what a load costs, a fixed part and a part per byte, from few
loads of which some were slowed down by something else. Knows the ports; not requests.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import combinations, pairwise
from math import inf, log
from typing import NamedTuple

from semantic.application.cache.prefix_lookup import StoredPrefix
from semantic.domain.block_hash import BlockKey, Part
from semantic.domain.errors import CacheReconstructionError
from semantic.domain.match import MatchEnd
from semantic.domain.stored import BlockHeader, BlockRead, Tier
from semantic.domain.value_objects import BLOCK_TOKENS, SequenceId
from semantic.ports.generation import BatchBackend, BodyTarget, Clock
from semantic.ports.store import CacheStorePort

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


Target = tuple[BlockHeader, BodyTarget]
"""A body, and where it goes."""

_THREADS = 4
"""Concurrent loads; the store reads the bodies of each in parallel besides."""
_GROUP_BYTES = 256 << 20
"""Bytes that a load reads before they are copied to where they stay: the memory that it needs."""


@dataclass(frozen=True, slots=True)
class ReadBodies:
    """Result of reading: how many bodies were verified before the first that was not, the
    checkpoint's bytes, in how many groups and seconds, and whether it was given up because
    computing the rest is faster."""

    n_verified: int
    checkpoint: bytes | None
    n_groups: int
    seconds: float
    overtaken: bool


@dataclass(frozen=True, slots=True)
class Load:
    """A prefix that is being read into a sequence on `terms`; it took `seconds` to begin."""

    prefix: StoredPrefix
    terms: Terms
    sequence: SequenceId
    seconds: float
    future: Future[ReadBodies]
    given_up: threading.Event

    @property
    def done(self) -> bool:
        return self.future.done()


@dataclass(frozen=True, slots=True)
class Loaded:
    """How many tokens the sequence holds after a load, why not all that were expected, and the
    seconds that it took: to begin, to read and to finish, without what it waited for others.

    `bytes_by_tier` were read, in `n_reads` reads one after the other.
    """

    length: int
    end: MatchEnd
    seconds: float
    bytes_by_tier: Mapping[Tier, int]
    n_reads: int


class Loader:
    """Loads prefixes from one store into sequences of one model."""

    def __init__(
        self, model: BatchBackend, store: CacheStorePort, clock: Clock = time.perf_counter
    ) -> None:
        self._model = model
        self._layout = model.layout()
        self._store = store
        self._clock = clock
        self._group_bytes = _GROUP_BYTES
        self._threads: Executor = ThreadPoolExecutor(_THREADS, thread_name_prefix="load")
        self._loads = 0  # in progress, guarded by `_ended`
        self._ended = threading.Condition()

    def keep_within(self, n_bytes: int) -> None:
        """Have at most so many bytes read, by all loads together, that are not copied."""
        self._group_bytes = min(_GROUP_BYTES, n_bytes // _THREADS)

    def begin(
        self, prefix: StoredPrefix, sequence: SequenceId, terms: Terms = NEVER_GIVEN_UP
    ) -> Load:
        """Start to read `prefix` into `sequence`, which holds the tokens before `prefix.start`.

        It is given up when computing the rest is faster. Raises BackendError when there is no
        memory for it.
        """
        started = self._clock()
        targets = self._targets(prefix.full, sequence, Part.FULL, prefix.start, prefix.length)
        if prefix.window:
            first = prefix.window[0].link.start
            targets += self._targets(prefix.window, sequence, Part.WINDOW, first, prefix.length)
        size = max(FEWEST_AT_ONCE, self._group_bytes * len(targets) // max(1, prefix.n_bytes))
        ends = [0, *group_ends(terms.first, size, len(targets))]
        groups = [targets[start:stop] for start, stop in pairwise(ends)]
        given_up = threading.Event()
        with self._ended:
            self._loads += 1
        future = self._threads.submit(self._read, groups, prefix.checkpoint, terms, given_up)
        future.add_done_callback(self._count_down)
        return Load(prefix, terms, sequence, self._clock() - started, future, given_up)

    def finish(self, load: Load) -> Loaded:
        """Give the sequence the verified blocks of a `load` that is done.

        A prefix with a checkpoint is restored whole or not at all. Raises BackendError.
        """
        read, prefix = load.future.result(), load.prefix
        started = self._clock()
        n_bodies = len(prefix.full) + len(prefix.window)
        complete = read.n_verified == n_bodies and (
            prefix.checkpoint is None or read.checkpoint is not None
        )
        if complete:
            length = prefix.length
        elif prefix.checkpoint is not None:
            length = prefix.start
        else:
            length = min(prefix.start + read.n_verified * BLOCK_TOKENS, prefix.length)
        try:
            self._model.loaded(load.sequence, length, read.checkpoint if complete else None)
        except CacheReconstructionError:
            length, complete = prefix.start, False  # the tokens are computed instead
        end = prefix.end if complete else MatchEnd.DAMAGED
        # The one that was not verified took its time, too.
        n_read = len(prefix.headers) if complete else read.n_verified + 1
        if read.overtaken:
            end, n_read = MatchEnd.SLOWER, read.n_verified
        seconds = load.seconds + read.seconds + self._clock() - started
        n_bytes = prefix.bytes_of(prefix.headers[:n_read])
        return Loaded(length, end, seconds, n_bytes, max(1, read.n_groups))

    def give_up(self, load: Load) -> None:
        """The sequence is being closed: read no more than what has begun."""
        load.given_up.set()

    def wait(self, loads: Iterable[Load], seconds: float) -> None:
        """Return when one of `loads` is done, or after `seconds`."""
        wait([load.future for load in loads], seconds, return_when="FIRST_COMPLETED")

    def wait_until_idle(self, seconds: float) -> bool:
        """Return when no load is in progress, or after `seconds`; whether none is. Thread-safe."""
        with self._ended:
            return self._ended.wait_for(lambda: not self._loads, seconds)

    def close(self) -> None:
        """End the threads after the reads in progress."""
        self._threads.shutdown()

    def _count_down(self, _: object) -> None:
        with self._ended:
            self._loads -= 1
            self._ended.notify_all()

    def _targets(
        self,
        headers: tuple[BlockHeader, ...],
        sequence: SequenceId,
        part: Part,
        start: int,
        stop: int,
    ) -> list[Target]:
        return list(zip(headers, self._model.loading(sequence, part, start, stop), strict=True))

    def _read(
        self,
        groups: list[list[Target]],
        checkpoint: BlockHeader | None,
        terms: Terms,
        given_up: threading.Event,
    ) -> ReadBodies:
        started = self._clock()
        n_bodies, n_groups = sum(map(len, groups)), len(groups)
        n_verified, complete, overtaken = 0, True, False
        try:
            while groups and complete and not overtaken and not given_up.is_set():
                verified = self._read_group(groups.pop(0))
                n_good = next((i for i, good in enumerate(verified) if not good), len(verified))
                n_verified += n_good
                complete = n_good == len(verified)
                overtaken = complete and terms.overtaken(
                    self._clock() - started, n_verified / n_bodies, divisible=checkpoint is None
                )
        finally:
            for group in groups:
                for _, target in group:
                    target.close()
        body = None
        if checkpoint is not None and complete and not overtaken and not given_up.is_set():
            body = self._store.read(checkpoint)
        seconds = self._clock() - started
        return ReadBodies(n_verified, body, n_groups - len(groups), seconds, overtaken)

    def _resident(self, headers: Sequence[BlockHeader]) -> dict[BlockKey, bytes | memoryview]:
        """The bodies that need no reading."""
        sizes = {
            header.key: self._layout.body_bytes(header.part, len(header.link.tokens))
            for header in headers
        }
        found = self._store.resident(headers)
        return {key: body for key, body in found.items() if len(body) == sizes[key]}

    def _read_group(self, group: list[Target]) -> list[bool]:
        """Read some bodies to where they stay; which of them were verified."""
        try:
            here = self._resident([header for header, _ in group])
            for header, target in group:
                if header.key in here:
                    target.put(here[header.key])
            rest = [(header, target) for header, target in group if header.key not in here]
            reads = [BlockRead(header, target.open()) for header, target in rest]
            verified = dict.fromkeys(here, True)
            for (header, target), good in zip(rest, self._store.read_into(reads), strict=True):
                target.close(len(header.link.tokens) if good else 0)
                verified[header.key] = good
        finally:
            for _, target in group:
                target.close()
        return [verified[header.key] for header, _ in group]


def group_ends(first: int, most: int, n_bodies: int) -> Iterator[int]:
    """Where groups of bodies end: `first` ones, then as many as all before, at most `most`."""
    stop = 0
    while stop < n_bodies:
        stop = min(n_bodies, stop + min(most, max(first, stop)))
        yield stop
