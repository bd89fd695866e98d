"""Replicas on Ray Serve over an S3 server: sessions stay, agents survive, clients may leave.

Each test has its own agents; the fleet of a model is started once.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from semantic_fleet.objects.objects import Objects
from semantic_fleet.replicas.replica import LOCK
from tests.fleet.seaweed import BUCKET, Seaweed, until_uploaded
from tests.support.serve_process import OURS, ServeProcess, ServerFailedError, served
from tests.zoo.folder import write_folder

pytestmark = pytest.mark.process

PYTHON = "SEMANTIC_FLEET_PYTHON"
"""The environment variable with the interpreter of an environment that has Ray."""
HYBRID = "qwen3_5"
_SECONDS = 180.0
WORDS = " ".join(f"Rule {i} is that {i} plus {i} is {2 * i}." for i in range(90))


@dataclass(frozen=True)
class Fleet:
    """A running fleet of two replicas, whose slots are below `store`."""

    process: ServeProcess
    store: Path
    url: str
    model: str

    def pid(self, replica: str) -> int:
        return int((self.store / f"replica-{replica}" / LOCK).read_text())

    def metric(self, name: str) -> dict[str, float]:
        """A metric by the name of its replica."""
        text = asked(self.process, "/metrics").text
        found = re.findall(rf'^{name}{{.*replica="(\d+)@.*"}} (\S+)$', text, re.MULTILINE)
        return {replica: float(value) for replica, value in found}


@dataclass(frozen=True)
class Reply:
    status: int
    headers: Mapping[str, str]
    text: str

    @property
    def replica(self) -> str:
        return self.headers["x-semantic-replica"]

    @property
    def answer(self) -> str:
        found: str = json.loads(self.text)["choices"][0]["text"]
        return found

    @property
    def cached_share(self) -> float:
        usage = json.loads(self.text)["usage"]
        cached: int = usage["prompt_tokens_details"]["cached_tokens"]
        return cached / int(usage["prompt_tokens"])


@pytest.fixture(scope="module", params=["semantic-tiny", HYBRID])
def fleet(
    request: pytest.FixtureRequest, weed: Seaweed, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("fleet")
    model = request.param
    if model == HYBRID:
        model = str(write_folder(HYBRID, folder / "model"))
    with running_fleet(weed, folder, "--model", model) as one:
        yield one


@contextmanager
def running_fleet(weed: Seaweed, folder: Path, *flags: str) -> Iterator[Fleet]:
    del weed
    url = f"s3://{BUCKET}/{folder.name}"
    secret = folder / "secret"
    if not secret.exists():
        secret.write_bytes(os.urandom(40))
        secret.chmod(0o600)
    shared = ("--remote-store", url, "--fleet-secret-file", str(secret))
    command = (os.environ[PYTHON], "-m", "semantic", "fleet", "serve", "--port", "0")
    process = ServeProcess(
        (*command, "--store", str(folder / "store"), *shared, *flags), {**os.environ, **OURS}
    )
    try:
        process.wait_ready(2 * _SECONDS)
        yield Fleet(process, folder / "store", url, flags[1])
        process.stop()
    finally:
        process.kill()


def completion(prompt: str, **more: object) -> dict[str, object]:
    return {"model": "default", "prompt": prompt, "max_tokens": 16, "temperature": 0, **more}


def asked(server: ServeProcess, path: str, body: object = None, agent: str | None = None) -> Reply:
    with sent(server, path, body, agent) as response:
        headers = {name.lower(): value for name, value in response.getheaders()}
        return Reply(response.status, headers, response.read().decode())


@contextmanager
def sent(
    server: ServeProcess, path: str, body: object = None, agent: str | None = None
) -> Iterator[HTTPResponse]:
    connection = HTTPConnection(urlsplit(server.url).netloc, timeout=_SECONDS)
    headers = {} if agent is None else {"X-Agent-ID": agent}
    try:
        data = None if body is None else json.dumps(body)
        connection.request("GET" if data is None else "POST", path, data, headers)
        yield connection.getresponse()
    finally:
        connection.close()


def complete(server: ServeProcess, prompt: str, agent: str, **more: object) -> Reply:
    reply = asked(server, "/v1/completions", completion(prompt, **more), agent)
    assert reply.status == 200, reply.text
    return reply


def test_sessions_stay_at_their_replica_and_use_both(fleet: Fleet) -> None:
    homes: dict[str, set[str]] = {}
    for turn in range(3):
        for agent in (f"stays-{number}" for number in range(8)):
            prompt = f"I am {agent}. " + WORDS[: 900 + 300 * turn]
            reply = complete(fleet.process, prompt, agent)
            homes.setdefault(agent, set()).add(reply.replica)
            if turn:
                assert reply.cached_share > 0.5
    assert all(len(replicas) == 1 for replicas in homes.values())
    assert {next(iter(replicas)) for replicas in homes.values()} == {"0", "1"}


def test_a_stream_comes_in_pieces_and_a_client_that_leaves_frees_its_row(fleet: Fleet) -> None:
    body = completion(WORDS, max_tokens=8, stream=True)
    with sent(fleet.process, "/v1/completions", body, "streams") as response:
        events = [line for line in response if line.startswith(b"data:")]
    assert events[-1].strip() == b"data: [DONE]"
    assert len(events) > 4
    endless = completion(WORDS, max_tokens=20_000, stream=True, ignore_eos=True)
    with sent(fleet.process, "/v1/completions", endless, "leaves") as response:
        assert response.readline().startswith(b"data:")
        replica = response.headers["x-semantic-replica"]
        assert fleet.metric("vllm:num_requests_running")[replica] == 1
    until(lambda: fleet.metric("vllm:num_requests_running")[replica] == 0)


def test_an_agent_goes_on_elsewhere_when_its_replica_is_killed_in_a_turn(
    fleet: Fleet, tmp_path: Path
) -> None:
    first = complete(fleet.process, WORDS, "moves")
    until_uploaded(Objects.open(fleet.url))
    pid = fleet.pid(first.replica)
    onward = f"{WORDS}{first.answer} And then?"
    ends: list[bytes] = []
    wholes: list[Reply] = []

    def long_turn() -> None:
        endless = completion(onward, max_tokens=20_000, stream=True, ignore_eos=True)
        with sent(fleet.process, "/v1/completions", endless, "moves") as response:
            ends.append(response.read())

    def whole_turn() -> None:
        endless = completion(onward, max_tokens=20_000, ignore_eos=True)
        wholes.append(asked(fleet.process, "/v1/completions", endless, "moves"))

    turns = [threading.Thread(target=one) for one in (long_turn, whole_turn)]
    for turn in turns:
        turn.start()
    until(lambda: fleet.metric("vllm:num_requests_running")[first.replica] == len(turns))
    os.kill(pid, signal.SIGKILL)
    for turn in turns:
        turn.join(_SECONDS)
    assert b"the fleet lost the answering replica" in ends[0].strip().split(b"\n\n")[-1]
    assert (wholes[0].status, wholes[0].headers["retry-after"]) == (503, "1")
    assert "the fleet lost the answering replica" in json.loads(wholes[0].text)["error"]["message"]
    moved = complete(fleet.process, onward, "moves")
    assert moved.replica != first.replica
    assert moved.cached_share >= 0.95
    with served(tmp_path / "alone", "--model", fleet.model) as alone:
        assert complete(alone, WORDS, "moves").answer == first.answer
        assert complete(alone, onward, "moves").answer == moved.answer
    until(lambda: len(fleet.metric("vllm:num_requests_running")) == 2)
    assert fleet.pid(first.replica) != pid  # the slot has another process


def test_load_brings_replicas_and_its_end_takes_them_away(weed: Seaweed, tmp_path: Path) -> None:
    """All that two at once leave waiting; agents of a replica that goes go on at the one left.
    Equal conversations without names, which have one key, do not wait for one replica."""
    flags = ("--replicas", "1", "--max-replicas", "3", "--upscale-delay", "0")
    quick = (*flags, "--downscale-delay", "4", "--max-batch", "2")
    homes: dict[str, Reply] = {}
    of_one_key: set[str] = set()
    is_enough = threading.Event()

    def ask_on(server: ServeProcess, agent: str) -> None:
        while not is_enough.is_set():
            homes[agent] = complete(server, f"{agent}. {WORDS}", agent, max_tokens=64)

    def ask_without_name(server: ServeProcess) -> None:
        while not is_enough.is_set():
            reply = asked(server, "/v1/completions", completion(WORDS, max_tokens=64))
            of_one_key.add(reply.replica)

    with running_fleet(weed, tmp_path, "--model", "semantic-tiny", *quick) as one:

        def replicas() -> set[str]:
            return set(one.metric("vllm:num_requests_running"))

        agents = [f"scales-{number}" for number in range(9)]
        asking = [threading.Thread(target=ask_on, args=(one.process, agent)) for agent in agents]
        asking += [threading.Thread(target=ask_without_name, args=(one.process,)) for _ in range(4)]
        for thread in asking:
            thread.start()
        try:
            until(lambda: {home.replica for home in homes.values()} == {"0", "1", "2"})
        finally:
            is_enough.set()
            for thread in asking:
                thread.join(_SECONDS)
        assert len(of_one_key) > 1
        assert len(replicas()) == 3
        assert not [line for line in one.process.log if "Warning: " in line]
        until(lambda: len(replicas()) == 1)
        (left,) = replicas()
        for agent, home in homes.items():
            onward = f"{agent}. {WORDS}{home.answer} And then?"
            again = complete(one.process, onward, agent)
            assert again.replica == left
            assert again.cached_share >= 0.95


def test_a_fleet_that_cannot_start_says_why_in_a_line(weed: Seaweed, tmp_path: Path) -> None:
    missing = str(tmp_path / "missing")
    with (
        pytest.raises(ServerFailedError, match=rf"error: cannot start the replicas: .*{missing}"),
        running_fleet(weed, tmp_path, "--model", missing),
    ):
        pytest.fail("it has started")


def until(condition: object) -> None:
    deadline = time.monotonic() + _SECONDS
    assert callable(condition)
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.2)


@pytest.fixture
def ray_cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A Ray that outlives the commands that use it; the address."""
    program = Path(os.environ[PYTHON]).with_name("ray")
    for name, value in {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": os.urandom(32).hex(),
        "RAY_USAGE_STATS_ENABLED": "0",
        "OMP_NUM_THREADS": str(os.cpu_count()),
        **OURS,
    }.items():
        monkeypatch.setenv(name, value)
    folder = tempfile.mkdtemp(dir=Path(os.sep) / "tmp")  # a short path: sockets are below it
    flags = ("--port=6399", "--node-ip-address=127.0.0.1", "--include-dashboard=false")
    sizes = ("--object-store-memory=128000000", f"--temp-dir={folder}")
    process = subprocess.Popen(
        (program, "start", "--head", "--block", *flags, *sizes), stdout=subprocess.DEVNULL
    )
    try:
        until(lambda: _is_open(6399))
        yield "127.0.0.1:6399"
    finally:
        process.terminate()
        process.wait(_SECONDS)
        shutil.rmtree(folder, ignore_errors=True)


