"""Bytes of Python's memory that a file's code took, and not what other threads take meanwhile."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_FRAMES = 8
"""Calls between the file and what takes memory for it, at most."""


@contextmanager
def traced(file: str) -> Iterator[Callable[[], int]]:
    """Calls the function that is yielded for the bytes that are held now of what was taken inside
    by calls from `file`, however deep."""

    def n_bytes() -> int:
        of_file = tracemalloc.Filter(inclusive=True, filename_pattern=file, all_frames=True)
        found = tracemalloc.take_snapshot().filter_traces([of_file]).traces
        return sum(trace.size for trace in found)

    tracemalloc.start(_FRAMES)
    try:
        yield n_bytes
    finally:
        tracemalloc.stop()
