"""The paged kernels bound to MLX: attention over pages, and tokens put into them.

The kernels write to the pages, which MLX takes for an input: the pages are never copied, and the
order of the writes follows from what is computed with what (a step's token depends on all that
the step before wrote). Knows one kind of pages; neither sequences nor batches.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from typing import cast

import mlx.core as mx

from semantic.adapters.mlx.paged import kernel_source as source
from semantic.adapters.mlx.paged.attention import Appended, Place
from semantic.adapters.mlx.paged.kinds import PageKind
from semantic.adapters.mlx.paged.numbers import on_device
from semantic.adapters.mlx.paged.pages import Pages
from semantic.adapters.mlx.paged.sequence import Chain
from semantic.domain.value_objects import BLOCK_TOKENS

HEAD_DIMS = (64, 80, 96, 128, 256)
DTYPES = (mx.bfloat16, mx.float16, mx.float32)

_MOST_ROWS = 4096
"""Rows of a batch that there are counters for."""
_WIDE = 128
_FEW_HEADS, _MANY_HEADS = 2, 4
"""Query heads of a thread group where a head is wider than _WIDE, and where it is not."""
_GROUPS_AT_ONCE = 396
"""Thread groups that run at once on a large GPU: three on each of 132 multiprocessors."""

_Kernel = Callable[..., list[mx.array]]
_Template = list[tuple[str, mx.Dtype | int | bool]]


class PagedKernels:
    """Implements `PagedAttention` for one kind of layers."""

    def __init__(self, kind: PageKind) -> None:
        self._kind = kind
        token_bytes = kind.shape.k_head_dim * kind.shape.dtype.size
        self._tile = min(16, 1 << (4096 // token_bytes).bit_length() - 1)  # a power of two
        self._space = max(
            4 * 2 * 2 * self._tile * token_bytes,
            4 * max(1, 512 // token_bytes) * 4 * kind.shape.k_head_dim * 4,
        )
        self._layers = [on_device([i]) for i in range(len(kind.layers))]
        self._counters = mx.zeros((_MOST_ROWS * kind.shape.kv_heads,), mx.int32)
        self._no_sinks = mx.zeros((1,), mx.float32)
        self._nothing = mx.zeros((1,), mx.int32)
        self._scales: dict[float, mx.array] = {}
        self._last_bounds = (0, 0, 0, 0), self._nothing
        self._templates: dict[tuple[int, mx.Dtype | None], _Template] = {}
        # Not lazily: they are inputs of every step.
        mx.eval(self._layers, self._counters, self._no_sinks, self._nothing)

    def attend(
        self,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        place: Place,
        scale: float,
        sinks: mx.array | None,
    ) -> mx.array:
        """See `PagedAttention.attend`."""
        rows, n_heads, _, dim = q.shape
        kv_heads = self._kind.shape.kv_heads
        parts = self._parts(n_heads)
        plan = place.lineup.plan(
            place.kind, place.step, max(1, _GROUPS_AT_ONCE // (kv_heads * parts))
        )
        n = plan.n_items
        _, _, out = _attend(self._space)(
            inputs=[
                q, k, v, place.pages.data, plan.plan, place.lineup.positions(place.step),
                self._layers[place.layer],
                self._scale(scale), self._no_sinks if sinks is None else sinks, self._counters,
            ],
            template=self._template(n_heads, None if sinks is None else sinks.dtype),
            grid=(source.THREADS * n, kv_heads * parts, 1),
            threadgroup=(source.THREADS, 1, 1),
            output_shapes=[(n, n_heads, dim), (n, n_heads, 2), (rows, n_heads, 1, dim)],
            output_dtypes=[mx.float32, mx.float32, q.dtype],
        )  # fmt: skip
        return out

    def append(
        self, k: mx.array, v: mx.array, chain: Chain, at: int, gather_from: int, layer: int
    ) -> Appended:
        """See `PagedAttention.append`."""
        nothing = self._nothing
        if gather_from >= at:
            return Appended(k, v, self._append(k, v, chain, at, at, layer, nothing).done)
        if self._kind.ring is None:
            return self._append(k, v, chain, at, gather_from, layer, nothing)
        # In a ring new tokens take the place of old ones: those are read before.
        read = self._append(k, v, chain, at, gather_from, layer, nothing, write=False)
        return read._replace(done=self._append(k, v, chain, at, at, layer, read.done).done)

    def store(self, pages: Pages, columns: list[int], data: mx.array) -> mx.array:
        """See `PagedAttention.store`."""
        kind = self._kind
        groups = -(-kind.column_bytes // 16 // source.THREADS)
        (done,) = _store()(
            inputs=[pages.data, on_device(columns), data],
            template=[
                ("T", data.dtype), ("D", kind.shape.k_head_dim), ("H", kind.shape.kv_heads),
                ("LAYERS", len(kind.layers)),
            ],
            grid=(source.THREADS * groups, len(columns), 1),
            threadgroup=(source.THREADS, 1, 1),
            output_shapes=[(1,)],
            output_dtypes=[mx.int32],
        )  # fmt: skip
        return done

    # Inside

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
        kind = self._kind
        keep_from = at if kind.ring is None else max(at, at + n - kind.ring * BLOCK_TOKENS)
        gather = first < at
        groups = -(-(at + n - first) * (dim * k.dtype.size // 16) // source.THREADS)
        gathered = (1, heads, at + n - first, dim) if gather else (1,)
        all_k, all_v, done = _append()(
            inputs=[
                k, v, chain.pages.data, chain.array(), self._bounds((at, n, keep_from, first)),
                self._layers[layer], after,
            ],
            template=[
                ("T", k.dtype), ("D", dim), ("H", heads), ("LAYERS", len(kind.layers)),
                ("RING", kind.ring is not None), ("GATHER", gather), ("WRITE", write),
            ],
            grid=(source.THREADS * groups, heads, 1),
            threadgroup=(source.THREADS, 1, 1),
            output_shapes=[gathered, gathered, (1,)],
            output_dtypes=[k.dtype, k.dtype, mx.int32],
        )  # fmt: skip
        return Appended(all_k, all_v, done)

    def _parts(self, n_heads: int) -> int:
        """Thread groups that share the query heads of a KV head."""
        return -(-(n_heads // self._kind.shape.kv_heads) // self._heads_together(n_heads))

    def _heads_together(self, n_heads: int) -> int:
        """Query heads of one thread group: they read the keys once, but each takes registers."""
        group = n_heads // self._kind.shape.kv_heads
        most = _FEW_HEADS if self._kind.shape.k_head_dim > _WIDE else _MANY_HEADS
        return -(-group // -(-group // most))

    def _template(self, n_heads: int, sinks: mx.Dtype | None) -> _Template:
        template = self._templates.get((n_heads, sinks))
        if template is None:
            shape = self._kind.shape
            template = [
                ("T", shape.dtype), ("D", shape.k_head_dim), ("H", shape.kv_heads),
                ("G", n_heads // shape.kv_heads), ("GT", self._heads_together(n_heads)),
                ("TILE", self._tile), ("STAGES", 2), ("LAYERS", len(self._kind.layers)),
                ("WINDOW", self._kind.window or 0), ("SINKS", sinks is not None),
                ("S", sinks or mx.float32),
            ]  # fmt: skip
            self._templates[n_heads, sinks] = template
        return template

    def _bounds(self, bounds: tuple[int, int, int, int]) -> mx.array:
        """The same for every layer of a chunk."""
        if self._last_bounds[0] != bounds:
            self._last_bounds = bounds, on_device(bounds)
        return self._last_bounds[1]

    def _scale(self, scale: float) -> mx.array:
        array = self._scales.get(scale)
        if array is None:
            array = self._scales[scale] = on_device([1]).astype(mx.float32) * scale
            mx.eval(array)
        return array


@functools.cache
def _attend(space: int) -> _Kernel:
    body = source.CUDA_IDS + source.CUDA_SPACE + source.ATTEND + source.LAST_ONE + source.COMBINE
    names = ["q", "k", "v", "pages", "plan", "positions", "layer", "scale", "sinks", "counters"]
    return _kernel(f"attend_{space}", names, ["partial", "weight", "out"], body, space)


@functools.cache
def _append() -> _Kernel:
    names = ["k", "v", "pages", "columns", "bounds", "layer", "after"]
    return _kernel("append", names, ["all_k", "all_v", "done"], source.CUDA_IDS + source.APPEND)


@functools.cache
def _store() -> _Kernel:
    return _kernel("store", ["pages", "columns", "data"], ["done"], source.CUDA_IDS + source.STORE)


def _kernel(name: str, inputs: list[str], outputs: list[str], body: str, space: int = 0) -> _Kernel:
    # MLX finds a compiled kernel by its name alone.
    version = hashlib.sha256((source.CUDA_NAMES + body).encode()).hexdigest()[:12]
    made = mx.fast.cuda_kernel(
        name=f"semantic_{name}_{version}",
        input_names=inputs,
        output_names=outputs,
        source=body,
        header=source.CUDA_NAMES,
        ensure_row_contiguous=False,
        shared_memory=space,
    )
    return cast(_Kernel, made)
