"""`semantic serve` as two processes on one model: a rank that is lost, a restart, `mlx.launch`."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import pytest

from benchmarks import gpu_ranks
from semantic_fleet.ranks.links import SILENCE_SECONDS
from tests.support.ports import free_port
from tests.support.serve_process import OURS, ServeProcess
from tests.support.two_ranks import launched

pytestmark = pytest.mark.process

SERVE = (sys.executable, "-m", "semantic", "serve", "--port", "0", "--store")
LAUNCH = str(Path(sys.executable).with_name("mlx.launch"))
BROKEN = (
    sys.executable,
    "-c",
    """
import sys
from semantic.adapters.mlx.ranks.leading import LeadingBackend
from semantic.cli.main import main

decode, calls = LeadingBackend.decode, []

def breaking(self):
    calls.append(1)
    if len(calls) > 5:
        raise RuntimeError("injected")
    return decode(self)

LeadingBackend.decode = breaking
main()
""",
    *SERVE[3:],
)
"""A server whose engine fails in a turn."""
SECONDS_OF_TWO_LOOKS = 30
STORY = "I am Ada. I have three cats, a dog and a red boat in the harbour. " * 30
BOUND = 15.0
"""Seconds in which all ranks end when one is lost and known to be."""


START = 120.0
"""Seconds for a start that fails, on a machine that has much else to do."""


class Reply(NamedTuple):
    text: str
    cached: int


def ask(
    server: ServeProcess, said: Sequence[str], *, max_tokens: int = 24, agent: str = "ada"
) -> Reply:
    """The greedy answer to what an agent said, in turns with its answers."""
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(said)]
    body = {"model": "default", "messages": messages, "max_tokens": max_tokens, "temperature": 0}
    headers = {"content-type": "application/json", "X-Agent-ID": agent}
    url = f"{server.url}/v1/chat/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as reply:
        found = json.load(reply)
    cached = found["usage"]["prompt_tokens_details"]["cached_tokens"]
    return Reply(found["choices"][0]["message"]["content"], cached)


@contextmanager
def ranks(
    store: Path, *flags: str, first: Sequence[str] = SERVE, of_second: Sequence[str] = ()
) -> Iterator[list[ServeProcess]]:
    """Both ranks, each started as `mlx.launch` does; none is left."""
    commands = (*first, str(store), *flags), (*SERVE, str(store), *flags, *of_second)
    started = [
        ServeProcess(command, {**os.environ, **OURS, **mine})
        for command, mine in zip(commands, launched(store.parent), strict=True)
    ]
    try:
        yield started
    finally:
        for one in started:
            one.kill()


def test_a_server_of_two_ranks_ends_in_good_order_and_resumes(tmp_path: Path) -> None:
    with ranks(tmp_path / "store") as (first, second):
        first.wait_ready()
        answer = ask(first, [STORY])
        assert ask(first, [STORY]).cached > 256
        second.signal(signal.SIGTERM)  # as a service manager does to all: rank 0 decides
        first.stop()
        assert second.wait(BOUND) == 0, second.tail
    with ranks(tmp_path / "store") as (first, _):
        first.wait_ready()
        again = ask(first, [STORY])
        assert again.text == answer.text
        assert again.cached > 256
        more = ask(first, [STORY, answer.text, "What is my name?"])
        assert more.cached > again.cached


def test_an_agent_that_was_evicted_returns_from_memory(tmp_path: Path) -> None:
    with ranks(tmp_path / "store", "--pool-blocks", "30") as (first, second):
        first.wait_ready()
        said = {agent: f"I am {agent}. {STORY}" for agent in ("ada", "ben", "cleo", "dora")}
        answers = {agent: ask(first, [said[agent]], agent=agent) for agent in said}
        for agent, answer in answers.items():
            again = ask(first, [said[agent]], agent=agent)
            assert again.text == answer.text
            assert again.cached > 256
        first.stop()
        assert second.wait(BOUND) == 0, second.tail


@pytest.mark.parametrize(
    ("lost", "how", "reason", "bound"),
    [
        (1, signal.SIGKILL, "rank 0 of 2 ends: rank 1 ended", BOUND),
        (0, signal.SIGKILL, "rank 1 of 2 ends: rank 0 ended", BOUND),
        (1, signal.SIGSTOP, "rank 0 of 2 ends: rank 1 was silent", SILENCE_SECONDS + BOUND),
    ],
)
def test_the_other_ranks_end_with_a_reason_when_one_is_lost_in_a_turn(
    lost: int, how: signal.Signals, reason: str, bound: float, tmp_path: Path
) -> None:
    with ranks(tmp_path / "store") as started:
        first = started[0]
        first.wait_ready()
        answer = ask(first, [STORY])
        turn = threading.Thread(target=_ask_in_vain, args=(first,))
        turn.start()
        started[lost].signal(how)
        other = started[1 - lost]
        assert other.wait(bound) == 1, other.tail
        assert reason in "\n".join(other.log), other.log
        started[lost].kill()
        turn.join()
    with ranks(tmp_path / "store") as (first, _):
        first.wait_ready()
        again = ask(first, [STORY])
        assert again.text == answer.text
        assert again.cached > 256


def test_all_ranks_end_with_a_reason_when_the_engine_fails(tmp_path: Path) -> None:
    with ranks(tmp_path / "store", first=BROKEN) as (first, second):
        first.wait_ready()
        _ask_in_vain(first)
        assert first.wait(BOUND) == 1, first.tail
        assert second.wait(BOUND) == 1, second.tail
        said = "\n".join(first.log)
        assert "unexpected RuntimeError: injected" in said
        assert "rank 0 of 2 ends: the engine failed" in said
        assert "rank 1 of 2 ends: rank 0 ends: the engine failed" in "\n".join(second.log)


def test_what_another_rank_may_still_take_limits_the_first(tmp_path: Path) -> None:
    most = 3 << 30
    with ranks(tmp_path / "store", "--memory-gb", "3", of_second=("--memory-gb", "2")) as (
        first,
        _,
    ):
        first.wait_ready()
        for _ in range(SECONDS_OF_TWO_LOOKS):
            limit = _limit_of(first)
            if limit < most:
                break
            time.sleep(1.0)
        assert (1 << 30) < limit < most - (1 << 29)
        assert ask(first, [STORY]).text == ask(first, [STORY]).text


def _limit_of(server: ServeProcess) -> int:
    with urllib.request.urlopen(f"{server.url}/v1/memory", timeout=30) as reply:
        return int(json.load(reply)["limit_bytes"])


def _ask_in_vain(server: ServeProcess) -> None:
    with suppress(urllib.error.URLError, OSError, ValueError):
        ask(server, [STORY, "Well.", "Tell me a very long story."], max_tokens=2000)


def test_what_ranks_cannot_do_is_refused_by_each_before_they_meet(tmp_path: Path) -> None:
    adapter = ("--adapter", f"a={tmp_path}")
    with ranks(tmp_path / "store", *adapter) as started:
        for one in started:
            assert one.wait(START) == 2, one.tail
            assert re.search(r"error: several ranks serve exactly one --model: remove", one.tail)


def test_a_model_that_is_not_there_ends_all_ranks_before_they_meet(tmp_path: Path) -> None:
    with ranks(tmp_path / "store", "--model", str(tmp_path / "none")) as started:
        for one in started:
            assert one.wait(START) != 0
            assert "no model folder" in one.tail


def test_mlx_launch_starts_both(tmp_path: Path) -> None:
    command = (LAUNCH, "-n", "2", "--backend", "ring", "-p", str(free_port()), "--", *SERVE)
    server = ServeProcess((*command, str(tmp_path / "store")), {**os.environ, **OURS})
    try:
        server.wait_ready()
        assert ask(server, [STORY]).text == ask(server, [STORY]).text
        for pid in _children(server.pid):
            os.kill(pid, signal.SIGTERM)
        assert server.wait(60.0) == 0, server.tail
        assert "stopped" in server.log
    finally:
        for pid in _children(server.pid):
            os.kill(pid, signal.SIGKILL)
        server.kill()


def test_the_benchmark_measures_one_device_and_all_ranks(tmp_path: Path) -> None:
    gpu_ranks.main(["--small", "--backend", "ring", "--output", str(tmp_path)])
    found = json.loads((tmp_path / "gpu_ranks_small.json").read_text())
    forms = {line["form"]: line for line in found["summary"]["forms"]}
    both = [gpu_ranks.PAGED_RANKS, gpu_ranks.RANKS]
    assert list(forms) == [gpu_ranks.PAGES, gpu_ranks.ALONE, *both]
    assert forms[gpu_ranks.RANKS]["block_bytes"] == forms[gpu_ranks.ALONE]["block_bytes"]
    steps = {form: line["step_ms"] for form, line in forms.items()}
    assert all(ms["1"] > 0 and ms["8"] > 0 for ms in steps.values())


def _children(pid: int) -> list[int]:
    found = subprocess.run(("pgrep", "-P", str(pid)), capture_output=True, text=True, check=False)
    return [int(one) for one in found.stdout.split()]
