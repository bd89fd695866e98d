"""Injects our caches into mlx-lm's unmodified BatchGenerator and compares every token.

The reference is mlx-lm's own loop with mlx-lm's own caches. Our engine is only asked to leave
caches in a store, in another process.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from experiments import subjects
from experiments.exp_003_injection.cases import Injector, prompts_of
from experiments.exp_003_injection.stored import StoreReader, save_elsewhere
from experiments.harness.document import Json, Scalar
from experiments.harness.record import Run
from experiments.harness.result import Result, Verdict
from experiments.harness.stats import summarise
from experiments.reference import greedy

ID = "EXP-003"
QUESTION = (
    "Does mlx-lm's unmodified BatchGenerator write the same tokens when it is given our caches "
    "instead of computing the prompt?"
)
CRITERION = (
    "for every model, prompt and way of injecting, all greedy tokens equal those of mlx-lm's own "
    "loop with its own caches, without an error, and loading a cache takes less than 500 ms at p95"
)
LIMIT_MS = 500.0
PARAMETERS: dict[str, Scalar] = {"models": ",".join(subjects.NAMES), "new_tokens": 24, "loads": 20}
Row: TypeAlias = dict[str, Scalar]
STORED = "blocks that another process stored"


def run(parameters: Mapping[str, Scalar]) -> Result:
    """Every case on every model that is here."""
    names = str(parameters["models"]).split(",")
    missing = {name: why for name in names if (why := subjects.why_missing(name))}
    for why in missing.values():
        print(f"skipped: {why}")
    present = [name for name in names if name not in missing]
    started = Run.start(
        ID, QUESTION, model=", ".join(present), parameters=parameters, seed=subjects.SEED
    )
    samples: list[Row] = []
    for name in present:
        samples += cases(subjects.load(name), parameters)
    loads = [ms for row in samples if isinstance(ms := row.get("load_ms"), float)]
    answers = [row for row in samples if "equal" in row]
    differing = sum(not row["equal"] for row in answers)
    p95 = summarise(loads)["p95"]
    stored = [row for row in samples if "store_ms" in row]
    from_disk = summarise([float(str(row["store_ms"])) for row in stored])
    other_bytes = sum(not row["bytes_equal"] for row in stored)
    summary: dict[str, Json] = {
        "answers": [{**row} for row in answers],
        "compared": len(answers),
        "differing": differing,
        "tokens_compared": sum(int(str(row["tokens"])) for row in answers),
        "load_ms": summarise(loads)["p50"],
        "load_p95_ms": p95,
        "load_worst_ms": max(loads),
        "store_loads": len(stored),
        "store_loads_with_other_bytes": other_bytes,
        "store_load_ms": from_disk["p50"],
        "store_load_p95_ms": from_disk["p95"],
        "skipped": "; ".join(missing.values()) or "none",
    }
    # What came from a store counts as the rest does; other bytes than were saved are an error.
    p95 = max(p95, from_disk["p95"])
    passed = not differing and not other_bytes and p95 < LIMIT_MS
    return started.finish(samples, summary, Verdict(CRITERION, LIMIT_MS, p95, passed=passed))


def cases(subject: subjects.Subject, parameters: Mapping[str, Scalar]) -> Iterator[Row]:
    """All comparisons and load times of one model."""
    new, loads = int(str(parameters["new_tokens"])), int(str(parameters["loads"]))
    injector = Injector(subject.model, subject.backend.ragged_layers)
    prompts = prompts_of(subject, new)
    expected = {name: greedy(subject.model, prompt, new) for name, prompt in prompts.items()}
    found = [
        (name, way, tokens)
        for name, prompt in prompts.items()
        for way, tokens in injected(injector, prompt, new)
    ]
    found += batched(injector, prompts, new)
    stored = list(across_processes(injector, subject, prompts, parameters))
    found += [(row.name, STORED, row.tokens) for row in stored]
    for name, way, tokens in found:
        yield {
            "model": subject.name,
            "prompt": name,
            "prompt_tokens": len(prompts[name]),
            "way": way,
            "tokens": new,
            "equal": tuple(tokens) == expected[name].tokens,
            "smallest_gap": round(expected[name].smallest_gap, 6),
        }
    for name, prompt in prompts.items():
        blocks = injector.to_blocks(injector.prefilled(prompt, new), prompt)
        for _ in range(loads):
            begun = time.perf_counter()
            injector.restored(blocks, len(prompt) - 1, new)
            load_ms = 1000 * (time.perf_counter() - begun)
            yield {"model": subject.name, "prompt": name, "load_ms": load_ms}
    for row in stored:
        for ms in row.load_ms:
            yield {
                "model": subject.name,
                "prompt": row.name,
                "store_ms": ms,
                "bytes_equal": row.bytes_equal,
            }


def injected(
    injector: Injector, prompt: Sequence[int], new: int
) -> Iterator[tuple[str, list[int]]]:
    """The answer to `prompt` behind caches that hold more and less of it."""
    most = injector.prefilled(prompt[:-1], new)
    (tokens,), (after,) = injector.generate([prompt[-1:]], [most], new)
    yield "all but the last token", tokens
    half = len(prompt) // 2
    (tokens,), _ = injector.generate([prompt[half:]], [injector.prefilled(prompt[:half], new)], new)
    yield "the first half", tokens
    blocks = injector.to_blocks(after, [*prompt, *tokens])
    again = injector.restored(blocks, len(prompt) - 1, new)
    (tokens,), _ = injector.generate([prompt[-1:]], [again], new)
    yield "blocks of a finished answer, cut to the prompt", tokens


@dataclass(frozen=True, slots=True)
class Stored:
    """What came of a prompt whose cache another process left on disk."""

    name: str
    tokens: list[int]
    bytes_equal: bool
    load_ms: list[float]


def across_processes(
    injector: Injector,
    subject: subjects.Subject,
    prompts: Mapping[str, Sequence[int]],
    parameters: Mapping[str, Scalar],
) -> Iterator[Stored]:
    """The engine answers and stores in another process; here its blocks are read and injected."""
    new, loads = int(str(parameters["new_tokens"])), int(str(parameters["loads"]))
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "store"
        digests = save_elsewhere(subject.name, folder, new)
        reader = StoreReader(subject.backend, folder)
        for name, prompt in prompts.items():
            read = [reader.load(prompt, new) for _ in range(loads)]
            (tokens,), _ = injector.generate([prompt[-1:]], [read[-1].caches], new)
            equal = all(one.digest == digests[name] for one in read)
            yield Stored(name, tokens, equal, [one.ms for one in read])
        reader.close()


def batched(
    injector: Injector, prompts: Mapping[str, Sequence[int]], new: int
) -> Iterator[tuple[str, str, list[int]]]:
    """Both prompts in one batch behind caches of different lengths, the rest padded by mlx-lm."""
    held = {name: len(prompt) // 2 for name, prompt in prompts.items()}
    caches = [injector.prefilled(prompt[: held[name]], new) for name, prompt in prompts.items()]
    rest = [prompt[held[name] :] for name, prompt in prompts.items()]
    answers, _ = injector.generate(rest, caches, new)
    for name, tokens in zip(prompts, answers, strict=True):
        yield name, "the first half, both prompts in one batch", tokens
