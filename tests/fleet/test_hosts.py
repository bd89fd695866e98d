"""Three hosts, with the commands of the documents: agents move between them, one is killed, a link
is slow, cut and mended, and no answer differs from that of one machine alone."""

from __future__ import annotations

import http.client
import json
import os
import re
import secrets
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

import pytest

from tests.fleet.hosts import DISK, Host, Switch, joined_hosts, missing
from tests.fleet.seaweed import PROGRAM
from tests.fleet.test_haproxy import FILE
from tests.fleet.test_haproxy import PROGRAM as HAPROXY
from tests.fleet.test_ray import PYTHON, WORDS, completion
from tests.fleet.wires import ask
from tests.support.serve_process import OURS, ROOT, served

PAGE: Final = ROOT / "docs/fleet.md"
BUCKET: Final = "s3://agents/run"
KEY, OPERATOR, SECRET, TOKEN = (secrets.token_hex(32) for _ in range(4))
KEYS: Final = "--host 0.0.0.0 --api-key-file keys --operator-key-file operators"
_SECONDS: Final = 240.0
_UNAVAILABLE: Final = {502, 503, 504}

_ABSENT: Final = missing()

pytestmark = [
    pytest.mark.skipif(_ABSENT is not None, reason=str(_ABSENT)),
    pytest.mark.skipif(HAPROXY is None, reason="needs haproxy"),
    pytest.mark.process,
]


def documented(start: str, **given: str) -> str:
    """The command of the page that begins with `start`, as it stands there but for what readers
    fill in."""
    lines = (line.strip() for line in PAGE.read_text().splitlines())
    (command,) = {line.split("  #")[0].rstrip() for line in lines if line.startswith(start)}
    for name, value in {"s3://bucket/prefix": BUCKET, "...": TOKEN, **given}.items():
        command = command.replace(name, value)
    return command


STORE_KEYS: Final = documented("export AWS_ACCESS_KEY_ID")
STORE: Final = f"{STORE_KEYS}; {documented('export AWS_ENDPOINT_URL', ADDRESS='one')}"
RAY: Final = f"{documented('export RAY_AUTH')}; {documented('export RAY_USAGE')}; {STORE}"
QUICK: Final = "RAY_health_check_period_ms=1000 RAY_health_check_timeout_ms=2000"
"""As the page has it, for a host that is cut off to be noticed sooner."""


@dataclass
class Agents:
    """Asks for agents, and keeps what they were answered."""

    url: str
    answers: dict[str, str] = field(default_factory=dict)
    """By their prompts."""

    def ask(self, agent: str, prompt: str, url: str | None = None) -> float:
        """The share of the prompt that was cached. As a client does it sends again what was not
        answered because a host is lost."""
        body = completion(prompt)
        headers = {"X-Agent-ID": agent, "Authorization": f"Bearer {KEY}"}
        answered: list[bytes] = []

        def is_answered() -> bool:
            try:
                status, reply = ask(f"{url or self.url}/v1/completions", body, headers)
            except (OSError, http.client.HTTPException):
                return False
            assert status in {200, *_UNAVAILABLE}, reply
            answered.append(reply)
            return status == 200

        until(is_answered, lambda: str(answered))
        found = json.loads(answered[-1])
        self.answers[prompt] = found["choices"][0]["text"]
        cached: int = found["usage"]["prompt_tokens_details"]["cached_tokens"]
        return cached / int(found["usage"]["prompt_tokens"])

    def go_on(self, agent: str, prompt: str, url: str | None = None) -> float:
        """The next turn of an agent whose last prompt this is."""
        return self.ask(agent, self.onward(prompt), url)

    def onward(self, prompt: str) -> str:
        return f"{prompt}{self.answers[prompt]} And then?"

    def are_as_alone(self, folder: Path) -> None:
        """Each answer is the one that a server without a fleet gives."""
        with served(folder) as alone:
            for prompt, answer in self.answers.items():
                _, reply = ask(f"{alone.url}/v1/completions", completion(prompt))
                assert json.loads(reply)["choices"][0]["text"] == answer


@pytest.fixture
def switch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Switch]:
    """Three hosts with the programs and files that the page expects, and the object store on the
    first."""
    assert PROGRAM in os.environ, "run `make test-fleet`"
    python = Path(os.environ[PYTHON])
    path = f"{DISK}/bin:{python.parent}:{os.environ['PATH']}:/usr/sbin"
    with joined_hosts(tmp_path, ("one", "two", "three"), {**OURS, "PATH": path}) as switch:
        for host in switch.hosts.values():
            _furnish(host, python)
        one = switch.hosts["one"]
        one.start(f"{STORE_KEYS}; {documented('mkdir -p objects')}")
        address = f"http://{one.address}:8333"
        for line in STORE.split(";"):
            for name, value in re.findall(r"(AWS_\w+)=(\S+)", line):
                monkeypatch.setenv(name, value)
        monkeypatch.setenv("AWS_ENDPOINT_URL", address)
        _until_it_answers(address, one)
        yield switch


