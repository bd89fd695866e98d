"""What it costs that models which do not fit together take turns in one server.

A swap, which unloads a model with idle agents and loads another that was loaded before, beside the
load of a server that has one model, in the wall's seconds and in those of all cores; the first load
in a process also tests the model's caches. The longest slice of loading, which nothing interrupts,
and the largest gap in a stream beside it; and how many answers two clients of two models get when
one fits, with the server's patience and without.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from benchmarks.server_model import words, write_model
from experiments.harness.document import Json, Scalar
from experiments.harness.record import Run
from experiments.harness.result import Result, Verdict
from semantic.adapters.mlx.kv_cache.forms import CHOSEN_LAYERS
from semantic.application.engine.step_loop import StepLoop
from semantic.application.models.residency import Patience
from semantic.bootstrap import build_in_slices, open_shared
from semantic.composition.engine_settings import Settings
from semantic.composition.framework import free_memory
from semantic.domain.answer import TextDelta
from semantic.domain.value_objects import SamplingParams
from semantic.ports.serving import Ask, ServingPort
from semantic.serve import ServeSettings, load_serving
from semantic.serve_models import ModelsSettings, load_models

QUESTION = "What does it cost that models which do not fit together take turns?"
CRITERION = (
    "a swap to a model whose caches were tested before, median of the rounds' ratios in processor "
    "seconds: at most 1.1 times the same load of a server of one model"
)
MOST, ROUNDS, LAYERS, SECONDS, AGENTS = 1.1, 11, (24, 25), 10.0, 8
MIB = 1 << 20
POOL, TIER, WEIGHTS = 64 * MIB, 128 * MIB, 200 * MIB
HASTY = Patience(residence=0.0, linger=0.0)
Row = dict[str, Scalar]


def run() -> Result:
    """Measure all in one process, on models that are made for it."""
    started = Run.start(
        "model_swaps",
        QUESTION,
        model="semantic-tiny, enlarged",
        parameters={"rounds": ROUNDS, "layers": LAYERS[0], "seconds": SECONDS, "agents": AGENTS},
        seed=0,
    )
    with TemporaryDirectory() as made:
        folders = [Path(made) / f"layers-{n}" for n in LAYERS]
        for folder, layers in zip(folders, LAYERS, strict=True):
            write_model(folder, layers)
        weights = sum(one.stat().st_size for one in folders[0].glob("*.safetensors"))
        longest = slices(folders[0])
        samples = asyncio.run(swaps(folders))
        gaps = asyncio.run(gap_beside_a_load(folders))
        hasty, patient = (asyncio.run(alternating(folders, one)) for one in (HASTY, Patience()))
    summary: dict[str, Json] = {
        "weights_mib": weights // MIB,
        **{name: _median(samples, name) for name in _MEASURED},
        "ratio": _ratio(samples, "swap_s", "load_again_s"),
        "cpu_ratio": _ratio(samples, "swap_cpu_s", "load_again_cpu_s"),
        **longest,
        **gaps,
        "answers_hasty": hasty[0],
        "loads_hasty": hasty[1],
        "answers_patient": patient[0],
        "loads_patient": patient[1],
    }
    ratio = float(str(summary["cpu_ratio"]))
    return started.finish(samples, summary, Verdict(CRITERION, MOST, ratio, passed=ratio <= MOST))


async def swaps(folders: Sequence[Path]) -> list[Row]:
    """The seconds of each plain load and of each swap to the same model, in turns."""
    models = await load_models(_settings(folders, fit=1))
    rows: list[Row] = []
    for number in range(-2, ROUNDS):
        here, other = (folders[(number + i) % 2] for i in (0, 1))
        await models.load(here.name)
        await _warm(models.serving_of(here.name))
        begun = _Times.now()
        await models.unload(here.name)
        unloaded = _Times.now()
        await models.load(other.name)
        swapped = _Times.now()
        await models.unload(other.name)
        again = await _plain_load(other)
        if number >= 0:
            unload, swap = unloaded.since(begun), swapped.since(begun)
            times = {"unload": unload, "swap": swap, "load_again": again}
            rows.append({"round": number, **_row(times)})
    await models.close()
    CHOSEN_LAYERS.clear()
    first = await _plain_load(folders[0])
    return [{**one, **_row({"load": first})} for one in rows]


_MEASURED = tuple(
    f"{what}_{unit}" for what in ("load", "load_again", "swap", "unload") for unit in ("s", "cpu_s")
)


class _Times(NamedTuple):
    """Seconds of the wall, and of all processors by this process."""

    s: float
    cpu_s: float

    @classmethod
    def now(cls) -> _Times:
        return cls(time.perf_counter(), time.process_time())

    def since(self, other: _Times) -> _Times:
        return _Times(self.s - other.s, self.cpu_s - other.cpu_s)


def _row(times: Mapping[str, _Times]) -> Row:
    return {
        f"{what}_{unit}": round(seconds, 4)
        for what, measured in times.items()
        for unit, seconds in measured._asdict().items()
    }


async def _plain_load(folder: Path) -> _Times:
    """The load of a server of one model; it is gone afterwards, so that no swap frees it."""
    begun = _Times.now()
    serving = await load_serving(_served(folder))
    taken = _Times.now().since(begun)
    await serving.close()
    del serving
    gc.collect()
    return taken


def slices(folder: Path) -> dict[str, Json]:
    """How many slices loading has, and the longest: when the caches are tested, and again."""
    loop = StepLoop()
    engine = _served(folder).engine
    shared = loop.call(lambda: open_shared(engine, loop, print)).result()

    def timed() -> list[_Times]:
        work = build_in_slices(engine, shared)
        taken: list[_Times] = []
        while True:
            begun = _Times.now()
            try:
                awaited = next(work)
            except StopIteration as end:
                end.value.engine.close(keep_store=True)
                return [*taken, _Times.now().since(begun)]
            taken.append(_Times.now().since(begun))
            if awaited is not None:
                awaited.exception()

    CHOSEN_LAYERS.clear()
    first = loop.call(timed).result()
    loop.call(free_memory).result()  # else the weights are shared
    again = loop.call(timed).result()
    loop.call(shared.store.close).result()
    return {
        "slices": len(first),
        "longest_slice_ms": round(1000 * max(one.s for one in first), 1),
        "longest_slice_cpu_ms": round(1000 * max(one.cpu_s for one in first), 1),
        "slices_again": len(again),
        "longest_slice_again_ms": round(1000 * max(one.s for one in again), 1),
        "longest_slice_again_cpu_ms": round(1000 * max(one.cpu_s for one in again), 1),
    }


async def gap_beside_a_load(folders: Sequence[Path]) -> dict[str, Json]:
    """The largest gaps in a stream: before another model is loaded beside it for the first time,
    and meanwhile. Other programs lengthen those of the wall, not the processor seconds in them."""
    CHOSEN_LAYERS.clear()
    models = await load_models(_settings(folders, fit=2))
    times: list[_Times] = []
    stream = asyncio.create_task(_stream(models.serving_of(folders[0].name), times))
    while len(times) < 100:
        await asyncio.sleep(0.01)
    begun = len(times)
    started = _Times.now()
    await models.load(folders[1].name)
    load = _Times.now().since(started)
    ended = len(times)
    stream.cancel()
    await asyncio.wait((stream,))
    await models.close()
    gaps = [later.since(earlier) for earlier, later in itertools.pairwise(times)]
    alone, beside = gaps[: begun - 1], gaps[begun - 1 : ended]
    return {
        "gap_alone_ms": round(1000 * max(gap.s for gap in alone), 1),
        "gap_alone_cpu_ms": round(1000 * max(gap.cpu_s for gap in alone), 1),
        "gap_beside_ms": round(1000 * max(gap.s for gap in beside), 1),
        "gap_beside_cpu_ms": round(1000 * max(gap.cpu_s for gap in beside), 1),
        "load_beside_s": round(load.s, 3),
        "tokens_beside": ended - begun,
    }


async def alternating(folders: Sequence[Path], patience: Patience) -> tuple[int, int]:
    """Answers and loads of two clients, each of its model, of which one fits."""
    models = await load_models(_settings(folders, fit=1, patience=patience))
    answers, deadline = 0, time.perf_counter() + SECONDS

    async def client(name: str) -> None:
        nonlocal answers
        turn = 0
        while time.perf_counter() < deadline:
            await _answer(models.serving_of(name), f"{name} {turn}", 8)
            answers += time.perf_counter() < deadline
            turn += 1

    await asyncio.gather(*(client(one.name) for one in folders))
    loads = models.loads
    await models.close()
    return answers, loads


async def _warm(serving: ServingPort) -> None:
    """Give it idle agents."""
    await asyncio.gather(*(_answer(serving, f"agent {n}", 2, 100) for n in range(AGENTS)))


async def _answer(serving: ServingPort, seed: str, n: int, of: int = 40) -> None:
    async for _ in serving.answer(_ask(seed, n, of)):
        pass


async def _stream(serving: ServingPort, times: list[_Times]) -> None:
    """Note when each piece arrives."""
    async for event in serving.answer(_ask("stream", 4000)):
        times += [_Times.now()] * isinstance(event, TextDelta)


def _ask(seed: str, n: int, of: int = 40) -> Ask:
    """A prompt of `of` words, which tells one agent from another."""
    return Ask(words(of, seed), SamplingParams(ignore_eos=True), n)


def _served(folder: Path) -> ServeSettings:
    return ServeSettings(Settings(str(folder), pool_bytes=POOL, memory_bytes=TIER))


def _settings(
    folders: Sequence[Path], *, fit: int, patience: Patience | None = None
) -> ModelsSettings:
    return ModelsSettings(
        [_served(one) for one in folders],
        max_bytes=TIER + fit * (POOL + WEIGHTS),
        patience=patience or Patience(),
    )


def _median(rows: Sequence[Row], name: str) -> float:
    return round(statistics.median(float(str(one[name])) for one in rows), 4)


def _ratio(rows: Sequence[Row], name: str, of: str) -> float:
    """The median of the rounds' ratios."""
    found = [float(str(one[name])) / float(str(one[of])) for one in rows]
    return round(statistics.median(found), 3)
