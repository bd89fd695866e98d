"""`python -m benchmarks.gpu_eight_bits`: caches of 8 bits beside caches of 16 on a GPU.

A model of the shape of Llama 3.1 8B with random bf16 weights, in pages. Both sides decode the same
prompts in turns, prefill prompts in turns, and restore an agent from memory and from disk. Prints a
line of JSON for each and writes them all. `--small` is a check for a CPU.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import shutil
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import semantic.adapters.mlx  # isort: skip  # noqa: F401  loads OpenBLAS before MLX
import mlx.core as mx
from mlx.nn.layers.base import Module

from benchmarks import gpu_restore, shapes
from benchmarks.gpu import free
from benchmarks.gpu_sides import Ours, milliseconds
from experiments.harness.document import Json, Scalar
from experiments.harness.record import Run
from experiments.harness.result import Verdict
from semantic.adapters.mlx.model.provider import wrap_model
from semantic.domain.stored import Tier
from semantic.domain.value_objects import KvBits

QUESTION = "How fast are steps, prompts and restores over caches of 8 bits, beside 16 bits?"
MOST: Mapping[str, float] = {
    "step of 1 x 1k": 1.02,
    "step of 32 x 2k": 1.02,
    "step of 8 x 32k": 1.0,
    "prompt": 1 / 0.95,
    "restore from memory": 0.6,
    "restore from disk": 0.6,
    "memory beside pages": 1.1,
}
"""The most that 8 bits may take of what 16 bits take, part by part."""
CRITERION = "; ".join(f"{part} at most {most:.2f} of 16 bits'" for part, most in MOST.items())
SIDES: tuple[KvBits, KvBits] = (16, 8)
STEPS = {"1 x 1k": [1024], "32 x 2k": [2048] * 32, "8 x 32k": [32768] * 8}
SMALL_STEPS = {"1 x 1k": [20], "32 x 2k": [30] * 3, "8 x 32k": [70] * 2}
PARTS = ("prompt", "restore")
ROUNDS, AT_ONCE, WARM = 12, 12, 8
PROMPT, PROMPTS, RESTORED, RESTORES = 8192, 5, 32768, 5
_NEW = 20
TIERS = (Tier.MEMORY, Tier.DISK)
Line = dict[str, Json]


def compared(part: str, times: Mapping[KvBits, Sequence[float]], unit: str) -> Line:
    """Medians of both sides, and the ratio."""
    found = {bits: statistics.median(times[bits]) for bits in SIDES}
    return {
        "part": part,
        **{f"{bits}_bits_{unit}": round(found[bits], 4) for bits in SIDES},
        "ratio": round(found[8] / found[16], 4),
    }


def steps(model: Module, name: str, lengths: Sequence[int], vocab: int) -> list[Line]:
    """Steps of a batch of both sides, in turns; and the most memory that a side takes beside its
    pages."""
    sides: dict[KvBits, Ours] = {}
    beside: dict[KvBits, list[float]] = {}
    for bits in SIDES:
        mx.clear_cache()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        backend = wrap_model(model, "benchmark", kv_bits=bits)
        sides[bits] = side = Ours(model, lengths, vocab, backend=backend)
        side.start(lengths)
        milliseconds(side.step, WARM)
        beside[bits] = [(mx.get_peak_memory() - before - side.pool_bytes) / 1e9]
    times: dict[KvBits, list[float]] = {bits: [] for bits in SIDES}
    for number in range(ROUNDS):
        for bits in SIDES if number % 2 else reversed(SIDES):
            milliseconds(sides[bits].step, 2)
            times[bits] += milliseconds(sides[bits].step, AT_ONCE)
    for side in sides.values():
        side.end()
        side.backend.abandon()
    pools = {bits: side.pool_bytes for bits, side in sides.items()}
    del sides, side, backend
    free()
    found = {**compared(f"step of {name}", times, "ms"), "bytes": round(pools[8] / pools[16], 4)}
    if len(lengths) == 1:  # such a peak is that of loading
        return [found]
    return [found, {**compared("memory beside pages", beside, "gb"), "of": name}]


def prompts(setups: Mapping[KvBits, gpu_restore.Setup], n_tokens: int) -> Line:
    """Prompts of both sides, in turns."""
    sides = {bits: gpu_restore.Side(setup, None) for bits, setup in setups.items()}
    times: dict[KvBits, list[float]] = {bits: [] for bits in SIDES}
    for number in range(PROMPTS + 1):
        for bits in SIDES if number % 2 else reversed(SIDES):
            told = sides[bits].ask("one", setups[bits].prompt(number, n_tokens))
            times[bits] += [told.ttft] if number else []
    for side in sides.values():
        side.close()
    return {**compared("prompt", times, "s"), "tokens": n_tokens}


def restores(setups: Mapping[KvBits, gpu_restore.Setup]) -> list[Line]:
    """An agent that the pool does not hold, from each tier: the time to its first token, and the
    part by which it exceeds that of a resident agent, which computes the same new tokens."""
    times: dict[Tier, dict[KvBits, list[float]]] = {tier: {} for tier in TIERS}
    beyond: dict[Tier, dict[KvBits, list[float]]] = {tier: {} for tier in TIERS}
    for number in range(RESTORES + 1):
        for bits in SIDES if number % 2 else reversed(SIDES):
            for tier, told in restored(setups[bits], bits, number):
                resident, ttft = told
                if number:
                    times[tier].setdefault(bits, []).append(ttft)
                    beyond[tier].setdefault(bits, []).append(ttft - resident)
    tokens = setups[8].tokens
    return [
        {**compared(f"{what} {tier}", taken[tier], "s"), "tokens": tokens}
        for tier in TIERS
        for what, taken in (("first token from", times), ("restore from", beyond))
    ]


def restored(
    setup: gpu_restore.Setup, bits: KvBits, number: int
) -> Iterator[tuple[Tier, tuple[float, float]]]:
    """Seconds to the first token of a resident agent and of one restored from each tier, with a
    store of its own: memory holds what the device wrote."""
    folder = setup.folder / f"{bits}-{number}"
    store = gpu_restore.open_tiers(folder)
    side = gpu_restore.Side(setup, store)
    side.ask("ann", setup.prompt(0))
    side.engine.flush()
    side.close(keep_store=True)
    for tier in TIERS:
        side = gpu_restore.Side(setup, store)
        for tokens in (setup.prompt(90, 300), [*setup.prompt(90, 300), *setup.prompt(91, _NEW)]):
            side.ask("warm", tokens)
        told = side.ask("ann", [*setup.prompt(0), *setup.prompt(20, _NEW)])
        n_bytes = side.engine.restored_bytes
        if told.done.cached_tokens < setup.tokens or n_bytes[tier] < sum(n_bytes.values()):
            raise AssertionError(f"{told.done.cached_tokens} tokens restored from {n_bytes}")
        again = side.ask("ann", [*setup.prompt(0), *setup.prompt(40, _NEW)])
        side.engine.flush()
        side.close(keep_store=True)
        yield tier, (again.ttft, told.ttft)
        store.close()
        store = gpu_restore.open_tiers(folder)
    store.close()
    shutil.rmtree(folder)


def judge(lines: Sequence[Mapping[str, Json]]) -> Verdict:
    """The parts whose ratio is above the most."""
    missed = [
        f"{line['part']}: {line['ratio']}"
        for line in lines
        if cast(float, line["ratio"]) > MOST.get(cast(str, line["part"]), math.inf)
    ]
    measured = {line["part"] for line in lines}
    missed += [f"{part}: not measured" for part in MOST if part not in measured]
    return Verdict(CRITERION, MOST["step of 8 x 32k"], "; ".join(missed) or "all", not missed)


def main(given: Sequence[str] | None = None) -> int:
    """Measure, print, write; 1 when the criterion is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--small", action="store_true", help="a small model, for a CPU")
    parser.add_argument("--only", action="append", choices=[*STEPS, *PARTS], help="repeatable")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args(given)
    shape = "small" if options.small else f"Llama 3.1 8B shape, {options.layers} layers, bf16"
    started = Run.start(
        "gpu_eight_bits", QUESTION, model=shape,
        parameters={"layers": options.layers, "rounds": ROUNDS, "steps_per_round": AT_ONCE}, seed=0,
    )  # fmt: skip
    options.output.mkdir(parents=True, exist_ok=True)
    model = shapes.small() if options.small else shapes.llama_8b(options.layers)
    vocab = 2048 if options.small else shapes.LLAMA_VOCAB
    lines: list[Line] = []

    def note(found: Sequence[Line]) -> None:
        """Print and write at once: a rented machine may go away."""
        lines.extend(found)
        for line in found:
            print(json.dumps(line), flush=True)
        samples = cast("list[dict[str, Scalar]]", lines)
        result = started.finish(samples, {"lines": cast(Json, lines)}, judge(lines))
        result.write(options.output / "gpu_eight_bits.json")

    with gpu_restore.store_folder(None) as folder:
        setup = gpu_restore.Setup(model, vocab, 96 if options.small else RESTORED, folder)
        setups: dict[KvBits, gpu_restore.Setup] = {
            bits: replace(setup, kv_bits=bits) for bits in SIDES
        }
        parts: dict[str, Callable[[], list[Line]]] = {
            "prompt": lambda: [prompts(setups, 48 if options.small else PROMPT)],
            "restore": lambda: restores(setups),
        }
        for name, lengths in (SMALL_STEPS if options.small else STEPS).items():
            parts[name] = functools.partial(steps, model, name, lengths, vocab)
        for name in options.only or parts:
            note(parts[name]())
            free()
    verdict = judge(lines)
    print(f"{'passed' if verdict.passed else 'MISSED'}: {verdict.observed}")
    return int(not verdict.passed)


if __name__ == "__main__":
    raise SystemExit(main())
