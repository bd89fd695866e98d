"""What computes over pages is right: attention, chunks put into pages, whole columns.

Everything runs with the portable operations, wherever the tests run; with CUDA with the kernels as
well, also in the way that they go on Metal. On Metal itself, where they have not run yet:
`HYPOTHESIS_PROFILE=thorough pytest tests/gpu`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import mlx.core as mx
import pytest
from mlx.nn.layers.base import Module
from mlx_lm.models import deepseek_v3, gemma3_text, llama

from semantic.adapters.mlx.backend import MLXBackend
from semantic.adapters.mlx.batch.draft_costs import StepSeconds
from semantic.adapters.mlx.kv_cache.eight_bits import held_in, packed_shape, seen_as
from semantic.adapters.mlx.kv_cache.forms import AttentionFor, find_kernels
from semantic.adapters.mlx.kv_cache.paged.attention import (
    DecodeStep,
    PagedAttention,
    PortableAttention,
    PrefillChunk,
)
from semantic.adapters.mlx.kv_cache.paged.batch_metadata import BatchMetadata, LateMetadata
from semantic.adapters.mlx.kv_cache.paged.dialect import CUDA, METAL
from semantic.adapters.mlx.kv_cache.paged.kernels import PagedKernels, computable
from semantic.adapters.mlx.kv_cache.paged.page_pool import (
    PagedSequence,
    PageKind,
    PagePool,
    PageRef,
    PageTable,
)
from semantic.adapters.mlx.kv_cache.spec_reader import LayerShape
from semantic.adapters.mlx.model.provider import wrap_model
from semantic.domain.value_objects import (
    BLOCK_TOKENS,
    LayerKind,
    LayerSpec,
    SamplingParams,
    SequenceId,
)
from tests.support.drafted_schedules import run_schedules
from tests.support.lanes import THOROUGH
from tests.support.one_batch import beside_others, said_by, same_bits
from tests.support.reference import logit_gap
from tests.support.tiny_models import VOCAB, randomize

HAS_GPU = mx.default_device() != mx.Device(mx.cpu)
ON_CUDA = HAS_GPU and mx.cuda.is_available()
ON_GPU = HAS_GPU and (ON_CUDA or THOROUGH)
PORTABLE, KERNELS, AS_ON_METAL = "portable", "kernels", "kernels as on Metal"

LIKE_METAL = replace(CUDA, stages=METAL.stages, space=METAL.space, fused=METAL.fused)
"""What CUDA does is another way through the same text: this is Metal's, in CUDA's names."""

LENGTHS = (0, 1, 15, 63, 255, 256, 257, 300, 511, 512, 1000, 2049, 4999)
"""Tokens before the new one, on a GPU."""
FEWER = (0, 1, 255, 256, 300, 1100)

N_LAYERS = 3
STEPS = 3

TOLERANCE = {mx.bfloat16: 2e-3, mx.float16: 4e-4, mx.float32: 2e-5}
"""‖out - ref‖ / ‖ref‖ over all rows; rounding the result alone costs bfloat16 1.5e-3."""
BEYOND_ROUNDING = {mx.bfloat16: 1e-4, mx.float16: 5e-5, mx.float32: 2e-5}
"""Of one row more than a tenth above what rounding costs it, which few numbers make a matter of
luck."""
PORTABLE_TOLERANCE = {mx.bfloat16: 1.5e-2, mx.float16: 2e-3, mx.float32: 2e-5}
"""Of one row: MLX on a CPU rounds the scores as well."""


@pytest.fixture(params=[PORTABLE, KERNELS, AS_ON_METAL])
def which(request: pytest.FixtureRequest) -> str:
    """What computes; the kernels only where there is a GPU for them."""
    name = str(request.param)
    if name == PORTABLE and not (ON_GPU or THOROUGH):
        pytest.skip("here the tests themselves are tested: HYPOTHESIS_PROFILE=thorough")
    if name == KERNELS and not ON_GPU:
        pytest.skip("the kernels need CUDA, and a GPU as MLX's default device")
    if name == AS_ON_METAL and not ON_CUDA:
        pytest.skip("here the kernels of CUDA go another way")
    return name


def attention_for(which: str) -> AttentionFor:
    """What computes over pages of each kind."""
    if which == PORTABLE:
        return lambda _: PortableAttention()
    if which == KERNELS:
        return find_kernels
    return lambda kind: PagedKernels(kind, LIKE_METAL) if computable(kind, LIKE_METAL) else None


@dataclass(frozen=True)
class Case:
    """Layers of one kind, and what is asked of them."""

    dim: int
    kv_heads: int
    group: int
    window: int | None = None
    sinks: bool = False
    dtype: mx.Dtype = mx.bfloat16
    v_dim: int | None = None
    """Width of values, if it is another; of rope keys, if keys are latents."""
    latent: bool = False
    packed: bool = False

    @property
    def widths(self) -> tuple[int, int]:
        return self.dim, self.v_dim or self.dim

    @property
    def kind(self) -> PageKind:
        ring = None
        if self.window is not None:
            ring = LayerSpec(LayerKind.SLIDING_WINDOW, window=self.window).max_blocks
        shape = LayerShape(self.kv_heads, *self.widths, self.dtype)
        if self.packed:
            shape = packed_shape(shape)
        return PageKind(tuple(range(N_LAYERS)), shape, self.window, ring)

    def held(self, numbers: mx.array) -> mx.array:
        """Heads as pages hold them."""
        return held_in(self.kind.shape.dtype, numbers)

    def seen(self, numbers: mx.array) -> mx.array:
        """Heads as attention sees them."""
        return seen_as(self.dtype, self.held(numbers))

    def fill(self, pages: PagePool) -> None:
        """All pages hold NaN: bytes of a group whose step and lowest number are NaN."""
        nothing = 255 if self.packed else math.nan
        pages.data = mx.full(pages.data.shape, nothing, pages.data.dtype)

    def is_filled(self, column: mx.array) -> bool:
        """Whether a page is as `fill` left it."""
        same = column == 255 if self.packed else mx.isnan(column)
        return bool(same.all().item())

    def attention(self, which: str) -> PagedAttention:
        found = attention_for(which)(self.kind)
        if found is None and which == AS_ON_METAL:
            pytest.skip(f"{self}: a thread group on Metal has no room for a tile")
        assert found is not None, f"no kernels for {self}"
        return found

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("mlx.core.")
        window = "" if self.window is None else f" window {self.window}"
        v_dim = "" if self.v_dim is None else f"+{self.v_dim}"
        more = f"{' sinks' * self.sinks}{' latent' * self.latent}{' packed' * self.packed}"
        return f"{dtype} {self.kv_heads}x{self.group}x{self.dim}{v_dim}{window}{more}"


# Each is a kernel of its own: as few as have every head size, group, window and type among them.
CASES = [
    Case(64, 2, 1),
    Case(64, 2, 8, window=128, sinks=True),
    Case(80, 2, 4),
    Case(96, 2, 3, window=300),
    Case(128, 2, 4),
    Case(128, 2, 8, sinks=True),
    Case(128, 1, 16),
    Case(128, 2, 3, window=16),
    Case(256, 2, 5, window=1024),
    Case(256, 1, 4),
    Case(128, 2, 4, dtype=mx.float16),
    Case(64, 2, 5, window=300, sinks=True, dtype=mx.float16),
    Case(80, 2, 5, window=300, dtype=mx.float32),
    Case(96, 2, 8, sinks=True, dtype=mx.float32),
    Case(256, 1, 1, dtype=mx.float32),
    Case(512, 2, 4),
    Case(512, 1, 3, window=300, dtype=mx.float32),
    Case(192, 2, 3, v_dim=128, sinks=True),
    Case(96, 1, 4, v_dim=192, window=300, dtype=mx.float32),
    Case(512, 1, 16, v_dim=64, latent=True),
    Case(512, 1, 5, v_dim=64, latent=True, dtype=mx.float16),
    Case(256, 1, 3, v_dim=64, latent=True, dtype=mx.float32),
    Case(128, 2, 4, packed=True),
    Case(64, 2, 8, window=300, sinks=True, dtype=mx.float16, packed=True),
    Case(128, 1, 16, packed=True),
    Case(256, 1, 5, packed=True),
    Case(192, 2, 3, v_dim=128, packed=True),
    Case(64, 2, 5, dtype=mx.float32, packed=True),
    Case(512, 1, 16, v_dim=64, latent=True, packed=True),
]
PACKED = [case for case in CASES if case.packed]


def drawn(seed: int, *shape: int, dtype: mx.Dtype) -> mx.array:
    """Normally distributed numbers, the same for the same seed."""
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


class Batch:
    """Sequences in pages whose every other slot and column is NaN, and what they hold."""

    def __init__(self, case: Case, lengths: Sequence[int], seed: int = 1) -> None:
        self.case, self.kind, self.lengths = case, case.kind, tuple(lengths)
        self.pages = PagePool(self.kind)
        n_pages = sum(length // BLOCK_TOKENS + 2 for length in lengths)
        self.pages.grow(n_pages + 3)
        case.fill(self.pages)
        free = [self.pages.take() for _ in range(n_pages + 3)]
        random.Random(seed).shuffle(free)  # no sequence's columns lie in order
        self.tables = [self._chain(length, free) for length in lengths]
        self.others = free
        self.keys = [self._past(seed + 2 * i, n, 0) for i, n in enumerate(lengths)]
        self.values = [self._past(seed + 2 * i + 1, n, 1) for i, n in enumerate(lengths)]
        for row in range(len(lengths)):
            self._write_past(row)
        mx.eval(self.pages.data)
        self.last: dict[int, mx.array] = {}
        self.metadata = BatchMetadata(
            tuple(PagedSequence([table]) for table in self.tables), self.lengths
        )

    def _chain(self, length: int, free: list[PageRef]) -> PageTable:
        needed = PageTable(self.pages).pages_for(length + STEPS)
        return PageTable(self.pages, [free.pop() for _ in range(needed)])

    def _past(self, seed: int, n: int, which: int) -> mx.array:
        shape = (N_LAYERS, self.case.kv_heads, n, self.case.widths[which])
        return drawn(seed, *shape, dtype=self.case.dtype)

    def _write_past(self, row: int) -> None:
        length = self.lengths[row]
        first = 0 if self.case.window is None else max(0, length - self.case.window + 1)
        for block in range(first // BLOCK_TOKENS, -(-length // BLOCK_TOKENS)):
            a, b = max(first, block * BLOCK_TOKENS), min(length, (block + 1) * BLOCK_TOKENS)
            if a < b:
                column = self.column(row, block)
                slots = slice(a - block * BLOCK_TOKENS, b - block * BLOCK_TOKENS)
                keys, values = self.kind.keys_and_values(self.pages.data[column])
                keys[:, :, slots] = self.case.held(self.keys[row][:, :, a:b])
                values[:, :, slots] = self.case.held(self.values[row][:, :, a:b])
                parts = [part.reshape(N_LAYERS, -1) for part in (keys, values)]
                self.pages.data[column] = mx.concatenate(parts, axis=1)

    def column(self, row: int, block: int) -> int:
        ring = self.kind.ring
        return self.tables[row].pages[block if ring is None else block % ring]

    def step(
        self,
        attention: PagedAttention,
        step: int,
        layer: int,
        sinks: mx.array | None,
        *,
        evaluate: bool = True,
    ) -> tuple[mx.array, mx.array]:
        """Attention of a new token of each row, and what it should be; (rows, heads, dim)."""
        case, rows = self.case, len(self.lengths)
        heads = case.kv_heads * case.group
        # As models make them: parts of one projection, heads behind tokens.
        seed = 100 + step * N_LAYERS + layer
        n_heads = [heads, case.kv_heads, case.kv_heads]
        if case.widths[0] == case.widths[1]:
            fused = drawn(seed, *(rows, 1, sum(n_heads), case.dim), dtype=case.dtype)
            parts = list(mx.split(fused, [heads, heads + case.kv_heads], axis=2))
        else:
            widths = (case.dim, *case.widths)
            parts = [
                drawn(seed + 1000 * i, rows, 1, n, width, dtype=case.dtype)
                for i, (n, width) in enumerate(zip(n_heads, widths, strict=True))
            ]
        q, k, v = (part.swapaxes(1, 2) for part in parts)
        scale = 1.3 * case.dim**-0.5
        rope = None
        if case.latent:
            rope = drawn(seed + 5000, rows, heads, 1, case.widths[1], dtype=case.dtype) * scale
        inputs = DecodeStep(
            q, k, v, self.metadata, step, 0, layer, scale, sinks, self.last.get(layer), rope=rope
        )
        out = attention.attend(inputs)
        self.last[layer] = out
        if evaluate:
            mx.eval(out)
        assert out.shape == (*q.shape[:3], case.widths[not case.latent])
        assert out.dtype == case.dtype
        for row in range(rows):
            at = self.lengths[row] + step
            for past, new in ((self.keys, k), (self.values, v)):
                if past[row].shape[2] == at:  # room for the token in all layers
                    more = mx.zeros((N_LAYERS, case.kv_heads, 1, new.shape[3]), case.dtype)
                    past[row] = mx.concatenate([past[row], more], axis=2)
                past[row][layer, :, at] = new[row, :, 0]
        expected = mx.stack(
            [
                self._expected(
                    row,
                    step,
                    layer,
                    q[row, :, 0].astype(mx.float32) * scale,
                    None if rope is None else rope[row, :, 0],
                    sinks,
                )
                for row in range(rows)
            ]
        )
        return out[:, :, 0], expected

    def _expected(
        self,
        row: int,
        step: int,
        layer: int,
        q: mx.array,
        rope: mx.array | None,
        sinks: mx.array | None,
    ) -> mx.array:
        """By hand in float32, without matrix products, whose precision is the device's."""
        position = self.lengths[row] + step
        window = self.case.window
        first = 0 if window is None else max(0, position - window + 1)
        k, v = (
            self.case.seen(heads[row][layer, :, None, first : position + 1]).astype(mx.float32)
            for heads in (self.keys, self.values)
        )
        if rope is not None:
            q = mx.concatenate([q, rope.astype(mx.float32)], axis=-1)
            k, v = mx.concatenate([k, v], axis=-1), k
        groups = q.reshape(self.case.kv_heads, self.case.group, 1, -1)
        scores = (groups * k).sum(-1)  # (kv_heads, group, tokens)
        top = scores.max(-1, keepdims=True)
        if sinks is not None:
            sink = sinks.astype(mx.float32).reshape(self.case.kv_heads, self.case.group, 1)
            top = mx.maximum(top, sink)
        shares = mx.exp(scores - top)
        total = shares.sum(-1, keepdims=True)
        if sinks is not None:
            total = total + mx.exp(sink - top)
        out = ((shares / total)[..., None] * v).sum(2)
        return out.reshape(q.shape[0], -1)

    def require_in_pages(self, step: int, layer: int) -> None:
        """The tokens of a step are in their pages, and slots that were not written to are NaN."""
        for row, length in enumerate(self.lengths):
            at = length + step
            page = self.pages.data[self.column(row, at // BLOCK_TOKENS), layer]
            slot = [heads[:, at % BLOCK_TOKENS] for heads in self.kind.keys_and_values(page)]
            assert mx.array_equal(slot[0], self.case.held(self.keys[row][layer, :, at])), (
                f"{self.case}, {length} tokens, step {step}: key differs in its page"
            )
            assert mx.array_equal(slot[1], self.case.held(self.values[row][layer, :, at])), (
                f"{self.case}, {length} tokens, step {step}: value differs in its page"
            )
        for ref in self.others:
            column = self.pages.data[ref.index]
            assert self.case.is_filled(column), f"{self.case}: column {ref.index} written to"


def error_of(out: mx.array, expected: mx.array) -> float:
    """‖out - expected‖ / ‖expected‖; NaN if there is one in either."""
    out = out.astype(mx.float32)
    gap = mx.sqrt(mx.square(out - expected).sum()) / mx.sqrt(mx.square(expected).sum())
    return cast(float, gap.item())


def require_close(
    which: str, batch: Batch, out: mx.array, expected: mx.array, step: int, layer: int
) -> None:
    """Each row is what it should be, as far as its type can tell; and all rows together."""
    dtype = batch.case.dtype
    for row, length in enumerate(batch.lengths):
        error = error_of(out[row], expected[row])
        if which == PORTABLE:
            limit = PORTABLE_TOLERANCE[dtype]
        else:
            rounding = error_of(expected[row].astype(dtype), expected[row])
            # Kernels round the numbers of packed heads, or add their steps later: both are right.
            limit = (3.5 if batch.case.packed else 1.1) * rounding + BEYOND_ROUNDING[dtype]
        assert error < limit, (
            f"{which}: {batch.case}, {length} tokens, step {step}, layer {layer}: "
            f"error {error:.2e}, at most {limit:.1e}"
        )
    if which != PORTABLE:
        error = error_of(out, expected)
        limit = (2 if batch.case.packed else 1) * TOLERANCE[dtype]
        assert error < limit, f"{batch.case}, step {step}: error {error:.2e}"


def sinks_of(case: Case) -> mx.array | None:
    return drawn(5, case.kv_heads * case.group, dtype=case.dtype) if case.sinks else None


def lengths_for(which: str) -> tuple[int, ...]:
    return FEWER if which == PORTABLE else LENGTHS


# Attention


@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention_is_that_computed_by_hand(case: Case, which: str) -> None:
    batch = Batch(case, lengths_for(which))
    attention, sinks = case.attention(which), sinks_of(case)
    for step in range(STEPS):
        for layer in range(N_LAYERS):
            out, expected = batch.step(attention, step, layer, sinks)
            require_close(which, batch, out, expected, step, layer)
            batch.require_in_pages(step, layer)


@pytest.mark.parametrize("case", [*(CASES[i] for i in (1, 4, 8, 17, 19)), *PACKED], ids=str)
@pytest.mark.parametrize("lengths", [(4999,), (300, 4999), (700,) * 40], ids=["1", "2", "40"])
def test_the_same_input_gives_the_same_bits(
    case: Case, lengths: tuple[int, ...], which: str
) -> None:
    if which == PORTABLE:
        lengths = tuple(min(length, 700) for length in lengths[:3])
    sinks, found = sinks_of(case), []
    for _ in range(3):
        batch, attention = Batch(case, lengths), case.attention(which)
        found.append([batch.step(attention, step, 0, sinks)[0] for step in range(STEPS)])
    for again in found[1:]:
        for step, (one, other) in enumerate(zip(found[0], again, strict=True)):
            assert mx.array_equal(one, other), (
                f"{which}: {case}, lengths {lengths}, step {step}: other bits, "
                f"error {error_of(one, other.astype(mx.float32)):.2e}"
            )


@pytest.mark.parametrize("case", [*(CASES[i] for i in (1, 4, 8, 17, 19)), *PACKED], ids=str)
def test_a_row_has_the_same_bits_alone_and_beside_rows_of_any_lengths(
    case: Case, which: str
) -> None:
    lengths = FEWER if which == PORTABLE else (17, 300, 511, 512, 1500, 4999, 33_000, 40_000)
    batch, attention, sinks = Batch(case, lengths), case.attention(which), sinks_of(case)
    n, heads = len(lengths), case.kv_heads * case.group
    q, k, v, rope = (
        drawn(seed, n, n_heads, 1, width, dtype=case.dtype)
        for seed, (n_heads, width) in enumerate(
            [
                (heads, case.dim),
                (case.kv_heads, case.dim),
                (case.kv_heads, case.widths[1]),
                (heads, case.widths[1]),
            ]
        )
    )

    def attended(rows: Sequence[int]) -> list[mx.array]:
        metadata = BatchMetadata(
            tuple(PagedSequence([batch.tables[row]]) for row in rows),
            tuple(lengths[row] for row in rows),
        )
        taken = [mx.concatenate([one[row : row + 1] for row in rows]) for one in (q, k, v, rope)]
        mine, keys, values, its_rope = taken
        step = DecodeStep(mine, keys, values, metadata, 0, 0, 0, 0.1, sinks, None)
        if case.latent:
            step = step._replace(rope=its_rope)
        out = attention.attend(step)
        mx.eval(out)
        return [out[i] for i in range(len(rows))]

    for row, rows, same in beside_others(n, 20, attended):
        assert same, f"{which}: {case}, {lengths[row]} in {rows}"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_drafted_rows_have_the_bits_of_one_token_at_a_time(case: Case, which: str) -> None:
    """Also where a draft begins a split or a block, and where splits double."""
    lengths = (0, 250, 300) if which == PORTABLE else (0, 1, 250, 505, 700, 1022, 4999, 32_760)
    counts = [(16, 5, 1, 12, 3, 7, 4, 16)[i] for i in range(len(lengths))]
    if case.kind.ring is not None and case.window is not None:
        most = case.kind.ring * BLOCK_TOKENS - case.window + 1
        counts = [min(count, most) for count in counts]
    sinks, heads = sinks_of(case), case.kv_heads * case.group
    firsts = [sum(counts[:i]) for i in range(len(counts))]
    widths = (case.dim, case.dim, case.widths[1], case.widths[1])
    q, k, v, rope = (
        drawn(seed, sum(counts), n_heads, 1, width, dtype=case.dtype)
        for seed, (n_heads, width) in enumerate(
            zip((heads, case.kv_heads, case.kv_heads, heads), widths, strict=True)
        )
    )
    one_by_one, drafted = Batch(case, lengths), Batch(case, lengths)

    def attended(batch: Batch, rows: Sequence[tuple[int, int]]) -> mx.array:
        batch.others.clear()
        metadata = BatchMetadata(
            tuple(PagedSequence([batch.tables[i]]) for i, _ in rows)
            if batch is one_by_one
            else tuple(shared[i] for i, _ in rows),
            tuple(lengths[i] + at for i, at in rows),
        )
        taken = [
            mx.concatenate([one[firsts[i] + at :][:1] for i, at in rows]) for one in (q, k, v, rope)
        ]
        step = DecodeStep(
            taken[0], taken[1], taken[2], metadata, 0, 0, 1, 0.1, sinks, None,
            rope=taken[3] if case.latent else None,
        )  # fmt: skip
        out = case.attention(which).attend(step)
        mx.eval(out)
        return out

    shared = [PagedSequence([table]) for table in drafted.tables]
    rows = [(i, at) for i, count in enumerate(counts) for at in range(count)]
    found = attended(drafted, rows)
    for at in range(max(counts)):
        alone = [(i, at) for i, count in enumerate(counts) if at < count]
        for (i, _), out in zip(alone, attended(one_by_one, alone), strict=True):
            assert mx.array_equal(found[firsts[i] + at], out), (
                f"{which}: {case}, draft {at} after {lengths[i]} tokens"
            )
    for i, count in enumerate(counts):
        tables = one_by_one.tables[i], drafted.tables[i]
        for at in range(lengths[i], lengths[i] + count):
            block = at // BLOCK_TOKENS % (case.kind.ring or 1 << 30)
            one, other = (
                table.pool.kind.keys_and_values(table.pool.data[table.pages[block], 1])
                for table in tables
            )
            for mine, theirs in zip(one, other, strict=True):
                slot = at % BLOCK_TOKENS
                assert mx.array_equal(mine[:, slot], theirs[:, slot])


@pytest.mark.parametrize("case", [CASES[4], CASES[3], CASES[7], PACKED[0]], ids=str)
def test_attention_stays_right_over_the_edges_of_items_and_blocks(case: Case, which: str) -> None:
    """A plan is made anew when its items are full, and columns are added on the way."""
    n_steps = 20 if which == PORTABLE else 300
    lengths = (0, 250, 500, 769) if which == PORTABLE else (0, 60, 130, 250, 500, 769)
    batch = Batch(case, lengths)
    attention, sinks = case.attention(which), sinks_of(case)
    batch.others.clear()
    for step in range(n_steps):
        out, expected = batch.step(attention, step, 2, sinks)
        require_close(which, batch, out, expected, step, 2)


@pytest.mark.parametrize("case", [CASES[4], CASES[3], CASES[7], *PACKED[:2]], ids=str)
def test_steps_computed_together_see_each_other(case: Case, which: str) -> None:
    """Nothing is evaluated in between, and a step's input does not depend on the one before."""
    batch = Batch(case, (0, 250, 511, 700))
    attention, sinks = case.attention(which), sinks_of(case)
    steps = [batch.step(attention, step, 1, sinks, evaluate=False) for step in range(STEPS)]
    mx.eval([out for out, _ in steps])
    for step, (out, expected) in enumerate(steps):
        require_close(which, batch, out, expected, step, 1)


# Chunks


def chunked(case: Case, which: str, chunks: Sequence[int], n_layers: int = N_LAYERS) -> None:
    """Chunks one behind the other: what is gathered, and what is in the pages afterwards."""
    kind, attention = case.kind, case.attention(which)
    pages = PagePool(kind)
    pages.grow(sum(chunks) // BLOCK_TOKENS + 4)
    case.fill(pages)
    holes = [pages.take() for _ in range(3)]
    del holes[1]  # columns do not lie in order
    table = PageTable(pages)
    total = sum(chunks)
    # Heads behind tokens, as models make them.
    keys, values = (
        drawn(1 + i, 1, total, case.kv_heads, width, dtype=case.dtype).swapaxes(1, 2)
        for i, width in enumerate(case.widths)
    )
    done: dict[int, mx.array] = {}
    at = 0
    for n in chunks:
        table.reserve(at + n)
        first = 0 if case.window is None else max(0, at - case.window + 1)
        k, v = keys[:, :, at : at + n], values[:, :, at : at + n]
        for layer in range(n_layers):
            added = attention.append(PrefillChunk(k, v, table, at, first, layer, done.get(layer)))
            done[layer] = added.done
            mx.eval(added.k, added.v, added.done)
            for name, got, whole in (("key", added.k, keys), ("value", added.v, values)):
                assert mx.array_equal(got, case.seen(whole[:, :, first : at + n])), (
                    f"{which}: {case}, {n} tokens at {at}, layer {layer}: {name}s of {got.shape} "
                    f"from {first} on differ"
                )
        at += n
        require_held(
            case, table, at, n_layers, (keys, values), f"{which}: {case}, {chunks} to {at}"
        )
    for ref in holes:
        assert case.is_filled(pages.data[ref.index]), f"{case}: a foreign column changed"


def require_held(
    case: Case,
    table: PageTable,
    stop: int,
    n_layers: int,
    written: tuple[mx.array, mx.array],
    what: str,
) -> None:
    """All tokens that a next one attends to are in the pages."""
    first = 0 if case.window is None else max(0, stop - case.window + 1)
    ring = table.pool.kind.ring
    for block in range(first // BLOCK_TOKENS, -(-stop // BLOCK_TOKENS)):
        a, b = max(first, block * BLOCK_TOKENS), min(stop, (block + 1) * BLOCK_TOKENS)
        column = table.pages[block if ring is None else block % ring]
        slots = slice(a - block * BLOCK_TOKENS, b - block * BLOCK_TOKENS)
        for layer in range(n_layers):
            found = table.pool.kind.keys_and_values(table.pool.data[column, layer])
            for heads, whole in zip(found, written, strict=True):
                got = heads[:, slots]
                assert mx.array_equal(got, case.held(whole[0, :, a:b])), (
                    f"{what}: tokens {a} to {b} differ"
                )


CHUNKS = [(1, 1, 254, 1, 255, 256), (700, 3, 600), (257, 1, 255, 1300), (30, 226, 512, 5)]


@pytest.mark.parametrize(
    "case",
    [
        *(CASES[0], CASES[2], CASES[3], CASES[7], CASES[8], CASES[10], CASES[12]),
        *(CASES[15], CASES[17], CASES[18], CASES[19]),
        *PACKED,
    ],
    ids=str,
)
def test_chunks_are_put_into_pages_and_gathered_exactly(case: Case, which: str) -> None:
    for chunks in CHUNKS:
        chunked(case, which, chunks)


@pytest.mark.parametrize("case", [CASES[0], CASES[3], CASES[7], *PACKED[:2]], ids=str)
def test_chunks_computed_together_come_one_behind_the_other(case: Case, which: str) -> None:
    """Nothing is evaluated in between: the order follows from what depends on what."""
    attention, pages = case.attention(which), PagePool(case.kind)
    pages.grow(8)
    table = PageTable(pages)
    table.reserve(1200)
    keys, values = (
        drawn(1 + i, 1, case.kv_heads, 1200, width, dtype=case.dtype)
        for i, width in enumerate(case.widths)
    )
    mx.eval(keys, values)
    found: list[tuple[range, mx.array, mx.array]] = []
    done: mx.array | None = None
    for at in range(0, 1200, 60):
        first = 0 if case.window is None else max(0, at - case.window + 1)
        k, v = keys[:, :, at : at + 60], values[:, :, at : at + 60]
        added = attention.append(PrefillChunk(k, v, table, at, first, 1, done))
        done = added.done
        found.append((range(first, at + 60), added.k, added.v))
    mx.eval(done, [(k, v) for _, k, v in found])
    for tokens, k, v in found:
        seen = slice(tokens.start, tokens.stop)
        assert mx.array_equal(k, case.seen(keys[:, :, seen])), f"{which}: {case}, keys {tokens}"
        assert mx.array_equal(v, case.seen(values[:, :, seen])), f"{which}: {case}, values {tokens}"


# Whole columns


@pytest.mark.parametrize("case", [*(CASES[i] for i in (0, 2, 8, 12, 17))], ids=str)
def test_whole_columns_are_stored_where_they_should_be(case: Case, which: str) -> None:
    attention, pages = case.attention(which), PagePool(case.kind)
    pages.grow(7)
    pages.data = mx.full(pages.data.shape, math.nan, case.dtype)
    mx.eval(pages.data)
    data = drawn(1, 3, *case.kind.page_shape, dtype=case.dtype)
    mx.eval(attention.store(pages, [5, 0, 2], data))
    for at, column in enumerate((5, 0, 2)):
        assert mx.array_equal(pages.data[column], data[at]), f"{which}: {case}, column {column}"
    for column in (1, 3, 4, 6):
        assert mx.isnan(pages.data[column]).all().item(), f"{which}: {case}, column {column}"
    mx.eval(attention.store(pages, [4], mx.contiguous(pages.data[5:6])))
    assert mx.array_equal(pages.data[4], data[0]), f"{which}: {case}, a copied column"


# Models


def small_llama() -> Module:
    """Wide enough heads for the kernels, and little else."""
    model = llama.Model(
        llama.ModelArgs(
            model_type="llama",
            hidden_size=64,
            num_hidden_layers=2,
            intermediate_size=64,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=64,
            rms_norm_eps=1e-5,
            vocab_size=VOCAB,
            rope_theta=10000.0,
            tie_word_embeddings=True,
        )
    )
    randomize(model)
    return model


def small_gemma3() -> Module:
    """The same with windows in every other layer."""
    model = gemma3_text.Model(
        gemma3_text.ModelArgs(
            model_type="gemma3_text",
            hidden_size=64,
            num_hidden_layers=4,
            intermediate_size=64,
            num_attention_heads=4,
            head_dim=64,
            rms_norm_eps=1e-6,
            vocab_size=VOCAB,
            num_key_value_heads=1,
            query_pre_attn_scalar=64,
            sliding_window=100,
            sliding_window_pattern=2,
        )
    )
    randomize(model)
    return model


def small_latent() -> Module:
    """Latents of 128 and rope keys of 64."""
    model = deepseek_v3.Model(
        deepseek_v3.ModelArgs(
            vocab_size=VOCAB,
            hidden_size=64,
            intermediate_size=64,
            moe_intermediate_size=32,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=4,
            kv_lora_rank=128,
            q_lora_rank=32,
            qk_rope_head_dim=64,
            qk_nope_head_dim=32,
            v_head_dim=32,
            n_routed_experts=4,
            num_experts_per_tok=2,
            n_shared_experts=1,
            n_group=1,
            topk_group=1,
            first_k_dense_replace=3,
            max_position_embeddings=4096,
        )
    )
    randomize(model)
    return model


def prompt_of(number: int, length: int) -> list[int]:
    """A prompt that begins like no other number's."""
    return [(number * 31 + i * i * 7 + i * 3) % VOCAB for i in range(length)]


def answers(model: MLXBackend, n_steps: int) -> list[list[int]]:
    """What five sequences say that join one by one; two leave, and one of them comes again."""
    said: dict[SequenceId, list[int]] = {}
    prompts: dict[SequenceId, list[int]] = {}

    def join(number: int, length: int) -> SequenceId:
        prompt = prompt_of(number, length)
        sequence = model.open(1024)
        model.prefill(sequence, prompt[:-1])
        model.start(sequence, prompt[-1], prompt[:-1], SamplingParams(), 0)
        said[sequence], prompts[sequence] = [], prompt
        return sequence

    def step() -> None:
        for one in model.decode():
            said[one.sequence].append(one.token)

    lengths = iter((250, 2, 97, 511, 300))
    sequences: list[SequenceId] = []
    for at in range(n_steps):
        if at % 7 == 0 and len(sequences) < 5:
            sequences.append(join(len(sequences), next(lengths)))
        if at == n_steps // 2:
            model.close(sequences[1])
            model.pause(sequences[3])
        if at == n_steps // 2 + 20:
            # The token that was drawn last is in the cache: go on with any other.
            history = [*prompts[sequences[3]], *said[sequences[3]]]
            model.start(sequences[3], 5, history, SamplingParams(), 0)
            said[sequences[3]].append(5)
        step()
    for sequence in sequences:
        if sequence != sequences[1]:
            model.close(sequence)
    return [[*prompts[sequence], -1, *said[sequence]] for sequence in sequences]


TIE = 1e-3
"""Two tokens whose logits differ by less, relative to the largest, are equally good."""


@pytest.mark.parametrize("build", [small_llama, small_gemma3, small_latent])
def test_a_batch_in_pages_says_what_one_in_buffers_says(build: object, which: str) -> None:
    assert callable(build)
    model = build()
    pages = wrap_model(model, "pages", attention=attention_for(which))
    assert pages.in_pages
    buffers = wrap_model(model, "buffers", attention=None)
    assert not buffers.in_pages
    n_steps = 80 if which == PORTABLE else 200
    for number, (found, expected) in enumerate(
        zip(answers(pages, n_steps), answers(buffers, n_steps), strict=True)
    ):
        if found == expected:
            continue
        same = next(i for i, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b)
        seen = [token for token in found[:same] if token >= 0]
        gap = logit_gap(model, seen, (found[same], expected[same]))
        assert gap < TIE, (
            f"{which}: sequence {number} parts after {len(seen)} tokens: {found[same]}, "
            f"expected {expected[same]}, logits differ by {gap:.2e}"
        )


@pytest.mark.parametrize("build", [small_llama, small_gemma3, small_latent])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=["float32", "bfloat16"])
def test_drafts_change_no_bit(
    build: object, dtype: mx.Dtype, which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the kernels, some passes are built before their tokens are known."""
    monkeypatch.setattr(StepSeconds, "of", lambda *_, **__: 1.0)  # drafts always pay
    fill, filled = LateMetadata.fill, list[bool]()

    def counted(self: LateMetadata, real: BatchMetadata) -> bool:
        filled.append(fill(self, real))
        return filled[-1]

    monkeypatch.setattr(LateMetadata, "fill", counted)
    assert callable(build)
    model = build()
    model.set_dtype(dtype)
    backend = wrap_model(model, "pages", attention=attention_for(which), exact_batch="on")
    assert not backend.drafts_problem
    run_schedules(backend, 3 if which == PORTABLE else 20)
    assert any(filled) == (which != PORTABLE)


@pytest.mark.parametrize("build", [small_llama, small_gemma3, small_latent])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=["float32", "bfloat16"])
def test_what_was_preempted_goes_on_with_the_same_bits(
    build: object, dtype: mx.Dtype, which: str
) -> None:
    assert callable(build)
    model = build()
    model.set_dtype(dtype)
    backend = wrap_model(model, "pages", attention=attention_for(which))
    assert backend.in_pages
    prompts = [prompt_of(length, length) for length in (250, 97, 511)]
    never = said_by(backend, prompts, 40, top=5)
    again = said_by(backend, prompts, 40, top=5, preempted_after=(1, 7, 20))
    for number, (mine, others) in enumerate(zip(again, never, strict=True)):
        same = same_bits(mine, others)
        assert all(same), f"{which}: sequence {number} differs from step {same.index(False)} on"
