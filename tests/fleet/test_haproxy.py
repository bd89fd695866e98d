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
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.fleet.wires import ask, chat, check_wires
from tests.support.ports import free_port
from tests.support.serve_process import ROOT, ServeProcess, served

PROGRAM = shutil.which("haproxy", path=f"{os.environ.get('PATH')}:/usr/sbin")
FILE = ROOT / "deploy/haproxy/haproxy.cfg"
SESSIONS = (
    "X-Agent-ID", "X-Claude-Code-Session-Id", "Session-Id", "X-Session-ID", "X-Session-Affinity",
    "X-Correlation-ID",
)  # fmt: skip

pytestmark = [pytest.mark.skipif(PROGRAM is None, reason="needs haproxy"), pytest.mark.process]


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
    with ExitStack() as stack:
        lives = {name: ExitStack() for name in ("one", "two")}
        servers = {
            name: life.enter_context(served(tmp_path / name)) for name, life in lives.items()
        }
        for server in servers.values():
            stack.callback(server.kill)
        found = stack.enter_context(proxy({name: one.url[7:] for name, one in servers.items()}))
        yield replace(found, servers=servers)


@contextmanager
def proxy(addresses: Mapping[str, str]) -> Iterator[Proxied]:
    """A proxy in front of servers at these addresses, once it has found both."""
    assert PROGRAM is not None
    with ExitStack() as stack:
        admin = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "admin"
        url = f"127.0.0.1:{free_port()}"
        environment = {
            "SEMANTIC_ADMIN": str(admin),
            "SEMANTIC_BIND": url,
            **{f"SEMANTIC_{name.upper()}": one for name, one in addresses.items()},
        }
        process = subprocess.Popen(
            [PROGRAM, "-f", FILE], env=environment, stdout=subprocess.DEVNULL
        )
        stack.callback(process.wait)
        stack.callback(process.kill)
        found = Proxied(f"http://{url}", str(admin), {})
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


LOST = "the server that answered is lost"
_OPENAI = {"error": {"message": LOST, "type": "server_error", "param": None, "code": "overloaded"}}
ERRORS: dict[str, object] = {
    "/v1/chat/completions": _OPENAI,
    "/v1/completions": _OPENAI,
    "/v1/responses": _OPENAI,
    "/api/v0/chat/completions": _OPENAI,
    "/v1/messages": {
        "type": "error",
        "error": {"type": "overloaded_error", "message": LOST},
        "request_id": None,
    },
    "/api/chat": {"error": LOST},
    "/api/generate": {"error": LOST},
}
"""Of each wire what the proxy answers when a server is lost."""


class _Lost(BaseHTTPRequestHandler):
    """Of a server that is ready, and closes each connection with a request on it unanswered."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_POST(self) -> None:
        self.close_connection = True

    def log_message(self, *_: object) -> None: ...


def test_a_server_that_is_lost_is_an_error_of_the_wire() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Lost) as server, ThreadPoolExecutor(1) as pool:
        pool.submit(server.serve_forever)
        one = f"127.0.0.1:{server.server_port}"
        try:
            with proxy({"one": one, "two": one}) as found:
                replies = {path: _refused(found.url + path) for path in ERRORS}
        finally:
            server.shutdown()
    assert replies == {path: (502, "1", error) for path, error in ERRORS.items()}


def _refused(url: str) -> tuple[int, str, object]:
    """The status of an error, when to repeat the request, and the body."""
    with pytest.raises(urllib.error.HTTPError) as raised:
        urllib.request.urlopen(urllib.request.Request(url, b"{}"), timeout=30)
    with raised.value as reply:
        return reply.code, reply.headers["Retry-After"], json.load(reply)


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
