"""Times BlockPool on the shape of Gemma 3 12B, with other agents' blocks already in the pool.

Only accounting is measured: a pool counts blocks and holds no arrays.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import TypeAlias

from experiments.harness.document import Json, Scalar
from experiments.harness.plots import Plot
from experiments.harness.record import Run
from experiments.harness.result import Result, Verdict
from experiments.harness.stats import summarise
from semantic.domain.services import BlockPool
from semantic.domain.value_objects import LayerKind, LayerSpec, ModelCacheSpec

ID = "EXP-002"
QUESTION = "Does giving blocks to an agent, or taking them back, ever take a noticeable time?"
CRITERION = (
    "over 1,000 cycles the p95 of allocating and the p95 of freeing are each below 1 ms, for one "
    "block of one layer, for one block of each of 48 layers and for 32 blocks of each"
)
LIMIT_US = 1000.0
AIM_US = 20.0
PARAMETERS: dict[str, Scalar] = {"cycles": 1000, "warmup": 50, "other_agents": 8}
PLOTS = (
    Plot(
        "allocation.svg",
        "Allocating blocks, 1,000 cycles each",
        x="blocks",
        y="allocate_us",
        x_label="blocks in one call",
        y_label="µs",
        x_scale="log",
        y_scale="log",
        show_threshold=True,
    ),
)

LAYERS = 48
COLUMNS = 32
Pool: TypeAlias = BlockPool
Row: TypeAlias = dict[str, Scalar]
CASES = {
    "one block of one layer": [1] + [0] * (LAYERS - 1),
    "one block of 48 layers": [1] * LAYERS,
    "32 blocks of 48 layers": [COLUMNS] * LAYERS,
}
LARGEST = "32 blocks of 48 layers"


def run(parameters: Mapping[str, Scalar]) -> Result:
    """Time every case in the same pool."""
    started = Run.start(
        ID, QUESTION, model="shape of Gemma 3 12B, all layers full", parameters=parameters, seed=0
    )
    pool = crowded_pool(int(str(parameters["other_agents"])))
    cycles, warmup = (int(str(parameters[name])) for name in ("cycles", "warmup"))
    samples: list[Row] = [
        {"case": case, "blocks": sum(counts), "allocate_us": allocate, "free_us": free}
        for case, counts in CASES.items()
        for allocate, free in timed_cycles(pool, counts, warmup, cycles)
    ]
    pool.check_integrity()
    table = [row(case, samples) for case in CASES]
    worst = max(float(str(line[key])) for line in table for key in P95)
    summary: dict[str, Json] = {
        "cases": [{**line} for line in table],
        "worst_p95_us": worst,
        "limit_us": LIMIT_US,
        "aim_us": AIM_US,
        "cases_within_aim": sum(max(float(str(line[k])) for k in P95) < AIM_US for line in table),
        "ns_per_block": 1000 * float(str(table[-1]["allocate_p50_us"])) / sum(CASES[LARGEST]),
        "blocks_in_the_pool": pool.used_blocks,
    }
    return started.finish(
        samples, summary, Verdict(CRITERION, LIMIT_US, worst, passed=worst < LIMIT_US)
    )


P95 = ("allocate_p95_us", "free_p95_us")


def crowded_pool(other_agents: int) -> Pool:
    """A pool in which `other_agents` hold 8,192 tokens each, with room for one more."""
    layer = LayerSpec(LayerKind.FULL, kv_heads=8, k_head_dim=256, v_head_dim=256, itemsize=2)
    spec = ModelCacheSpec((layer,) * LAYERS)
    pool = Pool(spec, total_blocks=(other_agents + 1) * LAYERS * COLUMNS, max_bytes=2**50)
    for agent in range(other_agents):
        pool.allocate_layers([COLUMNS] * LAYERS, f"agent-{agent}")
    return pool


def timed_cycles(
    pool: Pool, counts: list[int], warmup: int, cycles: int
) -> Iterator[tuple[float, float]]:
    """Microseconds of allocating and of freeing, cycle by cycle; the first ones do not count."""
    single = counts.index(1) if sum(counts) == 1 else None
    for cycle in range(warmup + cycles):
        begun = time.perf_counter_ns()
        if single is not None:
            blocks = [pool.allocate(1, single, "measured")]
        else:
            blocks = pool.allocate_layers(counts, "measured")
        given = time.perf_counter_ns()
        pool.free([block for layer in blocks for block in layer], "measured")
        freed = time.perf_counter_ns()
        if cycle >= warmup:
            yield (given - begun) / 1000, (freed - given) / 1000


def row(case: str, samples: list[Row]) -> Row:
    """One line of the table."""
    mine = [sample for sample in samples if sample["case"] == case]
    line: Row = {"case": case, "blocks": mine[0]["blocks"]}
    for step in ("allocate", "free"):
        found = summarise([float(str(sample[f"{step}_us"])) for sample in mine])
        line |= {f"{step}_{name}_us": found[name] for name in ("p50", "p95", "p99")}
    return line
