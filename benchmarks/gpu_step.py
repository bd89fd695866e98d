"""`python -m benchmarks.gpu_step`: variants of a decode step side by side, on one model.

The shape of Llama 3.1 8B with random bf16 weights. All variants share the weights and decode the
same sequences in pages, in turns. For each batch and variant: milliseconds of a step, of building
its graph, of handing it to the device and of waiting for the tokens; kernels and the device's busy
time where torch can count them; and what the logits of a batch differ by from the plain model's
alone. Prints a line of JSON for each and writes them all. `--small` is a check for a CPU.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import cast

import semantic.adapters.mlx  # isort: skip  # noqa: F401  loads OpenBLAS before MLX
import mlx.core as mx
from mlx.nn.layers.base import Module

from benchmarks import shapes
from benchmarks.gpu_floor import copy_rate, floor_ms
from benchmarks.gpu_sides import prompt
from experiments.harness.document import Json, Scalar
from experiments.harness.record import Run
from experiments.harness.result import Verdict
from semantic.adapters.mlx import arrays
from semantic.adapters.mlx.backend import MLXBackend
from semantic.adapters.mlx.batch import decode_batch
from semantic.adapters.mlx.kv_cache import probe
from semantic.adapters.mlx.model.joined import JOINED, join
from semantic.adapters.mlx.model.provider import wrap_model
from semantic.adapters.mlx.model.short_steps import shorten
from semantic.domain.value_objects import SamplingParams, SequenceId
from semantic.ports.generation import at_once
from tests.support.tiny_models import VOCAB, tiny_model

QUESTION = "Which form of a model's step decodes fastest?"
CRITERION = "at each batch the variant that is used, `shortened`, takes at most 1.05 of the fastest"
MOST_OVER_FASTEST = 1.05
USED = "shortened"
BATCHES, SMALL_BATCHES = (1, 8, 32, 128), (1, 3)
TOKENS, SMALL_TOKENS = 512, 12
ROUNDS, STEPS, WARM = 5, 5, 2
PROFILED = 4
"""Steps of which kernels are counted."""
_PER_BATCH = 1 + ROUNDS * (STEPS + 1) + PROFILED + 3
"""Tokens that a variant adds to each sequence of a batch after warm-up, and some."""

Build = Callable[[Module], Module]


def shortened(model: Module, *, add_in_product: bool, compiled: bool) -> Module:
    """Joined products, and Llama's step with fewer kernels."""
    joined = join(model)
    shorten(joined, add_in_product=add_in_product, compiled=compiled)
    return joined


VARIANTS: Mapping[str, Build] = {
    "plain": lambda model: model,
    "joined qkv": lambda model: join(model, JOINED[:1]),
    "joined gate-up": lambda model: join(model, JOINED[1:]),
    "joined both": join,
    "one rotation": functools.partial(shortened, add_in_product=False, compiled=False),
    "one rotation, compiled": functools.partial(shortened, add_in_product=False, compiled=True),
    "added in product": functools.partial(shortened, add_in_product=True, compiled=False),
    "shortened": functools.partial(shortened, add_in_product=True, compiled=True),
}


