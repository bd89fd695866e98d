"""What adapters cost beside their base: memory, loads, and the time of a token.

The base and two adapters of one server, LoRA and DoRA: bytes in arrays after each load, beside
those of the adapter's own arrays; the seconds of the first load of each, and of a base that is
loaded again while an adapter holds its weights; and the processor milliseconds of a token of one
client under each: other programs lengthen the wall's.
"""

from __future__ import annotations

import asyncio
import gc
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast

import semantic.adapters.mlx  # isort: skip  # noqa: F401  loads OpenBLAS before MLX
import mlx.core as mx

from benchmarks.server_model import write_model
from experiments.harness.document import Json, Scalar
from experiments.harness.record import Run
from experiments.harness.result import Result, Verdict
from semantic.application.models.on_demand import ManagedModels
from semantic.composition.engine_settings import NamedAdapter, Settings
from semantic.composition.named_models import describe_model
from semantic.domain.answer import TextDelta
from semantic.domain.value_objects import SamplingParams
from semantic.ports.serving import Ask, ServingPort
from semantic.serve import ServeSettings
from semantic.serve_models import ModelsSettings, load_models
from tests.support.adapter_folder import write_adapter

QUESTION = "What do adapters cost beside the base whose weights they share?"
CRITERION = "bytes that a loaded adapter adds: at most 1.1 times those of its own arrays"
MOST, LAYERS, RANK, TOKENS, ROUNDS = 1.1, 24, 8, 32, 3
MIB = 1 << 20
POOL, TIER = 32 * MIB, 64 * MIB
KINDS = ("lora", "dora")
Row = dict[str, Scalar]


def run() -> Result:
    """Measure all in one process, on a model and adapters that are made for it."""
    started = Run.start(
        "adapters",
        QUESTION,
        model="semantic-tiny, enlarged",
        parameters={"layers": LAYERS, "rank": RANK, "tokens": TOKENS, "rounds": ROUNDS},
        seed=0,
    )
    with TemporaryDirectory() as made:
        base = Path(made) / "base"
        write_model(base, LAYERS)
        adapters = {
            kind: write_adapter(base.parent / kind, base, kind, rank=RANK) for kind in KINDS
        }
        samples, again = asyncio.run(served(base, adapters))
        weights = describe_model(base).weights_bytes
    worst = max(_ratio(row) for row in samples[1:])
    summary: dict[str, Json] = {
        "weights_mib": round(weights / MIB, 1),
        "base_again_s": round(again, 3),
        "models": [dict(row) for row in samples],
    }
    return started.finish(
        samples, summary, Verdict(CRITERION, MOST, round(worst, 3), passed=worst <= MOST)
    )


async def served(base: Path, adapters: dict[str, Path]) -> tuple[list[Row], float]:
    """What each model adds and takes, and the seconds of the base's second load."""
    before, begun = _held(), time.perf_counter()
    models = await load_models(_settings(base, adapters))
    rows = [await _row(models, "", 0, before, begun)]
    for kind, folder in adapters.items():
        before, begun = _held(), time.perf_counter()
        await models.load(f"base+{kind}")
        adapter = describe_model(base, adapter=folder).adapter
        own = 0 if adapter is None else adapter.n_bytes
        rows.append(await _row(models, kind, own, before, begun))
    await models.unload("base")
    begun = time.perf_counter()
    await models.load("base")
    again = time.perf_counter() - begun
    await models.close()
    return rows, again


def _held() -> int:
    """Bytes in arrays, without those of objects in cycles that nothing refers to."""
    gc.collect()
    return mx.get_active_memory()


async def _row(models: ManagedModels, kind: str, own: int, before: int, begun: float) -> Row:
    seconds = time.perf_counter() - begun
    added = _held() - before
    serving = models.serving_of(f"base+{kind}" if kind else None)
    return {
        "adapter": kind,
        "load_s": round(seconds, 3),
        "own_mib": round(own / MIB, 2),
        "added_mib": round(added / MIB, 2),
        "token_cpu_ms": round(await _token_ms(serving), 1),
    }


def _ratio(row: Row) -> float:
    return float(cast(float, row["added_mib"])) / float(cast(float, row["own_mib"]))


async def _token_ms(serving: ServingPort) -> float:
    """Processor milliseconds between the tokens of one client; the median of rounds."""
    found = []
    for number in range(ROUNDS):
        prompt = tuple((number * 31 + i * 7) % 200 + 20 for i in range(64))
        times = []
        async for event in serving.answer(Ask(prompt, SamplingParams(ignore_eos=True), TOKENS)):
            times += [time.process_time()] * isinstance(event, TextDelta)
        found.append((times[-1] - times[0]) / (len(times) - 1))
    return 1000 * statistics.median(found)


def _settings(base: Path, adapters: dict[str, Path]) -> ModelsSettings:
    engine = Settings(str(base), pool_bytes=POOL, memory_bytes=TIER)
    under = [
        ServeSettings(
            Settings(
                str(base), pool_bytes=POOL, memory_bytes=TIER, adapter=NamedAdapter(kind, folder)
            ),
            (f"base+{kind}",),
            parent="base",
        )
        for kind, folder in adapters.items()
    ]
    return ModelsSettings([ServeSettings(engine), *under], max_bytes=TIER + 512 * MIB)
