"""Decides how many drafts a step checks: as many as make tokens the soonest."""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Sequence

from semantic.ports.generation import Clock, Draft

_SAMPLES = 16
"""The number of recent steps of a kind whose time counts."""
_LEAST_SAMPLES = 3
"""The fewest steps of a kind that show its time."""
_LONGEST = 1.0
"""Seconds after which a step's time includes a pause."""
_FORGOTTEN_AFTER = 128
"""After this many steps of other kinds, a time is unknown again."""
_PER_DOUBLING = 0.05
"""The assumed cost of twice the rows, relative to a step, before the first measurement."""
_NEW_WEIGHT = 0.05
_LEAST_GAIN = 1.03
"""Drafts must make tokens sooner by this factor."""

_Kind = tuple[int, bool]
"""The number of rows, rounded up to a power of two, and whether a step checks drafts: then it waits
for the end of the step before."""


class StepSeconds:
    """The usual seconds of a step by its kind."""

    def __init__(self, clock: Clock = time.perf_counter) -> None:
        self._clock = clock
        self._last: float | None = None
        self._steps = 0
        self._samples: dict[_Kind, deque[float]] = {}
        self._last_step: dict[_Kind, int] = {}

    def pause(self) -> None:
        """Ignore the time of the current step, which includes other work."""
        self._last = None

    def stepped(self, n_rows: int, *, drafted: bool) -> None:
        """Record the end of a step."""
        now, self._steps, kind = self._clock(), self._steps + 1, (_size(n_rows), drafted)
        before, self._last = self._last, now
        if self._is_forgotten(kind):  # a device may compile for the first step of a size
            self._samples[kind] = deque(maxlen=_SAMPLES)
        elif before is not None and now - before < _LONGEST:
            self._samples[kind].append(now - before)
        self._last_step[kind] = self._steps

    def of(self, n_rows: int, *, drafted: bool) -> float | None:
        """Return the seconds of a step; None if they are unknown."""
        kind = _size(n_rows), drafted
        if self._is_forgotten(kind) or len(self._samples[kind]) < _LEAST_SAMPLES:
            return None
        samples = sorted(self._samples[kind])
        return samples[len(samples) // 4]  # the fastest ones have no other work

    def _is_forgotten(self, kind: _Kind) -> bool:
        return self._steps - self._last_step.get(kind, -_FORGOTTEN_AFTER) >= _FORGOTTEN_AFTER


class Waiting:
    """Decides whether a step waits for the tokens of the step before it. Then it can check drafts
    of what follows them, but the device waits for the host."""

    def __init__(self, seconds: StepSeconds) -> None:
        self._seconds = seconds
        self._gain = 0.0  # tokens that drafts of a step are worth if the step before had none

    def learn(self, drafts: Sequence[Draft], counts: Sequence[int]) -> None:
        """Learn that a step can check `counts[i]` tokens of draft i after a step without drafts."""
        found = sum(
            draft.chance**n for draft, most in zip(drafts, counts, strict=True)
            for n in range(1, most + 1)
        )  # fmt: skip
        self._gain += _NEW_WEIGHT * (found - self._gain)

    def pays(self, n_rows: int) -> bool:
        """Return whether a step of `n_rows` rows should wait."""
        plain = self._seconds.of(n_rows, drafted=False)
        if plain is None:
            return False  # measure it
        waited = self._seconds.of(n_rows, drafted=True) or plain
        return self._gain > n_rows * (max(_LEAST_GAIN, waited / plain) - 1)


def _size(n_rows: int) -> int:
    return max(0, n_rows - 1).bit_length()


def allotted(
    drafts: Sequence[Draft], n_rows: int, most: int, seconds: StepSeconds
) -> Sequence[int]:
    """Return how many tokens of each draft the next step should check. `n_rows` rows decode. The
    step checks `most` tokens at most."""
    counts = [0] * len(drafts)
    plain = seconds.of(n_rows, drafted=False)
    if plain is None:
        return counts  # measure it
    best, chosen = _LEAST_GAIN * n_rows / plain, list(counts)
    gains = [(-draft.chance, at) for at, draft in enumerate(drafts) if draft.tokens]
    heapq.heapify(gains)
    expected = float(n_rows)
    for n_checked in range(1, most + 1):
        if not gains:
            break
        gain, at = heapq.heappop(gains)
        expected -= gain
        counts[at] += 1
        if counts[at] < len(drafts[at].tokens):
            heapq.heappush(gains, (gain * drafts[at].chance, at))
        doublings = _size(n_rows + n_checked) - _size(n_rows)
        assumed = plain * (1 + _PER_DOUBLING * doublings)
        rate = expected / (seconds.of(n_rows + n_checked, drafted=True) or assumed)
        if rate > best:
            best, chosen = rate, list(counts)
    return chosen
