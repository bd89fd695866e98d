"""Times every way to turn blocks into caches, for both of the plan's shapes and its grid.

On a small machine a token has fewer bytes than Gemma's: what is claimed there is the ratio to a
plain copy of the same bytes. `--set kv_heads=8 --set head_dim=256` measures the true size.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

import mlx.core as mx

from experiments.exp_006_gather import ways
from experiments.exp_006_gather.layouts import (
    Layout,
    Token,
    all_full,
    gemma,
    layer_caches,
    neighbours,
)
from experiments.exp_006_gather.scaling import fit
from experiments.exp_006_gather.timing import Line, Lines, compare, in_turns, keyed, number, table
from experiments.harness.document import Json, Scalar
from experiments.harness.plots import Plot
from experiments.harness.record import Run
from experiments.harness.result import Result, Verdict

ID = "EXP-006"
QUESTION = (
    "What does it cost to turn an agent's blocks into caches again, and is it more than copying "
    "the bytes?"
)
CRITERION = (
    "restoring scattered blocks of 8,192 tokens takes less than 5 ms at p95, with a standard "
    "deviation below 20 % of the mean, both for 48 layers of 32 blocks and for Gemma 3 12B's 8 "
    "full and 40 window layers; a run with less than Gemma's bytes per token can only fail it"
)
LIMIT_MS = 5.0
PARAMETERS: dict[str, Scalar] = {
    "kv_heads": 2,
    "head_dim": 64,
    "dtype": "bfloat16",
    "samples": 60,
    "grid_samples": 8,
    "warmup": 3,
    "true_size_samples": 3,
}
PLOTS = (
    Plot(
        "scaling.svg",
        "Restoring scattered blocks: time is proportional to bytes",
        x="mb",
        y="grid_ms",
        series="way",
        x_label="MB in the blocks",
        y_label="ms",
        x_scale="log",
        y_scale="log",
    ),
    Plot(
        "contexts.svg",
        "Gemma 3 12B's layers, 2K to 16K tokens",
        x="context",
        y="gemma_ms",
        series="way",
        x_label="tokens",
        y_label="ms",
        y_scale="log",
    ),
)

GEMMA_TOKEN = Token(8, 256, mx.bfloat16)
COPYING = (*ways.PLAIN_COPIES, ways.PER_LAYER, ways.GATHER)
MOVING = (*COPYING, ways.BLOCK_TENSORS)
FULL, GEMMA = all_full(48, 32), gemma(8192)
GEMMA_AS_WE_LEAVE_IT = gemma(8192, window_blocks=5)
CONTEXTS = [gemma(context) for context in (2048, 4096, 8192, 16384)]
GRID = [all_full(layers, n) for layers in (12, 24, 30, 48) for n in (1, 2, 4, 8, 16, 32)]


class Bench:
    """Measures layouts with one kind of token, and keeps the raw samples."""

    def __init__(self, token: Token, warmup: int) -> None:
        self.token = token
        self.samples: list[dict[str, Scalar]] = []
        self._warmup = warmup

    def measure(
        self, layout: Layout, names: Sequence[str], samples: int, field: str = "ms"
    ) -> Lines:
        """Time `names` on `layout`; the raw times go into the samples' field `field`."""
        ready = {name: ways.WAYS[name](layout, self.token) for name in names}
        times = in_turns(ready, samples, self._warmup)
        n_bytes = layout.n_blocks * self.token.block_bytes
        for name in names:
            head: Line = {"shape": layout.name, "way": name, "mb": n_bytes / 1e6}
            head["context"] = layout.context
            self.samples += [{**head, field: round(ms, 4)} for ms in times[name][1:]]
        ready.clear()
        mx.clear_cache()
        return compare(times, n_bytes, ways.PLAIN_COPIES)


