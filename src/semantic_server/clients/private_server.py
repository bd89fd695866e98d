"""A server that one process alone uses, and timed answers from it. A guard starts the server: when
the process ends, however it ends, the guard kills the server and removes its folder."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from semantic.domain.errors import OperatorError
from semantic_server.clients.server_connection import Upload, refusal, send

_HOST: Final = "127.0.0.1"
_STREAMS: Final = 8
_POLL_SECONDS: Final = 0.05
_ANSWER_SECONDS: Final = 3600.0
_MOST_LINE: Final = 1 << 20
_FIXED: Final = {
    "model": "default_model", "temperature": 0, "ignore_eos": True, "stream": True,
    "stream_options": {"include_usage": True},
}  # fmt: skip
_LOG: Final = "log"
_SETTING: Final = re.compile("SEMANTIC_(?!CACHE$)")
_TEXTS: Final = ("content", "reasoning", "reasoning_content")
"""The fields of a piece that have an answer's text."""

Message = Mapping[str, str]


@dataclass(slots=True)
class TimedAnswer:
    """One answer, perhaps unfinished. `sent`, `pieces`, which has the time of each piece of text,
    and `ended` are in seconds of `time.perf_counter`. The client disconnects once `is_left`."""

    sent: float = field(default_factory=time.perf_counter)
    ended: float = 0.0
    text: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    tokens: int = 0
    pieces: list[float] = field(default_factory=list)
    is_left: bool = False

    @property
    def first(self) -> float:
        """Seconds to the first piece of text, or to the end of an answer without text."""
        return (self.pieces or [self.ended])[0] - self.sent

    @property
    def rate(self) -> float:
        """Tokens per second after the first piece; 0 for a single piece."""
        seconds = self.pieces[-1] - self.pieces[0] if self.pieces else 0.0
        return (self.tokens - 1) / seconds if seconds else 0.0

    def take(self, line: bytes) -> None:
        """Add a line of the stream. Raises OperatorError if it says that the answer failed."""
        chunk = json.loads(line.removeprefix(b"data: ")) if line.startswith(b"data: {") else {}
        if "error" in chunk:
            raise OperatorError(f"cannot measure an answer: the server says {chunk['error']}")
        for choice in chunk.get("choices", ()):
            text = "".join(choice["delta"].get(name) or "" for name in _TEXTS)
            self.text += text
            self.pieces += [time.perf_counter()] * bool(text)
        if usage := chunk.get("usage"):
            self.prompt_tokens, self.tokens = usage["prompt_tokens"], usage["completion_tokens"]
            self.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)


