"""WriteOrder: which of the queued writes is next. UploadPace: when blocks may be uploaded.

Know numbers, headers and times; neither bodies nor stores.
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
"""Seconds that a partial interim block waits for the longer one that makes it needless. It is of a
checkpoint on the way: the end of the turn most likely extends it."""


class WriteOrder:
    """The order of queued writes. Not thread-safe.

    Writes are numbered in the order in which they are queued, and mostly done in it. Two kinds of a
    request that has not ended are held back. A partial block of keys and values lingers: a longer
    one replaces it, most likely at the end of the turn. Checkpoints, and windows for them, that lie
    behind the end give way to everything else, if asked for: where writes take time from decoding,
    what the next turn continues from goes first.
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
        """A write, of a block or of something else; `number` is above all others."""
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
        """The write is no longer queued."""
        self._prompt.pop(number, None)
        lingering = self._lingering.pop(number, None)
        key = lingering[0].key if lingering else self._deferred.pop(number, None)
        if key is not None:
            del self._held[key]

    def holds(self, key: BlockKey) -> bool:
        """True if a block is held back."""
        return key in self._held

    def hasten(self, key: BlockKey) -> None:
        """A block is held back no longer: it is of a turn that has ended."""
        number = self._held.get(key)
        if number is not None:
            self.discard(number)
            self._prompt[number] = None

    def replaced_by(self, longer: BlockHeader) -> Sequence[int]:
        """The writes that linger and with whose tokens this block begins."""
        return [n for n, (shorter, _) in self._lingering.items() if _extends(longer, shorter)]

    def next(self, *, lingers: bool = True) -> int | None:
        """The write that is due, which is not taken; None if none is. Without `lingers` nothing
        waits for a longer block."""
        number = next(iter(self._prompt), None)
        waiting, (_, due) = next(iter(self._lingering.items()), (None, (None, 0.0)))
        if waiting is not None and not (lingers and due > self._clock()):
            return waiting if number is None else min(number, waiting)
        return next(iter(self._deferred), None) if number is None else number

    def oldest_deferred(self) -> int | None:
        """The write that gives way to all others and came first."""
        return next(iter(self._deferred), None)

    def delay(self) -> float | None:
        """Seconds until what lingers is due; None if nothing does."""
        _, due = next(iter(self._lingering.values()), (None, None))
        return None if due is None else max(0.0, due - self._clock())


def _extends(longer: BlockHeader, shorter: BlockHeader) -> bool:
    """True if `longer` has all tokens of `shorter`, and more."""
    mine, other = longer.link, shorter.link
    return (
        longer.part is Part.FULL
        and mine.parent == other.parent
        and len(mine.tokens) > len(other.tokens)
        and mine.tokens[: len(other.tokens)] == other.tokens
    )


MOST_COST = 0.01
"""Uploads may lengthen decode steps by this part. It is half of the true limit: few steps are
measured, and effects on the caches of the processor are not seen."""
MOST_COST_OF_PREFILL = 0.05
"""Uploads may lengthen steps without decoding by this part: another replica prefills again what is
uploaded too late."""
ASSUMED_COST = 0.5
"""Seconds by which a second of uploading lengthens decode steps, before it is measured."""
LEAST_REST = 1 / 8
"""Of the time of uploading: in it the steps run that it is compared with."""
MOST_BUSY = 0.25
"""Seconds after which no further upload begins beside others before a rest."""
MOST_REST = 10.0
"""Seconds of a rest at most: uploads never cease."""
MOST_SAVED = 0.05
"""Seconds of uploading that a while without uploads pays for in advance: the end of a turn is then
uploaded at once."""
IDLE = 1.0
"""Seconds after the last step of an engine from which on uploads cost nothing."""
FEWEST_STEPS = 16
"""Steps beside uploads from which their cost is known."""
_STEPS = 128
"""Steps beside uploads that count: the last ones."""
_FEWEST_ALONE, _STEPS_ALONE, _SECONDS_ALONE = 8, 32, 60.0
"""Steps without an upload that a step is compared with: at least so many, at most the last so many,
and none that is older: contexts grow."""
_MOST_TIMES = 3.0
"""A step that takes more times what is usual counts as so much: something else held it up."""
_NO_REST = 1e-6
"""Seconds of a rest that are left by rounding."""
_ASK_AGAIN = 0.25
"""Seconds after which what rests looks whether engines still step."""


