"""`python tools/structure.py SOURCE [OUTPUT]`: the structure of a source tree, in figures.

Counts modules, lines and the largest folder below SOURCE (a `src` folder), then serves the
embedded model with a disk store and counts the files in which a function is called by
one streamed chat completion, until its blocks are written. Writes JSON to OUTPUT, else to the
standard output. Works on any version of the package that has `semantic serve`.
"""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from pathlib import Path
from types import FrameType

_PATIENCE = 300.0
"""Seconds that the server may take to be ready."""
_FLUSHED = 2.0
"""Seconds after the response in which the write-behind queue is written."""
_PROMPT = "Tell me a story about a red fox. " * 48
"""More than one block of 256 tokens."""


class Trace:
    """Counts calls by file while it is on, in every thread that starts after `install`."""

    def __init__(self, package: Path) -> None:
        self._prefix = f"{package}/"
        self._is_on = False
        self.calls: Counter[str] = Counter()
        self.functions: set[tuple[str, int]] = set()

    def install(self) -> None:
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)

    def figures(self) -> dict[str, object]:
        """How many files and functions were called, and which files."""
        folders = Counter(Path(name).parent.as_posix() for name in self.calls)
        return {
            "files": len(self.calls),
            "functions": len(self.functions),
            "calls": self.calls.total(),
            "by_folder": dict(sorted(folders.items())),
            "names": sorted(self.calls),
        }

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        self._is_on = True
        try:
            yield
        finally:
            self._is_on = False

    def _profile(self, frame: FrameType, event: str, _: object) -> None:
        if self._is_on and event == "call":
            code = frame.f_code
            if code.co_filename.startswith(self._prefix) and code.co_name != "<module>":
                self.calls[code.co_filename.removeprefix(self._prefix)] += 1
                self.functions.add((code.co_filename, code.co_firstlineno))


def main() -> int:
    source = Path(sys.argv[1]).resolve()
    output = Path(sys.argv[2]).resolve() if len(sys.argv) > 2 else None

    def write(trace: Trace) -> None:
        text = json.dumps(sizes(source) | {"streamed_chat": trace.figures()}, indent=1) + "\n"
        if output is None:
            sys.stdout.write(text)
        else:
            output.write_text(text, encoding="utf-8")

    serve(source, write)
    return 0


def sizes(source: Path) -> dict[str, object]:
    """Modules, lines, and the folder with most modules."""
    modules = sorted(source.rglob("*.py"))
    folders = Counter(path.parent.relative_to(source).as_posix() for path in modules)
    folder, n_modules = folders.most_common(1)[0]
    return {
        "modules": len(modules),
        "lines": sum(len(path.read_text(encoding="utf-8").splitlines()) for path in modules),
        "largest_folder": {"folder": folder, "modules": n_modules},
    }


def serve(source: Path, write: Callable[[Trace], None]) -> None:
    """Serve the embedded model for one traced request; `write` gets its trace."""
    sys.path.insert(0, str(source))
    trace = Trace(source)
    trace.install()
    with tempfile.TemporaryDirectory() as folder:
        port = free_port()
        client = threading.Thread(target=request_once, args=(trace, port, write), daemon=True)
        client.start()
        sys.argv = ["semantic", "serve", "--port", str(port), "--store", folder]
        from semantic.cli.main import main as semantic

        with contextlib.suppress(SystemExit, KeyboardInterrupt):
            semantic()


def request_once(trace: Trace, port: int, write: Callable[[Trace], None]) -> None:
    """Trace one streamed chat completion, write its figures, then stop the server."""
    sys.setprofile(None)  # the client itself is not part of the package
    try:
        await_ready(port)
        with trace.on():
            stream(port)
            time.sleep(_FLUSHED)
        write(trace)
    finally:
        signal.raise_signal(signal.SIGINT)


def await_ready(port: int) -> None:
    deadline = time.monotonic() + _PATIENCE
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            connection = HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request("GET", "/ready")
            if connection.getresponse().status == 200:
                return
        time.sleep(0.2)
    raise TimeoutError("the server did not become ready")


def stream(port: int) -> None:
    connection = HTTPConnection("127.0.0.1", port, timeout=120)
    body = {
        "model": "default",
        "messages": [{"role": "user", "content": _PROMPT}],
        "max_tokens": 16,
        "stream": True,
    }
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
    response = connection.getresponse()
    text = response.read().decode()
    if response.status != 200 or "[DONE]" not in text:
        raise RuntimeError(f"expected a stream, got {response.status}: {text[:300]}")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


if __name__ == "__main__":
    sys.exit(main())
