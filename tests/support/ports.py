"""Ports of loopback that stay free between choosing and binding them.

A port that the system chose may go to any other socket as soon as it is closed. These are below the
range that Linux and macOS choose from, and each pytest worker has its own thousand.
"""

from __future__ import annotations

import itertools
import os
import socket
from contextlib import suppress
from typing import Final

HERE: Final = "127.0.0.1"
_FIRST: Final = 20_000
_EACH: Final = 1_000
_WORKERS: Final = 12

_worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % _WORKERS
_steps = itertools.count(os.getpid())


def free_port(n: int = 1) -> int:
    """The first of `n` consecutive ports without a listener, never the same one soon again."""
    for step in itertools.islice(_steps, _EACH):
        port = _FIRST + _EACH * _worker + step * n % (_EACH - n)
        with suppress(OSError):
            for one in range(port, port + n):
                socket.create_server((HERE, one)).close()
            return port
    raise AssertionError(f"no {n} consecutive ports are free in {_EACH}")
