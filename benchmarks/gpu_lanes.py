"""`python -m benchmarks.gpu_lanes`: one answer per prompt on a GPU, and what that costs.

Models of known shapes with random weights, in pages: the lane that loading finds, and the seconds
that it takes. Then answers of prompts of random lengths: alone, beside 1, 7 and 15 others, and
preempted and restored; how many have the same tokens and log-probabilities, in the lane and
outside. Then milliseconds of a step by its sequences, and of the device's work where torch can
count it. Prints a line of JSON for each and writes them all. `--only-answers` measures no time and
answers in the lane only. `--small` is a check for a CPU.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import cast

import semantic.adapters.mlx  # isort: skip  # noqa: F401  loads OpenBLAS before MLX
from mlx.nn.layers.base import Module

from benchmarks import shapes
from benchmarks.gpu_models import free
from benchmarks.gpu_step import busy
from experiments.harness.document import Json, Scalar
from experiments.harness.record import Run
from experiments.harness.result import Verdict
from semantic.adapters.mlx.backend import MLXBackend
from semantic.adapters.mlx.kv_cache.forms import find_kernels
from semantic.adapters.mlx.kv_cache.paged.attention import PortableAttention
from semantic.adapters.mlx.model.provider import wrap_model
from semantic.domain.value_objects import ExactBatch, SampledToken, SamplingParams, whole_blocks
from tests.support.one_batch import said_by, same_bits
from tests.support.tiny_models import VOCAB, build, randomize

QUESTION = "Has an answer the same bits alone and beside others, and at which cost?"
MOST_COST = 1.05
CRITERION = (
    "all answers of the lane have the tokens and log-probabilities that they have alone; a step of "
    f"one sequence takes the device at most {MOST_COST} of the time outside the lane"
)
MODES: tuple[ExactBatch, ...] = ("auto", "off", "on")
BATCHES = (2, 8, 16)
ROWS = (1, 8, 16, 32)
PROMPTS, ANSWER, LENGTHS = 50, 128, (40, 1500)
TAIL = "tail prefilled, beside 15"
"""The cache of a prompt ends at a random token. The criterion does not ask for equal answers."""
FEW = 16
"""Prompts that are answered outside the lane, too, and prompts of models with few layers."""
RESTORED_AFTER = (1, 40)
STEP_TOKENS, WARM, STEPS = 1024, 30, 60
POOL_SEQUENCES, POOL_TOKENS = 40, 2048

MODELS: Mapping[str, tuple[Callable[[], Module], int]] = {
    "llama 8b bf16": (shapes.llama_8b, shapes.LLAMA_VOCAB),
    "llama 8b 4 bits": (shapes.llama_8b_4bit, shapes.LLAMA_VOCAB),
    "qwen3 30b a3b bf16, 12 layers": (lambda: shapes.qwen3_30b_a3b(12), 1000),
    "gemma3 12b bf16, 12 layers": (lambda: shapes.gemma3_12b(12), 1000),
    "gpt-oss 20b bf16, 8 layers": (lambda: shapes.gpt_oss_20b(8), 1000),
    "deepseek v2 lite bf16, 8 layers": (lambda: shapes.deepseek_v2_lite(8), 1000),
}


def small_model() -> Module:
    """A tiny model of its own, as a lane changes its layers."""
    model = build("llama")
    randomize(model)
    return model


class Sides:
    """The backends of a model, in its lane and outside."""

    def __init__(self, model: Module, *, small: bool) -> None:
        self._model = model
        self._attention = (lambda _: PortableAttention()) if small else find_kernels

    def backend(self, mode: ExactBatch) -> MLXBackend:
        """A new backend with pages for the largest batch."""
        free()
        backend = wrap_model(self._model, "benchmark", attention=self._attention, exact_batch=mode)
        backend.set_aside(POOL_SEQUENCES * backend.cache_spec().bytes_for(POOL_TOKENS))
        return backend


def answers(
    backend: MLXBackend, prompts: Sequence[list[int]], tokens: int
) -> Iterator[dict[str, Json]]:
    """How many answers have the tokens and the bits that they have alone."""
    alone = [said_by(backend, [prompt], tokens, top=0)[0] for prompt in prompts]
    order = list(range(len(prompts)))
    random.Random(0).shuffle(order)
    draw = random.Random(2)
    cuts = [draw.randrange(1, len(prompt)) for prompt in prompts]
    largest = BATCHES[-1]
    for case, size, after, tails in (
        *((f"beside {size - 1}", size, (), False) for size in BATCHES),
        ("restored twice, beside 15", largest, RESTORED_AFTER, False),
        (TAIL, largest, (), True),
    ):
        same_tokens = same_all = 0
        for group in (order[at : at + size] for at in range(0, len(order), size)):
            given = [prompts[i] for i in group]
            at = [cuts[i] for i in group] if tails else []
            said = said_by(backend, given, tokens, top=0, preempted_after=after, cuts=at)
            for i, mine in zip(group, said, strict=True):
                same_tokens += texts(mine) == texts(alone[i])
                same_all += all(same_bits(mine, alone[i]))
        yield {
            "case": case, "answers": len(order), "same_tokens": same_tokens, "same_bits": same_all,
        }  # fmt: skip


def texts(said: Sequence[SampledToken]) -> list[int]:
    return [one.token for one in said]


def decoding(backend: MLXBackend, rows: int, tokens: int) -> None:
    """Let so many sequences decode."""
    for number in range(rows):
        sequence = backend.open(whole_blocks(tokens + 4 * (WARM + STEPS)))
        history = [number + 1] * (tokens - 1)
        backend.prefill(sequence, history)
        backend.start(sequence, 1, history, SamplingParams(), 0)
    for _ in range(WARM):
        backend.decode()


def step_ms(backend: MLXBackend) -> float:
    taken = []
    for _ in range(STEPS):
        began = time.perf_counter()
        backend.decode()
        taken.append((time.perf_counter() - began) * 1e3)
    return round(statistics.median(taken), 3)


@dataclass(frozen=True)
class Sizes:
    """What is measured."""

    prompts: int = PROMPTS
    answer: int = ANSWER
    lengths: tuple[int, int] = LENGTHS
    rows: tuple[int, ...] = ROWS
    step_tokens: int = STEP_TOKENS

    def only_answers(self) -> Sizes:
        """The same without steps."""
        return replace(self, rows=())


SMALL = Sizes(4, 6, (5, 40), (1, 2), 20)


def measure(sides: Sides, vocab: int, sizes: Sizes) -> Iterator[tuple[str, Json]]:
    """The lanes, answers and steps of a model."""
    draw = random.Random(1)
    prompts = [
        [draw.randrange(vocab - 1) for _ in range(draw.randint(*sizes.lengths))]
        for _ in range(sizes.prompts)
    ]
    for mode in MODES if sizes.rows else ():
        began = time.perf_counter()
        lane = asdict(sides.backend(mode).lane)
        yield "lanes", {"mode": mode, "seconds": round(time.perf_counter() - began, 2), **lane}
    for mode, n_prompts in (("off", FEW if sizes.rows else 0), ("on", sizes.prompts)):
        if not n_prompts:
            continue
        for line in answers(sides.backend(mode), prompts[:n_prompts], sizes.answer):
            yield "answers", {"mode": mode, **line}
    for rows in sizes.rows:
        for mode in MODES[1:] * 2:
            backend = sides.backend(mode)
            decoding(backend, rows, sizes.step_tokens)
            yield "steps", {"mode": mode, "rows": rows, "step_ms": step_ms(backend)}
    for rows in sizes.rows:  # last, as counting slows all later steps
        for mode in MODES[1:]:
            backend = sides.backend(mode)
            decoding(backend, rows, sizes.step_tokens)
            yield "busy", {"mode": mode, "rows": rows, **busy(backend)}


def main(given: Sequence[str] | None = None) -> int:
    """Measure, print, write; 1 when the criterion is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", choices=list(MODELS), help="may be repeated")
    parser.add_argument("--prompts", type=int, default=PROMPTS)
    parser.add_argument("--only-answers", action="store_true", help="no times")
    parser.add_argument("--small", action="store_true", help="a tiny model")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args(given)
    small = cast(bool, arguments.small)
    sizes = SMALL if small else Sizes(cast(int, arguments.prompts))
    sizes = sizes.only_answers() if arguments.only_answers else sizes
    started = Run.start(
        "gpu_lanes",
        QUESTION,
        model="known shapes with random weights",
        parameters={"prompts": sizes.prompts, "tokens": sizes.answer, "small": small},
        seed=0,
    )
    arguments.output.mkdir(parents=True, exist_ok=True)
    samples: list[dict[str, Scalar]] = []
    for name in ["tiny"] if small else list(arguments.only or MODELS):
        make, vocab = (small_model, VOCAB) if small else MODELS[name]
        these = replace(sizes, prompts=min(sizes.prompts, FEW)) if "layers" in name else sizes
        for part, line in measure(Sides(make(), small=small), vocab, these):
            samples.append({"model": name, "part": part, **cast("dict[str, Scalar]", line)})
            print(json.dumps(samples[-1]), flush=True)
            # Write results at once: a rented machine may go away.
            done = started.finish(samples, summary_of(samples), judge(samples))
            done.write(arguments.output / "gpu_lanes.json")
        free()
    verdict = judge(samples)
    print(f"{'passed' if verdict.passed else 'MISSED'}: {verdict.observed}")
    return int(not verdict.passed)


