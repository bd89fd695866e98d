"""Server processes to measure: ours, and mlx-lm's in its own environment.

Both use OpenBLAS if it is there. Knows how servers start and end, not what is requested of them.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from importlib import metadata
from pathlib import Path

from experiments.harness.environment import ROOT
from semantic.composition.framework import blas_status

_OPENBLAS = "libopenblas.so.0"
_START_SECONDS, _STOP_SECONDS = 240.0, 60.0
_SOURCES = ROOT / "src"


class ServerEndedError(RuntimeError):
    """A server did not come up, or is gone."""


@dataclass(slots=True)
class ServerProcess:
    """A server that can be ended and started again, on the same port.

    `probe` is a path that answers 200 when requests may come. What it prints goes to `log`.
    """

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    probe: str
    log: Path
    port: int
    is_group: bool = False
    """Whether it starts the processes that serve, which end with it."""
    starts: int = 0
    _process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    def start(self) -> None:
        """Returns when the server can be asked. Raises ServerEndedError when it cannot."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(  # noqa: S603 - our own command line
                self.command,
                env=dict(self.environment),
                cwd=self.log.parent,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=self.is_group,
            )
        deadline = time.monotonic() + _START_SECONDS
        while not self._answers():
            if self.ended or time.monotonic() > deadline:
                self.kill()
                raise ServerEndedError(f"{self.name} did not start: {self.last_words()}")
            time.sleep(0.05)
        self.starts += 1

    def stop(self) -> None:
        """End it as an operator does; by force when it does not end."""
        if self._process is not None:
            self._signal(signal.SIGTERM)
            deadline = time.monotonic() + _STOP_SECONDS
            while not self.ended or self._signal(0):
                if time.monotonic() > deadline:
                    self.kill()
                    break
                time.sleep(0.05)

    def kill(self) -> None:
        """End it with SIGKILL, as a machine short of memory does."""
        if self._process is not None:
            self._signal(signal.SIGKILL)
            self._process.wait()

    def _signal(self, number: int) -> bool:
        """Send a signal; whether any process of the group is there."""
        if self._process is None:
            return False
        if not self.is_group:
            self._process.send_signal(number)
            return False
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)
            return True
        return False

    @property
    def ended(self) -> bool:
        """Whether there is no process."""
        return self._process is None or self._process.poll() is not None

    @property
    def pid(self) -> int | None:
        """The id of the process; None before it was started."""
        return None if self._process is None else self._process.pid

    def resident_bytes(self) -> int:
        """Memory of the process that is resident now; 0 of one that has ended."""
        if self._process is None:
            return 0
        ps = shutil.which("ps") or "/bin/ps"
        done = subprocess.run(  # noqa: S603 - a fixed program, no shell
            [ps, "-o", "rss=", "-p", str(self._process.pid)],
            capture_output=True,
            text=True,
            check=False,
        )
        return 1024 * int(done.stdout.strip() or 0)

    def cpu_seconds(self) -> float:
        """CPU time of the process so far, user and system; of Linux only, elsewhere 0."""
        if self._process is None:
            return 0.0
        stat = Path("/proc") / str(self._process.pid) / "stat"
        with suppress(OSError):
            user, system = stat.read_text().rpartition(")")[2].split()[11:13]
            return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
        return 0.0

    def footprint(self) -> dict[str, int]:
        """Resident bytes, open files and threads of the process; files and threads of Linux only,
        elsewhere 0."""
        files = threads = 0
        if self._process is not None:
            kernel = Path("/proc") / str(self._process.pid)
            with suppress(OSError):
                files = len(list((kernel / "fd").iterdir()))
                threads = len(list((kernel / "task").iterdir()))
        return {"rss_bytes": self.resident_bytes(), "files": files, "threads": threads}

    def last_words(self) -> str:
        """The last line of its log."""
        return next(
            (line.strip() for line in reversed(self.said()) if line.strip()), "it said nothing"
        )

    def said(self) -> list[str]:
        """The lines of its log."""
        return self.log.read_text(encoding="utf-8", errors="replace").splitlines()

    def _answers(self) -> bool:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("GET", self.probe)
            return connection.getresponse().status == 200
        except (OSError, HTTPException):
            return False
        finally:
            connection.close()


def semantic_server(
    model: str | Path, folder: Path, *flags: str, name: str = "semantic"
) -> ServerProcess:
    """`semantic serve` with a store in `folder`. Its environment has no settings but the flags."""
    folder.mkdir(parents=True, exist_ok=True)
    environment = _bare_environment()
    environment["PYTHONPATH"] = str(_SOURCES)
    port = free_port()
    command = (
        *(sys.executable, "-m", "semantic", "serve", "--model", str(model), "--port", str(port)),
        *("--store", str(folder / "store"), "--log-level", "warning", *flags),
    )
    return ServerProcess(name, command, environment, "/ready", folder / f"{name}.log", port)


def fleet_server(python: Path, model: str | Path, folder: Path, *flags: str) -> ServerProcess:
    """`semantic fleet serve` with its replicas' stores in `folder`, by the `python` of an
    environment that has Ray."""
    server = semantic_server(model, folder, *flags, name="fleet")
    command = [str(python), *server.command[1:]]
    command.insert(command.index("serve"), "fleet")
    server.command = command
    return server


def mlx_lm_server(model: Path, folder: Path, python: Path) -> ServerProcess:
    """`mlx_lm.server` with its own defaults, run by the `python` of its own environment."""
    folder.mkdir(parents=True, exist_ok=True)
    environment = _bare_environment()
    if blas_status() == "openblas":
        environment["LD_PRELOAD"] = _OPENBLAS
    port = free_port()
    command = (
        *(str(python), "-m", "mlx_lm.server", "--model", str(model)),
        *("--host", "127.0.0.1", "--port", str(port), "--log-level", "WARNING"),
    )
    log = folder / "mlx-lm.log"
    return ServerProcess("mlx-lm", command, environment, "/health", log, port)


def make_environment(folder: Path) -> Path:
    """A virtual environment with nothing but the mlx-lm that is installed here; its Python.

    Raises CalledProcessError when it cannot be installed.
    """
    wanted = [f"mlx-lm=={metadata.version('mlx-lm')}", f"mlx=={metadata.version('mlx')}"]
    if sys.platform == "linux":
        wanted.append("mlx[cpu]")
    python = folder / "bin" / "python"
    beside = Path(sys.executable).with_name("uv")
    uv = str(beside) if beside.exists() else shutil.which("uv")
    if uv is None:
        _run(sys.executable, "-m", "venv", str(folder))
        _run(str(python), "-m", "pip", "install", "--quiet", *wanted)
    else:
        _run(uv, "venv", "--quiet", "--python", sys.executable, str(folder))
        _run(uv, "pip", "install", "--quiet", "--python", str(python), *wanted)
    return python


def free_port() -> int:
    """A free port."""
    with socket.create_server(("127.0.0.1", 0)) as bound:
        port: int = bound.getsockname()[1]
        return port


def _bare_environment() -> dict[str, str]:
    """This process's, without what would change a server: settings, import paths, preloads."""
    ours = ("SEMANTIC_", "PYTHON", "LD_", "MLX_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return kept | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def _run(*command: str) -> None:
    subprocess.run(command, check=True)  # noqa: S603 - our own command line
