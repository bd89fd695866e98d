"""`python -m benchmarks.gpu_ranks`: one model on one device and divided among several.

Measures one device with pages and without, then as many ranks as `--ranks` says in both forms,
which `mlx.launch` starts over `--backend`: milliseconds of a decode step, tokens of a prompt per
second, and what it takes to export a block of 256 tokens, which the store has of all ranks.
`--shape 70b` is for ranks alone: it fits no single device. `--small` is a check for a CPU, over
`ring`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import cast

import semantic.adapters.mlx  # isort: skip  # noqa: F401  loads OpenBLAS before MLX
from mlx.nn.layers.base import Module

from benchmarks import shapes
from benchmarks.gpu_sides import prompt
from experiments.harness.document import Json, Scalar
from experiments.harness.record import Run
from experiments.harness.result import Verdict
from semantic.adapters.mlx.backend import MLXBackend
from semantic.adapters.mlx.kv_cache.forms import AttentionFor, find_kernels
from semantic.adapters.mlx.model.provider import wrap_model, wrapping
from semantic.adapters.mlx.ranks.following import follow
from semantic.adapters.mlx.ranks.shard import Ranks, shard_model, shared_name
from semantic.domain.block_hash import Part
from semantic.domain.value_objects import BLOCK_TOKENS, SamplingParams, whole_blocks
from semantic.ports.generation import at_once
from semantic_fleet.ranks.launched import Grid, read_grid
from tests.support.tiny_models import VOCAB, build

QUESTION = "What does it cost to divide a model among devices that fits one?"
MOST_EXPORT, MOST_STEP = 3.0, 1.3
CRITERION = (
    f"in pages, beside one device: a block exported in {MOST_EXPORT} times its time, a step of 8 "
    f"in {MOST_STEP} times its time"
)
BATCHES, TOKENS, CHUNK = (1, 8), 512, 2048
STEPS, ROUNDS, WARM = 40, 9, 20
SMALL_TOKENS, SMALL_CHUNK = 300, 512
LAUNCH = str(Path(sys.executable).with_name("mlx.launch"))
MODELS: Mapping[str, Callable[[int | None], Module]] = {
    "8b": lambda layers: shapes.llama_8b(layers or 32, lazy=True),
    "70b": lambda layers: shapes.llama_70b(layers or 80, lazy=True),
    "small": lambda _: build("llama"),
}
PAGES, ALONE, RANKS, PAGED_RANKS = "one device, in pages", "one device", "ranks", "ranks, in pages"


def main(given: Sequence[str] | None = None) -> int:
    """Measure, print, write; 1 when the criterion is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=("8b", "70b"), default="8b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--backend", default="nccl")
    parser.add_argument("--small", action="store_true", help="a tiny model")
    parser.add_argument(
        "--measure", choices=(PAGES, ALONE, RANKS, PAGED_RANKS), help=argparse.SUPPRESS
    )
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args(given)
    shape = "small" if arguments.small else cast(str, arguments.shape)
    if arguments.measure is not None:
        measure(shape, arguments.layers, arguments.measure)
        return 0
    run = Run.start(
        "gpu_ranks",
        QUESTION,
        model=f"Llama shape {shape}, random weights",
        parameters={"ranks": arguments.ranks, "transport": arguments.backend},
        seed=0,
    )
    own = ["--shape", arguments.shape, *(["--small"] if arguments.small else [])]
    own += [] if arguments.layers is None else ["--layers", str(arguments.layers)]
    launch = [LAUNCH, "-n", str(arguments.ranks), "--backend", arguments.backend, "--"]
    lines = [] if shape == "70b" else [_child([], own, PAGES), _child([], own, ALONE)]
    lines += [_child(launch, own, PAGED_RANKS), _child(launch, own, RANKS)]
    ratios = beside_one(lines)
    verdict = judge(ratios)
    arguments.output.mkdir(parents=True, exist_ok=True)
    summary: dict[str, Json] = {
        "forms": cast(list[Json], lines),
        "beside_one": cast(dict[str, Json], ratios),
    }
    samples: list[Mapping[str, Scalar]] = [
        {"form": cast(str, line["form"]), "batch": int(batch), "step_ms": ms}
        for line in lines
        for batch, ms in cast(Mapping[str, float], line["step_ms"]).items()
    ]
    run.finish(samples, summary, verdict).write(arguments.output / f"gpu_ranks_{shape}.json")
    print(f"{'passed' if verdict.passed else 'MISSED'}: {verdict.observed}")
    return int(not verdict.passed)


def _child(launch: Sequence[str], own: Sequence[str], form: str) -> dict[str, Json]:
    """What a process of its own, or one for each rank, prints last."""
    command = (*launch, sys.executable, "-m", "benchmarks.gpu_ranks", *own, "--measure", form)
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)  # noqa: S603
    line = next(one for one in reversed(done.stdout.splitlines()) if one.startswith("{"))
    print(line, flush=True)
    return cast(dict[str, Json], json.loads(line))


