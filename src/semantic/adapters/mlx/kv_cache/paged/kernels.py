"""The paged kernels bound to MLX: attention over pages, and tokens put into them.

The kernels write to the pages, which MLX takes for an input: the pages are never copied, and MLX
does not know that they change. So whoever has to see what was written gets something that the
writer returned, as an input: that is an order MLX keeps. Knows one kind of pages; neither sequences
nor batches.
"""

from __future__ import annotations

import functools
import struct

import mlx.core as mx

from semantic.adapters.mlx.arrays import on_device
from semantic.adapters.mlx.kv_cache.paged import kernel_source as source
from semantic.adapters.mlx.kv_cache.paged.attention import Appended, Place
from semantic.adapters.mlx.kv_cache.paged.dialect import Dialect, Kernel
from semantic.adapters.mlx.kv_cache.paged.kinds import PageKind
from semantic.adapters.mlx.kv_cache.paged.page_pool import Pages
from semantic.adapters.mlx.kv_cache.paged.page_table import Chain

HEAD_DIMS = (64, 80, 96, 128, 256)

_MOST_ROWS = 4096
"""Rows of a batch, each with at most 4 thread groups per KV head, that there are counters for."""
_WIDE = 128
_FEW_HEADS, _MANY_HEADS = 2, 4
"""Query heads of a thread group where a head is wider than _WIDE, and where it is not."""
_MOST_TILE, _WARPS = 16, 4
_GROUPS_AT_ONCE = 396
"""Thread groups that run at once on a large GPU: three on each of 132 multiprocessors."""

_ATTEND_INPUTS = ("q", "k", "v", "pages", "plan", "positions", "layer", "after")


def tile_of(kind: PageKind, dialect: Dialect) -> int:
    """Tokens that a warp reads at a time, a power of two; 0 when not even four have room."""
    token_bytes = kind.shape.k_head_dim * kind.shape.dtype.size
    fitting = dialect.space // (2 * _WARPS * dialect.stages * token_bytes)
    tile = min(_MOST_TILE, 1 << max(fitting, 1).bit_length() - 1)
    return tile if tile >= _WARPS else 0


