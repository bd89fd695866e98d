"""Sessions of coding agents replayed against a fleet on Ray: what is reused, and what Ray costs.

`python -m benchmarks.fleet_replay FILE --python ENVIRONMENT/bin/python`, of an environment with
semantic-engine[fleet]. Sessions are named by nothing, so a request's opening is its key; at random,
each has the name of another agent. The object store is a folder. A request follows the answer
before it at once, but for a run with pauses: at random it mostly needs what another replica has
computed a moment ago, and is still to upload.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import statistics
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from http.client import HTTPConnection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from benchmarks.server_process import ServerProcess, fleet_server, semantic_server
from benchmarks.trace_sessions import (
    RecordedSession,
    Session,
    recorded_sessions,
    sessions,
    single_words,
)
from benchmarks.traces import ROWS, Replay, Size, held_bytes, longest_request, model_for, reuse_row
from experiments.harness.document import Json, Scalar
from experiments.harness.record import Run
from experiments.harness.result import Result, Verdict
from semantic.adapters.mlx.model.provider import load_tokenizer
from tests.zoo.configurations import VOCAB

QUESTION: Final = "How much of what one replica reuses do two reuse, and what does Ray cost?"
WITH_AFFINITY: Final = 0.97
AT_RANDOM: Final = 0.9
CRITERION: Final = (
    f"two replicas reuse {WITH_AFFINITY} of what one does with affinity, {AT_RANDOM} at random"
)
_PAUSE: Final = 3.0
"""Seconds between an answer and the next request in the run with pauses: of the recording's
requests one in twenty comes sooner, half come after nine seconds."""
_RUNS: Final = {
    "alone": 0.0,
    "two, affinity": WITH_AFFINITY,
    "two, random": AT_RANDOM,
    "two, random, with pauses": AT_RANDOM,
}
"""And the least that they may reuse of what is reused alone."""
_ANSWERS: Final = 40
_STREAMS: Final = 8
_STREAMED: Final = 64
Row = dict[str, Scalar]


@dataclass(frozen=True, slots=True)
class Shape:
    """As of `traces`, for each of `kinds`."""

    sessions: int = 4
    turns: int = 24
    at_once: int = 4
    piece_tokens: int = 8
    kinds: tuple[str, ...] = ("full", "hybrid")


def run(recorded: Sequence[RecordedSession], shape: Shape, python: Path) -> Result:
    """First what Ray costs, then the replays."""
    started = Run.start(
        "fleet_replay",
        QUESTION,
        model="semantic-tiny; " + ", ".join(f"{kind}: {ROWS[kind]}" for kind in shape.kinds),
        parameters={name: str(value) for name, value in asdict(shape).items()},
        seed=0,
    )
    replayed = sessions(
        recorded[: shape.sessions],
        single_words(load_tokenizer("semantic-tiny"), VOCAB),
        most_turns=shape.turns,
        piece_tokens=shape.piece_tokens,
    )
    with TemporaryDirectory(prefix="semantic-fleet-") as folder:
        cost = costs(Path(folder) / "cost", python)
        rows: list[Row] = []
        for kind in shape.kinds:
            for row in _kind(kind, replayed, shape, Path(folder) / kind, python):
                print(json.dumps(row), flush=True)
                rows.append(row)
    missed = [f"{row['kind']}, {row['run']}" for row in rows if not row["met"]]
    summary: dict[str, Json] = {"cost": {**cost}, "rows": [{**one} for one in rows]}
    verdict = Verdict(CRITERION, "none missed", ", ".join(missed) or "none missed", not missed)
    return started.finish([cost, *rows], summary, verdict)


def costs(folder: Path, python: Path) -> Row:
    """Seconds of a start, bytes of all processes, and milliseconds of an answer of one token and of
    one that is streamed: of a server alone, and of a fleet of one replica."""
    found: Row = {}
    for name in ("alone", "fleet"):
        began = time.perf_counter()
        with _running(name, folder / name, python, 1, ("--model", "semantic-tiny")) as server:
            found[f"{name}_start_s"] = round(time.perf_counter() - began, 1)
            found[f"{name}_answer_ms"] = round(_median(server, _ANSWERS, 1), 2)
            found[f"{name}_stream_ms"] = round(_median(server, _STREAMS, _STREAMED), 2)
            found[f"{name}_rss_mb"] = round(_tree_bytes(server.pid or 0) / 1e6)
    print(json.dumps(found), flush=True)
    return found


def _median(server: ServerProcess, n: int, n_tokens: int) -> float:
    """Milliseconds of a streamed chat answer of one agent, whose prompt is cached."""
    times = [_answer_ms(server.port, n_tokens) for _ in range(n + 2)]
    return statistics.median(times[2:])


def _answer_ms(port: int, n_tokens: int) -> float:
    body = {
        "model": "default",
        "messages": [{"role": "user", "content": "Tell a story of Ada."}],
        "max_tokens": n_tokens,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
    }
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        began = time.perf_counter()
        headers = {"Content-Type": "application/json", "X-Agent-ID": "ada"}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        if not connection.getresponse().read().rstrip().endswith(b"[DONE]"):
            raise RuntimeError("an answer has no end")
        return 1e3 * (time.perf_counter() - began)
    finally:
        connection.close()


def _tree_bytes(root: int) -> int:
    """Resident bytes of a process and all that it started; shared pages count in each."""
    listed = subprocess.run(
        ["/bin/ps", "-eo", "pid=,ppid=,rss="],  # a fixed program
        capture_output=True,
        text=True,
        check=True,
    )
    found = [tuple(map(int, line.split())) for line in listed.stdout.splitlines()]
    tree, n_bytes = {root}, 0
    for _ in found:  # parents may be listed behind their children
        tree |= {pid for pid, parent, _ in found if parent in tree}
    for pid, _, rss in found:
        n_bytes += 1024 * rss * (pid in tree)
    return n_bytes


@contextmanager
def _running(
    name: str, folder: Path, python: Path, replicas: int, flags: Sequence[str]
) -> Iterator[ServerProcess]:
    """A server alone, or a fleet, over an object store of its own."""
    (folder / "bucket").mkdir(parents=True)
    secret = folder / "secret"
    secret.write_bytes(secrets.token_bytes(40))
    secret.chmod(0o600)
    shared = ("--remote-store", (folder / "bucket").as_uri(), "--fleet-secret-file", str(secret))
    if name == "alone":
        server = semantic_server(flags[1], folder, *shared, *flags[2:])
    else:
        more = ("--replicas", str(replicas), *shared, *flags[2:])
        server = fleet_server(python, flags[1], folder, *more)
    server.start()
    try:
        yield server
    finally:
        server.stop()


def _kind(
    kind: str, replayed: Sequence[Session], shape: Shape, folder: Path, python: Path
) -> Iterator[Row]:
    model, spec = model_for(kind, replayed, folder / "model")
    size = Size(held_bytes(spec, replayed, shape.at_once), longest_request(replayed))
    flags = ("--model", str(model), *size.flags())
    of_one = 0.0
    for number, (name, least) in enumerate(_RUNS.items()):
        with _running(name, folder / str(number), python, 2, flags) as server:
            pause = _PAUSE if name.endswith("pauses") else 0.0
            replay = Replay(server, replayed, shape.at_once, pause=pause)
            if "random" in name:
                replay.headers = lambda: {"X-Agent-ID": os.urandom(8).hex()}
            replay.run()
        row = reuse_row(kind, name, replay)
        reused = float(str(row["of_ceiling"]))
        of_one = of_one or reused
        row |= {"of_one": round(reused / of_one, 4)}
        yield row | {"met": reused / of_one >= least}


def main() -> int:
    """1 if a run misses its figure."""
    parser = argparse.ArgumentParser(prog="benchmarks.fleet_replay", description=__doc__)
    parser.add_argument("file", type=Path, help="recorded sessions")
    usual = Shape()
    parser.add_argument("--sessions", type=int, default=usual.sessions)
    parser.add_argument("--turns", type=int, default=usual.turns)
    parser.add_argument("--kind", action="append", choices=[*ROWS])
    parser.add_argument("--python", type=Path, required=True)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    given = parser.parse_args()
    shape = Shape(given.sessions, given.turns, kinds=tuple(given.kind or usual.kinds))
    result = run(recorded_sessions(given.file), shape, given.python)
    given.output.mkdir(parents=True, exist_ok=True)
    result.write(given.output / "fleet_replay.json")
    return int(not result.verdict.passed)


if __name__ == "__main__":
    raise SystemExit(main())
