"""A thread that tells where other threads stand still.

It looks at all threads' stacks and prints a line to stderr for each that stays at one place, other
than a wait for work, and for each time in which no thread could run Python.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import NamedTuple

_EVERY = 0.04
_DEPTH = 12
_WAITS = frozenset(
    {"thread.py", "threading.py", "selectors.py", "queue.py", "socket.py", "base_events.py"}
)
MARK = "stall: "
"""Each line begins with this."""


class Place(NamedTuple):
    """A stack, innermost call first, and when it was first seen."""

    calls: tuple[str, ...]
    since: float


def begin(least: float) -> None:
    """Watch this process for stalls of at least `least` seconds, until it ends."""
    threading.Thread(target=_watch, args=(least,), name="stall watch", daemon=True).start()


def _watch(least: float) -> None:
    seen: dict[int, Place] = {}
    before = time.monotonic()
    while True:
        time.sleep(_EVERY)
        now = time.monotonic()
        if now - before > least:
            _say(now - before, "all threads", ())
        before = now
        frames = {number: tuple(_calls(one)) for number, one in sys._current_frames().items()}  # noqa: SLF001
        names = {one.ident: one.name for one in threading.enumerate()}
        for number, calls in frames.items():
            last = seen.get(number)
            if last is not None and last.calls == calls:
                continue
            if last is not None and last.calls and now - last.since > least:
                _say(now - last.since, names.get(number, "a thread"), last.calls)
            seen[number] = Place(calls, now)


def _calls(frame: FrameType | None) -> Iterator[str]:
    """The calls of a stack; none if it waits for work."""
    for depth in range(_DEPTH):
        if frame is None:
            return
        name = Path(frame.f_code.co_filename).name
        if not depth and name in _WAITS:
            return
        yield f"{name}:{frame.f_lineno}"
        frame = frame.f_back


def _say(seconds: float, thread: str, calls: tuple[str, ...]) -> None:
    print(f"{MARK}{seconds:.2f} s, {thread}: {' < '.join(calls)}", file=sys.stderr, flush=True)
