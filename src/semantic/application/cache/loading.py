"""Restores prefixes: reads stored blocks into a sequence while other sequences decode.

BreakEven decides from measured times whether to read a prefix or to compute it.
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
"""The number of recent loads that determine the cost of a tier."""
_OLDER = 0.6
"""The weight of a load relative to the next newer one."""
_ABOVE = 2.0
"""The factor for the error of a high estimate; a low estimate has the factor 1."""
_ALIKE = 0.05
"""The difference in error below which two estimates are equally likely."""
_TRIALS = 3
"""The number of loads after which a local tier may count as slower than computing. The first loads
of a process often are slow."""
_MOST_LOST = 1 / 4
"""The time after which a load stops, as a fraction of the time to compute its prefix."""
_FIRST_PROBE, _LATER_PROBES = 1 / 8, 1 / 64
"""The maximum time to spend on measuring a slow tier again, at first and in the long run. A
fraction of the computing time that the tier could save."""
FEWEST_AT_ONCE = 8
"""The number of bodies in a load's first reads. `Terms` may set a smaller number."""

_SLOWEST_FIRST = (Tier.REMOTE, Tier.DISK, Tier.UPLOADS, Tier.QUEUE, Tier.MEMORY)


@dataclass(frozen=True, slots=True)
class Terms:
    """The conditions for reading a prefix that takes `seconds` to compute."""

    seconds: float = inf
    first: int = FEWEST_AT_ONCE

    def overtaken(self, seconds: float, part: float, *, divisible: bool) -> bool:
        """Return whether computing the rest of the prefix is faster than loading it. The load has
        read the fraction `part` of the prefix in `seconds`."""
        saved = part * self.seconds if divisible else 0.0
        rest = seconds * (1 - part) / part
        return seconds - saved > _MOST_LOST * self.seconds and rest > self.seconds - saved


NEVER_GIVEN_UP = Terms()
"""Terms of a load that never stops early."""


class Line(NamedTuple):
    """The cost of loads as a straight line: fixed seconds plus seconds per byte."""

    fixed: float
    per_byte: float

    def seconds(self, n_bytes: float) -> float:
        """Return the seconds that a load of `n_bytes` takes."""
        return self.fixed + n_bytes * self.per_byte


class TierCost:
    """The cost of loads from one tier."""

    def __init__(self, trials: int) -> None:
        """Trust the measured cost after `trials` loads."""
        self._trials = trials
        self._loads: deque[tuple[float, float]] = deque(maxlen=_LOADS)  # bytes, seconds
        self._lines: list[Line] = []
        self._skipped = 0.0
        self._probe = _FIRST_PROBE

    @property
    def is_measured(self) -> bool:
        """True after the first load."""
        return bool(self._loads)

    @property
    def is_known(self) -> bool:
        """True after enough loads to trust the cost."""
        return len(self._loads) >= self._trials

    @property
    def largest(self) -> float:
        """The size of the largest read so far in bytes; 0 before the first read."""
        return max((n_bytes for n_bytes, _ in self._loads), default=0.0)

    def observe(self, n_bytes: float, seconds: float) -> None:
        """Learn from a load that took `seconds`. The mean size of its reads was `n_bytes`."""
        self._loads.append((n_bytes, seconds))
        self._lines = _likely_lines(list(self._loads))

    def seconds(self, n_bytes: float) -> float:
        """Return the shortest likely time of a load of `n_bytes`; 0 before the first load."""
        return min((line.seconds(n_bytes) for line in self._lines), default=0.0)

    def is_worth_it(self) -> None:
        """Record that loading should be faster than computing."""
        self._skipped, self._probe = 0.0, _FIRST_PROBE

    def is_probed(self, loss: float, seconds: float) -> bool:
        """Return whether to measure the tier again. The load should take `loss` seconds longer than
        computing, which takes `seconds`."""
        if loss > self._probe * self._skipped:
            self._skipped += seconds
            return False
        self._skipped, self._probe = 0.0, max(_LATER_PROBES, self._probe / 2)
        return True