def _furnish(host: Host, python: Path) -> None:
    (host.disk / "bin").mkdir()
    command = host.disk / "bin/semantic"
    command.write_text(f'#!/bin/sh\nexec {python} -m semantic "$@"\n')
    command.chmod(0o755)
    for name, text in {"keys": KEY, "operators": OPERATOR, "fleet-secret": SECRET}.items():
        (host.disk / name).write_text(f"{text}\n")
        (host.disk / name).chmod(0o600)


def _until_it_answers(url: str, host: Host) -> None:
    def answers() -> bool:
        try:
            return ask(url)[0] not in _UNAVAILABLE
        except (OSError, http.client.HTTPException):
            return False

    until(answers, lambda: _end(host))


def _end(host: Host) -> str:
    return host.log.read_text(errors="replace")[-4000:]


def until(condition: Callable[[], bool], why: Callable[[], str]) -> None:
    end = time.monotonic() + _SECONDS
    while not condition():
        assert time.monotonic() < end, why()
        time.sleep(0.3)


def _operators(url: str) -> str:
    """The metrics of a server; none of one that does not answer."""
    try:
        status, text = ask(f"{url}/metrics", headers={"Authorization": f"Bearer {OPERATOR}"})
    except (OSError, http.client.HTTPException):
        return ""
    assert status in {200, *_UNAVAILABLE}, text
    return text.decode() if status == 200 else ""


def uploaded(*urls: str) -> None:
    """Return when all that these servers have answered is in the object store: the end of a turn
    is queued before its answer ends. Fails when a part was dropped instead."""
    for url in urls:
        until(partial(_has_uploaded, url), partial(_operators, url))


def _has_uploaded(url: str) -> bool:
    line = r'^semantic_store_(\w+){(?=[^}]*tier="uploads")([^}]*)} (\S+)$'
    found = re.findall(line, _operators(url), re.MULTILINE)
    lost = [one for one in found if 'event="dropped' in one[1] and float(one[2])]
    assert not lost, f"{url} does not upload all: {lost}"
    queued = [float(value) for name, _, value in found if name in {"blocks", "agents"}]
    return bool(queued) and not any(queued)


def test_servers_behind_a_router(switch: Switch, tmp_path: Path) -> None:
    """`deploy/haproxy` on a host, and a server on each of the others."""
    hosts = switch.hosts
    urls = {name: f"http://{host.address}:8000" for name, host in hosts.items()}
    for name in ("two", "three"):
        hosts[name].start(f"{STORE}; {documented('semantic serve --remote-store')} {KEYS}")
    shutil.copy(FILE, hosts["one"].disk)
    hosts["one"].start(
        f"SEMANTIC_ADMIN={DISK}/admin SEMANTIC_BIND=0.0.0.0:8000 SEMANTIC_ONE=two:8000 "
        f"SEMANTIC_TWO=three:8000 {HAPROXY} -f {FILE.name}"
    )
    for name in ("two", "three", "one"):
        _until_it_answers(f"{urls[name]}/ready", hosts[name])
    agents = Agents(urls["one"])

    def home(agent: str) -> str:
        """The host that has it, which the proxy calls by the number of its server."""
        headers = {"X-Agent-ID": agent, "Authorization": f"Bearer {KEY}"}
        request = urllib.request.Request(f"{agents.url}/v1/models", headers=headers)
        with urllib.request.urlopen(request, timeout=60) as reply:
            return {"one": "two", "two": "three"}[reply.headers["X-Semantic-Replica"]]

    agents.ask("moves", WORDS, urls["two"])
    uploaded(urls["two"])
    assert agents.go_on("moves", WORDS, urls["three"]) >= 0.95
    uploaded(urls["three"])
    assert agents.go_on("moves", agents.onward(WORDS), urls["two"]) >= 0.95

    until(lambda: {home(str(n)) for n in range(20)} == {"two", "three"}, lambda: "one is not used")
    homes = {home(agent): agent for agent in map(str, range(20))}
    for agent in homes.values():
        agents.ask(agent, f"I am {agent}. {WORDS}")
    uploaded(urls["two"], urls["three"])
    switch.cut("three")
    assert agents.go_on(homes["three"], f"I am {homes['three']}. {WORDS}") >= 0.95
    switch.heal("three")
    until(lambda: home(homes["three"]) == "three", lambda: "it does not come back")
    hosts["two"].kill()
    assert agents.go_on(homes["two"], f"I am {homes['two']}. {WORDS}") >= 0.95
    assert home(homes["two"]) == "three"
    agents.are_as_alone(tmp_path / "alone")


