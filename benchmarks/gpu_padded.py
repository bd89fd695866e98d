"""`python -m benchmarks.gpu_padded`: does a padded batch pay where caches have no pages?

The shape of Llama 3.1 8B with random bf16 weights, sequences of equal length, in turns: our engine
with pages, with contiguous caches one by one (`ragged`) and padded, and mlx-lm's BatchGenerator.
Prints a line of JSON for each batch and writes them all. `--small` is a check for a CPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import cast

import semantic.adapters.mlx  # isort: skip  # noqa: F401  loads OpenBLAS before MLX
from mlx.nn.layers.base import Module

from benchmarks import shapes
from benchmarks.gpu_sides import Ours, Theirs
from experiments.harness.document import Json, Scalar
from experiments.harness.record import Run
from experiments.harness.result import Verdict
from semantic.adapters.mlx.batch.padded_batch import even
from semantic.adapters.mlx.model.provider import wrap_model
from tests.support.tiny_models import VOCAB, tiny_model

QUESTION = "Is a padded batch faster than a ragged one of contiguous caches anywhere?"
CRITERION = "at some batch padded rows take at most 0.9 of ragged ones"
MOST_OF_RAGGED = 0.9
BATCHES, SMALL_BATCHES = (2, 8, 32), (2, 3)
TOKENS, SMALL_TOKENS = (256, 1024), (12,)
WARM, STEPS = 8, 15


def main(given: Sequence[str] | None = None) -> int:
    """Measure, print, write; 1 when padding pays nowhere."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--small", action="store_true", help="a tiny model")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args(given)
    small = cast(bool, arguments.small)
    started = Run.start(
        "gpu_padded",
        QUESTION,
        model=f"Llama 3.1 8B shape, {arguments.layers} layers, random bf16 weights",
        parameters={"steps": STEPS, "layers": arguments.layers},
        seed=0,
    )
    model = tiny_model("llama") if small else shapes.llama_8b(arguments.layers)
    vocab = VOCAB if small else shapes.LLAMA_VOCAB
    samples: list[dict[str, Scalar]] = []
    table: list[Json] = []
    for tokens in SMALL_TOKENS if small else TOKENS:
        for batch in SMALL_BATCHES if small else BATCHES:
            line: dict[str, Json] = {"batch": batch, "tokens": tokens}
            for name, side in sides(model, [tokens] * batch, vocab, paged=not small).items():
                taken = step_ms(side(), [tokens] * batch)
                samples += [{"batch": batch, "tokens": tokens, name: one} for one in taken]
                line[name] = round(statistics.median(taken), 3)
            table.append(line)
            print(json.dumps(line), flush=True)
    verdict = judge(table)
    arguments.output.mkdir(parents=True, exist_ok=True)
    summary: dict[str, Json] = {"steps": table}
    started.finish(samples, summary, verdict).write(arguments.output / "gpu_padded.json")
    print(f"{'passed' if verdict.passed else 'MISSED'}: {verdict.observed}")
    return int(not verdict.passed)


def judge(table: Sequence[Json]) -> Verdict:
    """The criterion, and the best of padding."""
    lines = cast(Sequence[Mapping[str, float]], table)
    best = min(line["padded"] / line["ragged"] for line in lines)
    observed = f"padded rows take {best:.2f} of ragged ones at best"
    return Verdict(CRITERION, MOST_OF_RAGGED, observed, passed=best <= MOST_OF_RAGGED)


def sides(
    model: Module, lengths: Sequence[int], vocab: int, *, paged: bool
) -> dict[str, Callable[[], Ours | Theirs]]:
    """How to build each side."""
    ragged = wrap_model(model, "benchmark", attention=None, pads=lambda _: None)
    padded = wrap_model(model, "benchmark", attention=None, pads=lambda _: even)
    found: dict[str, Callable[[], Ours | Theirs]] = {
        "ragged": lambda: Ours(model, lengths, vocab, backend=ragged),
        "padded": lambda: Ours(model, lengths, vocab, backend=padded),
        "mlx_lm": lambda: Theirs(model, vocab),
    }
    if paged:
        found["paged"] = lambda: Ours(model, lengths, vocab)
    return found


def step_ms(side: Ours | Theirs, lengths: Sequence[int]) -> list[float]:
    """Milliseconds of each step once all decode; the batch is stable by then."""
    side.start(lengths)
    taken: list[float] = []
    for _ in range(WARM + STEPS):
        begin = time.perf_counter()
        side.step()
        taken.append((time.perf_counter() - begin) * 1e3)
    if isinstance(side, Ours):
        side.end()
    return taken[WARM:]


if __name__ == "__main__":
    raise SystemExit(main())