class PrivateServer:
    """One program at a time, on a free port of loopback. `folder` ends with it. From `until` on, in
    seconds of `time.monotonic`, each method that waits raises TimeoutError."""

    def __init__(self) -> None:
        own = {name: text for name, text in os.environ.items() if not _SETTING.match(name)}
        # A session of its own: Ctrl-C is for the process that measures.
        self._guard = subprocess.Popen(
            (sys.executable, "-m", "semantic_server.clients.private_server"),
            env={**own, "HF_HUB_OFFLINE": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            encoding="utf-8",
            start_new_session=True,
        )
        self._pool = ThreadPoolExecutor(_STREAMS)
        self._runs: dict[int, Future[None]] = {}
        self.folder = Path(self._read())
        self.url, self.until = "", time.monotonic() + _ANSWER_SECONDS

    def close(self) -> None:
        """Kill the program and remove the folder."""
        with self._pool, suppress(BrokenPipeError), self._guard:
            pass  # the guard first: then no answer goes on

    def run(self, command: Sequence[str]) -> list[str]:
        """Return the lines that a command prints."""
        self._tell(command)
        while self._tell(None):
            self.pause()
        return self._log()

    def start(self, command: Sequence[str], ready: str) -> None:
        """Start a server with `command` and an address. Returns when its path `ready` answers.
        Raises OperatorError if it ends."""
        with socket.create_server((_HOST, 0)) as bound:
            port = bound.getsockname()[1]
        self.url = f"http://{_HOST}:{port}"
        self._tell((*command, "--host", _HOST, "--port", str(port)))
        while not self._answers(ready):
            if not self._tell(None):
                last = (self._log() or ["no word"])[-1].removeprefix("error: ")
                raise OperatorError(
                    f"cannot start the server: {last}; `semantic doctor --model` examines a model"
                )
            self.pause()

    def kill(self) -> None:
        """Kill the program with SIGKILL, and wait for its end."""
        self._tell(())

    def pause(self) -> None:
        """Wait a moment."""
        if time.monotonic() > self.until:
            raise TimeoutError
        time.sleep(_POLL_SECONDS)

    def begin(self, said: Sequence[Message], n_tokens: int, agent: str = "") -> TimedAnswer:
        """Begin an answer of at most `n_tokens`, which `finish` waits for."""
        body = {**_FIXED, "messages": said, "max_tokens": n_tokens}
        answer, data = TimedAnswer(), json.dumps({**body, "agent_id": agent} if agent else body)
        self._runs[id(answer)] = self._pool.submit(self._stream, data.encode(), answer)
        return answer

    def finish(self, answer: TimedAnswer) -> TimedAnswer:
        """Return the answer at its end. Raises the errors of `send` and `refusal`, and
        OperatorError if it fails."""
        self._runs.pop(id(answer)).result(max(self.until - time.monotonic(), 0))
        return answer

    def _stream(self, data: bytes, answer: TimedAnswer) -> None:
        upload = Upload((data,), len(data), _ANSWER_SECONDS)
        try:
            with send(self.url, "/v1/chat/completions", None, upload) as reply:
                if reply.status != HTTPStatus.OK:
                    raise refusal(reply, "a prompt")
                while not answer.is_left and (line := reply.read_line(_MOST_LINE)):
                    answer.take(line)
        finally:
            answer.ended = time.perf_counter()

    def _answers(self, path: str) -> bool:
        try:
            with send(self.url, path) as reply:
                return reply.status == HTTPStatus.OK
        except OperatorError:
            return False

    def _log(self) -> list[str]:
        return (self.folder / _LOG).read_text("utf-8", errors="replace").splitlines()

    def _tell(self, command: Sequence[str] | None) -> bool:
        """Return whether a program runs after `command`. See `main`."""
        with suppress(BrokenPipeError):
            print(json.dumps(command), file=self._guard.stdin, flush=True)
        return self._read() == "1"

    def _read(self) -> str:
        line = "" if self._guard.stdout is None else self._guard.stdout.readline()
        if not line:
            raise OperatorError("cannot hold a server: its guard ended; start the command again")
        return line.rstrip("\n")


def main() -> None:
    """Run the guard, which prints its folder, then after each line of stdin whether a program runs:
    a command replaces the one that runs, [] kills it, and null changes nothing."""
    process = None
    with TemporaryDirectory(prefix="semantic-bench-", ignore_cleanup_errors=True) as folder:
        try:
            os.write(1, f"{folder}\n".encode())
            for line in sys.stdin:
                if (command := json.loads(line)) is not None:
                    _kill(process)
                    process = _started(command, Path(folder)) if command else None
                os.write(1, b"1\n" if process is not None and process.poll() is None else b"0\n")
        except BrokenPipeError:
            pass  # the other process has ended
        finally:
            _kill(process)


def _started(command: Sequence[str], folder: Path) -> subprocess.Popen[bytes]:
    own = {**os.environ, "TMPDIR": str(folder)}
    with (folder / _LOG).open("wb") as log:
        return subprocess.Popen(command, env=own, stdin=subprocess.DEVNULL, stdout=log, stderr=log)  # noqa: S603


def _kill(process: subprocess.Popen[bytes] | None) -> None:
    if process is not None:
        process.kill()
        process.wait()


if __name__ == "__main__":
    main()
