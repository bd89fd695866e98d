"""`python -m benchmarks.gpu_attention`: decode attention over pages, alone on a GPU.

Asks whether a row's attention has the same bits alone and beside rows of any lengths, and measures
the kernel's own time, as torch's profiler reads it from the device: the host takes longer than most
of these kernels, so a clock would measure the host. Prints a line of JSON for each batch.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path

import semantic.adapters.mlx  # isort: skip  # noqa: F401  loads OpenBLAS before MLX
import mlx.core as mx

from benchmarks.gpu_floor import copy_rate
from experiments.harness.document import Json, Scalar
from experiments.harness.record import Run
from experiments.harness.result import Verdict
from semantic.adapters.mlx.kv_cache.forms import find_kernels
from semantic.adapters.mlx.kv_cache.paged.attention import DecodeStep, PagedAttention
from semantic.adapters.mlx.kv_cache.paged.batch_metadata import BatchMetadata
from semantic.adapters.mlx.kv_cache.paged.page_pool import (
    PagedSequence,
    PageKind,
    PagePool,
    PageTable,
)
from semantic.adapters.mlx.kv_cache.spec_reader import LayerShape
from semantic.domain.value_objects import BLOCK_TOKENS
from tests.support.one_batch import beside_others

QUESTION = "Does a row's attention depend on the rows beside it, and how long does it take?"
CRITERION = "all rows of random batches have the bits that they have alone"

SHAPES = {
    "8 KV heads of 128": (8, 32, 128),
    "2 KV heads of 128": (2, 16, 128),
    "32 KV heads of 128": (32, 32, 128),
    "4 KV heads of 256": (4, 16, 256),
}
"""KV heads, query heads, width."""

BATCHES: dict[str, list[int]] = {
    **{f"1 x {n}": [n] for n in (512, 2048, 8192, 32768, 131072)},
    **{f"8 x {n}": [n] * 8 for n in (512, 1024, 2048, 8192, 32768)},
    **{f"32 x {n}": [n] * 32 for n in (512, 2048, 8192)},
    **{f"128 x {n}": [n] * 128 for n in (512, 2048)},
    "32768 + 7 x 512": [32768, *[512] * 7],
    "4096 + 7 x 256": [4096, *[256] * 7],
}
LENGTHS = (17, 256, 300, 512, 1500, 5000, 9000, 33000, 40000, 70000)
"""Tokens of the rows whose bits are compared."""
DRAWS = 60
LAYERS, REPEATS, WARM = 16, 4, 3
POOL_BYTES = 18 << 30
"""Bytes for keys and values of all layers."""


class Attention:
    """Layers of one kind, their kernels, and pages for `most_tokens`."""

    def __init__(self, name: str, layers: int, most_tokens: int | None = None) -> None:
        kv_heads, self.n_heads, width = SHAPES[name]
        shape = LayerShape(kv_heads, width, width, mx.bfloat16)
        self.kind = PageKind(tuple(range(layers)), shape)
        found = find_kernels(self.kind)
        if found is None:
            raise SystemExit("this device has no kernels for pages: expected a GPU")
        self.kernels: PagedAttention = found
        self.pool = PagePool(self.kind)
        self.most_tokens = most_tokens or POOL_BYTES // self.kind.page_bytes * BLOCK_TOKENS
        self.pool.grow(self.most_tokens // BLOCK_TOKENS)

    def rows(self, lengths: Sequence[int]) -> list[PagedSequence]:
        """Return sequences with pages for `lengths` tokens."""
        tables = [PageTable(self.pool) for _ in lengths]
        for table, length in zip(tables, lengths, strict=True):
            table.reserve(length)
        return [PagedSequence([table]) for table in tables]

    def inputs(self, n: int) -> tuple[mx.array, mx.array]:
        """Return random queries and keys of `n` rows; the keys serve as values, too."""
        shape = self.kind.shape
        q, k = (
            mx.random.normal((n, heads, 1, shape.k_head_dim), key=mx.random.key(heads))
            for heads in (self.n_heads, shape.kv_heads)
        )
        made = q.astype(shape.dtype), k.astype(shape.dtype)
        mx.eval(made)
        return made

    def attend(self, q: mx.array, k: mx.array, metadata: BatchMetadata, layer: int = 0) -> mx.array:
        return self.kernels.attend(DecodeStep(q, k, k, metadata, 0, 0, layer, 0.1, None, None))


def main(given: Sequence[str] | None = None) -> int:
    """Measure, print, write; 1 when a row's bits depend on others."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args(given)
    started = Run.start(
        "gpu_attention",
        QUESTION,
        model="attention of one layer, random bf16 keys and values",
        parameters={"layers": LAYERS, "repeats": REPEATS, "draws": DRAWS},
        seed=0,
    )
    rate = copy_rate().bytes_per_s
    samples: list[dict[str, Scalar]] = []
    table: list[Json] = []
    equal = total = 0
    for name in SHAPES:
        same = bits(Attention(name, 1, sum(LENGTHS) + len(LENGTHS) * BLOCK_TOKENS))
        attention = Attention(name, LAYERS)
        equal, total = equal + sum(same), total + len(same)
        for batch, lengths in BATCHES.items():
            if sum(-(-n // BLOCK_TOKENS) for n in lengths) * BLOCK_TOKENS <= attention.most_tokens:
                taken = microseconds(attention, lengths)
                samples += [{"shape": name, "batch": batch, "us": one} for one in taken[::LAYERS]]
                n_bytes = sum(lengths) * attention.kind.page_bytes / BLOCK_TOKENS / LAYERS
                us = statistics.median(taken)
                line: dict[str, Json] = {"shape": name, "batch": batch, "us": round(us, 1)}
                line["of_copy_rate"] = round(n_bytes / us * 1e6 / rate, 3)
                table.append(line)
                print(json.dumps(line), flush=True)
        del attention
    observed = f"{equal} of {total} rows have the same bits"
    verdict = Verdict(CRITERION, total, observed, passed=equal == total)
    arguments.output.mkdir(parents=True, exist_ok=True)
    summary: dict[str, Json] = {"attention": table, "rows": total, "same_bits": equal}
    started.finish(samples, summary, verdict).write(arguments.output / "gpu_attention.json")
    print(f"{'passed' if verdict.passed else 'MISSED'}: {verdict.observed}")
    return int(not verdict.passed)


def bits(attention: Attention) -> list[bool]:
    """Return, for each row of random batches, whether it has the bits that it has alone."""
    pool = attention.pool
    pool.data = mx.random.normal(pool.data.shape, attention.kind.shape.dtype)
    rows, (q, k) = attention.rows(LENGTHS), attention.inputs(len(LENGTHS))

    def attended(chosen: Sequence[int]) -> list[mx.array]:
        metadata = BatchMetadata(
            tuple(rows[i] for i in chosen), tuple(LENGTHS[i] - 1 for i in chosen)
        )
        mine = [mx.concatenate([one[i : i + 1] for i in chosen]) for one in (q, k)]
        out = attention.attend(mine[0], mine[1], metadata)
        mx.eval(out)
        return [out[number] for number in range(len(chosen))]

    return [same for _, _, same in beside_others(len(LENGTHS), DRAWS, attended)]


def microseconds(attention: Attention, lengths: Sequence[int]) -> list[float]:
    """Return the device's time of each launch, in layers one after another as in a model."""
    import torch

    rows, (q, k) = attention.rows(lengths), attention.inputs(len(lengths))
    metadata = BatchMetadata(tuple(rows), tuple(n - 1 for n in lengths))

    def run() -> None:
        x = q
        for layer in range(LAYERS):
            x = attention.attend(x, k, metadata, layer)
        mx.eval(x)

    for _ in range(WARM):
        run()
    with torch.profiler.profile() as profile:
        for _ in range(REPEATS):
            run()
        torch.cuda.synchronize()
    events = [event for event in profile.events() if str(event.device_type).endswith("CUDA")]
    return [event.device_time_total for event in events if "attend" in event.name]


if __name__ == "__main__":
    raise SystemExit(main())
