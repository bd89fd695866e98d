"""Calls a test's function in a process of its own: nothing else takes memory or has threads there.

    python -m tests.support.own_process MODULE:FUNCTION ARGUMENT...

An interpreter and its imports take longer than most of what is called. So on Linux the process is a
fork of one that has imported most and computes nothing: `--forks DESCRIPTOR` instead of a function.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Final, Protocol

_ROOT = Path(__file__).resolve().parents[2]
_STUCK_S = 600.0
"""Seconds after which the process is taken for stuck."""
_COMMAND: Final = (sys.executable, "-m", "tests.support.own_process")
_SHARED: Final = ("tests.conftest", "semantic.serve", "semantic.adapters.mlx.model.provider")
"""Imported before the forks; the first sets up libraries as for any test."""
_MOST: Final = 1 << 18
"""Bytes of a message: a call and its environment."""


def environment() -> dict[str, str]:
    """This process's, in which another one imports the package and the tests."""
    return {**os.environ, "PYTHONPATH": f"{_ROOT / 'src'}{os.pathsep}{_ROOT}"}


class _Started(Protocol):
    """A process as `subprocess.Popen` shows it."""

    def kill(self) -> None: ...

    def wait(self) -> int: ...


class OwnProcess:
    """A process that calls a function, with pipes as of text files. Close it in the end."""

    def __init__(self, function: str, *arguments: object) -> None:
        """`function` is given as "module:function", `arguments` as texts."""
        (stdin, ours), (out, stdout), (err, stderr) = (os.pipe() for _ in range(3))
        self.stdin, self.stdout, self.stderr = os.fdopen(ours, "w"), os.fdopen(out), os.fdopen(err)
        theirs = (stdin, stdout, stderr)
        try:
            self._process = _started([function, *map(str, arguments)], theirs)
        finally:
            for descriptor in theirs:
                os.close(descriptor)

    def kill(self) -> None:
        """End it now; harmless when it has ended."""
        self._process.kill()

    def wait(self) -> int:
        """Its exit code, or minus the signal that ended it."""
        return self._process.wait()

    def close(self) -> None:
        """End it, unless it has ended, and close the pipes."""
        self.kill()
        self.wait()
        for pipe in (self.stdin, self.stdout, self.stderr):
            pipe.close()

    def finish(self, seconds: float = _STUCK_S) -> tuple[int, str, str]:
        """Close its input and wait for its end: the exit code, all that is left of its output, and
        of its errors. It is killed when it takes longer than `seconds`."""
        watch = threading.Timer(seconds, self.kill)
        watch.start()
        try:
            self.stdin.close()
            with ThreadPoolExecutor(1) as pool:
                errors = pool.submit(self.stderr.read)
                said = self.stdout.read()
            return self.wait(), said, errors.result()
        finally:
            watch.cancel()


def in_own_process(function: str, *arguments: object) -> None:
    """Call `function`, given as "module:function", with `arguments` as texts.

    Fails with all that the process printed, its traceback included, unless the function returns.
    """
    process = OwnProcess(function, *arguments)
    try:
        code, said, errors = process.finish()
    finally:
        process.close()
    assert code == 0, f"{function} failed:\n{said}\n{errors}"


def _started(call: Sequence[str], pipes: Sequence[int]) -> _Started:
    """A process that calls, with `pipes` as its input, output and errors."""
    if sys.platform == "linux":
        return _forks().start(call, pipes)
    stdin, stdout, stderr = pipes
    return subprocess.Popen(
        [*_COMMAND, *call], cwd=_ROOT, env=environment(), stdin=stdin, stdout=stdout, stderr=stderr
    )


class _Forks:
    """The process that forks one for each call; it ends with this one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [*_COMMAND, "--forks", str(theirs.fileno())],
                cwd=_ROOT,
                env=environment(),
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        atexit.register(self._end)

    def start(self, call: Sequence[str], pipes: Sequence[int]) -> _Fork:
        """Fork a process that calls, in the environment of now."""
        return _Fork(self, self._ask([environment(), *call], pipes))

    def exit_code(self, pid: int) -> int:
        """How a fork ended, when it has."""
        return self._ask(pid)

    def _ask(self, message: object, pipes: Sequence[int] = ()) -> int:
        with self._lock:
            socket.send_fds(self._channel, [json.dumps(message).encode()], pipes)
            return int(self._channel.recv(_MOST))

    def _end(self) -> None:
        self._channel.close()
        self._process.wait()


class _Fork:
    """A fork, which is there until its exit code is asked for."""

    def __init__(self, forks: _Forks, pid: int) -> None:
        self._forks, self._pid = forks, pid
        self._code: int | None = None

    def kill(self) -> None:
        if self._code is None:
            os.kill(self._pid, signal.SIGKILL)

    def wait(self) -> int:
        if self._code is None:
            self._code = self._forks.exit_code(self._pid)
        return self._code


_forks = functools.cache(_Forks)


def _fork_calls(channel: socket.socket) -> list[str]:
    """Fork for each call that comes, and tell its process or how that ended, until there are no
    more. In a fork this returns the call."""
    while True:
        message, pipes, _, _ = socket.recv_fds(channel, _MOST, 3)
        asked = json.loads(message or "[]")
        if not asked:
            return []
        if isinstance(asked, int):
            answer = os.waitstatus_to_exitcode(os.waitpid(asked, 0)[1])
        elif (answer := os.fork()) == 0:
            os.environ.clear()
            os.environ.update(asked[0])
            for descriptor, pipe in enumerate(pipes):
                os.dup2(pipe, descriptor)
        for pipe in pipes:
            os.close(pipe)
        if answer == 0 and pipes:
            return list(asked[1:])
        channel.send(str(answer).encode())


def _call() -> list[str]:
    """The call that this process is for: its own, or one that is asked of it later."""
    if sys.argv[1] != "--forks":
        import_module(_SHARED[0])
        return sys.argv[1:]
    for name in _SHARED:
        import_module(name)
    with socket.socket(fileno=int(sys.argv[2])) as channel:
        return _fork_calls(channel)


if __name__ == "__main__" and (call := _call()):
    module, _, name = call[0].partition(":")
    getattr(import_module(module), name)(*call[1:])