def summary_of(samples: Sequence[Mapping[str, Scalar]]) -> dict[str, Json]:
    """The lines of each model by part."""
    found: dict[str, dict[str, list[Json]]] = {}
    for sample in samples:
        line: Json = {key: one for key, one in sample.items() if key not in ("model", "part")}
        parts = found.setdefault(str(sample["model"]), {})
        parts.setdefault(str(sample["part"]), []).append(line)
    return cast("dict[str, Json]", found)


def judge(samples: Sequence[Mapping[str, Scalar]]) -> Verdict:
    """The criterion, and what misses it."""
    missed = [
        f"{one['model']}, {one['case']}: {one['same_bits']} of {one['answers']} answers"
        for one in samples
        if (one["part"], one["mode"]) == ("answers", "on")
        and one["case"] != TAIL
        and one["same_bits"] != one["answers"]
    ]
    times: dict[tuple[Scalar, Scalar], float] = {
        (one["model"], one["mode"]): cast(float, one["busy_ms"])
        for one in samples
        if one["part"] == "busy" and one["rows"] == 1 and "busy_ms" in one
    }
    for (model, mode), inside in times.items():
        if mode == "on" and inside > MOST_COST * times[model, "off"]:
            missed.append(f"{model}: one sequence takes {inside / times[model, 'off']:.3f}")
    return Verdict(CRITERION, MOST_COST, "; ".join(missed) or "all of it", passed=not missed)


if __name__ == "__main__":
    raise SystemExit(main())