class BreakEven:
    """Compares the time to restore a prefix with the time to compute it."""

    def __init__(self, prefill_seconds: Callable[[int], float | None]) -> None:
        """`prefill_seconds` estimates the seconds of prefill for a number of tokens. It returns
        None before the first chunk."""
        self._prefill_seconds = prefill_seconds
        self._costs = {tier: TierCost(1 if tier is Tier.REMOTE else _TRIALS) for tier in Tier}

    def terms(self, n_bytes: Mapping[Tier, int], n_tokens: int) -> Terms | None:
        """Return the terms of a load of `n_bytes` per tier; None if computing should be faster."""
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
        # If the costs are known, do not split reads needlessly: each read has a fixed cost.
        tried = min((2 * cost.largest / n for cost, n in costs.items()), default=0.0)
        return Terms(seconds, max(FEWEST_AT_ONCE, int(tried * blocks)))

    def observe(self, n_bytes: Mapping[Tier, int], seconds: float, n_reads: int = 1) -> None:
        """Record a load of `n_bytes` from each tier. The load made `n_reads` sequential reads."""
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
    return sum(n_bytes.values())


def _likely_lines(loads: list[tuple[float, float]]) -> list[Line]:
    # Absolute deviations: a load that other work slowed down then hardly counts.
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
    for n_bytes, seconds in loads:
        yield Line(seconds, 0.0)
        yield Line(0.0, seconds / n_bytes)
    for (n_bytes, seconds), (more, longer) in combinations(sorted(loads), 2):
        if more > n_bytes and longer > seconds:
            per_byte = (longer - seconds) / (more - n_bytes)
            if (fixed := seconds - n_bytes * per_byte) > 0:
                yield Line(fixed, per_byte)


def _deviation(ratio: float) -> float:
    return _ABOVE * log(ratio) if ratio > 1 else -log(ratio)


Target = tuple[BlockHeader, BodyTarget]
"""The header of a body, and the memory to read it into."""

_THREADS = 4
"""The number of concurrent loads."""
_GROUP_BYTES = 256 << 20
"""The bytes that a load reads before it copies them. A load needs this much memory."""


@dataclass(frozen=True, slots=True)
class ReadBodies:
    """The result of a load's reads. `overtaken` says that computing is now faster than loading."""

    n_verified: int
    checkpoint: bytes | None
    n_groups: int
    seconds: float
    overtaken: bool


@dataclass(frozen=True, slots=True)
class Load:
    """A running load of a prefix into a sequence."""

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
    """The result of a load: the sequence's `length` in tokens, and the load's time and bytes."""

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
        self._loads = 0  # in progress; `_ended` guards it
        self._ended = threading.Condition()

    def keep_within(self, n_bytes: int) -> None:
        """Let all loads together hold at most `n_bytes` that they have read but not copied."""
        self._group_bytes = min(_GROUP_BYTES, n_bytes // _THREADS)

    def begin(
        self, prefix: StoredPrefix, sequence: SequenceId, terms: Terms = NEVER_GIVEN_UP
    ) -> Load:
        """Start to read `prefix` into `sequence`, which holds the tokens before it. Raises
        BackendError if memory runs out."""
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
        """Put the verified blocks of a finished `load` into its sequence. Raises BackendError."""
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
            length, complete = prefix.start, False  # the engine computes the tokens instead
        end = prefix.end if complete else MatchEnd.DAMAGED
        # The body that failed verification took its time too.
        n_read = len(prefix.headers) if complete else read.n_verified + 1
        if read.overtaken:
            end, n_read = MatchEnd.SLOWER, read.n_verified
        seconds = load.seconds + read.seconds + self._clock() - started
        n_bytes = prefix.bytes_of(prefix.headers[:n_read])
        return Loaded(length, end, seconds, n_bytes, max(1, read.n_groups))

    def give_up(self, load: Load) -> None:
        """Stop the load after the reads in progress."""
        load.given_up.set()

    def wait(self, loads: Iterable[Load], seconds: float) -> None:
        """Wait until one of `loads` ends, but at most `seconds`."""
        wait([load.future for load in loads], seconds, return_when="FIRST_COMPLETED")

    def wait_until_idle(self, seconds: float) -> bool:
        """Wait at most `seconds` for all loads to end; return whether all ended. Thread-safe."""
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
        sizes = {
            header.key: self._layout.body_bytes(header.part, len(header.link.tokens))
            for header in headers
        }
        found = self._store.resident(headers)
        return {key: body for key, body in found.items() if len(body) == sizes[key]}

    def _read_group(self, group: list[Target]) -> list[bool]:
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
    """Yield the ends of groups of `n_bodies` bodies. Each group is as large as all groups before it
    together, but has at least `first` and at most `most` bodies."""
    stop = 0
    while stop < n_bodies:
        stop = min(n_bodies, stop + min(most, max(first, stop)))
        yield stop