class PagedKernels:
    """Implements `PagedAttention` for one kind of layers."""

    def __init__(self, kind: PageKind, dialect: Dialect) -> None:
        """`kind` must be one that `supports` says yes to."""
        self._kind = kind
        self._dialect = dialect
        self._counters = mx.zeros((_MOST_ROWS * 4 * kind.shape.kv_heads,), mx.int32)
        self._nothing = mx.zeros((1,), mx.int32)
        # Not lazily: they are inputs of every step.
        mx.eval(self._counters, self._nothing)
        self._layers: dict[tuple[int, float], mx.array] = {}
        self._last_bounds = (0, 0, 0, 0), self._nothing

    def attend(
        self,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        place: Place,
        scale: float,
        sinks: mx.array | None,
        after: mx.array | None,
    ) -> mx.array:
        """See `PagedAttention.attend`."""
        rows, n_heads, _, dim = q.shape
        kv_heads = self._kind.shape.kv_heads
        parts = self._parts(n_heads)
        if rows * kv_heads * parts > self._counters.size:
            raise ValueError(f"{rows} sequences are more than a step can join")
        plan = place.lineup.plan(
            place.kind, place.step, max(1, _GROUPS_AT_ONCE // (kv_heads * parts))
        )
        of_heads = [] if sinks is None else [sinks.astype(q.dtype)]
        inputs = [
            q, k, v, place.pages.data, plan.plan, place.lineup.positions(place.step),
            self._layer(place.layer, scale), self._nothing if after is None else after, *of_heads,
        ]  # fmt: skip
        n = plan.n_items
        shapes = [(n, n_heads, dim), (n, n_heads, 2), (rows, n_heads, 1, dim)]
        dtypes = [mx.float32, mx.float32, q.dtype]
        group = (source.THREADS, 1, 1)
        attend, combine = self._attention(n_heads, sinks is not None)
        grid = (source.THREADS * n, kv_heads * parts, 1)
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
            grid=(source.THREADS * rows, kv_heads * parts, 1), threadgroup=group,
            output_shapes=shapes[2:], output_dtypes=dtypes[2:],
        )[0]  # fmt: skip

    def append(
        self,
        k: mx.array,
        v: mx.array,
        chain: Chain,
        at: int,
        gather_from: int,
        layer: int,
        after: mx.array | None,
    ) -> Appended:
        """See `PagedAttention.append`."""
        before = self._nothing if after is None else after
        if gather_from >= at:
            return Appended(k, v, self._append(k, v, chain, at, at, layer, before).done)
        if self._kind.ring is None:
            return self._append(k, v, chain, at, gather_from, layer, before)
        # In a ring new tokens take the place of old ones: those are read before.
        read = self._append(k, v, chain, at, gather_from, layer, before, write=False)
        return read._replace(done=self._append(k, v, chain, at, at, layer, read.done).done)

    def store(self, pages: Pages, columns: list[int], data: mx.array) -> mx.array:
        """See `PagedAttention.store`."""
        inputs = [pages.data, on_device(columns), data]
        names = ["pages", "columns", "data"]
        return self._columns("store", names, source.STORE, inputs, len(columns))

    def copy(self, pages: Pages, columns: list[int], to: list[int]) -> mx.array:
        """See `PagedAttention.copy`."""
        pairs = [column for pair in zip(columns, to, strict=True) for column in pair]
        inputs = [pages.data, on_device(pairs)]
        return self._columns("copy", ["pages", "pairs"], source.COPY, inputs, len(columns))

    # Inside

    def _columns(
        self, name: str, names: list[str], body: str, inputs: list[mx.array], n_columns: int
    ) -> mx.array:
        """One launch over so many columns."""
        shape = self._kind.shape
        kernel = _built(
            self._dialect, name, self._constants(shape.dtype), tuple(names), ("done",), body
        )
        groups = -(-self._kind.column_bytes // 16 // source.THREADS)
        (done,) = kernel(
            inputs=inputs,
            grid=(source.THREADS * groups, n_columns, 1),
            threadgroup=(source.THREADS, 1, 1),
            output_shapes=[(1,)],
            output_dtypes=[mx.int32],
        )
        return done

    def _append(
        self,
        k: mx.array,
        v: mx.array,
        chain: Chain,
        at: int,
        first: int,
        layer: int,
        after: mx.array,
        *,
        write: bool = True,
    ) -> Appended:
        """One launch of the kernel, once `after` is there; gathers if `first` is before `at`."""
        _, heads, n, dim = k.shape
        keep_from = self._kind.first_kept(at, at + n)
        gather = first < at
        kernel = _built(
            self._dialect,
            "append",
            (
                *self._constants(k.dtype),
                ("RING", int(self._kind.ring is not None)),
                ("GATHER", int(gather)), ("WRITE", int(write)),
            ),
            ("k", "v", "pages", "columns", "bounds", "layer", "after"),
            ("all_k", "all_v", "done"),
            source.APPEND,
        )  # fmt: skip
        groups = -(-(at + n - first) * (dim * k.dtype.size // 16) // source.THREADS)
        gathered = (1, heads, at + n - first, dim) if gather else (1,)
        all_k, all_v, done = kernel(
            inputs=[
                k, v, chain.pages.data, chain.array(), self._bounds((at, n, keep_from, first)),
                self._layer(layer, 1.0), after,
            ],
            grid=(source.THREADS * groups, heads, 1),
            threadgroup=(source.THREADS, 1, 1),
            output_shapes=[gathered, gathered, (1,)],
            output_dtypes=[k.dtype, k.dtype, mx.int32],
        )  # fmt: skip
        return Appended(all_k, all_v, done)

    def _attention(self, n_heads: int, sinks: bool) -> tuple[Kernel, Kernel | None]:
        """The kernels for so many query heads: one, or one and another that joins its results."""
        return _built_attention(self._kind, self._dialect, n_heads, self._together(n_heads), sinks)

    def _constants(self, dtype: mx.Dtype) -> tuple[tuple[str, int | mx.Dtype], ...]:
        shape = self._kind.shape
        return (
            ("T", dtype), ("D", shape.k_head_dim), ("H", shape.kv_heads),
            ("LAYERS", len(self._kind.layers)),
        )  # fmt: skip

    def _parts(self, n_heads: int) -> int:
        """Thread groups that share the query heads of a KV head."""
        return -(-(n_heads // self._kind.shape.kv_heads) // self._together(n_heads))

    def _together(self, n_heads: int) -> int:
        """Query heads of one thread group: they read the keys once, but each takes registers."""
        group = n_heads // self._kind.shape.kv_heads
        most = _FEW_HEADS if self._kind.shape.k_head_dim > _WIDE else _MANY_HEADS
        return -(-group // -(-group // most))

    def _bounds(self, bounds: tuple[int, int, int, int]) -> mx.array:
        """The same for every layer of a chunk."""
        if self._last_bounds[0] != bounds:
            self._last_bounds = bounds, on_device(bounds)
        return self._last_bounds[1]

    def _layer(self, layer: int, scale: float) -> mx.array:
        """A layer's number and the bits of its scale."""
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


@functools.cache
def _built_attention(
    kind: PageKind, dialect: Dialect, n_heads: int, together: int, sinks: bool
) -> tuple[Kernel, Kernel | None]:
    shape = kind.shape
    constants: list[tuple[str, int | mx.Dtype]] = [
        ("T", shape.dtype), ("D", shape.k_head_dim), ("H", shape.kv_heads),
        ("G", n_heads // shape.kv_heads), ("GT", together), ("TILE", tile_of(kind, dialect)),
        ("STAGES", dialect.stages), ("LAYERS", len(kind.layers)), ("WINDOW", kind.window or 0),
        ("SINKS", int(sinks)),
    ]  # fmt: skip
    tile_bytes = tile_of(kind, dialect) * shape.k_head_dim * shape.dtype.size
    row_bytes = together * shape.k_head_dim * 4
    at_once = max(1, 512 // (shape.k_head_dim * shape.dtype.size))
    space = max(_WARPS * dialect.stages * 2 * tile_bytes, _WARPS * at_once * row_bytes)
    partial = ("partial", "weight")
    of_heads = ("sinks",) if sinks else ()
    inputs = (*_ATTEND_INPUTS, *of_heads)
    if dialect.fused:
        body = source.ATTEND + source.DIRECT + source.ATTEND_END + source.LAST_ONE + source.COMBINE
        attend = dialect.build(
            "attend", constants, (*inputs, "counters"), (*partial, "out"), body, space
        )
        return attend, None
    body = source.ATTEND + source.ATTEND_END
    attend = dialect.build("attend", constants, inputs, partial, body, space)
    body = source.COMBINE_START + source.COMBINE
    joined = (*partial, "spans", *of_heads)
    return attend, dialect.build("combine", constants, joined, ("out",), body)
