"""Calls the paged kernels from MLX: decode attention over pages, and writes to pages.

The kernels write to the page pool, but MLX does not know that the pool changes. To see earlier
writes, a launch takes an output of the earlier launch as an input (`after`).
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Collection
from typing import NamedTuple

import mlx.core as mx

from semantic.adapters.mlx.arrays import on_device
from semantic.adapters.mlx.cuda import rows_source
from semantic.adapters.mlx.cuda.nvrtc import capability
from semantic.adapters.mlx.kv_cache.eight_bits import numbers_of
from semantic.adapters.mlx.kv_cache.paged import kernel_source as source
from semantic.adapters.mlx.kv_cache.paged.attention import Appended, DecodeStep, PrefillChunk
from semantic.adapters.mlx.kv_cache.paged.dialect import Dialect, Kernel
from semantic.adapters.mlx.kv_cache.paged.page_pool import PageKind, PagePool
from semantic.adapters.mlx.kv_cache.spec_reader import LayerShape

HEAD_DIMS = (64, 80, 96, 128, 192, 256, 512)
"""Widths of keys and of values for which there are kernels."""

_MOST_ROWS = 4096
"""The maximum number of rows of a batch for which there are counters."""
_WIDE, _WIDEST = 128, 256
_FEW_HEADS, _MANY_HEADS = 2, 4
"""Query heads per thread group: `_FEW_HEADS` for keys wider than `_WIDE`, else `_MANY_HEADS`."""
_MOST_TILE, _ROWS_WARPS = 16, 4
_MULTIPROCESSORS, _GROUPS, _SMALL_GROUPS = 132, 3, 4
"""A large GPU has 132 multiprocessors, and each runs three or four thread groups at once."""
_MATRIX_TYPES = (mx.bfloat16, mx.float16)
_MATRICES_SINCE = 80
"""The compute capability, 8.0, with instructions that multiply matrices of these types."""

_ATTEND_INPUTS = ("q", "k", "v", "pages", "plan", "positions", "layer", "after")


class Tiling(NamedTuple):
    """The number of warps per thread group, and of tokens that a warp reads at a time."""

    warps: int
    tile: int

    @property
    def threads(self) -> int:
        return 32 * self.warps


class _Form(NamedTuple):
    """How the kernel of a decode step divides the queries of a KV head among thread groups."""

    together: int  # query heads
    rows: int  # of one sequence
    tiling: Tiling
    multiplies: bool  # with matrix instructions
    at_once: int = _GROUPS  # per multiprocessor


def tiling_of(kind: PageKind, dialect: Dialect) -> Tiling | None:
    """Return a tiling that fits shared memory; None if there is none."""
    shape = numbers_of(kind.shape)
    token_bytes = (shape.k_head_dim + shape.v_head_dim) * shape.dtype.size
    for warps in (4, 2):
        fitting = dialect.space // (warps * dialect.stages * token_bytes)
        if fitting >= 4:  # a warp multiplies four keys at a time  # noqa: PLR2004
            return Tiling(warps, min(_MOST_TILE, 1 << fitting.bit_length() - 1))
    return None


def computable(kind: PageKind, dialect: Dialect) -> bool:
    """Return whether there are kernels for pages of this kind."""
    shape = numbers_of(kind.shape)
    widths = shape.k_head_dim, shape.v_head_dim
    known = shape.dtype in dialect.types and all(width in HEAD_DIMS for width in widths)
    return known and tiling_of(kind, dialect) is not None


class PagedKernels:
    """A `PagedAttention` for one kind of layers."""

    reads_plans = True

    def __init__(self, kind: PageKind, dialect: Dialect) -> None:
        """Raise ValueError if `kind` is not `computable`."""
        if not computable(kind, dialect):
            raise ValueError(f"there are no kernels for {kind.shape}")
        self._kind = kind
        self._shape = numbers_of(kind.shape)
        self._dialect = dialect
        self._forms: dict[tuple[int, bool], _Form] = {}
        self._counters = mx.zeros((_MOST_ROWS * 4 * kind.shape.kv_heads,), mx.int32)
        self._nothing = mx.zeros((1,), mx.int32)
        # Evaluate these now, because they are inputs of every step.
        mx.eval(self._counters, self._nothing)
        self._layers: dict[tuple[int, float], mx.array] = {}
        self._last_bounds = (0, 0, 0, 0, 0), self._nothing

    def reads_together(self, n_heads: int, *, latent: bool = False) -> bool:
        """Return whether a thread group can read keys once for several rows of a sequence."""
        shape = self._shape
        queries, widest = n_heads // shape.kv_heads, _widest(shape)
        fits = not latent and widest <= _WIDEST and queries <= _group_queries(widest)
        return self._dialect.is_cuda and shape.dtype in _MATRIX_TYPES and fits

    def prepare(self, n_heads: int, sinks: Collection[bool], *, latent: bool = False) -> None:
        """Start compiling the kernels of `attend` and `append` for `n_heads` query heads."""
        if not n_heads or n_heads % self._kind.shape.kv_heads:
            return
        n_parts = self._parts(n_heads, self._form(n_heads, latent=latent))
        n_groups = self._kind.shape.kv_heads * n_parts
        if _MOST_ROWS * n_groups > self._counters.size:
            self._counters = mx.zeros((_MOST_ROWS * n_groups,), mx.int32)
            mx.eval(self._counters)
        for with_sinks in sinks:
            self._attention(n_heads, with_sinks, latent)
            if self.reads_together(n_heads, latent=latent):
                self._row_attention(n_heads, with_sinks)
        for gather, write in ((False, True), (True, True)):
            self._append_kernel(gather=gather, write=write)

    def attend(self, step: DecodeStep) -> mx.array:
        latent = step.rope is not None
        if step.together and self.reads_together(step.q.shape[1], latent=latent):
            return self._attend_together(step)
        q, sinks = step.q, step.sinks
        rows, n_heads, _, _ = q.shape
        kv_heads, dim = self._shape.kv_heads, _result_width(self._shape, latent=latent)
        form = self._form(n_heads, latent=latent)
        parts, threads = self._parts(n_heads, form), form.tiling.threads
        if rows * kv_heads * parts > self._counters.size:
            raise ValueError(f"a decode step cannot combine {rows} sequences")
        plan = step.metadata.plan(
            step.kind,
            step.number,
            max(1, _MULTIPROCESSORS * form.at_once // (kv_heads * parts)),
            form.rows,
        )
        of_heads = [] if sinks is None else [sinks.astype(q.dtype)]
        after = self._nothing if step.after is None else step.after
        inputs = [
            q, step.k, step.v, step.pool.data, plan.plan, step.metadata.positions(step.number),
            self._layer(step.layer, step.scale), after, *of_heads,
            *([] if step.rope is None else [step.rope]),
        ]  # fmt: skip
        n = plan.n_results
        shapes = [(n, n_heads, dim), (n, n_heads, 2), (rows, n_heads, 1, dim)]
        dtypes = [mx.float32, mx.float32, q.dtype]
        group = (threads, 1, 1)
        attend, combine = self._attention(n_heads, sinks is not None, latent)
        grid = (threads * plan.n_items, kv_heads * parts, 1)
        if combine is None:
            return attend(
                inputs=[*inputs, self._counters], grid=grid, threadgroup=group,
                output_shapes=shapes, output_dtypes=dtypes,
            )[2]  # fmt: skip
        partial, weight = attend(
            inputs=inputs, grid=grid, threadgroup=group,
            output_shapes=shapes[:2], output_dtypes=dtypes[:2],
        )  # fmt: skip
        return combine(
            inputs=[partial, weight, plan.spans, *of_heads],
            # Padding rows have no results to combine.
            grid=(threads * len(step.metadata.lengths), kv_heads * parts, 1),
            threadgroup=group, output_shapes=shapes[2:], output_dtypes=dtypes[2:],
        )[0]  # fmt: skip

    def _attend_together(self, step: DecodeStep) -> mx.array:
        """Compute attention in runs of one sequence's rows. A run reads the keys only once."""
        q, sinks = step.q, step.sinks
        rows, n_heads, _, _ = q.shape
        shape = self._shape
        dim = _result_width(shape)
        attend, combine = self._row_attention(n_heads, sinks is not None)
        form = _scalar_form(self._kind, self._dialect, n_heads)
        threads, groups = form.tiling.threads, shape.kv_heads * self._parts(n_heads, form)
        most_rows = _group_queries(_widest(shape)) * shape.kv_heads // n_heads
        plan = step.metadata.row_plan(
            step.kind, most_rows, max(1, _MULTIPROCESSORS * _GROUPS // shape.kv_heads)
        )
        n = plan.n_results
        partial, weight = attend(
            inputs=[
                q, step.k, step.v, step.pool.data, plan.plan, step.metadata.positions(step.number),
                self._layer(step.layer, step.scale),
                self._nothing if step.after is None else step.after,
            ],
            grid=(source.THREADS * plan.n_items, shape.kv_heads, 1),
            threadgroup=(source.THREADS, 1, 1),
            output_shapes=[(n, n_heads, dim), (n, n_heads, 2)],
            output_dtypes=[mx.float32, mx.float32],
        )  # fmt: skip
        of_heads = [] if sinks is None else [sinks.astype(q.dtype)]
        return combine(
            inputs=[partial, weight, plan.spans, *of_heads],
            grid=(threads * len(step.metadata.lengths), groups, 1),
            threadgroup=(threads, 1, 1),
            output_shapes=[(rows, n_heads, 1, dim)],
            output_dtypes=[q.dtype],
        )[0]

    def append(self, chunk: PrefillChunk) -> Appended:
        at, gather_from = chunk.at, chunk.gather_from
        before = self._nothing if chunk.after is None else chunk.after
        if gather_from >= at:
            if self._kind.shape.packs is not None:  # attention sees packed heads, also new ones
                return self._append(chunk, at, before, gather=True)
            return Appended(chunk.k, chunk.v, self._append(chunk, at, before).done)
        if self._kind.ring is None:
            return self._append(chunk, gather_from, before, gather=True)
        # In a ring, new tokens overwrite old ones, so read the old ones first.
        read = self._append(chunk, gather_from, before, gather=True, write=False)
        return read._replace(done=self._append(chunk, at, read.done).done)

    def store(self, pool: PagePool, pages: list[int], data: mx.array) -> mx.array:
        inputs = [pool.data, on_device(pages), data]
        names = ["pages", "indices", "data"]
        return self._whole_pages("store", names, source.STORE, inputs, len(pages))

    def copy(self, pool: PagePool, pages: list[int], to: list[int]) -> mx.array:
        pairs = [page for pair in zip(pages, to, strict=True) for page in pair]
        inputs = [pool.data, on_device(pairs)]
        return self._whole_pages("copy", ["pages", "pairs"], source.COPY, inputs, len(pages))

    # Inside

    def _append_kernel(self, *, gather: bool, write: bool) -> Kernel:
        return _built(
            self._dialect,
            "append",
            (
                *_constants(self._kind),
                ("RING", int(self._kind.ring is not None)),
                ("GATHER", int(gather)), ("WRITE", int(write)),
            ),
            ("k", "v", "pages", "page_table", "bounds", "layer", "after"),
            ("all_k", "all_v", "done"),
            source.APPEND,
        )  # fmt: skip

    def _whole_pages(
        self, name: str, names: list[str], body: str, inputs: list[mx.array], n_pages: int
    ) -> mx.array:
        kernel = _built(self._dialect, name, _constants(self._kind), tuple(names), ("done",), body)
        groups = -(-self._kind.page_bytes // 16 // source.THREADS)
        (done,) = kernel(
            inputs=inputs,
            grid=(source.THREADS * groups, n_pages, 1),
            threadgroup=(source.THREADS, 1, 1),
            output_shapes=[(1,)],
            output_dtypes=[mx.int32],
        )
        return done

    def _append(
        self,
        chunk: PrefillChunk,
        first: int,
        after: mx.array,
        *,
        gather: bool = False,
        write: bool = True,
    ) -> Appended:
        """Launch the kernel once `after` is done. If `gather`, gathers tokens from `first` on."""
        k, v, at = chunk.k, chunk.v, chunk.at
        _, heads, n, _ = k.shape
        shape = self._shape
        write_to = at + n - chunk.padding
        keep_from = self._kind.first_kept(at, write_to)
        kernel = self._append_kernel(gather=gather, write=write)
        groups = -(-(at + n - first) * self._vectors // source.THREADS)
        gathered = [
            (1, heads, at + n - first, width) if gather else (1,)
            for width in (shape.k_head_dim, shape.v_head_dim)
        ]
        all_k, all_v, done = kernel(
            inputs=[
                k, v, chunk.table.pool.data, chunk.table.array(),
                self._bounds((at, n, keep_from, first, write_to)),
                self._layer(chunk.layer, 1.0), after,
            ],
            grid=(source.THREADS * groups, heads, 1),
            threadgroup=(source.THREADS, 1, 1),
            output_shapes=[*gathered, (1,)],
            output_dtypes=[k.dtype, k.dtype, mx.int32],
        )  # fmt: skip
        return Appended(all_k, all_v, done)

    @property
    def _vectors(self) -> int:
        """Return the number of threads that write one token of a head, 16 bytes of numbers each."""
        return _widest(self._shape) * self._shape.dtype.size // 16

    def _attention(self, n_heads: int, sinks: bool, latent: bool) -> tuple[Kernel, Kernel | None]:
        """Return the kernel for `n_heads` query heads, and one that combines results if needed."""
        variant = _Variant(n_heads, self._form(n_heads, latent=latent), sinks, latent)
        return _built_attention(self._kind, self._dialect, variant)

    def _row_attention(self, n_heads: int, sinks: bool) -> tuple[Kernel, Kernel]:
        variant = _Variant(n_heads, _scalar_form(self._kind, self._dialect, n_heads), sinks)
        return _built_row_attention(self._kind, self._dialect, variant)

    def _form(self, n_heads: int, *, latent: bool) -> _Form:
        key = n_heads, latent
        if key not in self._forms:
            self._forms[key] = _form_of(self._kind, self._dialect, n_heads, latent=latent)
        return self._forms[key]

    def _parts(self, n_heads: int, form: _Form) -> int:
        return -(-(n_heads // self._kind.shape.kv_heads) // form.together)

    def _bounds(self, bounds: tuple[int, int, int, int, int]) -> mx.array:
        if self._last_bounds[0] != bounds:
            self._last_bounds = bounds, on_device(bounds)
        return self._last_bounds[1]

    def _layer(self, layer: int, scale: float) -> mx.array:
        array = self._layers.get((layer, scale))
        if array is None:
            (bits,) = struct.unpack("<i", struct.pack("<f", scale))
            array = self._layers[layer, scale] = on_device([layer, bits])
            mx.eval(array)
        return array


@functools.cache
def _built(
    dialect: Dialect,
    name: str,
    constants: tuple[tuple[str, int | mx.Dtype], ...],
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
    body: str,
) -> Kernel:
    return dialect.build(name, constants, inputs, outputs, body)


def _form_of(kind: PageKind, dialect: Dialect, n_heads: int, *, latent: bool) -> _Form:
    shape = numbers_of(kind.shape)
    known = shape.dtype in _MATRIX_TYPES and _widest(shape) <= _WIDEST and not latent
    if not (dialect.fused and known and capability() >= _MATRICES_SINCE):
        return _scalar_form(kind, dialect, n_heads, latent=latent)
    together = _evenly(n_heads // shape.kv_heads, rows_source.WARP_QUERIES)
    tiling = Tiling(2 if _widest(shape) > _WIDE else 4, rows_source.WARP_QUERIES)
    small = kind.shape.packs is not None and _widest(shape) <= _WIDE
    return _Form(
        together, rows_source.WARP_QUERIES // together, tiling, multiplies=True,
        at_once=_SMALL_GROUPS if small else _GROUPS,
    )  # fmt: skip


def _scalar_form(kind: PageKind, dialect: Dialect, n_heads: int, *, latent: bool = False) -> _Form:
    shape = numbers_of(kind.shape)
    width = shape.k_head_dim + (shape.v_head_dim if latent else 0)
    most = _FEW_HEADS if width > _WIDE else _MANY_HEADS
    if width > _WIDEST and not dialect.is_cuda:
        most = 1
    together = _evenly(n_heads // shape.kv_heads, most)
    return _Form(together, 1, _tiling(kind, dialect), multiplies=False)


def _evenly(n: int, most: int) -> int:
    """Return the size of equal parts of `n`, as few as have at most `most`."""
    return -(-n // -(-n // most))


class _Variant(NamedTuple):
    n_heads: int
    form: _Form
    sinks: bool
    latent: bool = False


@functools.cache
def _built_attention(
    kind: PageKind, dialect: Dialect, variant: _Variant
) -> tuple[Kernel, Kernel | None]:
    shape = numbers_of(kind.shape)
    constants = _attention_constants(kind, dialect, variant)
    (warps, tile), form = variant.form.tiling, variant.form
    partial = ("partial", "weight")
    of_heads = (*(("sinks",) if variant.sinks else ()), *(("rope",) if variant.latent else ()))
    inputs = (*_ATTEND_INPUTS, *of_heads)
    if form.multiplies:
        held = kind.shape
        padding = 2 * 16 if held.packs is None else 0
        pitch = (held.k_head_dim + held.v_head_dim) * held.dtype.size + padding
        space = max(2 * warps * tile * pitch, warps * tile * shape.v_head_dim * 4)
        body = (
            rows_source.MATRICES + source.SIZES + rows_source.ATTEND_RUN + source.DIRECT
            + source.ATTEND_END + source.LAST_ONE
            + rows_source.EACH_ROW + source.COMBINE + rows_source.EACH_ROW_END
        )  # fmt: skip
        attend = dialect.build(
            "attend_run", (*constants, _half(shape)), (*inputs, "counters"), (*partial, "out"),
            body, space, None if form.at_once == _GROUPS else (form.tiling.threads, form.at_once),
        )  # fmt: skip
        return attend, None
    token_bytes = (shape.k_head_dim + shape.v_head_dim) * shape.dtype.size
    width = _result_width(shape, latent=variant.latent)
    at_once = max(1, 512 // (width * shape.dtype.size))
    space = warps * max(dialect.stages * tile * token_bytes, at_once * form.together * width * 4)
    if dialect.fused:
        body = source.ATTEND + source.DIRECT + source.ATTEND_END + source.LAST_ONE + source.COMBINE
        attend = dialect.build(
            "attend", constants, (*inputs, "counters"), (*partial, "out"), body, space
        )
        return attend, None
    body = source.ATTEND + source.ATTEND_END
    attend = dialect.build("attend", constants, inputs, partial, body, space)
    return attend, _built_combine(dialect, constants)


@functools.cache
def _built_row_attention(
    kind: PageKind, dialect: Dialect, variant: _Variant
) -> tuple[Kernel, Kernel]:
    shape = numbers_of(kind.shape)
    widest = _widest(shape)
    constants = _attention_constants(kind, dialect, variant)
    mine = (*constants, ("MT", _multiple(widest)), _half(shape))
    key, value = (dim * shape.dtype.size + 16 for dim in (shape.k_head_dim, shape.v_head_dim))
    attend = dialect.build(
        "attend_rows",
        mine,
        _ATTEND_INPUTS,
        ("partial", "weight"),
        rows_source.MATRICES + source.PAGE + rows_source.ATTEND_ROWS,
        _group_queries(widest) * key + 2 * rows_source.KEYS * (key + value),
    )
    return attend, _built_combine(dialect, constants)


def _built_combine(dialect: Dialect, constants: tuple[tuple[str, int | mx.Dtype], ...]) -> Kernel:
    joined = ("partial", "weight", "spans", *(("sinks",) if ("SINKS", 1) in constants else ()))
    return _built(
        dialect, "combine", constants, joined, ("out",), source.COMBINE_START + source.COMBINE
    )


def _attention_constants(
    kind: PageKind, dialect: Dialect, variant: _Variant
) -> tuple[tuple[str, int | mx.Dtype], ...]:
    together, (warps, tile) = variant.form.together, variant.form.tiling
    return (
        *_constants(kind), ("G", variant.n_heads // kind.shape.kv_heads), ("GT", together),
        ("WARPS", warps), ("TILE", tile), ("STAGES", dialect.stages),
        ("WINDOW", kind.window or 0), ("SINKS", int(variant.sinks)),
        ("LATENT", int(variant.latent)),
    )  # fmt: skip


def _constants(kind: PageKind) -> tuple[tuple[str, int | mx.Dtype], ...]:
    shape = numbers_of(kind.shape)
    return (
        ("T", shape.dtype), ("S", kind.shape.dtype), ("PACKED", int(kind.shape.packs is not None)),
        ("DK", shape.k_head_dim), ("DV", shape.v_head_dim),
        ("H", shape.kv_heads), ("LAYERS", len(kind.layers)),
    )  # fmt: skip


def _tiling(kind: PageKind, dialect: Dialect) -> Tiling:
    tiling = tiling_of(kind, dialect)
    if tiling is None:
        raise AssertionError(f"kernels for {kind.shape} do not fit")
    return tiling


def _widest(shape: LayerShape) -> int:
    return max(shape.k_head_dim, shape.v_head_dim)


def _result_width(shape: LayerShape, *, latent: bool = False) -> int:
    return shape.k_head_dim if latent else shape.v_head_dim


def _half(shape: LayerShape) -> tuple[str, int]:
    return "HALF", int(shape.dtype == mx.float16)


def _multiple(head_dim: int) -> int:
    """Return how many matrix instructions a warp has registers for."""
    return 1 if head_dim > _WIDE else 2


def _group_queries(head_dim: int) -> int:
    """Return the maximum of a thread group's rows times query heads per KV head."""
    return _ROWS_WARPS * rows_source.WARP_QUERIES * _multiple(head_dim)
