"""WriteOrder picks the next queued write; UploadPace decides when uploads may begin."""

from __future__ import annotations

import statistics
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from semantic.domain.block_hash import BlockKey, Part
from semantic.domain.stored import BlockHeader, StoredBlock
from semantic.ports.generation import Clock

LINGER = 60.0
"""Seconds that a partial block waits for the longer block that will most likely replace it."""


class WriteOrder:
    """The order of queued writes, mostly that of their arrival. Not thread-safe.

    A partial block of an unfinished request waits, because a longer one most likely replaces it. If
    `defers`, the checkpoints of unfinished requests come last.
    """

    def __init__(self, clock: Callable[[], float], *, defers: bool) -> None:
        self._clock = clock
        self._defers = defers
        self._prompt: dict[int, None] = {}
        self._lingering: dict[int, tuple[BlockHeader, float]] = {}  # with the due time
        self._deferred: dict[int, BlockKey] = {}
        self._held: dict[BlockKey, int] = {}  # writes' numbers, of both kinds

    def add(self, number: int, block: StoredBlock | None = None) -> None:
        """Add a write; `block` is None for other data."""
        if block is None or not block.interim:
            self._prompt[number] = None
        elif block.header.part is not Part.FULL and self._defers:
            self._held[block.header.key] = number
            self._deferred[number] = block.header.key
        elif block.header.part is Part.FULL and not block.header.link.is_full:
            self._held[block.header.key] = number
            self._lingering[number] = block.header, self._clock() + LINGER
        else:
            self._prompt[number] = None

    def discard(self, number: int) -> None:
        """Forget a write."""
        self._prompt.pop(number, None)
        lingering = self._lingering.pop(number, None)
        key = lingering[0].key if lingering else self._deferred.pop(number, None)
        if key is not None:
            del self._held[key]

    def holds(self, key: BlockKey) -> bool:
        """Return whether a write of the block `key` has to wait."""
        return key in self._held

    def hasten(self, key: BlockKey) -> None:
        """Let the block `key` be written now."""
        number = self._held.get(key)
        if number is not None:
            self.discard(number)
            self._prompt[number] = None

    def replaced_by(self, longer: BlockHeader) -> Sequence[int]:
        """Return the numbers of the waiting writes that the block `longer` makes unnecessary."""
        return [n for n, (shorter, _) in self._lingering.items() if _extends(longer, shorter)]

    def next(self, *, lingers: bool = True) -> int | None:
        """Return the number of the next write, or None if all must wait."""
        number = next(iter(self._prompt), None)
        waiting, (_, due) = next(iter(self._lingering.items()), (None, (None, 0.0)))
        if waiting is not None and not (lingers and due > self._clock()):
            return waiting if number is None else min(number, waiting)
        return next(iter(self._deferred), None) if number is None else number

    def oldest_deferred(self) -> int | None:
        """Return the number of the oldest deferred write, or None."""
        return next(iter(self._deferred), None)

    def delay(self) -> float | None:
        """Return the seconds until a waiting write may start, or None."""
        _, due = next(iter(self._lingering.values()), (None, None))
        return None if due is None else max(0.0, due - self._clock())


def _extends(longer: BlockHeader, shorter: BlockHeader) -> bool:
    mine, other = longer.link, shorter.link
    return (
        longer.part is Part.FULL
        and mine.parent == other.parent
        and len(mine.tokens) > len(other.tokens)
        and mine.tokens[: len(other.tokens)] == other.tokens
    )


MOST_COST = 0.01
"""The fraction by which uploads may lengthen decode steps."""
MOST_COST_OF_PREFILL = 0.05
"""The fraction by which uploads may lengthen steps that only prefill."""
ASSUMED_COST = 0.5
"""The seconds by which a second of uploading lengthens decode steps, before measurements."""
LEAST_REST = 1 / 8
"""The shortest rest, as a fraction of the uploading time."""
MOST_BUSY = 0.25
"""The seconds of uploading after which a rest comes first."""
MOST_REST = 10.0
"""The longest rest in seconds, so that uploads never cease."""
MOST_SAVED = 0.05
"""Seconds of uploading without a rest after idle time."""
IDLE = 1.0
"""Seconds without a step after which uploads cost nothing."""
FEWEST_STEPS = 16
"""The number of steps with uploads after which their cost counts as measured."""
_STEPS = 128
"""The number of latest steps with uploads that determine the cost."""
_FEWEST_ALONE, _STEPS_ALONE, _SECONDS_ALONE = 8, 32, 60.0
"""The minimum and maximum number of steps without uploads to compare with, and their maximum age in
seconds."""
_MOST_TIMES = 3.0
"""The longest step to count, as a multiple of the usual step."""
_NO_REST = 1e-6
"""The seconds below which a rest is a rounding error."""
_ASK_AGAIN = 0.25
"""Seconds between two checks during a rest."""