def _is_open(port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


def test_replicas_are_replaced_while_requests_go_on_and_agents_are_saved(
    weed: Seaweed, tmp_path: Path, ray_cluster: str
) -> None:
    flags = ("--model", "semantic-tiny", "--ray-address", ray_cluster)
    four = ("--replicas-per-machine", "4")
    last: list[bytes] = []
    is_over = threading.Event()

    def ask_on(server: ServeProcess, agent: str) -> None:
        """One stream after the other."""
        body = completion(f"{agent}. {WORDS}", max_tokens=600, stream=True, ignore_eos=True)
        while not is_over.is_set():
            with sent(server, "/v1/completions", body, agent) as response:
                lines = [line.strip() for line in response if line.strip()]
                last.append(lines[-1])

    with ExitStack() as stack:
        old = stack.enter_context(running_fleet(weed, tmp_path, *flags, *four))
        first = complete(old.process, WORDS, "drains")
        asking = [
            threading.Thread(target=ask_on, args=(old.process, f"asks-{number}"))
            for number in range(3)
        ]
        for one in asking:
            one.start()
        new = stack.enter_context(running_fleet(weed, tmp_path, *flags, *four, "--replicas", "1"))
        is_over.set()
        for one in asking:
            one.join(_SECONDS)
        assert len(last) > len(asking)
        assert set(last) == {b"data: [DONE]"}
        assert len(new.metric("vllm:num_requests_running")) == 1
        again = complete(new.process, f"{WORDS}{first.answer} And then?", "drains")
        assert again.cached_share >= 0.9
    ended = subprocess.run(
        (os.environ[PYTHON], "-m", "semantic", "fleet", "stop", "--ray-address", ray_cluster),
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr


def test_streams_longer_than_a_replica_drains_end_with_a_reason_and_go_on_elsewhere(
    weed: Seaweed, tmp_path: Path, ray_cluster: str
) -> None:
    """The old replicas are replaced under streams of every wire, then the new one's edge stops."""
    flags = ("--model", "semantic-tiny", "--ray-address", ray_cluster, "--max-batch", "8")
    short = (*flags, "--replicas-per-machine", "4", "--drain-timeout", "3")
    texts: dict[str, str] = {}

    def stream(server: ServeProcess, path: str) -> None:
        body = {"model": "default", "stream": True, **ENDLESS[path][0]}
        with sent(server, path, body, f"long{path.replace('/', '-')}") as response:
            texts[path] = response.read().decode()

    def streamed(server: ServeProcess) -> list[threading.Thread]:
        threads = [threading.Thread(target=stream, args=(server, path)) for path in ENDLESS]
        for one in threads:
            one.start()
        return threads

    def have_ended(threads: list[threading.Thread], *, events: Mapping[str, str]) -> None:
        for one in threads:
            one.join(_SECONDS)
        for path, text in texts.items():
            assert "the server is stopping: send the request again" in text
            assert text.strip().split("\n\n")[-1].startswith(events[path])
        assert set(texts) == set(ENDLESS)
        texts.clear()

    def running(server: ServeProcess) -> float:
        return sum(Fleet(server, tmp_path, "", "").metric("vllm:num_requests_running").values())

    with ExitStack() as stack:
        old = stack.enter_context(running_fleet(weed, tmp_path, *short)).process
        threads = streamed(old)
        until(lambda: running(old) == len(ENDLESS))
        new = stack.enter_context(running_fleet(weed, tmp_path, *short, "--replicas", "1")).process
        have_ended(threads, events={path: of[1] for path, of in ENDLESS.items()})
        again = complete(new, WORDS, "long-v1-completions")
        assert again.cached_share >= 0.95
        threads = streamed(new)
        until(lambda: running(new) == len(ENDLESS))
        new.stop()
        have_ended(threads, events={path: of[2] for path, of in ENDLESS.items()})


_LONG: dict[str, object] = {"max_tokens": 3500, "ignore_eos": True}
_SAYS: dict[str, object] = {"messages": [{"role": "user", "content": WORDS}], **_LONG}
_ERROR = 'data: {"error"'
ENDLESS: dict[str, tuple[dict[str, object], str, str]] = {
    "/v1/completions": ({"prompt": WORDS, **_LONG}, _ERROR, _ERROR),
    "/v1/chat/completions": (_SAYS, _ERROR, _ERROR),
    "/v1/responses": (
        {"input": WORDS, "max_output_tokens": 3500, "ignore_eos": True},
        "event: response.failed",
        "event: error",
    ),
}
"""Of each wire that knows `ignore_eos` a long request, and what the last event of its stream begins
with if the replica ends it, and if the edge does."""
