"""A server that the commands `semantic code` of a user share: the first starts it, the last stops
it, whichever of them started it."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Final

from semantic.domain.errors import OperatorError, OverloadedError
from semantic_server.clients.coding_agents import RunningServer, find_server

_POLL_SECONDS: Final = 0.1
_CONNECT_SECONDS: Final = 5.0


def answers(host: str, port: int) -> bool:
    """Return whether a program listens at this address."""
    try:
        socket.create_connection((host, port), timeout=_CONNECT_SECONDS).close()
    except OSError:
        return False
    return True


class SharedServer:
    """The server at one port of this machine. `log` is what a started one prints.

    Each user of the server locks `code-PORT.users` in `folder`, a process that starts or stops it
    `code-PORT.starting`, and the server itself `code-PORT.server`, which holds its process number.
    A lock ends with its process.
    """

    def __init__(self, folder: Path, host: str, port: int) -> None:
        self._address = host, port
        self._base = folder / f"code-{port}"
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        self.log = self._base.with_suffix(".log")

    @contextmanager
    def used(self, command: Sequence[str], environment: Mapping[str, str]) -> Iterator[bool]:
        """Start a server with `command` unless one answers, and yield whether that happened. After
        the `with` block, stop it unless others use it or it is not one that this class started.
        Raises OperatorError if it cannot write the files."""
        try:
            self._base.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            users = self._opened("users")
        except OSError as error:
            raise OperatorError(f"cannot write {self._base}.*: {error.strerror}") from error
        with users:
            try:
                with self._alone():
                    fcntl.flock(users, fcntl.LOCK_SH)
                    is_new = not answers(*self._address)
                    if is_new:
                        self._start(command, environment)
                yield is_new
            finally:
                with self._alone():
                    if _locks(users):
                        self._stop()

    def wait_ready(self) -> RunningServer:
        """Return the server once it has loaded its model. Raises OperatorError if a started server
        ends, and the errors of `find_server`."""
        while True:
            try:
                return find_server(self.url)
            except OverloadedError:
                pass
            except OperatorError:
                if answers(*self._address):
                    raise
                with self._alone():
                    pid = self._pid()
                if pid is None:
                    raise OperatorError(self._failure()) from None
            time.sleep(_POLL_SECONDS)

    def _opened(self, kind: str) -> IO[str]:
        return self._base.with_suffix(f".{kind}").open("a+", encoding="ascii")

    @contextmanager
    def _alone(self) -> Iterator[None]:
        with self._opened("starting") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _start(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        with self._opened("server") as held, self.log.open("wb") as log:
            if not _locks(held):
                return  # it runs, but does not listen yet
            # A new session: Ctrl-C is for the agent. The server keeps the lock until it ends.
            process = subprocess.Popen(  # noqa: S603  no shell, and no text of a request
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(held.fileno(),),
                start_new_session=True,
            )
            held.truncate(0)
            held.write(str(process.pid))

    def _pid(self) -> int | None:
        """Return the process of a started server that runs, or None."""
        with self._opened("server") as held:
            if _locks(held):
                return None
            held.seek(0)
            return int(held.read() or 0) or None

    def _stop(self) -> None:
        pid = self._pid()
        if pid is None:
            return
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
        while self._pid() is not None:
            time.sleep(_POLL_SECONDS)

    def _failure(self) -> str:
        lines = self.log.read_text("utf-8", errors="replace").splitlines() or ["no word"]
        return f"cannot start the server: {lines[-1].removeprefix('error: ')}; its log: {self.log}"


def _locks(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
