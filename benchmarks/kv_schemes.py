"""`python -m benchmarks.kv_schemes [MODEL ...]`: what 8-bit keys and values do to probabilities.

Each scheme rounds keys and values as they enter mlx-lm's own caches, in chunks of a prompt. The
probabilities of the next token after each of 4,096 tokens are compared with those without rounding:
the mean Kullback-Leibler divergence, and how often the likeliest token is the same. The text is
source code of this package. Models are folders; without any, the one inside the package. Prints a
line of JSON for each scheme and writes them all.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

import semantic.adapters.mlx  # isort: skip  # noqa: F401  loads OpenBLAS before MLX
import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.utils import load_model

from experiments.harness.document import Json, Scalar
from experiments.harness.record import Run
from experiments.harness.result import Verdict, read
from semantic.adapters.mlx.kv_cache.eight_bits import rounded
from semantic.adapters.mlx.model.cache_quality import (
    LEAST_AGREEMENT,
    MOST_DIVERGENCE,
    TOKENS,
    Rounds,
    measuring,
    text,
)
from semantic.adapters.mlx.model.provider import EMBEDDED_MODEL, find_folder, load_tokenizer
from semantic.ports.generation import at_once

QUESTION = "Which form of keys and values in 8 bits changes a model's probabilities the least?"
CRITERION = (
    "with ours, on each model: a mean divergence of at most 0.01, and the same likeliest token "
    "after at least 96.5 % of the tokens"
)


def affine(group: int) -> Rounds:
    """MLX's own affine form. Its steps are rounded after they have chosen the levels."""

    def rounds(numbers: mx.array) -> mx.array:
        halves = numbers.astype(mx.bfloat16)
        levels, steps, lowest = mx.quantize(halves, group_size=group, bits=8)
        found = mx.dequantize(levels, steps, lowest, group_size=group, bits=8)
        return found.astype(numbers.dtype)

    return rounds


def mxfp8(numbers: mx.array) -> mx.array:
    """Floating point of 8 bits in groups of 32 that share an exponent."""
    levels, exponents = mx.quantize(numbers, group_size=32, bits=8, mode="mxfp8")[:2]
    found = mx.dequantize(levels, exponents, group_size=32, bits=8, mode="mxfp8")
    return found.astype(numbers.dtype)


SCHEMES: Mapping[str, tuple[Rounds, float]] = {
    "bfloat16": (lambda numbers: numbers.astype(mx.bfloat16).astype(numbers.dtype), 1.0),
    "ours, groups of 64": (rounded, 68 / 128),
    "affine, groups of 64": (affine(64), 68 / 128),
    "affine, groups of 32": (affine(32), 36 / 64),
    "mxfp8": (mxfp8, 33 / 64),
}
"""How each rounds, and its bytes relative to bfloat16's."""
OURS = "ours, groups of 64"


def judge(samples: Sequence[Mapping[str, Scalar]]) -> Verdict:
    """The criterion, and what misses it."""
    missed = [
        f"{one['model']}: {one['divergence']}, {one['agreement']}"
        for one in samples
        if one["scheme"] == OURS
        and (
            cast(float, one["divergence"]) > MOST_DIVERGENCE
            or cast(float, one["agreement"]) < LEAST_AGREEMENT
        )
    ]
    observed = "; ".join(missed) or "on all models"
    return Verdict(CRITERION, MOST_DIVERGENCE, observed, passed=not missed)


def main(given: Sequence[str] | None = None) -> int:
    """Measure, print, write; 1 when the criterion is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=[EMBEDDED_MODEL], help="folders")
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--only", choices=SCHEMES, help="keeps what the file says of others")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args(given)
    n_tokens = cast(int, arguments.tokens)
    started = Run.start(
        "kv_schemes", QUESTION, model="see summary", parameters={"tokens": n_tokens}, seed=0
    )
    samples: list[dict[str, Scalar]] = []
    arguments.output.mkdir(parents=True, exist_ok=True)
    names = [Path(name).name for name in arguments.models]
    schemes = [arguments.only] if arguments.only else list(SCHEMES)
    if arguments.only:
        kept = read(arguments.output / "kv_schemes.json").samples
        samples += [
            dict(one) for one in kept if one["model"] not in names or one["scheme"] not in schemes
        ]
    for name in cast("list[str]", arguments.models):
        model = cast(Module, load_model(find_folder(name))[0])
        model.set_dtype(mx.float32)
        tokens = text(load_tokenizer(name), n_tokens)
        for scheme in schemes:
            rounds, size = SCHEMES[scheme]
            found = at_once(measuring(model, tokens, rounds))
            line: dict[str, Scalar] = {
                "model": Path(name).name, "scheme": scheme, "bytes": round(size, 4),
                "tokens": found.n_tokens, "divergence": round(found.divergence, 6),
                "largest": round(found.largest, 4), "agreement": round(found.agreement, 5),
            }  # fmt: skip
            samples.append(line)
            print(json.dumps(line), flush=True)
            summary = cast("dict[str, Json]", {"lines": list(samples)})
            done = started.finish(samples, summary, judge(samples))
            done.write(arguments.output / "kv_schemes.json")
    verdict = judge(samples)
    print(f"{'passed' if verdict.passed else 'MISSED'}: {verdict.observed}")
    return int(not verdict.passed)


if __name__ == "__main__":
    raise SystemExit(main())
