"""Soak test: new agents without end, and what of the server process grows with them.

Every request is of another agent, in turns on all wires; pool, memory tier and disk tier have room
for few. Run: python -m benchmarks.soak [--minutes M] [--output DIR]; fails if a file or a thread
is left behind, or if memory grows by more than what is remembered of each agent and turn.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from tempfile import TemporaryDirectory

import semantic.adapters.mlx  # isort: skip  # noqa: F401  loads OpenBLAS before MLX

from benchmarks.server_process import ServerProcess, semantic_server
from experiments.exp_006_gather.scaling import fit
from experiments.harness.document import Scalar
from experiments.harness.record import Run
from experiments.harness.result import Result, Verdict
from tests.support.model_folder import small_model

QUESTION = "Does a server that meets new agents without end keep to its memory?"
CRITERION = (
    "three clients, every request another agent: all are answered, after the first third the "
    "process opens no more files and threads, and its resident memory grows by at most 6 MB for "
    "1,000 requests: of an agent and of a turn some kilobytes are remembered, of 10,000 agents and "
    "64 MiB of turns at most"
)
MOST_GROWTH = 6.0
MINUTES = 15.0
CLIENTS, POOL_BLOCKS, RAM_GB, DISK_GB = 3, 64, 0.01, 0.02
SPARE = 4
"""Files and threads by which two moments may differ: connections, and threads that end."""
_EVERY = 100
_SECONDS = 120.0
_WORDS = [
    "the",
    "fox",
    "sleeps",
    "near",
    "old",
    "river",
    "and",
    "small",
    "dog",
    "sings",
    "under",
    "red",
    "tree",
    "but",
    "then",
    "one",
]
Row = dict[str, Scalar]


@dataclass(frozen=True, slots=True)
class Question:
    """A request's path, body and headers."""

    path: str
    body: dict[str, object]
    headers: dict[str, str]


class Soak:
    """Clients of one server, and samples of its process.

    `asking` makes the request of a number, `sample` what is recorded after each hundred.
    """

    def __init__(
        self,
        server: ServerProcess,
        minutes: float,
        asking: Callable[[random.Random, int], Question] | None = None,
        sample: Callable[[], Row] | None = None,
        *,
        clients: int = CLIENTS,
    ) -> None:
        self._clients = clients
        self._asking = asking or question
        self._sample = sample or (lambda: dict(server.footprint()))
        self.samples: list[Row] = []
        self.failures: list[str] = []
        self.asked = 0
        self._server = server
        self._lock = threading.Lock()
        self._ends = time.monotonic() + 60 * minutes

    def run(self) -> None:
        """Ask until the time is over."""
        clients = [threading.Thread(target=partial(self._talk, n)) for n in range(self._clients)]
        for client in clients:
            client.start()
        for client in clients:
            client.join()

    def _talk(self, number: int) -> None:
        draw = random.Random(number)
        while time.monotonic() < self._ends and not self._server.ended:
            with self._lock:
                self.asked += 1
                asked = self.asked
                if asked % _EVERY == 0:
                    self.samples.append({"requests": asked, **self._sample()})
            problem = self._ask(self._asking(draw, asked))
            if problem is not None:
                self.failures.append(problem)

    def _ask(self, asked: Question) -> str | None:
        connection = HTTPConnection("127.0.0.1", self._server.port, timeout=_SECONDS)
        try:
            headers = {"Content-Type": "application/json", **asked.headers}
            connection.request("POST", asked.path, json.dumps(asked.body), headers)
            response = connection.getresponse()
            said = response.read()
        except (OSError, HTTPException) as error:
            return f"{asked.path}: {type(error).__name__}: {error}"
        finally:
            connection.close()
        return None if response.status == 200 else f"{asked.path}: {response.status} {said[:200]!r}"