def main(given: Sequence[str] | None = None) -> int:
    """Measure, print, write; 1 when the criterion is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--batch", type=int, action="append", help="may be repeated")
    parser.add_argument("--only", action="append", choices=list(VARIANTS), help="may be repeated")
    parser.add_argument("--small", action="store_true", help="a tiny model")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args(given)
    small = cast(bool, arguments.small)
    started = Run.start(
        "gpu_step",
        QUESTION,
        model=f"Llama 3.1 8B shape, {arguments.layers} layers, random bf16 weights",
        parameters={"rounds": ROUNDS, "steps_per_round": STEPS, "layers": arguments.layers},
        seed=0,
    )
    model = tiny_model("llama") if small else shapes.llama_8b(arguments.layers)
    vocab = VOCAB if small else shapes.LLAMA_VOCAB
    variants = {name: VARIANTS[name](model) for name in arguments.only or VARIANTS}
    samples: list[dict[str, Scalar]] = []
    table: list[Json] = []
    summary: dict[str, Json] = {"steps": table, "differences": differences(model, variants)}
    print(json.dumps(summary["differences"]), flush=True)
    arguments.output.mkdir(parents=True, exist_ok=True)
    batches = sorted(arguments.batch or (SMALL_BATCHES if small else BATCHES))
    steps = Steps(model, vocab, SMALL_TOKENS if small else TOKENS, batches, len(variants))
    for batch in batches:
        for line in steps.measure(batch, variants, samples):
            table.append(line)
            print(json.dumps(line), flush=True)
        result = started.finish(samples, summary, judge(table))
        result.write(arguments.output / "gpu_step.json")
    summary["kernels"] = {name: steps.kernels(model) for name, model in variants.items()}
    print(json.dumps(summary["kernels"]), flush=True)
    verdict = judge(table)
    started.finish(samples, summary, verdict).write(arguments.output / "gpu_step.json")
    print(f"{'passed' if verdict.passed else 'MISSED'}: {verdict.observed}")
    return int(not verdict.passed)


def judge(table: Sequence[Json]) -> Verdict:
    """The criterion, and what misses it."""
    lines = cast(Sequence[Mapping[str, Json]], table)
    missed: list[str] = []
    for batch in dict.fromkeys(line["batch"] for line in lines):
        times = {
            str(line["variant"]): cast(float, line["step_ms"])
            for line in lines
            if line["batch"] == batch
        }
        best = min(times, key=lambda name: times[name])
        if times.get(USED, float("inf")) > MOST_OVER_FASTEST * times[best]:
            missed.append(f"{batch}: {best} takes {times[best]} ms, {USED} {times.get(USED)}")
    return Verdict(
        CRITERION, MOST_OVER_FASTEST, "; ".join(missed) or "all of it", passed=not missed
    )


def differences(model: Module, variants: Mapping[str, Module]) -> dict[str, Json]:
    """Of six logit vectors of a padded batch from the plain model alone, relative to their norm."""
    alone = probe.LogitsProbe(model)
    padded = probe._Padded(model)  # noqa: SLF001
    return {
        name: [
            round(one, 5)
            for one in alone._differences(at_once(probe._batched(variant, padded)))  # noqa: SLF001
        ]
        for name, variant in variants.items()
    }


class Steps:
    """Sequences that decode; which variant of the model computes a step is chosen for each."""

    def __init__(
        self,
        model: Module,
        vocab: int,
        tokens: int,
        batches: Sequence[int],
        n_variants: int,
        warm: int = WARM,
    ) -> None:
        self._model = model
        self._warm = warm
        self._backend: MLXBackend = wrap_model(model, "benchmark", decoding=lambda plain: plain)
        spec = self._backend.cache_spec()
        per_batch = (warm + _PER_BATCH) * n_variants
        capacities = [
            tokens + per_batch * sum(batch > number for batch in batches)
            for number in range(max(batches))
        ]
        self._backend.set_aside(sum(map(spec.bytes_for, capacities)))
        self._tokens = tokens
        self._sequences: list[SequenceId] = []
        self._rate = copy_rate().bytes_per_s
        for number, capacity in enumerate(capacities):
            sequence = self._backend.open(capacity)
            self._backend.prefill(sequence, prompt(tokens, number, vocab))
            self._sequences.append(sequence)
        self._decoding = 0

    def measure(
        self, batch: int, variants: Mapping[str, Module], samples: list[dict[str, Scalar]]
    ) -> Iterator[Json]:
        """A line for each variant, of a batch that is at least as large as the one before."""
        self.grow(batch)
        times: dict[str, list[list[float]]] = {name: [] for name in variants}
        for model in variants.values():
            self._run(model, self._warm)
        for _ in range(ROUNDS):
            for name, model in variants.items():
                times[name] += self._run(model, STEPS)
        spec = self._backend.cache_spec()
        lengths = [self._backend.length(sequence) for sequence in self._sequences[:batch]]
        floor = floor_ms(self._model, spec, lengths, self._rate)
        for name in variants:
            samples += [{"batch": batch, "variant": name, "step_ms": one[0]} for one in times[name]]
            step, graph, hand_over, wait = (
                round(statistics.median(part), 3) for part in zip(*times[name], strict=True)
            )
            yield {
                "batch": batch,
                "variant": name,
                "step_ms": step,
                "graph_ms": graph,
                "hand_over_ms": hand_over,
                "wait_ms": wait,
                "floor_ms": round(floor, 3),
                "over_floor": round(step / floor, 3),
            }

    def grow(self, batch: int) -> None:
        """Let as many sequences decode."""
        greedy = SamplingParams()
        for sequence in self._sequences[self._decoding : batch]:
            self._backend.start(sequence, 1, [0] * self._tokens, greedy, 0)
        self._decoding = batch
        self._backend.decode()

    def _run(self, model: Module, n: int) -> list[list[float]]:
        """Milliseconds of `n` steps, the first not counted: whole, graph, hand-over, waiting."""
        batch = cast(decode_batch.ContinuousBatch, self._backend._batch)  # noqa: SLF001
        batch._caches.model = model  # noqa: SLF001
        self._backend.decode()
        taken: list[list[float]] = []
        for _ in range(n):
            with timed_parts() as parts:
                begin = time.perf_counter()
                self._backend.decode()
                whole = (time.perf_counter() - begin) * 1e3
            graph, hand_over = parts["graph"], parts["hand_over"]
            taken.append([whole, graph, hand_over, whole - graph - hand_over])
        return taken

    def kernels(self, model: Module) -> dict[str, Json]:
        """Kernels and the device's busy milliseconds per step of the largest batch; see `busy`."""
        self._run(model, 1)
        return busy(self._backend)


