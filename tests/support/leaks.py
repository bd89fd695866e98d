"""A socket or process that a test leaves open is found at its end, and charged to that test.

A later collection of garbage would find it, and pytest would blame the test that runs then. A test
that starts a process or a server without the marker `process` is charged, too.
"""

from __future__ import annotations

import functools
import gc
import socket
import subprocess
import sys
import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import TypeAlias

import pytest

Resource: TypeAlias = "socket.socket | subprocess.Popen[bytes]"

_failed = pytest.StashKey[bool]()
_made: list[weakref.ref[Resource]] = []
_started: list[str] = []


def pytest_configure() -> None:
    """Note each socket and process that is made from now on; an event loop has two sockets."""
    for kind in (socket.socket, subprocess.Popen):
        kind.__init__ = _noted(kind.__init__)  # type: ignore[method-assign]
    subprocess.Popen.__init__ = _told(subprocess.Popen.__init__)  # type: ignore[method-assign]
    socket.socket.listen = _told(socket.socket.listen)  # type: ignore[method-assign]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Note that a test failed: its frames hold what it did not come to close."""
    report = yield
    if report.failed:
        item.stash[_failed] = True
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Begin anew: the fixtures of this test are its own."""
    _made.clear()
    _started.clear()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    """Finalise what the test dropped. One that has failed is not charged, nor is any later one."""
    result = yield
    if left := left_open():
        failed = item.stash.get(_failed, False)
        assert failed, "the test leaves open: " + "; ".join(left)
    assert not _started or item.get_closest_marker("process"), "mark the test with `process`"
    return result


def left_open() -> list[str]:
    """Warnings of the finalisers of what this test made and did not close.

    Costs a collection of garbage, but only where something is open.
    """
    if not any(_is_open(made()) for made in _made):
        return []
    for name in ("last_type", "last_value", "last_traceback"):
        vars(sys).pop(name, None)  # the frames of a failure
    with _unraisable() as found:
        gc.collect()
    return found


def _noted(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def noted(self: Resource, *args: object, **named: object) -> None:
        init(self, *args, **named)
        _made.append(weakref.ref(self))

    return noted


def _told(start: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(start)
    def told(*args: object, **named: object) -> None:
        _started.append(start.__qualname__)
        start(*args, **named)

    return told


def _is_open(one: Resource | None) -> bool:
    if one is None:
        return False
    if isinstance(one, subprocess.Popen):
        pipes = (one.stdin, one.stdout, one.stderr)
        return one.returncode is None or any(pipe and not pipe.closed for pipe in pipes)
    return one.fileno() != -1


@contextmanager
def _unraisable() -> Iterator[list[str]]:
    """Take errors that finalisers raise, as warnings are errors here."""
    found: list[str] = []

    def take(error: sys.UnraisableHookArgs) -> None:
        found.append(f"{error.err_msg or 'in'} {error.object!r}: {error.exc_value}")

    earlier, sys.unraisablehook = sys.unraisablehook, take
    try:
        yield found
    finally:
        sys.unraisablehook = earlier