def run(parameters: Mapping[str, Scalar]) -> Result:
    """Measure the two shapes of the verdict, then contexts, grid, and once the true size."""
    model = f"shapes only, on {mx.default_device()}"
    started = Run.start(ID, QUESTION, model=model, parameters=parameters, seed=0)
    count = {name: int(str(value)) for name, value in parameters.items() if name != "dtype"}
    token = Token(count["kv_heads"], count["head_dim"], getattr(mx, str(parameters["dtype"])))
    few, many = count["grid_samples"], count["samples"]
    before = mx.get_active_memory()
    bench = Bench(token, count["warmup"])
    plan = {
        FULL.name: bench.measure(FULL, MOVING, many),
        GEMMA.name: bench.measure(GEMMA, MOVING, many),
    }
    ours = bench.measure(GEMMA_AS_WE_LEAVE_IT, list(ways.WAYS), many)
    contexts = {x.name: bench.measure(x, COPYING, few, "gemma_ms") for x in CONTEXTS}
    grid = {x.name: bench.measure(x, COPYING, few, grid_field(x)) for x in GRID}
    leaked = mx.get_active_memory() - before
    at_size: dict[str, Lines] = {}
    if token != GEMMA_TOKEN and count["true_size_samples"]:
        true = Bench(GEMMA_TOKEN, warmup=0)
        at_size[GEMMA.name] = true.measure(GEMMA, COPYING, count["true_size_samples"])
    summary: dict[str, Json] = {
        "plan": {name: keyed(lines) for name, lines in plan.items()},
        "plan_table": table(plan),
        "ours": keyed(ours),
        "ours_table": table({GEMMA_AS_WE_LEAVE_IT.name: ours}),
        "contexts_table": table(contexts, COPYING[1:]),
        "grid_table": table(grid, (ways.GATHER,)),
        "grid_ratio": ratios(grid),
        "scaling": scaling(grid),
        "true_size_table": table(at_size),
        "moved_by_taking_over": moved_by_taking_over(token),
        "leaked_bytes": leaked,
        "share_of_gemmas_bytes": token.block_bytes / GEMMA_TOKEN.block_bytes,
    }
    return started.finish(bench.samples, summary, judge(plan, token))


def grid_field(layout: Layout) -> str:
    """Where the grid's raw times go; a block alone in its layer is not copied, nor drawn."""
    return "grid_ms" if max(layout.blocks) > 1 else "single_block_ms"


def judge(plan: Mapping[str, Lines], token: Token) -> Verdict:
    """The criterion, on what the engine does with scattered blocks."""
    lines = [lines[ways.GATHER] for lines in plan.values()]
    slowest = max(number(line, "p95_ms") for line in lines)
    steady = all(number(line, "std_ms") < 0.2 * number(line, "mean_ms") for line in lines)
    full_size = token.block_bytes >= GEMMA_TOKEN.block_bytes
    passed = slowest < LIMIT_MS and steady and full_size
    return Verdict(CRITERION, LIMIT_MS, round(slowest, 3), passed=passed)


def ratios(grid: Mapping[str, Lines]) -> dict[str, Json]:
    """Gather over plain copy, where there is something to gather: two blocks or more."""
    found = [
        number(lines[ways.GATHER], "ratio") for name, lines in grid.items() if name[-2:] != "x1"
    ]
    return {"median": statistics.median(found), "least": min(found), "most": max(found)}


def scaling(grid: Mapping[str, Lines]) -> dict[str, Json]:
    """How straight the line of time over bytes is, and what twice the blocks cost."""
    several = [lines[ways.GATHER] for name, lines in grid.items() if name[-2:] != "x1"]
    straight = fit([number(x, "mb") for x in several], [number(x, "p50_ms") for x in several])
    whole, half = (grid[all_full(48, n).name][ways.GATHER] for n in (32, 16))
    return {
        "r_squared": straight.r_squared,
        "gb_per_s": 1 / straight.slope if straight.slope else None,
        "intercept_ms": straight.intercept,
        "twice_the_blocks": number(whole, "mean_ms") / number(half, "mean_ms"),
    }


def moved_by_taking_over(token: Token) -> int:
    """Bytes of new arrays that taking over makes, for Gemma as we leave it."""
    layout = GEMMA_AS_WE_LEAVE_IT
    agent = neighbours(layout, token)
    makes = layer_caches(layout, token)
    caches = makes.restored(agent, layout.context, layout.context, exclusive=True)
    return ways.bytes_moved(caches, agent)
