"""Two servers behind vllm-router: all wires pass, agents stay, and come back to their blocks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.fleet.router import Router, is_there, routed
from tests.fleet.wires import MODEL, ask, cached, chat, check_wires
from tests.support.ports import free_port
from tests.support.serve_process import ServeProcess, served

pytestmark = [
    pytest.mark.skipif(not is_there(), reason="needs vllm-router, from `make test-fleet`"),
    pytest.mark.process,
]

WORDS = "The quick brown fox jumps over the lazy dog. "


@dataclass(frozen=True)
class Replica:
    """A server, and where it publishes."""

    process: ServeProcess
    events: str

    @property
    def url(self) -> str:
        return self.process.url

    def agents(self) -> set[str]:
        """The names of the agents that it has served."""
        _, body = ask(f"{self.url}/v1/agents")
        return {one["id"] for one in json.loads(body)["data"]}


def started(stack: ExitStack, folder: Path, *flags: str) -> Replica:
    events = f"tcp://127.0.0.1:{free_port(2)}"
    process = stack.enter_context(served(folder, "--kv-events", events, *flags))
    return Replica(process, events)


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Replica]]:
    with ExitStack() as stack:
        yield [started(stack, tmp_path_factory.mktemp(name)) for name in ("one", "two")]


def sources(replicas: list[Replica]) -> list[str]:
    """The flags with which a router follows the events of `replicas`."""
    flags = ["--kv-event-block-size", "256", "--kv-event-model", MODEL]
    for one in replicas:
        host, port = one.events.rsplit(":", 1)
        flags += ["--kv-event-source", f"{one.url}={one.events}"]
        flags += ["--kv-event-replay-source", f"{one.url}={host}:{int(port) + 1}"]
    return flags


@pytest.mark.parametrize("policy", ["consistent_hash", "kv_aware"])
def test_all_wires_pass(policy: str, replicas: list[Replica], tmp_path: Path) -> None:
    flags = sources(replicas) if policy == "kv_aware" else []
    urls = [one.url for one in replicas]
    with routed(tmp_path / "log", policy, urls, *flags) as router:
        check_wires(router.url, urls[0])


def test_consistent_hash_keeps_sessions(replicas: list[Replica], tmp_path: Path) -> None:
    names = [f"kept-{n}" for n in range(6)]
    n_cached = n_tokens = 0
    with routed(tmp_path / "log", "consistent_hash", [one.url for one in replicas]) as router:
        for name in names:
            messages: list[object] = []
            before = 0
            for turn in range(3):
                messages.append({"role": "user", "content": f"{name} {turn}: {WORDS * 20}"})
                headers = {"X-Session-ID": name, "X-Agent-ID": name}
                body = {"model": MODEL, "messages": messages, "max_tokens": 4}
                _, found = ask(f"{router.url}/v1/chat/completions", body, headers)
                answer = json.loads(found)
                messages.append(answer["choices"][0]["message"])
                if turn:
                    n_cached += cached(found)
                n_tokens += before
                before = answer["usage"]["total_tokens"]
    homes = [one.agents() & {*names} for one in replicas]
    assert homes[0] | homes[1] == {*names}
    assert not homes[0] & homes[1]
    assert n_cached >= 0.95 * n_tokens


def come_back(router: Router, replicas: list[Replica], *, follows: bool) -> list[int]:
    """Agents begin at one replica each, and come back through a router, which may follow events:
    the cached tokens of each, over the tokens of its first turn in percent."""
    found = []
    for n in range(6):
        home, text = replicas[n % 2], f"{follows} {n}: {WORDS * 40}"
        before = router.read_from(home.url)
        _, first = ask(f"{home.url}/v1/chat/completions", chat(text))
        if follows:
            router.wait_for(home.url, before)
        answer = json.loads(first)
        reply = answer["choices"][0]["message"]
        later = {"role": "user", "content": "Go on."}
        _, second = ask(f"{router.url}/v1/chat/completions", chat(text, reply, later))
        found.append(100 * cached(second) // answer["usage"]["total_tokens"])
    return found


def test_kv_aware_finds_the_replica_that_has_the_blocks(
    replicas: list[Replica], tmp_path: Path
) -> None:
    urls = [one.url for one in replicas]
    with routed(tmp_path / "blind", "kv_aware", urls) as router:
        assert min(come_back(router, replicas, follows=False)) < 50
    with routed(tmp_path / "log", "kv_aware", urls, *sources(replicas)) as router:
        assert min(come_back(router, replicas, follows=True)) >= 95


def test_a_router_that_starts_later_and_a_replica_that_is_killed(tmp_path: Path) -> None:
    """A replica publishes what it has to a router that comes, and after a restart to all."""
    port, text = str(free_port()), f"before the router: {WORDS * 40}"
    with ExitStack() as stack:
        kept = started(stack, tmp_path / "kept")
        life = ExitStack()  # never closed: that would expect a server that ends in good order
        lost = started(life, tmp_path / "lost", "--port", port)
        stack.callback(lost.process.kill)
        ask(f"{lost.url}/v1/chat/completions", chat(text))
        urls, flags = [kept.url, lost.url], sources([kept, lost])
        router = stack.enter_context(routed(tmp_path / "log", "kv_aware", urls, *flags))
        router.wait_for(lost.url, 0)
        assert cached(ask(f"{router.url}/v1/chat/completions", chat(text))[1]) > 256
        before = router.read_from(lost.url)
        lost.process.kill()
        again = served(tmp_path / "lost", "--kv-events", lost.events, "--port", port)
        assert stack.enter_context(again).url == lost.url
        router.wait_for(lost.url, before)
        assert cached(ask(f"{router.url}/v1/chat/completions", chat(text))[1]) > 256