def busy(backend: MLXBackend) -> dict[str, Json]:
    """Kernels and the device's busy milliseconds per step of the sequences that decode.

    Nothing if torch cannot count. Last of all: once counted, every launch takes longer.
    """
    if find_spec("torch") is None:
        return {}
    import torch

    if not torch.cuda.is_available():
        return {}
    with torch.profiler.profile() as profile:
        for _ in range(PROFILED):
            backend.decode()
        mx.synchronize(backend.stream)
    events = [event for event in profile.events() if str(event.device_type).endswith("CUDA")]
    total = sum(event.device_time_total for event in events) / 1e3
    return {"kernels": round(len(events) / PROFILED, 1), "busy_ms": round(total / PROFILED, 3)}


@contextmanager
def timed_parts() -> Iterator[dict[str, float]]:
    """Milliseconds of building a step's graph and of handing it over."""
    parts = {"graph": 0.0, "hand_over": 0.0}
    advance = decode_batch.ContinuousBatch._advance  # noqa: SLF001
    hand_over = arrays.async_eval

    def timed_advance(self: decode_batch.ContinuousBatch, inputs: mx.array) -> list[mx.array]:
        begin = time.perf_counter()
        found = advance(self, inputs)
        parts["graph"] += (time.perf_counter() - begin) * 1e3
        return found

    def timed_hand_over(*given: object) -> None:
        begin = time.perf_counter()
        hand_over(*given)
        parts["hand_over"] += (time.perf_counter() - begin) * 1e3

    setattr(decode_batch.ContinuousBatch, "_advance", timed_advance)  # noqa: B010
    setattr(decode_batch, "async_eval", timed_hand_over)  # noqa: B010
    try:
        yield parts
    finally:
        setattr(decode_batch.ContinuousBatch, "_advance", advance)  # noqa: B010
        setattr(decode_batch, "async_eval", hand_over)  # noqa: B010


if __name__ == "__main__":
    raise SystemExit(main())
