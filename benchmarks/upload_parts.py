"""The parts of an upload: processor seconds and page faults of each, and decode steps beside it.

`python -m benchmarks upload_parts`: without decode steps, bodies over S3's protocol to a process of
this machine that keeps none. `benchmarks.uploads` has decode steps on a GPU beside each part: what
costs them most is the cause of what all of it costs. Sealing a whole body with one call is nothing
that objects allow; it shows what calls for each of their chunks cost.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

import semantic.adapters.mlx  # isort: skip  # noqa: F401  loads OpenBLAS before MLX

from benchmarks.discarding import discarding
from experiments.harness.document import Json, Scalar
from experiments.harness.record import Run
from experiments.harness.result import Result, Verdict
from semantic.adapters.mlx.ranks.shared_memory import GatheredBody
from semantic_fleet.objects.objects import Objects
from semantic_fleet.objects.sealing import TAG, SealingMemory, seal, sealed_bytes

QUESTION = "What do the parts of an upload take of the processor and of the memory?"
CRITERION = (
    "sealing into memory that is used again takes at most half of the processor seconds, and a "
    "hundredth of the page faults"
)
MOST_SECONDS, MOST_FAULTS = 0.5, 0.01
BODY_BYTES = 32 << 20
"""Of Llama 3.1 8B's shape in bf16."""
KEY = bytes(range(32))
BODIES, TURNS = 8, 5
"""In each turn of each part."""
FRESH, AGAIN = "seal, fresh memory", "seal, memory used again"
BOTH = "seal and send, memory used again"
Row = dict[str, Scalar]
Job = Callable[[], object]