class _Beside(NamedTuple):
    """A step: by how many seconds it was longer, and for how many there was an upload."""

    excess: float
    overlap: float


class UploadPace:
    """The pace of all uploads of a process, so that decode steps become hardly longer by them.
    Thread-safe.

    What uploads cost is measured: a decode step that one falls into is compared with the steps of
    as many requests that none did. A second of uploading lengthens them by so many seconds; the
    rest after it is so long that, of all the time, that part is `MOST_COST`. Steps that only
    prefill may become longer by more. Where uploads cost nothing they go on all the time but for
    what is needed to compare, and while no engine steps nothing holds them up. Where steps of one
    kind differ much, as beside other programs that compute, the cost is overestimated: uploads fall
    into the longer ones more often.

    Uploads call `begin` once `delay` is 0, and `end`. Each engine reports its steps to an observer
    of its own, of `new_observer`.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._active = 0
        self._began = 0.0  # the time of uploading that goes on, or was the last
        self._ended = 0.0
        self._before: deque[tuple[float, float]] = deque(maxlen=256)  # when each began, ended
        self._beside: deque[_Beside] = deque(maxlen=_STEPS)
        self._stepped: float | None = None
        self._owed = 0.0  # seconds of rest; below 0 what is saved
        self._settled = 0.0  # until when what has passed is paid off

    @property
    def cost(self) -> float:
        """Seconds by which a second of uploading lengthens decode steps; at least 0."""
        with self._lock:
            return self._cost()

    def new_observer(self) -> DecodeSteps:
        """What learns of the steps of one engine."""
        return DecodeSteps(self)

    def delay(self) -> float:
        """Seconds after which to ask again whether an upload may begin; 0 if it may now."""
        with self._lock:
            now = self._clock()
            if self._stepped is None or now - self._stepped > IDLE:
                return 0.0
            if self._active:
                return 0.0 if now - self._began < MOST_BUSY else _ASK_AGAIN
            self._rest(now)
            return min(_ASK_AGAIN, self._owed) if self._owed > _NO_REST else 0.0

    def begin(self) -> None:
        """An upload begins, maybe beside others."""
        with self._lock:
            if not self._active:
                self._began = self._clock()
                self._rest(self._began)
            self._active += 1

    def end(self) -> None:
        """An upload has ended."""
        with self._lock:
            self._active -= 1
            if not self._active:
                self._ended = self._settled = self._clock()
                self._before.append((self._began, self._ended))
                owed = self._owed + (self._ended - self._began) * self._times()
                self._owed = min(MOST_REST, owed)

    def stepped(self, seconds: float, *, decoded: bool = True) -> float:
        """An engine has stepped for `seconds`, until now; for how many there was an upload."""
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
        """A step was `excess` seconds longer than without the upload during `overlap` of it."""
        with self._lock:
            self._beside.append(_Beside(excess, overlap))

    def _rest(self, now: float, more: float = 0.0) -> None:
        """Since it was settled there was no upload. `more` seconds count beside those."""
        owed = self._owed - (now - self._settled) - more
        self._owed, self._settled = max(-MOST_SAVED * self._times(), owed), now

    def _times(self) -> float:
        """Returns the seconds of rest after each second of uploading."""
        return max(LEAST_REST, self._cost() / MOST_COST - 1)

    def _cost(self) -> float:
        if len(self._beside) < FEWEST_STEPS:
            return ASSUMED_COST
        excess = sum(one.excess for one in self._beside)
        return max(0.0, excess / sum(one.overlap for one in self._beside))


class DecodeSteps:
    """What the decode steps of one engine take with and without uploads. See `StepObserver`."""

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
