"""WriteOrder picks the next of the queued writes. UploadPace decides when blocks may upload.

Know numbers, headers and times, but neither bodies nor stores.
"""

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
"""Seconds that a partial interim block waits for a longer one that makes it needless. It belongs to
a checkpoint before the end of the turn, which most likely extends it."""


class WriteOrder:
    """The order of queued writes, mostly of their arrival. Not thread-safe.

    Holds back two kinds of an unfinished request's writes. A partial block of keys and values
    lingers: a longer one most likely replaces it at the end of the turn. If asked for, checkpoints
    before the end, and windows for them, give way to everything else: where writes take time from
    decoding, what the next turn continues from goes first.
    """

    def __init__(self, clock: Callable[[], float], *, defers: bool) -> None:
        """With `defers` interim checkpoints and windows give way to all other writes."""
        self._clock = clock
        self._defers = defers
        self._prompt: dict[int, None] = {}
        self._lingering: dict[int, tuple[BlockHeader, float]] = {}  # and when it is due
        self._deferred: dict[int, BlockKey] = {}
        self._held: dict[BlockKey, int] = {}  # of these two

    def add(self, number: int, block: StoredBlock | None = None) -> None:
        """Add a write, of a block or of something else; `number` is above all others."""
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
        """Remove a write that has left the queue."""
        self._prompt.pop(number, None)
        lingering = self._lingering.pop(number, None)
        key = lingering[0].key if lingering else self._deferred.pop(number, None)
        if key is not None:
            del self._held[key]

    def holds(self, key: BlockKey) -> bool:
        """Return whether the order holds a block back."""
        return key in self._held

    def hasten(self, key: BlockKey) -> None:
        """Release a block, because its turn has ended."""
        number = self._held.get(key)
        if number is not None:
            self.discard(number)
            self._prompt[number] = None

    def replaced_by(self, longer: BlockHeader) -> Sequence[int]:
        """Return the lingering writes whose tokens begin this block."""
        return [n for n, (shorter, _) in self._lingering.items() if _extends(longer, shorter)]

    def next(self, *, lingers: bool = True) -> int | None:
        """Return, but do not take, the next due write, or None. Without `lingers` no write waits
        for a longer block."""
        number = next(iter(self._prompt), None)
        waiting, (_, due) = next(iter(self._lingering.items()), (None, (None, 0.0)))
        if waiting is not None and not (lingers and due > self._clock()):
            return waiting if number is None else min(number, waiting)
        return next(iter(self._deferred), None) if number is None else number

    def oldest_deferred(self) -> int | None:
        """Return the first write that gives way to all others."""
        return next(iter(self._deferred), None)

    def delay(self) -> float | None:
        """Return seconds until the first lingering write is due; None if none lingers."""
        _, due = next(iter(self._lingering.values()), (None, None))
        return None if due is None else max(0.0, due - self._clock())


def _extends(longer: BlockHeader, shorter: BlockHeader) -> bool:
    """Return whether `longer` has all tokens of `shorter`, and more."""
    mine, other = longer.link, shorter.link
    return (
        longer.part is Part.FULL
        and mine.parent == other.parent
        and len(mine.tokens) > len(other.tokens)
        and mine.tokens[: len(other.tokens)] == other.tokens
    )


MOST_COST = 0.01
"""The part by which uploads may lengthen decode steps, half of the true limit: the samples are few
and miss effects on the processor's caches."""
MOST_COST_OF_PREFILL = 0.05
"""The part by which uploads may lengthen steps without decoding: another replica would repeat the
prefill of a late upload."""
ASSUMED_COST = 0.5
"""Assumed seconds by which a second of uploading lengthens decode steps, before measurement."""
LEAST_REST = 1 / 8
"""Least rest as a part of the uploading time: its steps serve as the comparison."""
MOST_BUSY = 0.25
"""Seconds after which no further upload joins the running ones before a rest."""
MOST_REST = 10.0
"""The most seconds of a rest: uploads never cease."""
MOST_SAVED = 0.05
"""Seconds of uploading that idle time pays for in advance, so that a turn's end uploads at once."""
IDLE = 1.0
"""Seconds after an engine's last step from which uploads cost nothing."""
FEWEST_STEPS = 16
"""Steps with uploads before their cost counts as measured."""
_STEPS = 128
"""The latest steps with uploads, which determine the cost."""
_FEWEST_ALONE, _STEPS_ALONE, _SECONDS_ALONE = 8, 32, 60.0
"""Steps without uploads to compare a step with: at least, at most, and their maximum age in
seconds, since contexts grow."""
_MOST_TIMES = 3.0
"""Caps a step at this multiple of the usual: something else held it up."""
_NO_REST = 1e-6
"""Seconds of rest below which only rounding remains."""
_ASK_AGAIN = 0.25
"""Seconds between checks of a rest whether engines still step."""


