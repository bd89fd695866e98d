"""vllm-router of the package registry, in front of servers on this machine."""

from __future__ import annotations

import os
import re
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tests.support.ports import free_port

PROGRAM: Final = "SEMANTIC_ROUTER"
"""The environment variable with the path of the program."""
_SECONDS: Final = 60.0
_COLOUR: Final = re.compile(r"\x1b\[[0-9;]*m")


def is_there() -> bool:
    """Whether the program is installed: there is a wheel for Linux on x86-64 only."""
    return PROGRAM in os.environ and Path(os.environ[PROGRAM]).exists()


class Router:
    """A running router at `url`; what it does is in its log."""

    def __init__(self, url: str, log: Path) -> None:
        self.url = url
        self._log = log

    def read_from(self, server: str) -> int:
        """How many messages of events it has read from the server at this address."""
        said = f"sequence advanced source={server} "
        return _COLOUR.sub("", self._log.read_text(errors="replace")).count(said)

    def wait_for(self, server: str, before: int) -> None:
        """Return when it has read more than `before` messages from `server`, and no more come."""
        until, last = time.monotonic() + _SECONDS, before
        while True:
            time.sleep(0.3)
            now = self.read_from(server)
            if now == last > before:
                return
            assert time.monotonic() < until, "no events came"
            last = now


@contextmanager
def routed(log: Path, policy: str, urls: Sequence[str], *flags: str) -> Iterator[Router]:
    """A router in front of the servers at `urls`, when it answers."""
    port, metrics = free_port(), free_port()
    command = [
        os.environ[PROGRAM], "--port", str(port), "--prometheus-port", str(metrics),
        "--log-level", "debug", "--worker-startup-check-interval", "1",
        "--policy", policy, "--worker-urls", *urls, *flags,
    ]  # fmt: skip
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out)
    try:
        router = Router(f"http://127.0.0.1:{port}", log)
        _wait(f"{router.url}/health")
        yield router
    finally:
        process.kill()
        process.wait()


def _wait(url: str) -> None:
    until = time.monotonic() + _SECONDS
    while True:
        try:
            with urllib.request.urlopen(url, timeout=2):
                return
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.1)
