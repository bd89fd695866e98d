"""From the start of a server's process to ready, and to the first token of its first request.

Our server and mlx_lm.server start in turns on the same small model folder, so that what is measured
is the programs, not the weights. Processor time is that of the whole process up to its first token.
"""

from __future__ import annotations

import json
import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from http.client import HTTPConnection
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.server_process import ServerProcess, mlx_lm_server, semantic_server
from experiments.harness.document import Json, Scalar
from experiments.harness.record import Run
from experiments.harness.result import Result, Verdict
from semantic.adapters.mlx.model.provider import find_folder

QUESTION = "How long does a server take from the start of its process to its first token?"
CRITERION = (
    "first token of the first request after the start of the process, medians of starts in turns: "
    "at most 1.5 times mlx_lm.server's"
)
MOST, ROUNDS = 1.5, 7
MODEL = "semantic-tiny"
MEASURES = ("ready_s", "first_token_s", "processor_s")
Row = dict[str, Scalar]


def run() -> Result:
    """Start both in turns; the first round, which fills caches of files, is not counted."""
    started = Run.start(
        "start", QUESTION, model=MODEL, parameters={"rounds": ROUNDS, "model": MODEL}, seed=0
    )
    model = find_folder(MODEL)
    samples: list[Row] = []
    with TemporaryDirectory() as made:
        folder = Path(made)
        makers: dict[str, Callable[[Path], tuple[ServerProcess, str]]] = {
            "semantic": lambda at: (semantic_server(model, at), "default"),
            "mlx_lm": lambda at: (mlx_lm_server(model, at, Path(sys.executable)), "default_model"),
        }
        for number in range(-1, ROUNDS):
            for name, make in makers.items():
                measured = measure(*make(folder / f"{name}{number}"))
                if number >= 0:
                    samples.append({"round": number, "server": name, **measured})
    found = ratios(samples, list(makers))
    summary: dict[str, Json] = {
        "servers": [{"server": name, **medians(samples, name)} for name in makers],
        "ratios": {**found},
    }
    ratio = found["first_token_s"]
    return started.finish(samples, summary, Verdict(CRITERION, MOST, ratio, passed=ratio <= MOST))


def measure(server: ServerProcess, model: str) -> dict[str, float]:
    """One start, in seconds."""
    before = _processor_seconds()
    begun = time.perf_counter()
    server.start()
    ready = time.perf_counter() - begun
    try:
        first_token(server.port, model)
        first = time.perf_counter() - begun
    finally:
        server.kill()
    used = _processor_seconds() - before
    return {
        "ready_s": round(ready, 3),
        "first_token_s": round(first, 3),
        "processor_s": round(used, 3),
    }


def first_token(port: int, model: str) -> None:
    """Return when the first event of a streamed completion is here."""
    body = {"model": model, "prompt": "The red fox", "max_tokens": 2, "stream": True}
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        headers = {"content-type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        response = connection.getresponse()
        if response.status != 200:
            raise RuntimeError(f"{response.status}: {response.read()!r:.200}")
        while not response.readline().startswith(b"data:"):
            pass
    finally:
        connection.close()


def medians(samples: Sequence[Row], server: str) -> dict[str, Json]:
    """The medians of one server's starts."""
    own = [one for one in samples if one["server"] == server]
    return {
        name: round(statistics.median(float(str(one[name])) for one in own), 3) for name in MEASURES
    }


def ratios(samples: Sequence[Row], servers: Sequence[str]) -> dict[str, float]:
    """The medians of the first server over those of the second."""
    ours, theirs = (medians(samples, name) for name in servers)
    return {name: round(float(str(ours[name])) / float(str(theirs[name])), 2) for name in MEASURES}


def _processor_seconds() -> float:
    """Of all processes that this one has started and seen end."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
