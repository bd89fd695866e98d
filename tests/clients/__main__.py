"""Checks every client, or those that are named: `python -m tests.clients [--pin] [name ...]`.

Each has an environment of its own; all talk to one started server with an empty store. Ends with
a table, and with 1 when any check failed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from xml.etree import ElementTree as ET

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tests.clients import talk
from tests.clients.clients import CLIENTS, HERE, Client
from tests.clients.conftest import PACKAGES_VARIABLE, SERVER_VARIABLE, URL_VARIABLE
from tests.clients.environments import EnvironmentFailedError, packages_of, pin, python_of
from tests.clients.sessions import hold_sessions
from tests.support.embedding_model import write_embedding_model
from tests.support.serve_process import OURS, ROOT, ServeProcess, ServerFailedError, served

_MINUTES: Final = 10
"""A client that takes longer hangs."""


@dataclass(frozen=True, slots=True)
class Result:
    """How a client's checks went: how many there were, and what went wrong."""

    client: str
    passed: int = 0
    failures: tuple[str, ...] = ()
    build_seconds: float = 0.0
    seconds: float = 0.0

    @property
    def is_good(self) -> bool:
        """Whether there were checks, and none failed."""
        return bool(self.passed) and not self.failures


def main(arguments: Sequence[str]) -> int:
    """Run the checks of all clients, or of those in `arguments`; 0 when all is well."""
    names = {client.name: client for client in CLIENTS}
    parser = argparse.ArgumentParser(
        prog="tests.clients", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--pin", action="store_true", help="write requirements anew, run nothing")
    parser.add_argument("clients", nargs="*", metavar="name", help="one of " + ", ".join(names))
    given = parser.parse_args(arguments)
    unknown = sorted(set(given.clients) - set(names))
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; expected some of {', '.join(names)}")
    chosen = [names[name] for name in given.clients or names]
    if given.pin:
        for client in chosen:
            pin(client)
        return 0
    return _check(chosen, Console())


def _check(chosen: Sequence[Client], console: Console) -> int:
    try:
        with _home() as home, _server(home) as server:
            results = [_checked(client, server.url, console) for client in chosen]
            good = all(result.is_good for result in results)
            if not good:
                console.print("\n".join(filter(_tells_of_a_bug, server.log)), markup=False)
            console.print(_table(results))
    except ServerFailedError as error:
        console.print(f"the server failed:\n{error}", markup=False)
        return 1
    return 0 if good else 1


def _server(home: Path) -> AbstractContextManager[ServeProcess]:
    """The server that all checks talk to: the model inside the package, and one for vectors."""
    vectors = write_embedding_model(home / talk.EMBEDDING_MODEL)
    flags = ("--embedding-model", str(vectors))
    return served(home / "store", *flags, environment=OURS | _plain(home))


def _tells_of_a_bug(line: str) -> bool:
    return " error " in line or "status=500" in line


def _checked(client: Client, url: str, console: Console) -> Result:
    console.print(f"[bold]{client.name}[/bold]")
    began = time.monotonic()
    try:
        python = python_of(client)
        built = time.monotonic()
        with _home() as home:
            passed, failures = _run(client, python, home, url)
            held, broken = hold_sessions(client, python, home)
    except (EnvironmentFailedError, ServerFailedError, subprocess.TimeoutExpired) as error:
        console.print(str(error), markup=False)
        return Result(client.name, failures=(type(error).__name__,))
    ended = time.monotonic()
    return Result(
        client.name,
        passed + held,
        (*failures, *broken),
        build_seconds=built - began,
        seconds=ended - built,
    )


def _run(client: Client, python: Path, home: Path, url: str) -> tuple[int, tuple[str, ...]]:
    """(checks that passed, names of those that did not)."""
    report = home / "report.xml"
    command = (
        *(str(python), "-m", "pytest", "-c", str(HERE / "pytest.ini")),
        *(f"--rootdir={HERE}", f"--junitxml={report}", str(client.path)),
    )
    server = json.dumps([sys.executable, OURS | _plain(home)])
    packages = str(packages_of(client))
    variables = {URL_VARIABLE: url, SERVER_VARIABLE: server, PACKAGES_VARIABLE: packages}
    environment = _plain(home) | variables
    done = subprocess.run(command, cwd=ROOT, env=environment, check=False, timeout=_MINUTES * 60)
    if not report.exists():
        return 0, (f"pytest ended with {done.returncode}",)
    return _read(report)


def _read(report: Path) -> tuple[int, tuple[str, ...]]:
    cases = list(ET.parse(report).iter("testcase"))
    bad = [case for case in cases if any(case.find(kind) is not None for kind in _BAD)]
    return len(cases) - len(bad), tuple(case.get("name", "?") for case in bad)


_BAD: Final = ("failure", "error", "skipped")


@contextmanager
def _home() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="semantic-clients-") as folder:
        yield Path(folder)


def _plain(home: Path) -> dict[str, str]:
    """Variables for a process that shall know nothing of who started it."""
    return {
        "HOME": str(home),
        "PATH": os.environ.get("PATH", os.defpath),
        "LANG": "C.UTF-8",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "SEMANTIC_CACHE": str(home / "cache"),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "NO_PROXY": "*",
    }


def _table(results: Sequence[Result]) -> Table:
    table = Table("client", "", "checks", "seconds", "built in", "failed")
    for result in results:
        table.add_row(
            result.client,
            "ok" if result.is_good else "FAILED",
            str(result.passed + len(result.failures)),
            f"{result.seconds:.1f}",
            f"{result.build_seconds:.1f}",
            escape("\n".join(result.failures)),
        )
    return table


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
