"""`semantic serve` in its own process, on a free port. Standard library only.

The checks of foreign clients use it too, from environments that have nothing of ours.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]

_READY: Final = re.compile(r"^ready: (http://\S+)/v1 ")
_SECONDS: Final = 120.0
"""For a start or a stop on a machine that has much else to do."""


class ServerFailedError(Exception):
    """The server did not come up, or did not end as it should; the text is its log."""


class ServerLateError(ServerFailedError, TimeoutError):
    """The server did not come up or end in time."""


class ServeProcess:
    """A started server. `url` is its address without a path; `log` what it printed so far."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            command,
            env=environment,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.log: list[str] = []
        self.url = ""
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def tail(self) -> str:
        """The end of the log."""
        return "\n".join(self.log[-20:])

    @property
    def pid(self) -> int:
        return self._process.pid

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        self._process.send_signal(number)

    def wait(self, seconds: float) -> int:
        """Its exit code when it ends by itself. Raises subprocess.TimeoutExpired."""
        code = self._process.wait(seconds)
        self._reader.join()
        return code

    def wait_ready(self, seconds: float = _SECONDS) -> None:
        """Return when requests can come. Raises ServerFailedError if they cannot in `seconds`."""
        is_late = not self._ready.wait(seconds)
        if not self.url:
            self.kill()
            raise (ServerLateError if is_late else ServerFailedError)(self.tail)

    def stop(self) -> None:
        """End it as an operator does. Raises ServerFailedError unless it ends in good order."""
        self._process.send_signal(signal.SIGTERM)
        try:
            code = self._process.wait(_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            raise ServerLateError(self.tail) from None
        self._reader.join()
        if code not in {0, -signal.SIGTERM}:
            raise ServerFailedError(f"{self.tail}\nexit code {code}")

    def kill(self) -> None:
        """End it without a chance to save anything. Harmless when it has ended."""
        self._process.kill()
        self._process.wait()
        self._reader.join()

    def _read(self) -> None:
        pipe = self._process.stderr
        if pipe is None:
            return
        with pipe:
            for line in pipe:
                self.log.append(line.rstrip())
                found = _READY.match(line)
                if found:
                    self.url = found[1]
                    self._ready.set()
        self._ready.set()


@contextmanager
def served(
    store: Path | None,
    *flags: str,
    python: str = sys.executable,
    environment: Mapping[str, str] | None = None,
) -> Iterator[ServeProcess]:
    """A server of the model inside the package that keeps its caches in `store`, by default in
    the user's.

    It is stopped at the end, with SIGTERM; a body that fails does not hide its error behind one
    of the server.
    """
    kept = () if store is None else ("--store", str(store))
    command = (python, "-m", "semantic", "serve", "--port", "0", *kept, *flags)
    process = ServeProcess(command, dict(environment or {**os.environ, **OURS}))
    try:
        process.wait_ready()
        yield process
        process.stop()
    finally:
        process.kill()


OURS: Final = {
    "PYTHONPATH": str(ROOT / "src"),
    "HF_HUB_OFFLINE": "1",
    "TERM": "dumb",
    # Compiling kernels anew, for a home folder of its own, would take each server seconds.
    "XDG_CACHE_HOME": os.environ.get("XDG_CACHE_HOME", str(Path("~/.cache").expanduser())),
    # Else each server takes all cores, where others of the suite compute: its threads spin.
    **{name: value for name, value in os.environ.items() if name.startswith("OPENBLAS_")},
}