def test_a_slow_link_changes_no_answer(switch: Switch, tmp_path: Path) -> None:
    """What has been computed comes as far as it is worth it; the object store is behind it too."""
    hosts = switch.hosts
    urls = {name: f"http://{hosts[name].address}:8000" for name in ("two", "three")}
    if not switch.slow_down("three", megabits=4):
        pytest.skip("needs tc, and a kernel with netem or tbf")
    for name, url in urls.items():
        hosts[name].start(f"{STORE}; {documented('semantic serve --remote-store')} {KEYS}")
        _until_it_answers(f"{url}/ready", hosts[name])
    agents = Agents(urls["two"])
    prompts = [f"I am {number}. {WORDS}" for number in range(3)]
    for number, prompt in enumerate(prompts):
        agents.ask(f"agent-{number}", prompt)
    uploaded(urls["two"])
    for number, prompt in enumerate(prompts):
        agents.go_on(f"agent-{number}", prompt, urls["three"])
    agents.are_as_alone(tmp_path / "alone")


class RayFleet:
    """A Ray head on the first host with the object store, and a replica on each."""

    def __init__(self, switch: Switch) -> None:
        self.hosts = switch.hosts
        one = self.hosts["one"]
        one.start(f"{RAY}; {QUICK} {documented('ray start --head')}")
        until(lambda: "Ray runtime started" in one.log.read_text(), lambda: _end(one))
        self._rays = {name: self.join(name) for name in ("two", "three")}
        one.start(f"{RAY}; {documented('semantic fleet serve --replicas 3')} {KEYS}")
        self.agents = Agents(f"http://{one.address}:8000")
        until(lambda: "ready: http" in one.log.read_text(), lambda: _end(one))
        self.is_whole()

    def join(self, name: str) -> subprocess.Popen[bytes]:
        """Start Ray on another host; the process."""
        head = self.hosts["one"].address
        return self.hosts[name].start(f"{RAY}; {documented('ray start --address', HEAD=head)}")

    def join_again(self, name: str) -> None:
        """As a service manager does: once Ray there has ended, which it does by itself."""
        until(lambda: self._rays[name].poll() is not None, lambda: _end(self.hosts[name]))
        self._rays[name] = self.join(name)
        self.is_whole()

    def is_whole(self) -> None:
        """Return when there is a replica on each host."""
        until(
            lambda: set(self.metric("vllm:num_requests_running")) == set(self.hosts),
            lambda: "\n".join(_end(host) for host in self.hosts.values()),
        )

    def has_noticed_a_loss(self) -> None:
        """Return when the head counts one host less."""
        one = self.hosts["one"]
        until(lambda: one.run(f"{RAY}; ray status").count(" node_") == 2, lambda: _end(one))

    def metric(self, name: str) -> dict[str, float]:
        """A metric by the name of the host."""
        text = _operators(self.agents.url)
        line = rf'^{name}{{.*replica="\d+@(\w+)".*}} (\S+)$'
        return {m[1]: float(m[2]) for m in re.finditer(line, text, re.MULTILINE)}

    def prompts_at(self) -> dict[str, tuple[str, str]]:
        """Of each host an agent that has its home there, and its first prompt, stored for all."""
        found: dict[str, tuple[str, str]] = {}
        for agent in map(str, range(40)):
            prompt, before = f"I am {agent}. {WORDS}", self.metric("vllm:prompt_tokens_total")
            self.agents.ask(agent, prompt)
            after = self.metric("vllm:prompt_tokens_total")
            found |= {at: (agent, prompt) for at in after if after[at] > before.get(at, 0)}
            if len(found) == len(self.hosts):
                break
        uploaded(self.agents.url)
        return found


def test_a_fleet_on_ray(switch: Switch, tmp_path: Path) -> None:
    """With the commands for several machines. A host is killed and boots again; another is cut off,
    joined to the network again, and Ray on it started again."""
    fleet = RayFleet(switch)
    hosts, agents, at = fleet.hosts, fleet.agents, fleet.prompts_at()
    assert set(at) == set(hosts)

    agent, prompt = at["two"]
    hosts["two"].kill()
    assert agents.go_on(agent, prompt) >= 0.95
    uploaded(agents.url)
    hosts["two"].boot()
    fleet.join_again("two")
    assert agents.go_on(agent, agents.onward(prompt)) >= 0.95

    agent, prompt = at["three"]
    switch.cut("three")
    assert agents.go_on(agent, prompt) >= 0.95
    uploaded(agents.url)
    fleet.has_noticed_a_loss()
    switch.heal("three")
    fleet.join_again("three")
    assert agents.go_on(agent, agents.onward(prompt)) >= 0.95

    assert "stopped" in hosts["one"].run(f"{RAY}; {documented('semantic fleet stop')} 2>&1")
    agents.are_as_alone(tmp_path / "alone")
