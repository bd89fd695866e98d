"""Runs a function on a stack that is deep enough for input that is nested without measure.

A native library that follows nested input by calling itself ends the process when the stack does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

Result = TypeVar("Result")

_STACK = 512 << 20
"""Bytes of address space; memory is taken only as far as the stack is really used."""
_starting = threading.Lock()


class _Call(threading.Thread, Generic[Result]):
    def __init__(self, function: Callable[[], Result]) -> None:
        super().__init__(name="deep-stack", daemon=True)
        self._function = function
        self.results: list[Result] = []

    def run(self) -> None:
        self.results.append(self._function())


def on_deep_stack(function: Callable[[], Result]) -> Result:
    """What `function` returns. It must not raise."""
    call = _Call(function)
    with _starting:  # the size is the process's: it holds for whichever thread starts next
        before = threading.stack_size(_STACK)
        try:
            call.start()
        finally:
            threading.stack_size(before)
    call.join()
    return call.results[0]