class Parts:
    """The parts of uploading one body again and again; any thread may do each."""

    def __init__(self, objects: Objects, n_bytes: int = BODY_BYTES) -> None:
        self.n_bytes = n_bytes
        self._objects = objects
        self._body = os.urandom(n_bytes)
        self._halves = self._body[: n_bytes // 2], self._body[n_bytes // 2 :]
        self._sealed = seal(KEY, KEY, self._body)
        self._memory = SealingMemory()
        self._paths = (f"parts/{os.getpid()}-{number}" for number in count())
        self._naming = threading.Lock()

    def jobs(self) -> dict[str, Job]:
        """Each part by its name."""
        return {
            "gather from two ranks": self._gather,
            FRESH: lambda: seal(KEY, KEY, self._body),
            AGAIN: self._seal,
            "seal with one call": self._seal_at_once,
            "send": lambda: self._send(self._sealed),
            "seal and send, fresh memory": lambda: self._send(seal(KEY, KEY, self._body)),
            BOTH: self.upload,
        }

    def upload(self) -> None:
        """As the remote tier does it."""
        with self._memory.piece(len(self._sealed)) as piece:
            self._send(seal(KEY, KEY, self._body, piece))

    def close(self) -> None:
        self._memory.close()

    def _gather(self) -> None:
        own, other = self._halves
        arrived: Future[bytes | bytearray | memoryview] = Future()
        arrived.set_result(other)
        GatheredBody(own, [arrived]).wait()

    def _seal(self) -> None:
        with self._memory.piece(sealed_bytes(self.n_bytes)) as piece:
            seal(KEY, KEY, self._body, piece)

    def _seal_at_once(self) -> None:
        with self._memory.piece(self.n_bytes + TAG) as piece:
            AESGCM(KEY).encrypt_into(bytes(12), self._body, None, piece)

    def _send(self, data: memoryview) -> None:
        with self._naming:
            path = next(self._paths)
        self._objects.create(path, data)


def alone(parts: Parts) -> list[Row]:
    """What each part takes for a GB, in the median of some turns, with nothing beside it."""
    found: dict[str, list[_Used]] = {}
    jobs = parts.jobs()
    for _ in range(TURNS):
        for name, job in jobs.items():
            job()
            before = _Used.now()
            for _ in range(BODIES):
                job()
            found.setdefault(name, []).append(_Used.now().since(before))
    gigabytes = BODIES * parts.n_bytes / 1e9
    return [_row(name, turns, gigabytes) for name, turns in found.items()]


def _row(name: str, turns: list[_Used], gigabytes: float) -> Row:
    user, system, faults, seconds = (statistics.median(each) for each in zip(*turns, strict=True))
    return {
        "part": name,
        "user_s_per_gb": round(user / gigabytes, 3),
        "system_s_per_gb": round(system / gigabytes, 3),
        "cpu_s_per_gb": round((user + system) / gigabytes, 3),
        "faults_per_gb": round(faults / gigabytes),
        "s_per_gb": round(seconds / gigabytes, 3),
    }


class _Used(NamedTuple):
    """What this process has used."""

    user: float
    system: float
    faults: float
    seconds: float

    @classmethod
    def now(cls) -> _Used:
        own = resource.getrusage(resource.RUSAGE_SELF)
        return cls(own.ru_utime, own.ru_stime, own.ru_minflt, time.perf_counter())

    def since(self, before: _Used) -> _Used:
        return _Used(*(b - a for a, b in zip(before, self, strict=True)))


@dataclass(frozen=True, slots=True)
class Beside:
    """Steps of an engine that decodes: before a part goes on beside them, meanwhile, and after."""

    step: Job
    seconds: float = 1.0
    """Of a window without a part; the one between them takes three times as long."""

    def rows(self, parts: Parts, url: str, threads: int) -> Iterator[Row]:
        """By how much decode steps are longer, and what a GB takes from decoding, for each part
        on one thread, and all of it on so many threads and in a process of its own."""
        for name, job in parts.jobs().items():
            yield self._row(name, parts.n_bytes, _repeating([job]))
        if threads > 1:
            jobs = [parts.upload] * threads
            yield self._row(f"{BOTH}, {threads} threads", parts.n_bytes, _repeating(jobs))
        yield self._row(f"{BOTH}, another process", parts.n_bytes, _process(url))

    def _row(
        self, name: str, n_bytes: int, going_on: AbstractContextManager[Callable[[], int]]
    ) -> Row:
        before = self._steps(1.0)
        with going_on as n_done:
            self._steps(0.25)
            first, begun = n_done(), time.perf_counter()
            beside = self._steps(3.0)
            bodies, seconds = n_done() - first, time.perf_counter() - begun
        without = before + self._steps(1.0)
        step, longer = statistics.fmean(without), statistics.fmean(beside)
        middle, middle_beside = statistics.median(without), statistics.median(beside)
        gigabytes = bodies * n_bytes / 1e9
        lost = seconds * (1 - step / longer)
        return {
            "part": name,
            "step_ms": round(1e3 * step, 3),
            "step_beside_ms": round(1e3 * longer, 3),
            "longer_percent": round(100 * (longer / step - 1), 2),
            "median_longer_percent": round(100 * (middle_beside / middle - 1), 2),
            "mb_s": round(1e3 * gigabytes / seconds, 1),
            "decode_s_lost_per_gb": round(lost / gigabytes, 4) if bodies else None,
        }

    def _steps(self, windows: float) -> list[float]:
        found: list[float] = []
        until = time.perf_counter() + windows * self.seconds
        while (begun := time.perf_counter()) < until:
            self.step()
            found.append(time.perf_counter() - begun)
        return found


@contextmanager
def _repeating(jobs: Sequence[Job]) -> Iterator[Callable[[], int]]:
    """Each job again and again on a thread of its own; how often they were done."""
    stop, done = threading.Event(), [0] * len(jobs)

    def repeat(at: int, job: Job) -> None:
        while not stop.is_set():
            job()
            done[at] += 1

    threads = [threading.Thread(target=repeat, args=each) for each in enumerate(jobs)]
    for one in threads:
        one.start()
    try:
        yield lambda: sum(done)
    finally:
        stop.set()
        for one in threads:
            one.join()


@contextmanager
def _process(url: str) -> Iterator[Callable[[], int]]:
    """Bodies uploaded by another process, and how many."""
    command = [sys.executable, "-m", "benchmarks.upload_parts", url]
    with subprocess.Popen(  # noqa: S603 - our own command line
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        if child.stdin is None or child.stdout is None:
            raise AssertionError("pipes were asked for")
        asked, told = child.stdin, child.stdout
        told.readline()

        def n_done() -> int:
            asked.write("?\n")
            asked.flush()
            return int(told.readline())

        try:
            yield n_done
        finally:
            asked.close()


def run() -> Result:
    """Each part alone."""
    started = Run.start(
        "upload_parts",
        QUESTION,
        model="none",
        parameters={"body_bytes": BODY_BYTES, "bodies": BODIES, "turns": TURNS},
        seed=0,
    )
    with discarding() as url:
        parts = Parts(Objects.open(url))
        rows = alone(parts)
        parts.close()
    by_name = {str(row["part"]): row for row in rows}
    fresh, again = by_name[FRESH], by_name[AGAIN]
    shares = [
        float(str(again[figure])) / float(str(fresh[figure]))
        for figure in ("cpu_s_per_gb", "faults_per_gb")
    ]
    passed = shares[0] <= MOST_SECONDS and shares[1] <= MOST_FAULTS
    summary: dict[str, Json] = {"parts": [{**row} for row in rows]}
    observed = round(shares[0], 3)
    return started.finish(rows, summary, Verdict(CRITERION, MOST_SECONDS, observed, passed=passed))


def main() -> None:
    """Upload until the input ends; for each line of it a line with how many bodies there were."""
    parts = Parts(Objects.open(sys.argv[1]))
    with _repeating([parts.upload]) as n_done:
        print("begins", flush=True)
        for _ in sys.stdin:
            print(n_done(), flush=True)
    parts.close()


if __name__ == "__main__":
    main()
