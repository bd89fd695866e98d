"""Decode steps beside uploads at the pace that the engine's own steps set, and without them.

`python -m benchmarks uploads`: a small model on a CPU, objects in a folder. `python -m
benchmarks.uploads [--output DIR]`: the shape of Llama 3.1 8B on this device, bodies over S3's
protocol to a process of this machine that keeps none, so no network and no TLS; before that, what
each part of an upload costs decode steps (`upload_parts`); all of it in 200 seconds. Windows
without, with, with and without uploads follow each other, so that neither contexts that grow nor a
device that becomes slower decide; a figure is the median over such fours. A window with uploads
begins when one begins after a rest, and ends likewise: rests may be longer than windows.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import semantic.adapters.mlx  # isort: skip  # noqa: F401  loads OpenBLAS before MLX

from mlx.nn.layers.base import Module

from benchmarks import shapes
from benchmarks.discarding import discarding
from benchmarks.gpu_sides import prompt
from benchmarks.shapes import smollm2_135m
from benchmarks.upload_parts import Beside, Parts, alone
from experiments.harness.document import Json, Scalar
from experiments.harness.record import Run
from experiments.harness.result import Result, Verdict
from semantic import BlockPool, BlockPoolBatchEngine
from semantic.adapters.mlx.model.provider import wrap_model
from semantic.adapters.stores.background import BackgroundStore
from semantic.adapters.stores.write_order import FEWEST_STEPS, MOST_REST, UploadPace
from semantic.application.engine.prefill_budget import PrefillBudget
from semantic.composition.process_stores import upload_threads
from semantic.domain.block_hash import Part, Scope
from semantic.domain.stored import BlockHeader, StoredBlock
from semantic.domain.value_objects import BLOCK_TOKENS, CompletedGeneration, TokenEvent
from semantic_fleet.objects.objects import Objects
from semantic_fleet.objects.remote_store import RemoteStore
from tests.support.char_tokenizer import CharTokenizer

QUESTION = "How many bytes a second are uploaded beside decoding, and what does that cost it?"
CRITERION = (
    "in the median decode steps beside uploads are at most 2 % longer than without them, in a run "
    "in which other load makes them at most 5 % longer"
)
MOST, MOST_BY_OTHER_LOAD = 1.02, 1.05
SECRET = bytes(range(32))
FOURS, SECONDS = 12, 4.0
"""How many, and of a window."""
WARM_SECONDS, SETTLE_SECONDS = 30.0, 0.5
"""In the first the cost of uploads is measured, at most so long, by what sets their pace."""
MOST_SECONDS = 195.0
"""Of a run on a GPU from the begin of its process on: no four begins that would end later."""
VOCAB = 1000
AGENTS, TOKENS, MOST_TOKENS = 2, 256, 1 << 14
"""Of each agent its prompt, and its answer at most."""
Row = dict[str, Scalar]


def beside_uploads(
    engine: BlockPoolBatchEngine, url: str, fours: int, seconds: float, ends: float = math.inf
) -> Iterator[Row]:
    """Decode steps in windows of so many seconds, the last before `ends` on the monotonic clock;
    see the module."""
    pace = _WatchedPace()
    engine.report_steps(pace.new_observer())
    threads = upload_threads(os.cpu_count() or 1)
    remote = RemoteStore(Objects.open(url), SECRET)
    # No `forgets_at_once`, as nothing is forgotten.
    queue = BackgroundStore(remote, 1 << 33, pace=pace, threads=threads)
    windows = _Windows(engine, queue, pace, 2 * threads)
    with _decoding(engine, "warm"):
        windows.warm_up()
    for number in range(fours):
        begun = time.monotonic()
        with _decoding(engine, f"{number}"):
            first, *beside, last = (
                windows.without(seconds),
                windows.beside(seconds),
                windows.beside(seconds),
                windows.without(seconds),
            )
        step = statistics.fmean(one.step for one in beside)
        without = first.step, last.step
        yield {"what": "step", "value": 1e3 * statistics.fmean(without)}
        yield {"what": "step beside uploads", "value": 1e3 * step}
        yield {"what": "longer", "value": step / statistics.fmean(without)}
        yield {"what": "longer by other load", "value": max(without) / min(without)}
        yield {"what": "uploaded", "value": statistics.fmean(one.rate for one in beside)}
        yield {"what": "times of uploading", "value": sum(one.times for one in beside)}
        yield {"what": "cost of a second", "value": pace.cost}
        now = time.monotonic()
        if now + (now - begun) > ends:
            break
    queue.close()


def _engine(model: Module) -> BlockPoolBatchEngine:
    backend = wrap_model(model, "benchmark")
    spec = backend.cache_spec()
    n_bytes = AGENTS * spec.bytes_for(TOKENS + MOST_TOKENS)
    pool: BlockPool = BlockPool(spec, max_bytes=n_bytes)
    budget = PrefillBudget(largest=backend.best_chunk)
    return BlockPoolBatchEngine(backend, CharTokenizer(), pool, spec, budget=budget)


class _WatchedPace(UploadPace):
    """A pace that counts the times of uploading: each is followed by a rest."""

    def __init__(self) -> None:
        super().__init__(time.monotonic)
        self._watching = threading.Lock()
        self._going_on = 0
        self.times = 0

    def begin(self) -> None:
        with self._watching:
            self.times += not self._going_on
            self._going_on += 1
        super().begin()

    def end(self) -> None:
        with self._watching:
            self._going_on -= 1
        super().end()


class _Window(NamedTuple):
    """Seconds of a step, on average; bytes uploaded in a second; how often uploading began."""

    step: float
    rate: float = 0.0
    times: int = 0


class _Windows:
    """Steps of an engine whose agents decode, while a queue of blocks is kept filled or empty."""

    def __init__(
        self,
        engine: BlockPoolBatchEngine,
        queue: BackgroundStore,
        pace: _WatchedPace,
        most_queued: int,
    ) -> None:
        self._engine = engine
        self._queue = queue
        self._pace = pace
        self._most = most_queued
        self._body = os.urandom(engine.pool.spec.bytes_for(BLOCK_TOKENS))
        self._headers = blocks()
        self._put = 0

    def warm_up(self) -> None:
        """Have the cost of uploads measured, so many seconds at most."""
        until = time.monotonic() + WARM_SECONDS
        while time.monotonic() < until and len(self._pace._beside) < 2 * FEWEST_STEPS:  # noqa: SLF001
            self._fill()
            self._step()

    def without(self, seconds: float) -> _Window:
        """So long without uploads."""
        self._queue.flush()
        self._run(SETTLE_SECONDS)
        n_steps, taken = self._run(seconds)
        return _Window(taken / n_steps)

    def beside(self, seconds: float) -> _Window:
        """At least so long with uploads, and their rests."""
        self._until_upload()
        before, times = self._written(), self._pace.times
        begun, n_steps = time.perf_counter(), 0
        while time.perf_counter() < begun + seconds:
            self._fill()
            self._step()
            n_steps += 1
        n_steps += self._until_upload()
        taken = time.perf_counter() - begun
        uploaded = self._written() - before
        return _Window(taken / n_steps, uploaded / taken, self._pace.times - times)

    def _until_upload(self) -> int:
        """Steps until uploading begins after a rest; how many."""
        times, n_steps = self._pace.times, 0
        until = time.monotonic() + 2 * MOST_REST
        while self._pace.times == times:
            self._fill()
            self._step()
            n_steps += 1
            if time.monotonic() > until:
                raise AssertionError("no upload began although uploads were queued")
        return n_steps

    def _run(self, seconds: float) -> tuple[int, float]:
        begun, n_steps = time.perf_counter(), 0
        while time.perf_counter() < begun + seconds:
            self._step()
            n_steps += 1
        return n_steps, time.perf_counter() - begun

    def _step(self) -> None:
        events = self._engine.step_once()
        if any(isinstance(one, CompletedGeneration) for one in events):
            raise AssertionError("the agents ended before the windows did")

    def _fill(self) -> None:
        while self._queued() < self._most:
            self._queue.put(StoredBlock(next(self._headers), self._body))
            self._put += 1

    def _queued(self) -> int:
        return self._queue.stats()[0].n_blocks

    def _written(self) -> int:
        return (self._put - self._queued()) * len(self._body)


@contextmanager
def _decoding(engine: BlockPoolBatchEngine, name: str) -> Iterator[None]:
    """New agents of one length that decode without end."""
    agents = [f"{name}-{number}" for number in range(AGENTS)]
    prompts = [prompt(TOKENS, number, VOCAB) for number in range(AGENTS)]
    asked = zip(agents, prompts, strict=True)
    uids = [engine.submit(one, tokens, max_tokens=MOST_TOKENS) for one, tokens in asked]
    waiting = set(uids)
    while waiting:
        waiting -= {one.uid for one in engine.step_once() if isinstance(one, TokenEvent)}
    yield
    for uid in uids:
        engine.cancel(uid)
    while engine.has_work:
        engine.step_once()
    for agent in agents:
        engine.forget(agent)


def blocks() -> Iterator[BlockHeader]:
    """Headers of blocks that follow no other."""
    scope = Scope(bytes(32), bytes(32))
    for number in count():
        [link] = scope.chain([number] * 256)
        yield BlockHeader(link, Part.FULL, "benchmark")


def medians(samples: Sequence[Row]) -> dict[str, float]:
    """The median of what each sample says."""
    found: dict[str, list[float]] = {}
    for sample in samples:
        if "value" in sample:
            found.setdefault(str(sample["what"]), []).append(float(str(sample["value"])))
    return {what: statistics.median(each) for what, each in found.items()}


def run() -> Result:
    """On a CPU that decoding uses whole."""
    started = _started("uploads", "SmolLM2-135M shape, random fp32 weights", FOURS, SECONDS)
    with TemporaryDirectory(prefix="semantic-benchmark-") as folder:
        engine = _engine(smollm2_135m())
        rows = list(beside_uploads(engine, Path(folder).as_uri(), FOURS, SECONDS))
        engine.close()
        return _finished(started, rows)


def _started(name: str, model: str, fours: int, seconds: float) -> Run:
    return Run.start(
        name,
        QUESTION,
        model=model,
        parameters={
            "agents": AGENTS,
            "tokens": TOKENS,
            "fours": fours,
            "seconds": seconds,
            "threads": upload_threads(os.cpu_count() or 1),
        },
        seed=0,
    )


def _finished(started: Run, samples: list[Row]) -> Result:
    middle = medians(samples)
    summary: dict[str, Json] = {
        "step_ms": round(middle["step"], 3),
        "step_beside_uploads_ms": round(middle["step beside uploads"], 3),
        "longer_percent": round(100 * (middle["longer"] - 1), 2),
        "longer_by_other_load_percent": round(100 * (middle["longer by other load"] - 1), 2),
        "uploads_mb_s": round(middle["uploaded"] / 1e6, 1),
        "times_of_uploading": round(middle["times of uploading"], 1),
        "cost_of_a_second": round(middle["cost of a second"], 4),
    }
    passed = middle["longer"] <= MOST and middle["longer by other load"] <= MOST_BY_OTHER_LOAD
    parts: list[Json] = [{**row} for row in samples if "part" in row]
    summary |= {"parts": parts} if parts else {}
    verdict = Verdict(CRITERION, MOST, round(middle["longer"], 4), passed=passed)
    return started.finish(samples, summary, verdict)


def _parts(engine: BlockPoolBatchEngine, url: str) -> list[Row]:
    """What each part of an upload takes, and costs decode steps."""
    parts = Parts(Objects.open(url), engine.pool.spec.bytes_for(BLOCK_TOKENS))
    rows = alone(parts)
    with _decoding(engine, "parts"):
        beside = Beside(engine.step_once)
        rows += beside.rows(parts, url, upload_threads(os.cpu_count() or 1))
    parts.close()
    return rows


def main() -> int:
    """Measure on this device, print, write; 1 when the criterion is missed."""
    parser = argparse.ArgumentParser(prog="benchmarks.uploads", description=__doc__)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--fours", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=2.0, help="of a window")
    parser.add_argument("--most-seconds", type=float, default=MOST_SECONDS, help="of all")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    given = parser.parse_args()
    ends = time.monotonic() + given.most_seconds
    model = f"Llama 3.1 8B shape, {given.layers} layers, random bf16 weights"
    started = _started("gpu_uploads", model, given.fours, given.seconds)
    engine = _engine(shapes.llama_8b(given.layers))
    with discarding() as url:
        rows = _parts(engine, url)
        print(json.dumps(rows, indent=1), flush=True)
        rows += beside_uploads(engine, url, given.fours, given.seconds, ends)
    engine.close()
    result = _finished(started, rows)
    given.output.mkdir(parents=True, exist_ok=True)
    result.write(given.output / "gpu_uploads.json")
    print(json.dumps(result.summary, indent=1))
    return int(not result.verdict.passed)


if __name__ == "__main__":
    raise SystemExit(main())
