"""Sessions of ten answers that a maker's SDK holds with models of several families."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from tests.clients.clients import Client
from tests.families.held import RESTARTS_BEFORE, Session, write_session
from tests.families.sessions import SPEAKERS, TOOLS
from tests.support.http_server import Address, Reply
from tests.support.serve_process import OURS, ROOT, served
from tests.support.wires import WIRES

FAMILIES: Final = ("harmony", "kimi", "mistral", "glm")


@dataclass(frozen=True)
class Spoken(Address):
    """A server that is asked through an SDK."""

    says: IO[str]
    hears: IO[str]

    def ask(
        self, method: str, path: str, body: object = None, headers: dict[str, str] | None = None
    ) -> Reply:
        """Raises AssertionError when the SDK took its answer for a failure."""
        del method, headers
        self.says.write(json.dumps([self.url, path, body]) + "\n")
        self.says.flush()
        line = self.hears.readline()
        assert line, f"expected an answer at {path}; see the SDK's error above"
        return Reply(200, {}, "\n".join(map(json.dumps, json.loads(line))).encode())


def hold_sessions(client: Client, python: Path, home: Path) -> tuple[int, tuple[str, ...]]:
    """Hold one on each wire that the client speaks, whole and streamed, with each family; the
    server is started again in the middle. (sessions that went well, names of those that did not)"""
    good, bad = 0, list[str]()
    for family in FAMILIES if client.wires else ():
        failed = _held(client, python, home / family, family)
        good += 2 * len(client.wires) - len(failed)
        bad += failed
    return good, tuple(bad)


def _held(client: Client, python: Path, folder: Path, family: str) -> list[str]:
    folder.mkdir()
    steps = write_session(family, folder / "model")
    sessions = {
        f"{family} {name}{' streamed' * streams}": Session(
            WIRES[name](TOOLS, streams=streams), SPEAKERS[family]
        )
        for name in client.wires
        for streams in (False, True)
    }
    failed = list[str]()
    for first in (0, RESTARTS_BEFORE):
        part = steps[first : first + RESTARTS_BEFORE]
        with served(folder / "store", "--model", str(folder / "model"), environment=OURS) as server:
            port = int(server.url.rpartition(":")[2])
            for name in sessions.keys() - set(failed):
                try:
                    with _speaking(client, python, OURS) as (says, hears):
                        sessions[name].talk(Spoken(port, says, hears), part, first)
                except AssertionError as error:
                    sys.stderr.write(f"{name}: {error}\n")
                    failed.append(name)
    return failed


@contextmanager
def _speaking(
    client: Client, python: Path, environment: Mapping[str, str]
) -> Iterator[tuple[IO[str], IO[str]]]:
    sdk = subprocess.Popen(
        (str(python), "-m", "tests.clients.speak", client.name.partition("-")[0]),
        cwd=ROOT,
        env={**environment, "NO_PROXY": "*"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert sdk.stdin is not None
    assert sdk.stdout is not None
    try:
        with sdk.stdin as says, sdk.stdout as hears:
            yield says, hears
    finally:
        sdk.kill()
        sdk.wait()
