"""`semantic serve` with caches of 8 bits: more agents stay resident, and stores hold both kinds."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.support.http_server import Address, until
from tests.support.lanes import more
from tests.support.serve_process import OURS, ServeProcess, served

pytestmark = pytest.mark.process

N_AGENTS = 14
POOL = ("--pool-gb", "0.012")
TAR = {"Content-Type": "application/x-tar"}


def address_of(server: ServeProcess) -> Address:
    port = urlsplit(server.url).port
    assert port is not None
    return Address(port)


def ask(server: Address, number: int) -> int:
    """Ask a question as an agent; returns the tokens of its prompt that were cached."""
    text = f"agent {number}: " + "the sea is blue and wide. " * 60
    body = {"model": "semantic-tiny", "messages": [{"role": "user", "content": text}]}
    reply = server.ask(
        "POST", "/v1/chat/completions", {**body, "max_tokens": 2}, {"X-Agent-ID": f"a-{number}"}
    )
    assert reply.status == 200, reply.body
    return int(json.loads(reply.body)["usage"]["prompt_tokens_details"]["cached_tokens"])


def reason(server: Address, number: int) -> str:
    (agent,) = json.loads(server.ask("GET", f"/v1/agents?prefix=a-{number}").body)["data"]
    return str(agent["last_turn"]["reason"])


def test_a_pool_keeps_nearly_twice_the_agents(tmp_path: Path) -> None:
    residents: list[int] = []
    for bits in ("16", "8"):
        with served(tmp_path / bits, "--kv-bits", bits, *POOL) as process:
            server = address_of(process)
            for number in range(N_AGENTS):
                assert ask(server, number) == 0
            agents = json.loads(server.ask("GET", "/v1/agents?limit=100").body)["data"]
            assert len(agents) == N_AGENTS
            residents.append(sum(1 for one in agents if one["blocks"]["pool"]))
            assert ask(server, N_AGENTS - 1) > 500
    # The model computes in 32 bits on a CPU, with twice the bytes of bfloat16.
    assert residents[1] >= 1.8 * 2 * residents[0] > 0


def test_an_agent_moves_between_servers_of_other_bits(tmp_path: Path) -> None:
    other = "The agent's cache has other bits; see --kv-bits."
    archive = b""
    for bits, cached, why in (("16", False, "No cached"), ("8", False, other), ("16", True, "The")):
        with served(tmp_path, "--kv-bits", bits) as process:
            server = address_of(process)
            assert (ask(server, 1) > 500) == cached
            assert reason(server, 1).startswith(why)
            assert reason(server, 1) != other or bits == "8"
            if bits == "8":
                moved = server.ask("POST", "/v1/agents/import?name=b", archive, TAR)
                assert moved.status == 400
                assert b"this agent's cache has other bits: see --kv-bits" in moved.body
            archive = server.ask("GET", "/v1/agents/a-1/export").body


@pytest.mark.parametrize("seconds", [1.0, *more(0.2, 2.0, 3.0)])
def test_a_signal_ends_the_measurement_of_a_model(tmp_path: Path, seconds: float) -> None:
    """It takes seconds, and MLX must not compute while the process ends."""
    command = (sys.executable, "-m", "semantic", "serve", "--port", "0", "--no-store")
    fresh = {**os.environ, **OURS, "XDG_CACHE_HOME": str(tmp_path)}
    server = ServeProcess((*command, "--kv-bits", "8"), fresh)
    try:
        until(lambda: any(line.startswith("memory: ") for line in server.log))
        time.sleep(seconds)
        server.signal(signal.SIGTERM)
        assert server.wait(60.0) == 0, server.tail
        assert server.log[-1] == "stopped"
        assert not any("ready" in line for line in server.log)
        assert not any("longer than the specified" in line for line in server.log)
    finally:
        server.kill()
