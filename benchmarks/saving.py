"""Cost of saving: the disk store beside plain files, and decoding during saves."""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import semantic.adapters.mlx  # isort: skip  # noqa: F401  loads OpenBLAS before MLX
from mlx.nn.layers.base import Module

from benchmarks import stored
from benchmarks.rig import Rig
from benchmarks.shapes import smollm2_135m
from experiments.harness.document import Json, Scalar
from experiments.harness.record import Run
from experiments.harness.result import Result, Verdict
from experiments.harness.stats import percentile
from semantic.adapters.stores.background import BackgroundStore
from semantic.adapters.stores.disk.store import DiskStore
from semantic.adapters.stores.memory import MemoryStore
from semantic.adapters.stores.tiered import TieredStore
from semantic.domain.block_hash import Part, Scope
from semantic.domain.stored import BlockHeader, StoredBlock
from semantic.domain.value_objects import BLOCK_TOKENS
from semantic.ports.store import StorePort

QUESTION = "How fast are blocks saved, and how much slower do agents decode meanwhile?"
CRITERION = (
    "4 agents decode while in every 16 steps another agent ends a turn of 300 new tokens: with a "
    "store in memory and on disk 16 steps take at most 5 % longer than without (median of pairs)"
)
MOST_SLOWDOWN = 0.05
Row = dict[str, Scalar]

BLOCKS, WRITE_ROUNDS = 8, 15
RESIDENT, TURN, STEPS, DECODE_ROUNDS = 512, 300, 16, 12
WARM_BYTES, QUEUE_BYTES = 256 << 20, 256 << 20


def run() -> Result:
    """First the writing alone, then decoding with and without a store."""
    started = Run.start(
        "saving",
        QUESTION,
        model="SmolLM2-135M shape, random fp32 weights",
        parameters={
            "blocks": BLOCKS,
            "write_rounds": WRITE_ROUNDS,
            "agents": 4,
            "turn_tokens": TURN,
            "steps": STEPS,
            "decode_rounds": DECODE_ROUNDS,
        },
        seed=0,
    )
    model = smollm2_135m()
    writing = list(written(block_bytes(model)))
    with stored.folder() as folder:
        decoding = list(decoded(model, folder))
    slowdown = statistics.median(
        b / a - 1 for a, b in zip(spans(decoding, NO_STORE), spans(decoding, STORE), strict=True)
    )
    summary: dict[str, Json] = {
        "writing": [write_row(way, writing) for way in WRITERS],
        "decoding": [decode_row(side, decoding) for side in (NO_STORE, STORE)],
        "slowdown_percent": round(100 * slowdown, 2),
        "block_mb": round(block_bytes(model) / 1e6, 1),
    }
    verdict = Verdict(CRITERION, MOST_SLOWDOWN, round(slowdown, 4), passed=slowdown < MOST_SLOWDOWN)
    return started.finish([*writing, *decoding], summary, verdict)


# Writing


def written(n_bytes: int) -> Iterator[Row]:
    """MB per second of every way to write eight blocks, in turns, each to a folder of its own."""
    body = random.Random(0).randbytes(n_bytes)
    for i in range(WRITE_ROUNDS):
        for way, write in WRITERS.items() if i % 2 else reversed(WRITERS.items()):
            with stored.folder() as folder:
                os.sync()  # so that pending writes of others are not measured
                seconds = write(folder, body)
                yield {"way": way, "mb_per_s": BLOCKS * n_bytes / seconds / 1e6}


def plain(folder: Path, body: bytes, *, durable: bool) -> float:
    """Seconds to write temporary files and rename them; durable: files synced, then the folder."""
    folder.mkdir()
    begin = time.perf_counter()
    for i in range(BLOCKS):
        with (folder / f"{i}.new").open("wb", buffering=0) as file:
            rest = memoryview(body)
            while rest:
                rest = rest[file.write(rest) :]
        (folder / f"{i}.new").rename(folder / str(i))
    if durable:
        for path in (*(folder / str(i) for i in range(BLOCKS)), folder):
            sync(path)
    return time.perf_counter() - begin


