"""Stop strings: how an answer is cut when one appears, however its text arrives.

Works on text alone; knows no tokens. Text that could still become a stop string is held back,
so nothing of a stop string is ever emitted.
"""

from __future__ import annotations

from collections.abc import Sequence


def _held_back(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of `text` that begins a stop string."""
    longest = max(map(len, stops)) - 1
    for size in range(min(longest, len(text)), 0, -1):
        if any(stop.startswith(text[-size:]) for stop in stops):
            return size
    return 0


class StopStrings:
    """Cuts a stream of text at the first stop string.

    Of two that end at the same character the one that began first wins, so the result does not
    depend on how the text was divided.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._pending = ""
        self.matched: str | None = None

    @property
    def stopped(self) -> bool:
        """Whether a stop string has cut the text; see `matched`."""
        return self.matched is not None

    def push(self, text: str) -> str:
        """The text that may be emitted now; sets `matched` when a stop string is complete."""
        if self.stopped or not self._stops:
            return "" if self.stopped else text
        self._pending += text
        first = self._first()
        if first is not None:
            cut, self.matched = first
            emitted, self._pending = self._pending[:cut], ""
            return emitted
        keep = _held_back(self._pending, self._stops)
        emitted = self._pending[: len(self._pending) - keep]
        self._pending = self._pending[len(self._pending) - keep :]
        return emitted

    def flush(self) -> str:
        """The text still held back, at the end of an answer that no stop string cut."""
        text, self._pending = self._pending, ""
        return text

    def _first(self) -> tuple[int, str] | None:
        """Where the stop string that is complete first begins, and which it is."""
        found = []
        for stop in self._stops:
            start = self._pending.find(stop)
            if start >= 0:
                found.append((start + len(stop), start, stop))
        return min(found)[1:] if found else None