class _Beside(NamedTuple):
    # `excess` is the seconds beyond the usual step, `overlap` the seconds with uploads.

    excess: float
    overlap: float


class UploadPace:
    """Paces all uploads of a process, so that they barely lengthen decode steps. Thread-safe.

    An upload calls `begin` when `delay` is 0, and `end` at its end. Each engine reports its steps
    to its own observer from `new_observer`.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._active = 0
        self._began = 0.0  # start of the current or last period of uploading
        self._ended = 0.0
        self._before: deque[tuple[float, float]] = deque(maxlen=256)  # start and end of each period
        self._beside: deque[_Beside] = deque(maxlen=_STEPS)
        self._stepped: float | None = None
        self._owed = 0.0  # seconds of rest still due; negative if saved in advance
        self._settled = 0.0  # time up to which the rest due is computed

    @property
    def cost(self) -> float:
        """Seconds by which a second of uploading lengthens decode steps."""
        with self._lock:
            return self._cost()

    def new_observer(self) -> DecodeSteps:
        return DecodeSteps(self)

    def delay(self) -> float:
        """Return 0 if an upload may begin now, else the seconds to wait."""
        with self._lock:
            now = self._clock()
            if self._stepped is None or now - self._stepped > IDLE:
                return 0.0
            if self._active:
                return 0.0 if now - self._began < MOST_BUSY else _ASK_AGAIN
            self._rest(now)
            return min(_ASK_AGAIN, self._owed) if self._owed > _NO_REST else 0.0

    def begin(self) -> None:
        """Record the start of an upload."""
        with self._lock:
            if not self._active:
                self._began = self._clock()
                self._rest(self._began)
            self._active += 1

    def end(self) -> None:
        with self._lock:
            self._active -= 1
            if not self._active:
                self._ended = self._settled = self._clock()
                self._before.append((self._began, self._ended))
                owed = self._owed + (self._ended - self._began) * self._times()
                self._owed = min(MOST_REST, owed)

    def stepped(self, seconds: float, *, decoded: bool = True) -> float:
        """Record a step that ends now; return for how many of its seconds uploads ran."""
        with self._lock:
            now = self._stepped = self._clock()
            started = now - seconds
            if not (decoded or self._active):
                alone = now - max(started, self._ended)
                self._rest(now, alone * (MOST_COST_OF_PREFILL / MOST_COST - 1))
            found = now - max(self._began, started) if self._active else 0.0
            for began, ended in reversed(self._before):
                if ended <= started:
                    break
                found += ended - max(began, started)
            return found

    def compared(self, excess: float, overlap: float) -> None:
        """Record a step that overlapped uploads for `overlap` seconds, and took `excess` seconds
        longer than usual."""
        with self._lock:
            self._beside.append(_Beside(excess, overlap))

    def _rest(self, now: float, more: float = 0.0) -> None:
        # No upload ran since `_settled`.
        owed = self._owed - (now - self._settled) - more
        self._owed, self._settled = max(-MOST_SAVED * self._times(), owed), now

    def _times(self) -> float:
        return max(LEAST_REST, self._cost() / MOST_COST - 1)

    def _cost(self) -> float:
        if len(self._beside) < FEWEST_STEPS:
            return ASSUMED_COST
        excess = sum(one.excess for one in self._beside)
        return max(0.0, excess / sum(one.overlap for one in self._beside))


class DecodeSteps:
    """Measures one engine's decode steps with and without uploads."""

    def __init__(self, pace: UploadPace) -> None:
        self._pace = pace
        self._now = 0.0  # total seconds of steps, with which contexts grow
        self._alone: dict[int, deque[tuple[float, float]]] = {}  # by number of requests

    def stepped(self, seconds: float, n_decoding: int, *, prefilled: bool) -> None:
        overlap = self._pace.stepped(seconds, decoded=n_decoding > 0)
        self._now += seconds
        if prefilled or not n_decoding:
            return
        alone = self._alone.setdefault(n_decoding, deque(maxlen=_STEPS_ALONE))
        if not overlap:
            alone.append((self._now, seconds))
            return
        recent = [one for at, one in alone if self._now - at <= _SECONDS_ALONE]
        if len(recent) >= _FEWEST_ALONE:
            most = _MOST_TIMES * statistics.median(recent)
            usual = statistics.fmean(min(one, most) for one in recent)
            self._pace.compared(min(seconds, most) - usual, overlap)
