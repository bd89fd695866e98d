"""`python -m benchmarks.gpu_models`: decode steps of several architectures, ours and mlx-lm's.

Models of known shapes with random bf16 or 4-bit weights, one after the other; both sides decode the
same prompts in turns. Says which form a model's caches take, what the logits of a batch differ by
and what wrapping a model takes. Prints a line of JSON for each measurement and writes them all
after each; a model takes less than a minute. `--small` measures tiny models, for a CPU.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import semantic.adapters.mlx  # isort: skip  # noqa: F401  loads OpenBLAS before MLX
import mlx.core as mx
from mlx.nn.layers.base import Module

from benchmarks import shapes
from benchmarks.gpu_sides import Ours, Theirs, milliseconds
from experiments.harness.document import Json, Scalar
from experiments.harness.record import Run
from experiments.harness.result import Verdict
from semantic.adapters.mlx.backend import MLXBackend
from semantic.adapters.mlx.kv_cache import forms, probe
from semantic.domain.errors import UnsupportedModelError
from semantic.ports.generation import Slices
from tests.support.tiny_models import tiny_model

QUESTION = "How fast does a GPU decode with other architectures, beside mlx-lm?"
CRITERION = (
    "mlx-lm's time of a step over ours is at least 1 for each architecture at 1, 8 and 32 agents; "
    "all caches are in pages"
)
BATCHES = (1, 8, 32)
TOKENS = 512
SMALL: Mapping[str, Callable[[], Module]] = {
    name: functools.partial(tiny_model, name)
    for name in (
        "llama",
        "qwen3",
        "gemma3",
        "gpt_oss",
        "quantized",
        "moe",
        "qwen3_next",
        "deepseek_v3",
    )
}
SMALL_BATCHES, SMALL_TOKENS = (2, 3), 20
ROUNDS, STEPS = 8, 8
WARM = 80 if mx.cuda.is_available() else 6
"""Steps before the measurement. CUDA graphs are made for each new order of buffers, for so long."""
MOST_SECONDS = 12.0
"""Of the rounds of one batch; at least two are run."""


def main(given: Sequence[str] | None = None) -> int:
    """Measure, print, write; 1 when the criterion is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", help="a model's name, or its beginning")
    parser.add_argument("--layers", type=int, help="layers of every model, instead of its own")
    parser.add_argument("--batch", type=int, action="append", help="agents; may be repeated")
    parser.add_argument("--tokens", type=int, help="of each prompt")
    parser.add_argument("--small", action="store_true", help="tiny models")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args(given)
    small = cast(bool, arguments.small)
    batches = arguments.batch or (SMALL_BATCHES if small else BATCHES)
    tokens = arguments.tokens or (SMALL_TOKENS if small else TOKENS)
    started = Run.start(
        "gpu_models",
        QUESTION,
        model="shapes of known models, random weights",
        parameters={
            "tokens": tokens,
            "rounds": ROUNDS,
            "steps_per_round": STEPS,
            "layers": arguments.layers or "each model's own",
            "small": small,
        },
        seed=0,
    )
    samples: list[dict[str, Scalar]] = []
    table: list[Json] = []
    arguments.output.mkdir(parents=True, exist_ok=True)
    for name, build in builders(small=small, layers=arguments.layers).items():
        if arguments.only and not name.startswith(tuple(arguments.only)):
            continue
        for line in measured(name, build, batches, tokens, samples):
            table.append(line)
            print(json.dumps(line), flush=True)
            result = started.finish(samples, {"models": table}, judge(table))
            result.write(arguments.output / "gpu_models.json")
    verdict = judge(table)
    print(f"{'passed' if verdict.passed else 'MISSED'}: {verdict.observed}")
    return int(not verdict.passed)


def builders(*, small: bool, layers: int | None) -> Mapping[str, Callable[[], Module]]:
    """What makes each model."""
    if small:
        return SMALL
    if layers is None:
        return shapes.MODELS
    return {name: functools.partial(build, layers) for name, build in shapes.MODELS.items()}


def judge(table: Sequence[Json]) -> Verdict:
    """The criterion, and what misses it."""
    missed: list[str] = []
    worst = float("inf")
    for line in cast(Sequence[Mapping[str, Json]], table):
        who = f"{line['model']} x {line['batch']}"
        if "refused" in line:
            missed.append(f"{line['model']}: {line['refused']}")
            continue
        ratio = cast(float, line["ratio"])
        worst = min(worst, ratio)
        if ratio < 1:
            missed.append(f"{who}: {ratio} of mlx-lm")
        if line["form"] != "pages":
            missed.append(f"{who}: {line['form']}")
    return Verdict(CRITERION, 1.0, "; ".join(missed) or "all of it", passed=not missed)


def measured(
    name: str,
    build: Callable[[], Module],
    batches: Sequence[int],
    tokens: int,
    samples: list[dict[str, Scalar]],
) -> Iterator[Json]:
    """One line for each batch, or one that says why the model is refused."""
    begin = time.perf_counter()
    model = build()
    mx.eval(cast("Callable[[], dict[str, object]]", model.parameters)())
    weights = mx.get_active_memory()
    built = time.perf_counter() - begin
    for batch in batches:
        try:
            line = measure(model, name, [tokens] * batch, samples)
        except UnsupportedModelError as error:
            yield {"model": name, "batch": batch, "refused": str(error)}
            break
        yield {**line, "weights_gb": round(weights / 1e9, 2), "built_s": round(built, 2)}
    del model
    free()