def question(draw: random.Random, number: int) -> Question:
    """The request `number`, of an agent that is like no other."""
    text = f"{number} " + " ".join(draw.choices(_WORDS, k=draw.randrange(30, 250)))
    messages: list[dict[str, str]] = [
        {"role": "system", "content": f"You are {number}."},
        {"role": "user", "content": text},
    ]
    body: dict[str, object] = {
        "model": "default",
        "messages": messages,
        "max_tokens": draw.randrange(4, 16),
        "temperature": 0,
    }
    if number % 5 == 0:
        return Question("/v1/chat/completions", body, {"X-Agent-ID": f"agent-{number}"})
    if number % 5 == 1:
        return Question("/v1/chat/completions", {**body, "user": f"user-{number}"}, {})
    if number % 5 == 2:
        return Question("/v1/chat/completions", {**body, "stream": True}, {})
    if number % 5 == 3:
        user = {"metadata": {"user_id": f"user-{number}"}, "messages": messages[1:]}
        return Question("/v1/messages", {**body, **user}, {})
    return Question(
        "/v1/responses", {"model": "default", "input": text, "max_output_tokens": 8}, {}
    )


def summarise(samples: Sequence[Row], failures: Sequence[str]) -> dict[str, Scalar]:
    """Growth after the first third, when pool and tiers are full."""
    late = samples[len(samples) // 3 :]
    requests = [float(str(row["requests"])) for row in late]
    resident = [float(str(row["rss_bytes"])) / 1e6 for row in late]
    third = max(1, len(late) // 3)

    def grown(name: str) -> float:
        counts = [float(str(row[name])) for row in late]
        return statistics.median(counts[-third:]) - statistics.median(counts[:third])

    return {
        "requests": int(requests[-1]),
        "failed": len(failures),
        "rss_begin_mb": round(resident[0], 1),
        "rss_end_mb": round(resident[-1], 1),
        "mb_per_1000_requests": round(1000 * fit(requests, resident).slope, 2),
        "files_grown": grown("files"),
        "threads_grown": grown("threads"),
    }


def run(minutes: float = MINUTES) -> Result:
    """Requests for so many minutes, then what has grown."""
    parameters: dict[str, Scalar] = {
        "minutes": minutes,
        "clients": CLIENTS,
        "pool_blocks": POOL_BLOCKS,
        "ram_gb": RAM_GB,
        "disk_gb": DISK_GB,
    }
    started = Run.start("soak", QUESTION, model="tiny llama", parameters=parameters, seed=0)
    with TemporaryDirectory(prefix="semantic-benchmark-") as folder:
        flags = ("--pool-blocks", POOL_BLOCKS, "--ram-gb", RAM_GB, "--disk-gb", DISK_GB)
        model = small_model(Path(folder) / "model")
        server = semantic_server(model, Path(folder) / "soak", *map(str, flags))
        server.start()
        try:
            soak = Soak(server, minutes)
            soak.run()
        finally:
            server.stop()
    summary = summarise(soak.samples, soak.failures)
    verdict = judge(CRITERION, summary, is_right=not soak.failures)
    return started.finish(soak.samples, dict(summary), verdict)


def judge(criterion: str, summary: Row, *, is_right: bool) -> Verdict:
    """Passed if the answers are right and the process kept to its memory, files and threads."""
    growth = float(str(summary["mb_per_1000_requests"]))
    left = max(float(str(summary[name])) for name in ("files_grown", "threads_grown"))
    passed = is_right and growth <= MOST_GROWTH and left <= SPARE
    return Verdict(criterion, MOST_GROWTH, growth, passed=passed)


def main() -> int:
    """Run it; 1 when the criterion is missed."""
    return command(__doc__, "soak", run, MINUTES)


def command(
    description: str | None, name: str, run: Callable[[float], Result], minutes: float
) -> int:
    """The command line of a soak; 1 when its criterion is missed. Writes a result, named `name`,
    only with `--output`."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--minutes", type=float, default=minutes)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    result = run(options.minutes)
    if options.output is not None:
        options.output.mkdir(parents=True, exist_ok=True)
        result.write(options.output / f"{name}.json")
    print(json.dumps(result.summary, indent=2))
    return int(not result.verdict.passed)


if __name__ == "__main__":
    raise SystemExit(main())
