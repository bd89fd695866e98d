"""What it costs that models which do not fit together take turns in one server.

A swap, which unloads one model and loads another that was loaded before, beside the load at the
start of a server that has one model, which also tests its caches, and beside that without the test;
the largest gap in a stream while another model is loaded beside it; and how many answers two
clients of two models get when one fits, with the server's patience and without.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.server_model import words, write_model
from experiments.harness.document import Json, Scalar
from experiments.harness.record import Run
from experiments.harness.result import Result, Verdict
from semantic.adapters.mlx.model.provider import CHOSEN_LAYERS
from semantic.application.models.residency import Patience
from semantic.bootstrap import Settings
from semantic.domain.answer import TextDelta
from semantic.domain.value_objects import SamplingParams
from semantic.ports.serving import Ask, ServingPort
from semantic.serve import ServeSettings, load_serving
from semantic.serve_models import ModelsSettings, load_models

QUESTION = "What does it cost that models which do not fit together take turns?"
CRITERION = "a swap, median of rounds: at most 1.1 times the load of a server of one model"
MOST, ROUNDS, LAYERS, SECONDS = 1.1, 7, (24, 25), 10.0
MIB = 1 << 20
POOL, TIER, WEIGHTS = 32 * MIB, 64 * MIB, 200 * MIB
HASTY = Patience(residence=0.0, linger=0.0)
Row = dict[str, Scalar]


def run() -> Result:
    """Measure all in one process, on models that are made for it."""
    started = Run.start(
        "model_swaps",
        QUESTION,
        model="semantic-tiny, enlarged",
        parameters={"rounds": ROUNDS, "layers": LAYERS[0], "seconds": SECONDS},
        seed=0,
    )
    with TemporaryDirectory() as made:
        folders = [Path(made) / f"layers-{n}" for n in LAYERS]
        for folder, layers in zip(folders, LAYERS, strict=True):
            write_model(folder, layers)
        weights = sum(one.stat().st_size for one in folders[0].glob("*.safetensors"))
        samples = asyncio.run(swaps(folders))
        gaps = asyncio.run(gap_beside_a_load(folders))
        hasty, patient = (asyncio.run(alternating(folders, one)) for one in (HASTY, Patience()))
    plain, swap = (_median(samples, name) for name in ("load_s", "swap_s"))
    summary: dict[str, Json] = {
        "weights_mib": weights // MIB,
        "load_s": plain,
        "load_again_s": _median(samples, "load_again_s"),
        "swap_s": swap,
        "unload_s": _median(samples, "unload_s"),
        "ratio": round(swap / plain, 3),
        **gaps,
        "answers_hasty": hasty[0],
        "loads_hasty": hasty[1],
        "answers_patient": patient[0],
        "loads_patient": patient[1],
    }
    ratio = swap / plain
    return started.finish(
        samples, summary, Verdict(CRITERION, MOST, round(ratio, 3), passed=ratio <= MOST)
    )


async def swaps(folders: Sequence[Path]) -> list[Row]:
    """The seconds of each plain load and of each swap to the same model, in turns."""
    models = await load_models(_settings(folders, fit=1))
    rows: list[Row] = []
    for number in range(-1, ROUNDS):
        here, other = (folders[(number + i) % 2] for i in (0, 1))
        await models.load(here.name)
        await _warm(models.serving_of(here.name))
        begun = time.perf_counter()
        await models.unload(here.name)
        unloaded = time.perf_counter()
        await models.load(other.name)
        swapped = time.perf_counter()
        await models.unload(other.name)
        again = await _plain_load(other)
        known = dict(CHOSEN_LAYERS)
        CHOSEN_LAYERS.clear()
        plain = await _plain_load(other)
        CHOSEN_LAYERS.update(known)
        if number >= 0:
            rows.append(
                {
                    "round": number,
                    "load_s": round(plain, 4),
                    "load_again_s": round(again, 4),
                    "swap_s": round(swapped - begun, 4),
                    "unload_s": round(unloaded - begun, 4),
                }
            )
    await models.close()
    return rows


async def _plain_load(folder: Path) -> float:
    """The load of a server of one model."""
    begun = time.perf_counter()
    serving = await load_serving(_served(folder))
    seconds = time.perf_counter() - begun
    await serving.close()
    return seconds


async def gap_beside_a_load(folders: Sequence[Path]) -> dict[str, Json]:
    """The largest gaps in a stream: before another model is loaded beside it, and meanwhile."""
    models = await load_models(_settings(folders, fit=2))
    times: list[float] = []
    stream = asyncio.create_task(_stream(models.serving_of(folders[0].name), times))
    while len(times) < 100:
        await asyncio.sleep(0.01)
    begun = time.perf_counter()
    await models.load(folders[1].name)
    ended = time.perf_counter()
    stream.cancel()
    await asyncio.wait((stream,))
    await models.close()
    gaps = [(later, later - earlier) for earlier, later in itertools.pairwise(times)]
    return {
        "gap_alone_ms": round(1000 * max(gap for at, gap in gaps if at < begun), 1),
        "gap_beside_ms": round(1000 * max(gap for at, gap in gaps if begun < at < ended), 1),
        "load_beside_s": round(ended - begun, 3),
        "tokens_beside": sum(begun < at < ended for at in times),
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
    await _answer(serving, "warm", 2)


async def _answer(serving: ServingPort, seed: str, n: int) -> None:
    async for _ in serving.answer(_ask(seed, n)):
        pass


async def _stream(serving: ServingPort, times: list[float]) -> None:
    """Note when each piece arrives."""
    async for event in serving.answer(_ask("stream", 4000)):
        times += [time.perf_counter()] * isinstance(event, TextDelta)


def _ask(seed: str, n: int) -> Ask:
    return Ask(words(40, seed), SamplingParams(ignore_eos=True), n)


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