def beside_one(lines: Sequence[Mapping[str, Json]]) -> dict[str, float]:
    """How many times as long ranks take as one device, in pages; nothing without one device."""
    forms = {cast(str, line["form"]): line for line in lines}
    if PAGES not in forms:
        return {}

    def ratio(figure: Callable[[Mapping[str, Json]], float]) -> float:
        return round(figure(forms[PAGED_RANKS]) / figure(forms[PAGES]), 2)

    return {
        "export": ratio(lambda line: cast(float, line["export_block_ms"])),
        "step_8": ratio(lambda line: cast(Mapping[str, float], line["step_ms"])["8"]),
    }


def judge(ratios: Mapping[str, float]) -> Verdict:
    """The criterion; without one device there is nothing to compare with."""
    if not ratios:
        return Verdict(CRITERION, MOST_STEP, "no device has room for it alone", passed=True)
    observed = f"export {ratios['export']}, step {ratios['step_8']}"
    passed = ratios["export"] <= MOST_EXPORT and ratios["step_8"] <= MOST_STEP
    return Verdict(CRITERION, MOST_STEP, observed, passed=passed)


def measure(shape: str, layers: int | None, form: str) -> None:
    """Measure in this process, or follow the one that does."""
    model, grid = MODELS[shape](layers), read_grid(os.environ)
    attention = find_kernels if form in (PAGES, PAGED_RANKS) else None
    if grid is not None:
        backend = _shard(model, grid, attention)
        if backend is None:
            return
    else:
        shapes.evaluate(model)
        backend = wrap_model(model, attention=attention)
    small = shape == "small"
    vocab = VOCAB if small else shapes.LLAMA_VOCAB
    found = _Measured(backend, vocab, SMALL_TOKENS if small else TOKENS)
    line = {
        "form": form,
        "in_pages": backend.in_pages,
        "prefill_tokens_per_s": found.prefill(SMALL_CHUNK if small else CHUNK),
        "step_ms": {str(batch): found.step(batch) for batch in BATCHES},
        "block_bytes": backend.layout().body_bytes(Part.FULL, BLOCK_TOKENS),
        "export_block_ms": found.export(),
    }
    print(json.dumps(line), flush=True)


def _shard(model: Module, grid: Grid, attention: AttentionFor | None) -> MLXBackend | None:
    """Rank 0 of the model; None on the others, when rank 0 has ended."""
    ranks = Ranks(grid)
    shard_model(model, ranks)
    shapes.evaluate(model)
    name = shared_name("benchmark:", "", ranks)
    backend = at_once(wrapping(model, name, attention=attention, ranks=ranks))
    if grid.rank == 0:
        return backend
    follow(backend, ranks)
    return None


class _Measured:
    """Medians of one backend's work."""

    def __init__(self, backend: MLXBackend, vocab: int, tokens: int) -> None:
        """Sequences that decode hold `tokens` at first."""
        self._backend = backend
        self._vocab = vocab
        self._tokens = tokens

    def prefill(self, chunk: int) -> float:
        """Tokens per second of a prompt of one chunk; the first is not counted."""
        taken: list[float] = []
        for number in range(ROUNDS + 1):
            sequence = self._backend.open(whole_blocks(chunk))
            begin = time.perf_counter()
            self._backend.prefill(sequence, prompt(chunk, number, self._vocab))
            taken.append(time.perf_counter() - begin)
            self._backend.close(sequence)
        return round(chunk / statistics.median(taken[1:]), 1)

    def step(self, batch: int) -> float:
        """Milliseconds of a decode step of so many sequences."""
        opened = []
        for number in range(batch):
            tokens = prompt(self._tokens, number, self._vocab)
            capacity = whole_blocks(self._tokens + WARM + STEPS + 3)
            opened.append(sequence := self._backend.open(capacity))
            self._backend.prefill(sequence, tokens[:-1])
            self._backend.start(sequence, tokens[-1], tokens[:-1], SamplingParams(), 0)
        taken: list[float] = []
        for _ in range(WARM + STEPS):
            begin = time.perf_counter()
            self._backend.decode()
            taken.append((time.perf_counter() - begin) * 1e3)
        for sequence in opened:
            self._backend.close(sequence)
        return round(statistics.median(taken[WARM:]), 3)

    def export(self) -> float:
        """Milliseconds until a block's body is here, as a store waits for it."""
        sequence = self._backend.open(BLOCK_TOKENS)
        self._backend.prefill(sequence, prompt(BLOCK_TOKENS, 0, self._vocab))
        taken: list[float] = []
        for _ in range(ROUNDS + 1):
            begin = time.perf_counter()
            body = self._backend.export_block(sequence, Part.FULL, 0, BLOCK_TOKENS)
            if not isinstance(body, bytes):
                body.wait()
            taken.append((time.perf_counter() - begin) * 1e3)
        self._backend.close(sequence)
        return round(statistics.median(taken[1:]), 3)


if __name__ == "__main__":
    raise SystemExit(main())
