"""A process that compiles grammars within limits on CPU time and memory.

A schema of a few hundred bytes can take minutes and gigabytes, and llguidance cannot interrupt it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import llguidance

from semantic.adapters.mlx.sampling import grammar_child
from semantic.adapters.mlx.sampling.grammar_child import (
    OUT_OF_MEMORY,
    Header,
    read_frame,
    write_frame,
)
from semantic.adapters.mlx.sampling.grammar_compiler import error_line, grammar_source, name_of
from semantic.adapters.mlx.sampling.token_mask import Vocabulary
from semantic.domain.errors import BackendError, CapacityError, InvalidRequestError
from semantic.domain.grammar import Grammar

_RUN = (
    "import runpy, sys; sys.path.append(sys.argv[1]); runpy.run_path(sys.argv[2], None, '__main__')"
)
_ONE_ARENA = {"MALLOC_ARENA_MAX": "1"}
"""With this setting, glibc reserves no address space for each thread."""
_ENVIRONMENT = {"DYLD_LIBRARY_PATH", "LD_LIBRARY_PATH"}
"""The only environment variables that the process gets. Other variables may contain keys."""
_STARTS = 2
"""The number of tries per grammar, since the process may fail by chance."""
_LINE = 200
"""The maximum number of characters of the process's last message to repeat in an error."""
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class ProcessLimits:
    """Limits for one grammar: CPU seconds, bytes of memory, and wall-clock seconds."""

    cpu_s: float = 2.0
    memory: int = 256 * _MIB
    stuck_s: float = 120.0


class GrammarProcess:
    """A `GrammarProbe` that compiles one grammar at a time.

    If a grammar ends the process, the next grammar starts a new one.
    """

    def __init__(
        self, vocabulary: Callable[[], Vocabulary], limits: ProcessLimits | None = None
    ) -> None:
        """`vocabulary` returns the model's vocabulary."""
        self._vocabulary = vocabulary
        self._limits = limits or ProcessLimits()
        self._lock = threading.Lock()
        self._running: _Child | None = None

    @property
    def pid(self) -> int | None:
        """The id of the process; None if no process is running."""
        with self._lock:
            return None if self._running is None else self._running.process.pid

    def problem(self, grammar: Grammar) -> str:
        try:
            source = grammar_source(grammar).encode()
        except InvalidRequestError as error:
            return str(error)
        for _ in range(_STARTS):
            child = self._child()
            answer = self._exchange(child, source)
            if answer is not None:
                return f"{name_of(grammar)}: {error_line(answer)}" if answer else ""
            self._drop(child)
            status = child.end()
            if status < 0 or status == OUT_OF_MEMORY:
                return f"{name_of(grammar)}: {_reason(status, self._limits)}"
        raise CapacityError(f"the process that compiles grammars ended: {child.last_words()}")

    def _exchange(self, child: _Child, source: bytes) -> str | None:
        watch = threading.Timer(self._limits.stuck_s, child.kill)
        watch.daemon = True
        watch.start()
        try:
            return child.exchange(source)
        finally:
            watch.cancel()

    def stop(self) -> None:
        with self._lock:
            if self._running is not None:
                self._running.kill()

    def close(self) -> None:
        with self._lock:
            child, self._running = self._running, None
        if child is not None:
            child.kill()
            child.end()

    def _child(self) -> _Child:
        with self._lock:
            child = self._running
        if child is not None and not child.is_killed:
            return child
        if child is not None:
            self._drop(child)
            child.end()
        vocabulary = self._vocabulary()
        try:
            child = _Child()
        except OSError as error:
            raise CapacityError(f"cannot start the compiler of grammars: {error}") from error
        with self._lock:
            self._running = child
        if not child.introduce(vocabulary, self._limits):
            self._drop(child)
            child.end()
            raise CapacityError(f"cannot start the compiler of grammars: {child.last_words()}")
        return child

    def _drop(self, child: _Child) -> None:
        with self._lock:
            if self._running is child:
                self._running = None


class _Child:
    def __init__(self) -> None:
        self.is_killed = False
        self._said = b""
        packages = str(Path(llguidance.__file__).parents[1])
        script = str(Path(grammar_child.__file__))
        self.process = subprocess.Popen(  # noqa: S603  files of our own
            [sys.executable, "-I", "-S", "-c", _RUN, packages, script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            close_fds=True,
            env=_ONE_ARENA | {name: os.environ[name] for name in _ENVIRONMENT & os.environ.keys()},
        )

    def introduce(self, vocabulary: Vocabulary, limits: ProcessLimits) -> bool:
        texts, trie = vocabulary.texts, vocabulary.trie
        header: Header = {
            "lengths": [len(text) for text in texts],
            "special": [i for i in range(len(texts)) if trie.is_special_token(i)],
            "eos": sorted(vocabulary.eos),
            "cpu_s": limits.cpu_s,
            "memory": limits.memory,
        }
        return self._send(json.dumps(header).encode()) and self.exchange(b"".join(texts)) == ""

    def exchange(self, content: bytes) -> str | None:
        """Send a frame and return the answer; None if the process ends instead of answering."""
        if not self._send(content):
            return None
        answer = read_frame(_pipe(self.process.stdout))
        return None if answer is None else answer.decode()

    def kill(self) -> None:
        """End the process. A call that is waiting for an answer gets None."""
        self.is_killed = True
        self.process.kill()

    def end(self) -> int:
        _, self._said = self.process.communicate()
        return self.process.returncode

    def last_words(self) -> str:
        """Return how the process ended, and the last line that it wrote to stderr."""
        lines = self._said.decode(errors="replace").split("\n")
        last = next((line for line in reversed(lines) if line.strip()), "no message")
        return f"status {self.process.returncode}, {last[:_LINE]}; retry"

    def _send(self, content: bytes) -> bool:
        try:
            write_frame(_pipe(self.process.stdin), content)
        except BrokenPipeError:
            return False
        return True


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    if pipe is None:
        raise BackendError("the process that compiles grammars has no pipe")
    return pipe


def _reason(status: int, limits: ProcessLimits) -> str:
    """Return why to refuse a grammar that ended the process. Raises CapacityError if the grammar is
    not the cause."""
    if status == -signal.SIGPROF:
        return f"compiling it takes more than {limits.cpu_s:g} s of CPU time; {_SIMPLER}"
    if status in (OUT_OF_MEMORY, -signal.SIGABRT):
        return f"compiling it takes more than {limits.memory / _MIB:g} MiB; {_SIMPLER}"
    if status == -signal.SIGKILL:
        raise CapacityError("the process that compiles grammars ended; retry")
    return f"it ends the compiler (status {status}); {_SIMPLER}"


_SIMPLER = (
    "simplify it: smaller or fewer multipleOf, patterns, ranges and repetitions, "
    "above all in allOf, anyOf and oneOf"
)
