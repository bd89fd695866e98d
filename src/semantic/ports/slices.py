"""Long work in slices: a thread does other work between them, or none.

Knows futures; not what the work is.
"""

from __future__ import annotations

from collections.abc import Generator
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")

Slices = Generator[Future[object] | None, None, T]
"""Work that yields after each slice what the next one waits for: a future that is done then, or
None. Its result is the generator's; `close` gives it up between two slices."""


def at_once(work: Slices[T]) -> T:
    """Do all of `work`. Raises what it raises."""
    while True:
        try:
            awaited = next(work)
        except StopIteration as end:
            result: T = end.value
            return result
        if awaited is not None:
            awaited.exception()  # waits for it; the work itself raises it