def sync(path: Path) -> None:
    """Sync a file or folder to the drive."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def through_store(folder: Path, body: bytes, *, durable: bool) -> float:
    """Seconds to put the same number of bytes as a chain of blocks into a new store."""
    store = DiskStore.open(folder, stored.ROOM, durable=durable)
    scope = Scope(bytes(32), bytes(32))
    blocks = [
        StoredBlock(BlockHeader(link, Part.FULL, "benchmark"), body)
        for link in scope.chain(range(BLOCKS * BLOCK_TOKENS))
    ]
    begin = time.perf_counter()
    kept = [store.put(block) for block in blocks]
    store.flush()
    seconds = time.perf_counter() - begin
    store.close()
    if not all(kept):
        raise AssertionError("the store did not keep all blocks")
    return seconds


WRITERS: dict[str, Callable[[Path, bytes], float]] = {
    "plain": lambda folder, body: plain(folder, body, durable=False),
    "store": lambda folder, body: through_store(folder, body, durable=False),
    "plain, durable": lambda folder, body: plain(folder, body, durable=True),
    "store, durable": lambda folder, body: through_store(folder, body, durable=True),
}


def block_bytes(model: Module) -> int:
    """Bytes of a full block's body."""
    return Rig.build(model).backend.layout().body_bytes(Part.FULL, BLOCK_TOKENS)


def write_row(way: str, samples: Sequence[Row]) -> dict[str, Json]:
    """One line of the table; the ratio is to the plain way of the same durability."""
    rates = [float(str(s["mb_per_s"])) for s in samples if s["way"] == way]
    other = "plain, durable" if way.endswith("durable") else "plain"
    plain_rates = [float(str(s["mb_per_s"])) for s in samples if s["way"] == other]
    of_plain = statistics.median(a / b for a, b in zip(rates, plain_rates, strict=True))
    return {
        "way": way,
        "mb_per_s": round(statistics.median(rates), 1),
        "of_plain": round(of_plain, 3),
    }


# Decoding

NO_STORE, STORE = "no store", "memory and disk"


def decoded(model: Module, folder: Path) -> Iterator[Row]:
    """Milliseconds of each step of both sides, in alternating stretches."""
    disk = DiskStore.open(folder, stored.ROOM)
    store = TieredStore(
        MemoryStore(WARM_BYTES, secret=disk.secret), BackgroundStore(disk, QUEUE_BYTES)
    )
    sides = {NO_STORE: side(model, None), STORE: side(model, store)}
    for i in range(DECODE_ROUNDS + 1):
        for name in sides if i % 2 else reversed(sides):
            steps, left = stretch(sides[name], i)
            if i:  # the first stretch warms up
                for seconds in steps:
                    yield {"side": name, "stretch": i, "step_ms": 1e3 * seconds}
                yield {"side": name, "stretch": i, "left_ms": 1e3 * left}
    counts = disk.stats()[0].counts
    sides[STORE].engine.close()
    if counts["written"] < 2 * DECODE_ROUNDS or counts["write_errors"]:
        raise AssertionError(f"the store did not write what it was to write: {counts}")


def side(model: Module, store: StorePort | None) -> Rig:
    """Four agents, decoding."""
    rig = Rig.build(model, store=store, model_id=stored.MODEL_ID)
    rig.start_agents([RESIDENT] * 4)
    rig.settle(2)
    return rig


def stretch(rig: Rig, i: int) -> tuple[list[float], float]:
    """Seconds of each step while a fifth agent joins, answers and ends; seconds still to write.

    Its last 300 tokens are new to the store, as after a turn. What is not written when the
    stretch ends is waited for, so that it does not disturb the other side.
    """
    guest = f"guest-{i}"
    tokens = rig.add_idle_agent(guest, TURN, first=i)
    rig.engine.submit(guest, (*tokens, 1), max_tokens=2)
    steps = [rig.step() for _ in range(STEPS)]
    begin = time.perf_counter()
    rig.engine.flush()
    left = time.perf_counter() - begin
    rig.engine.forget(guest)
    return steps, left


def spans(samples: Sequence[Row], name: str) -> list[float]:
    """Milliseconds of each whole stretch."""
    found: dict[int, float] = {}
    for sample in samples:
        if sample["side"] == name and "step_ms" in sample:
            i = int(str(sample["stretch"]))
            found[i] = found.get(i, 0.0) + float(str(sample["step_ms"]))
    return list(found.values())


def decode_row(name: str, samples: Sequence[Row]) -> dict[str, Json]:
    """One line of the table."""
    own = [s for s in samples if s["side"] == name]
    steps = [float(str(s["step_ms"])) for s in own if "step_ms" in s]
    left = [float(str(s["left_ms"])) for s in own if "left_ms" in s]
    return {
        "store": name,
        "steps": len(steps),
        "p50_ms": round(percentile(steps, 50), 1),
        "p99_ms": round(percentile(steps, 99), 1),
        "stretch_ms": round(statistics.median(spans(samples, name)), 1),
        "left_to_write_ms": round(statistics.median(left), 1),
    }
