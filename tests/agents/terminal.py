"""An agent in a terminal: what it shows, and what is typed."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, Self

from tests.agents.conversation import TURN_SECONDS, CheckFailedError
from tests.support.http_server import until

_SIZE: Final = struct.pack("HHHH", 600, 160, 0, 0)
"""So high that nothing scrolls: a program writes only those characters that change."""
_TAKE: Final = (
    "import fcntl, os, sys, termios;"
    "fcntl.ioctl(0, termios.TIOCSCTTY, 0);"
    "os.execv(sys.argv[1], sys.argv[1:])"
)
"""Makes it the program's controlling terminal."""
_CONTROL: Final = re.compile(
    r"\x1b(?:\[[0-9;?<>=]*[A-Za-z]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[()].|.)|\s"
)
"""What moves and colours, and white space, which may be a movement as well."""


class Terminal:
    """A program with a terminal of its own; it is killed at the end."""

    def __init__(
        self, command: Sequence[str | Path], work: Path, environment: dict[str, str]
    ) -> None:
        self._end, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, _SIZE)
        self._process = subprocess.Popen(
            (sys.executable, "-c", _TAKE, *command),
            cwd=work,
            env={**environment, "TERM": "xterm-256color"},
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
        )
        os.close(theirs)
        self._shown = b""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()
        os.close(self._end)

    @property
    def shown(self) -> str:
        """All that was shown, without white space."""
        return _CONTROL.sub("", self._shown.decode(errors="replace"))

    def type(self, text: str) -> None:
        os.write(self._end, text.encode())

    def wait(self, text: str) -> None:
        """Raises CheckFailedError unless `text` is shown in time."""
        wanted = _CONTROL.sub("", text)
        try:
            until(lambda: wanted in self.shown, TURN_SECONDS)
        except TimeoutError as error:
            raise CheckFailedError(f"expected {text!r} in {self.shown[-600:]!r}") from error

    def _read(self) -> None:
        with suppress(OSError):  # the program has ended
            while data := os.read(self._end, 1 << 16):
                self._shown += data
