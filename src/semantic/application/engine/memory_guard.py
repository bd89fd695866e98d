"""MemoryGuard: keeps the process within its memory limit by freeing caches in a fixed order.

StepMemory predicts the temporary memory of a pass over prompt tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from semantic.domain.errors import InvalidRequestError
from semantic.ports.generation import Clock
from semantic.ports.serving import MemoryFigures

_INTERVAL = 0.25
"""Seconds between two measurements."""
_PARTS = 16
"""The limit has this many equal parts; one part stays free."""
_CALM = 60.0
"""The seconds without pressure after which a report says that the pressure is over."""
_FORGET = 0.98
"""The factor for the largest rise of memory at each measurement: a half-life of about 9 s."""
_FIRST_PAUSE, _LONGEST_PAUSE = 2.0, 64.0
"""The first and the longest time in seconds for which memory must suffice before a size doubles."""
_LASTING = ("chunks", "batch", "requests")
"""The measures that last until the guard reverses them."""
_GIB = 1 << 30

Free = Callable[[int], bool]
"""Frees the given bytes as far as possible; returns False if that frees nothing."""


@dataclass(frozen=True, slots=True)
class Memory:
    """The process's memory. `kept` counts the framework's unused bytes, which `give_back`
    returns to the system. `spare` is the bytes that the system has left."""

    in_use: Callable[[], int]
    give_back: Callable[[], None]
    spare: Callable[[], int | None] = lambda: None
    kept: Callable[[], int] = lambda: 0


class Narrowing:
    """A size that the guard can halve up to `most` times."""

    def __init__(self, name: str, most: int) -> None:
        self.name = name
        self.most = most
        self.times = 0

    def of(self, size: int) -> int:
        """Return `size` after `times` halvings, but at least 1."""
        return max(1, size >> self.times)


class MemoryGuard:
    """Frees caches while almost all of `max_bytes` is in use. Then narrows chunks and the batch. A
    running request keeps its memory. For one thread only, except `is_exceeded` and `figures`."""

    def __init__(
        self,
        max_bytes: int,
        memory: Memory,
        *,
        clock: Clock,
        report: Callable[[str], None],
        most: int | None = None,
    ) -> None:
        """`report` receives lines of text about memory pressure. `most` is the highest limit that
        `limit` accepts, in bytes."""
        self.max_bytes = self._first = max_bytes
        self._most = most
        self._rise = 0.0
        self._last = self._needed = memory.in_use()
        self._memory = memory
        self._clock = clock
        self._report = report
        self._order: list[tuple[str, Free]] = []
        self.chunks = Narrowing("chunks", 7)
        """Limits the prompt tokens in one chunk."""
        self.batch = Narrowing("batch", 5)
        """Limits the requests that may run."""
        self._next = clock()
        self._calm_at: float | None = None  # while there is pressure: when it will be over
        self._widen_at = clock()
        self._widened_at = float("-inf")
        self._pause = _FIRST_PAUSE
        self._has_slack = True
        self._steps: dict[str, None] = {}  # since the pressure began
        self._counts: Counter[str] = Counter()
        self._least = 0
        self.on_limit: Callable[[int], None] = lambda _: None
        self._limit = max_bytes  # what the process may have now
        self.is_exceeded = False
        """True if no more requests should begin."""

    def measure_by(self, memory: Memory) -> None:
        self._memory = memory

    def add(self, name: str, free: Free) -> None:
        """Register `free` under `name`, after the functions added earlier."""
        self._order.append((name, free))

    def settle(self) -> None:
        """Expect no more of the memory in use now: a model took it to keep."""
        self._needed = self._memory.in_use() - self._memory.kept()

    def lacks_room(self) -> int | None:
        """Return the bytes in use if memory is too short for a first request, else None."""
        used = self._memory.in_use()
        self._least = used + 2 * used // (_PARTS - 2)
        return used if used > self.max_bytes - self._part else None

    def limit(self, n_bytes: int | None) -> None:
        """Set the limit to `n_bytes`; None means the first limit. Raises InvalidRequestError if the
        process needs more, or the machine has less."""
        wanted = self._first if n_bytes is None else n_bytes
        given = f"{wanted / _GIB:.3g} GiB"
        if wanted < self._least:
            raise InvalidRequestError(
                f"the limit must be at least {self._least / _GIB:.3g} GiB, mostly in use without "
                f"requests, got {given}"
            )
        if self._most is not None and wanted > max(self._most, self._first):
            raise InvalidRequestError(
                f"the limit must be at most all memory, {self._most / _GIB:.3g} GiB, got {given}"
            )
        self.max_bytes = self._limit = wanted
        self.on_limit(wanted)
        self._next = self._clock()
        self._say(self._last, "this is the new limit")

    def check(self) -> None:
        """Measure the memory at a fixed interval, and free caches if necessary."""
        now = self._clock()
        if now < self._next:
            return
        self._next = now + _INTERVAL
        used = self._memory.in_use()
        spare = self._memory.spare()
        limit = self._limit = self.max_bytes if spare is None else min(self.max_bytes, used + spare)
        high = limit - self._reserve(used - self._memory.kept())
        target = high - self._part
        taken: list[str] = []
        is_high = used > high
        if is_high:
            used = self._give_up(used, high, target, taken)
            self._has_slack = used <= target
        self._last, self._needed = used, used - self._memory.kept()
        self.is_exceeded = used > limit - self._part
        if is_high and used > limit - 2 * self._part:
            self._narrow(now, taken)
        elif used <= target or (self._has_slack and not is_high):
            self._widen(now)
        else:
            self._widen_at = now + self._pause
        self._tell(now, used, taken)

    def left(self) -> int:
        """Return the number of free bytes below the limit."""
        return max(0, self._limit - self._memory.in_use())

    def room(self, n_bytes: int, *, frees: bool = True) -> int:
        """Return the part of `n_bytes` that the caller may use briefly. May free caches."""
        most = self._limit - self._part // 2
        if n_bytes <= self._part // 4:
            return n_bytes
        used = self._memory.in_use() - self._memory.kept()
        if frees and used + n_bytes > most:
            taken: list[str] = []
            used = self._give_up(used, most - n_bytes, most - n_bytes, taken)
            self._tell(self._clock(), used, taken)
        return min(n_bytes, max(self._part // 4, most - used))

    @property
    def figures(self) -> MemoryFigures:
        """The guard's figures for the statistics. Thread-safe."""
        steps = [name for name in tuple(self._steps) if name not in _LASTING]
        steps += [
            f"{one.name} halved {one.times} times" for one in (self.chunks, self.batch) if one.times
        ]
        steps += ["requests wait"] if self.is_exceeded else []
        return MemoryFigures(
            self._last, max(0, self._limit), self.max_bytes, tuple(steps), dict(self._counts)
        )

    @property
    def _is_narrowed(self) -> bool:
        return bool(self.chunks.times or self.batch.times)

    @property
    def _part(self) -> int:
        return self.max_bytes // _PARTS

    def _reserve(self, needed: int) -> int:
        self._rise = max(needed - self._needed, self._rise * _FORGET)
        return self._part + min(int(self._rise), self.max_bytes // 2)

    def _give_up(self, used: int, high: int, target: int, names: list[str]) -> int:
        """Free buffers, then caches down to `target` if over `high`. Return the bytes in use."""
        before, used = used, self._after()
        if used < before:
            names.append("buffers")
        if used <= high:
            return used
        for name, free in self._order:
            if used <= target:
                break
            if free(used - target):
                names.append(name)
                used = self._after()
        return used

    def _after(self) -> int:
        self._memory.give_back()
        return self._memory.in_use()

    def _narrow(self, now: float, names: list[str]) -> None:
        """Halve the size of chunks, or else the number of running requests."""
        before = self.chunks.times, self.batch.times
        for one in (self.chunks, self.batch):
            if one.times < one.most:
                one.times = one.most if self.is_exceeded else one.times + 1
                names.append(one.name)
                if not self.is_exceeded:
                    break
        if before != (self.chunks.times, self.batch.times):
            if now - self._widened_at < 2 * self._pause:
                self._pause = min(_LONGEST_PAUSE, 2 * self._pause)
            self._widened_at = float("-inf")
        self._widen_at = now + self._pause

    def _widen(self, now: float) -> None:
        """Double the number of running requests, or else the size of chunks."""
        if now < self._widen_at:
            return
        narrowed = next((one for one in (self.batch, self.chunks) if one.times), None)
        if narrowed is not None:
            narrowed.times -= 1
            self._widened_at = now
        else:
            self._pause = max(_FIRST_PAUSE, self._pause / 2)
        self._widen_at = now + self._pause

    def _tell(self, now: float, used: int, taken: Sequence[str]) -> None:
        refused = ["requests"] if self.is_exceeded and (taken or self._calm_at) else []
        new = [name for name in (*taken, *refused) if name not in self._steps]
        self._counts.update((*taken, *refused))
        if taken or self.is_exceeded:
            self._calm_at = now + _CALM
            self._steps |= dict.fromkeys((*taken, *refused))
            if new:
                self._say(used, _words(new))
        elif self._calm_at is not None and now >= self._calm_at and not self._is_narrowed:
            self._calm_at, self._steps = None, {}
            self._say(used, "no pressure")

    def _say(self, used: int, what: str) -> None:
        in_use = f"{used / _GIB:.2f} of {self._limit / _GIB:.2f} GiB in use"
        self._report(f"memory: {in_use}; {what}")


def _words(new: Sequence[str]) -> str:
    narrowed = [name for name in new if name in ("chunks", "batch")]
    given_up = [name for name in new if name not in _LASTING]
    words = [f"given up: {', '.join(given_up)}"] if given_up else []
    words += [f"smaller: {', '.join(narrowed)}"] if narrowed else []
    return "; ".join([*words, *(["requests are refused"] if "requests" in new else [])])


_FADE = 0.8
"""The weight of earlier measurements. The first passes have few tokens."""


_FEWER = 4
"""A measurement holds for passes with at most this many times its tokens."""


class _Measured(NamedTuple):
    per_token: float
    context: int
    n_tokens: int


class StepMemory:
    """Predicts the memory of a pass from recent passes at a similar position in a prompt."""

    def __init__(self) -> None:
        self._measured: dict[int, _Measured] = {}  # by the power of two of the context

    def observe(self, n_tokens: int, context: int, n_bytes: int) -> None:
        """Record that a pass over `n_tokens` up to `context` needed `n_bytes`. Ignores 0 bytes."""
        if n_tokens < 1 or n_bytes < 1:
            return
        place = context.bit_length()
        before = self._measured.get(place)
        per_token = n_bytes / n_tokens
        if before is not None:
            if n_tokens < before.n_tokens and n_bytes <= before.n_tokens * before.per_token:
                return  # mostly the part of a pass that does not depend on its tokens
            per_token = max(per_token, _FADE * before.per_token)
        self._measured[place] = _Measured(per_token, context, n_tokens)

    def is_measured(self, n_tokens: int, context: int) -> bool:
        """Return whether a similar pass ran before. If not, `expected` may be far too high."""
        known = self._measured.get(context.bit_length())
        return known is not None and n_tokens <= _FEWER * known.n_tokens

    def expected(self, n_tokens: int, context: int) -> int:
        """Return the bytes that a pass up to position `context` will need; 0 if this is unknown."""
        place = context.bit_length()
        lower = [at for at in self._measured if at <= place]
        nearest = max(lower) if lower else min(self._measured, default=None)
        if nearest is None:
            return 0
        known = self._measured[nearest]
        return int(n_tokens * known.per_token * max(1.0, context / known.context))
