"""`python -m benchmarks.gpu_rows`: the cost of a decode step by its rows.

The shape of Llama 3.1 8B with random weights of 4 bits in groups of 64, in pages; with `--bits 16`,
of bfloat16. One side
multiplies with MLX's kernels, the other with ours; they decode the same sequences in turns. For
each number of rows: milliseconds of a step, and of the device's work where torch can count it. Then
one sequence alone and beside others of other lengths: how many tokens are the same, and what their
log-probabilities differ by. Prints a line of JSON for each and writes them all. `--small` is a
check for a CPU.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

import semantic.adapters.mlx  # isort: skip  # noqa: F401  loads OpenBLAS before MLX
from mlx.nn.layers.base import Module

from benchmarks import gpu_bits, shapes
from benchmarks.gpu_models import free
from benchmarks.gpu_step import Steps
from experiments.harness.document import Json, Scalar
from experiments.harness.record import Run
from experiments.harness.result import Verdict
from semantic.adapters.mlx.model.joined import join
from semantic.adapters.mlx.model.row_layers import use_rows
from semantic.adapters.mlx.model.short_steps import shorten
from tests.support.tiny_models import VOCAB, tiny_model

QUESTION = "What do further rows of a decode step cost?"
PLAIN, MOST_OVER_MLX, PLAIN_UP_TO = 16, 1.05, 16
PLAIN_CRITERION = (
    f"with our kernel the device works for steps of 1 to {PLAIN_UP_TO} rows at most "
    f"{MOST_OVER_MLX} of the time with MLX's kernels"
)
MOST_OVER_ONE, UP_TO = 1.3, 8
CRITERION = (
    f"with our kernel the device works for steps of 2 to {UP_TO} rows at most {MOST_OVER_ONE} of "
    "the time of one row; a sequence gets the same log-probabilities beside any others"
)
BATCHES, SMALL_BATCHES = (1, 2, 4, 8, 16, 32), (1, 3)
TOKENS, SMALL_TOKENS = 512, 12
WARM, SMALL_WARM = 80, 1
"""Steps of each side before the measurement: MLX makes CUDA graphs for so long."""
MLX, OURS = "MLX", "ours"


def sides(model: Module) -> dict[str, Module]:
    """The model with MLX's products and with ours, which need a GPU."""
    found = {MLX: join(model), OURS: join(model, change=use_rows)}
    for one in found.values():
        shorten(one)
    return found


def parsed(given: Sequence[str] | None) -> argparse.Namespace:
    """The command's arguments."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--batch", type=int, action="append", help="rows; may be repeated")
    parser.add_argument("--bits", type=int, default=4, choices=(4, PLAIN))
    parser.add_argument("--small", action="store_true", help="a tiny model")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> int:
    """Measure, print, write; 1 when the criterion is missed."""
    arguments = parsed(given)
    small, plain = cast(bool, arguments.small), arguments.bits == PLAIN
    name = f"gpu_rows{'_plain' * plain}"
    started = Run.start(
        name,
        QUESTION,
        model=f"Llama 3.1 8B shape, {arguments.layers} layers, random {arguments.bits}-bit weights",
        parameters={"layers": arguments.layers, "small": small, "bits": arguments.bits},
        seed=0,
    )
    make = shapes.llama_8b if plain else shapes.llama_8b_4bit
    tiny = "llama" if plain else "quantized"
    model = tiny_model(tiny) if small else make(arguments.layers)
    vocab = VOCAB if small else shapes.LLAMA_VOCAB
    batches = sorted(arguments.batch or (SMALL_BATCHES if small else BATCHES))
    both = sides(model)
    samples: list[dict[str, Scalar]] = []
    table: list[Json] = []
    summary: dict[str, Json] = {"steps": table}
    arguments.output.mkdir(parents=True, exist_ok=True)

    def note(line: Json) -> None:
        """Print and write results at once: a rented machine may go away."""
        print(json.dumps(line), flush=True)
        started.finish(samples, summary, judge(summary, plain=plain)).write(
            arguments.output / f"{name}.json"
        )

    def all_steps() -> Steps:
        tokens, warm = (SMALL_TOKENS, SMALL_WARM) if small else (TOKENS, WARM)
        return Steps(model, vocab, tokens, batches, len(both), warm)

    steps = all_steps()
    for batch in batches:
        for line in steps.measure(batch, both, samples):
            table.append(line)
            note(line)
    del steps
    free()
    if not (small or plain):
        summary["bits"] = gpu_bits.bits(model, vocab)
        note(summary["bits"])
        free()
    busy: list[Json] = []
    summary["busy"] = busy
    counted = all_steps()  # counting slows all later steps, so it comes last
    for batch in batches:
        counted.grow(batch)
        for variant, side in both.items():
            busy.append({"batch": batch, "variant": variant, **counted.kernels(side)})
            note(busy[-1])
    verdict = judge(summary, plain=plain)
    print(f"{'passed' if verdict.passed else 'MISSED'}: {verdict.observed}")
    return int(not verdict.passed)


def judge_plain(summary: Mapping[str, Json]) -> Verdict:
    """The criterion of weights of 16 bits, and what misses it."""
    lines = cast(Sequence[Mapping[str, Json]], summary.get("busy", []))
    times = {
        (cast(int, one["batch"]), str(one["variant"])): cast(float, one["busy_ms"])
        for one in lines
        if "busy_ms" in one
    }
    ratios = {
        n: times[n, OURS] / times[n, MLX] for n, side in times if side == MLX and (n, OURS) in times
    }
    missed = [] if ratios else ["the device's work was not counted"]
    missed += [
        f"{n} rows: {ratio:.3f}"
        for n, ratio in ratios.items()
        if n <= PLAIN_UP_TO and ratio > MOST_OVER_MLX
    ]
    observed = "; ".join(missed) or ", ".join(f"{n}: {one:.3f}" for n, one in ratios.items())
    return Verdict(PLAIN_CRITERION, MOST_OVER_MLX, observed, passed=not missed)


def judge(summary: Mapping[str, Json], *, plain: bool = False) -> Verdict:
    """The criterion, and what misses it."""
    if plain:
        return judge_plain(summary)
    missed: list[str] = []
    lines = cast(Sequence[Mapping[str, Json]], summary.get("busy", []))
    busy = {
        cast(int, line["batch"]): cast(float, line["busy_ms"])
        for line in lines
        if line["variant"] == OURS and "busy_ms" in line
    }
    if 1 not in busy:
        missed.append("the device's work was not counted")
    missed += [
        f"{n} rows: {busy[n] / busy[1]:.2f} of one"
        for n in busy
        if 1 < n <= UP_TO and busy[n] > MOST_OVER_ONE * busy[1]
    ]
    bits = cast(Mapping[str, Sequence[Mapping[str, float]]], summary.get("bits", {}))
    missed += [
        f"beside {one['batch'] - 1:.0f} others: {one['same_tokens']} of {one['of']} tokens"
        for one in bits.get("divergence", [])
        if one["largest_logprob_difference"] or one["same_tokens"] < one["of"]
    ]
    return Verdict(CRITERION, MOST_OVER_ONE, "; ".join(missed) or "all of it", passed=not missed)


if __name__ == "__main__":
    raise SystemExit(main())
