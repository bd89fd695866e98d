"""HAProxy with the configuration of `deploy` in front of two servers."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.fleet.router import free_port
from tests.fleet.wires import ask, chat, check_wires
from tests.support.serve_process import ROOT, ServeProcess, served

PROGRAM = shutil.which("haproxy", path=f"{os.environ.get('PATH')}:/usr/sbin")
FILE = ROOT / "deploy/haproxy/haproxy.cfg"
SESSIONS = (
    "X-Agent-ID", "X-Claude-Code-Session-Id", "Session-Id", "X-Session-ID", "X-Session-Affinity",
    "X-Correlation-ID",
)  # fmt: skip

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="needs haproxy")


@dataclass(frozen=True)
class Proxied:
    """A proxy at `url`, its admin socket, and the servers behind it by their names."""

    url: str
    admin: str
    servers: dict[str, ServeProcess]

    def home(self, path: str = "/v1/models", **headers: str) -> str:
        """The name of the server that answers."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        request = urllib.request.Request(self.url + path, headers=named)
        with urllib.request.urlopen(request, timeout=30) as answer:
            name: str = answer.headers["X-Semantic-Replica"]
        return name

    def agent_of(self, server: str) -> str:
        """The name of an agent whose home is `server`."""
        return next(name for name in map(str, range(100)) if self.home(X_Agent_ID=name) == server)

    def tell(self, command: str) -> str:
        """What the proxy replies to a command of its operator."""
        with socket.socket(socket.AF_UNIX) as admin:
            admin.connect(self.admin)
            admin.sendall(f"{command}\n".encode())
            return b"".join(iter(lambda: admin.recv(4096), b"")).decode()


@pytest.fixture
def proxied(tmp_path: Path) -> Iterator[Proxied]:
    assert PROGRAM is not None
    with ExitStack() as stack:
        lives = {name: ExitStack() for name in ("one", "two")}
        servers = {
            name: life.enter_context(served(tmp_path / name)) for name, life in lives.items()
        }
        for server in servers.values():
            stack.callback(server.kill)
        admin = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "admin"
        url = f"127.0.0.1:{free_port()}"
        environment = {
            "SEMANTIC_ADMIN": str(admin),
            "SEMANTIC_BIND": url,
            **{f"SEMANTIC_{name.upper()}": one.url[7:] for name, one in servers.items()},
        }
        process = subprocess.Popen(
            [PROGRAM, "-f", FILE], env=environment, stdout=subprocess.DEVNULL
        )
        stack.callback(process.wait)
        stack.callback(process.kill)
        found = Proxied(f"http://{url}", str(admin), servers)
        until = time.monotonic() + 30
        while not admin.exists() or found.tell("show servers state").count(" 2 0 ") < 2:
            assert time.monotonic() < until
            time.sleep(0.1)
        yield found


def test_sessions_stay_streams_pass_and_servers_may_go(proxied: Proxied) -> None:
    check_wires(proxied.url, proxied.servers["one"].url)
    for header in SESSIONS:
        homes = [proxied.home(**{header: str(n)}) for n in range(20)]
        assert {*homes} == {"one", "two"}
        assert homes == [proxied.home(**{header: str(n)}) for n in range(20)]
    by_agent = [proxied.home(X_Agent_ID=f"a {n}", X_Session_ID="same") for n in range(9)]
    assert len({*by_agent}) == 2
    agents = [proxied.agent_of("one"), proxied.agent_of("two")]
    check_drain(proxied, agents[0])
    proxied.servers["two"].kill()
    status, _ = ask(f"{proxied.url}/v1/chat/completions", chat("Hi"), {"X-Agent-ID": agents[1]})
    assert status == 200
    assert proxied.home(X_Agent_ID=agents[1]) == "one"


def check_drain(proxied: Proxied, agent: str) -> None:
    """A stream of a server that is drained goes on, piece by piece; what is new goes elsewhere."""
    body = json.dumps(chat("Count.", stream=True, max_tokens=150, ignore_eos=True))
    headers = {"Content-Type": "application/json", "X-Agent-ID": agent}
    with closing(http.client.HTTPConnection(proxied.url[7:], timeout=60)) as connection:
        connection.request("POST", "/v1/chat/completions", body, headers)
        answer = connection.getresponse()
        pieces = [answer.read1()]
        proxied.tell("set server replicas/one state drain")
        assert proxied.home(X_Agent_ID=agent) == "two"
        while piece := answer.read1():
            pieces.append(piece)
    assert len(pieces) > 10
    assert pieces[-1].endswith(b"data: [DONE]\n\n")
    proxied.tell("set server replicas/one state ready")
    assert proxied.home(X_Agent_ID=agent) == "one"