class _Beside(NamedTuple):
    """A step: its excess seconds, and its seconds of overlap with uploads."""

    excess: float
    overlap: float


class UploadPace:
    """Paces all uploads of a process, so that they barely lengthen decode steps. Thread-safe.

    Measures the cost of uploads: compares a decode step that overlaps one with steps of as many
    requests that overlap none. The rest after each second of uploading keeps the lengthening at
    `MOST_COST` of all time. Steps that only prefill may lengthen more. Free uploads rest only for
    the steps that the comparison needs, and while no engine steps none rests. Where steps of one
    kind differ much, as beside other busy programs, the pace overestimates the cost: longer steps
    overlap uploads more often.

    Uploads call `begin` once `delay` is 0, and `end`. Each engine reports its steps to an observer
    of its own, from `new_observer`.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._active = 0
        self._began = 0.0  # start of the current or last time of uploading
        self._ended = 0.0
        self._before: deque[tuple[float, float]] = deque(maxlen=256)  # when each began, ended
        self._beside: deque[_Beside] = deque(maxlen=_STEPS)
        self._stepped: float | None = None
        self._owed = 0.0  # seconds of rest; negative for savings
        self._settled = 0.0  # time up to which the rest accounts for uploads

    @property
    def cost(self) -> float:
        """Seconds by which a second of uploading lengthens decode steps, at least 0."""
        with self._lock:
            return self._cost()

    def new_observer(self) -> DecodeSteps:
        """Return an observer of one engine's steps."""
        return DecodeSteps(self)

    def delay(self) -> float:
        """Return seconds until the next check whether an upload may begin; 0 if it may now."""
        with self._lock:
            now = self._clock()
            if self._stepped is None or now - self._stepped > IDLE:
                return 0.0
            if self._active:
                return 0.0 if now - self._began < MOST_BUSY else _ASK_AGAIN
            self._rest(now)
            return min(_ASK_AGAIN, self._owed) if self._owed > _NO_REST else 0.0

    def begin(self) -> None:
        """Record the start of an upload, maybe beside others."""
        with self._lock:
            if not self._active:
                self._began = self._clock()
                self._rest(self._began)
            self._active += 1

    def end(self) -> None:
        """Record the end of an upload."""
        with self._lock:
            self._active -= 1
            if not self._active:
                self._ended = self._settled = self._clock()
                self._before.append((self._began, self._ended))
                owed = self._owed + (self._ended - self._began) * self._times()
                self._owed = min(MOST_REST, owed)

    def stepped(self, seconds: float, *, decoded: bool = True) -> float:
        """Record an engine's step of `seconds`, ending now; return its overlap with uploads."""
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
        """Record a step `excess` seconds longer than one without its `overlap` with uploads."""
        with self._lock:
            self._beside.append(_Beside(excess, overlap))

    def _rest(self, now: float, more: float = 0.0) -> None:
        """Pay off the rest since the last settlement, without uploads, plus `more` seconds."""
        owed = self._owed - (now - self._settled) - more
        self._owed, self._settled = max(-MOST_SAVED * self._times(), owed), now

    def _times(self) -> float:
        """Return the seconds of rest after each second of uploading."""
        return max(LEAST_REST, self._cost() / MOST_COST - 1)

    def _cost(self) -> float:
        if len(self._beside) < FEWEST_STEPS:
            return ASSUMED_COST
        excess = sum(one.excess for one in self._beside)
        return max(0.0, excess / sum(one.overlap for one in self._beside))


class DecodeSteps:
    """Measures one engine's decode steps with and without uploads. See `StepObserver`."""

    def __init__(self, pace: UploadPace) -> None:
        self._pace = pace
        self._now = 0.0  # the sum of all steps: contexts grow with it
        self._alone: dict[int, deque[tuple[float, float]]] = {}  # by the number of requests

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