def measure(
    model: Module, name: str, lengths: Sequence[int], samples: list[dict[str, Scalar]]
) -> dict[str, Json]:
    """Both sides on one model, in turns, so that other load affects both alike."""
    vocab = vocabulary(model)
    begin = time.perf_counter()
    with watched() as seen:
        ours = Ours(model, lengths, vocab, any_form=True)
    wrapped = time.perf_counter() - begin
    begin = time.perf_counter()
    ours.start(lengths)
    milliseconds(ours.step, WARM)
    began = time.perf_counter() - begin
    theirs = Theirs(model, vocab)
    theirs.start(lengths)
    milliseconds(theirs.step, WARM)
    mine: list[float] = []
    others: list[float] = []
    stop = time.perf_counter() + MOST_SECONDS
    for number in range(ROUNDS):
        if number >= 2 and time.perf_counter() > stop:
            break
        mine += milliseconds(ours.step, STEPS)
        others += milliseconds(theirs.step, STEPS)
    form = form_of(ours.backend)
    ours.end()
    del ours, theirs
    free()
    samples += [
        {"model": name, "batch": len(lengths), "ours_ms": a, "mlx_lm_ms": b}
        for a, b in zip(mine, others, strict=True)
    ]
    our_ms, their_ms = of_rounds(mine), of_rounds(others)
    return {
        "model": name,
        "batch": len(lengths),
        "form": form,
        "ours_ms": round(our_ms, 3),
        "mlx_lm_ms": round(their_ms, 3),
        "ratio": round(their_ms / our_ms, 3),
        "wrap_s": round(wrapped, 2),
        "start_s": round(began, 2),
        **seen,
    }


def of_rounds(steps: Sequence[float]) -> float:
    """The median of the mean steps of all rounds: a step that is launched ahead waits for two, and
    the next one for none."""
    return statistics.median(
        statistics.fmean(steps[at : at + STEPS]) for at in range(0, len(steps), STEPS)
    )


@contextmanager
def watched() -> Iterator[dict[str, Json]]:
    """Seconds of the parts of wrapping a model, and what each form's logits differ by."""
    seconds: dict[str, float] = {}
    differences: list[Json] = []
    seen: dict[str, Json] = {}
    replaced = [
        (forms, "attention_use"),
        (forms, "computes_attention"),
        (probe, "_solo"),
        (probe, "_batched"),
    ]
    before = [cast("Callable[..., object]", getattr(owner, name)) for owner, name in replaced]
    of_logits = probe.LogitsProbe._differences  # noqa: SLF001

    def noted(self: probe.LogitsProbe, found: Sequence[mx.array]) -> list[float]:
        mine = of_logits(self, found)
        differences.append([round(one, 4) for one in mine])
        return mine

    for (owner, name), call in zip(replaced, before, strict=True):
        summed = _summed_slices if owner is probe else _summed
        setattr(owner, name, summed(call, name.strip("_"), seconds))
    setattr(probe.LogitsProbe, "_differences", noted)  # noqa: B010
    try:
        yield seen
    finally:
        for (owner, name), call in zip(replaced, before, strict=True):
            setattr(owner, name, call)
        setattr(probe.LogitsProbe, "_differences", of_logits)  # noqa: B010
        seen["wrap_parts_s"] = {name: round(taken, 3) for name, taken in seconds.items()}
        seen["differences"] = differences


def _summed(
    call: Callable[..., object], name: str, seconds: dict[str, float]
) -> Callable[..., object]:
    """The same call, with its seconds added up under `name`."""

    def timed(*given: object, **named: object) -> object:
        begin = time.perf_counter()
        try:
            return call(*given, **named)
        finally:
            seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - begin

    return timed


def _summed_slices(
    call: Callable[..., object], name: str, seconds: dict[str, float]
) -> Callable[..., object]:
    """`_summed` for work in slices."""

    def timed(*given: object, **named: object) -> Slices[object]:
        begin = time.perf_counter()
        try:
            return (yield from cast("Slices[object]", call(*given, **named)))
        finally:
            seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - begin

    return timed


def form_of(backend: MLXBackend) -> str:
    """Where the caches are and how batches decode."""
    if backend.in_pages:
        return "pages"
    if not any(backend.ragged_layers):
        return "mlx-lm's caches"
    if not all(backend.ragged_layers):
        return "some of mlx-lm's caches"
    return "ragged" if backend.pads is None else "ragged or padded"


def vocabulary(model: Module) -> int:
    """Number of tokens."""
    return int(cast("Mapping[str, int]", vars(model.args))["vocab_size"])


def free() -> None:
    """Free all memory."""
    gc.collect()
    mx.synchronize()
    mx.clear_cache()


if __name__ == "__main__":
    raise SystemExit(main())
