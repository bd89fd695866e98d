"""The kernels' text for Metal compiles, as far as that can be known without a Mac.

Metal is C++ with address spaces, and so is OpenCL's C++, which clang reads everywhere: with Metal's
names for OpenCL's, clang checks syntax, types and address spaces. What it cannot tell is whether
Metal's own compiler agrees in every word, and what the kernels compute: the former is tried on the
user's device before anything is believed, the latter in `tests/gpu`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import pytest

from semantic.adapters.mlx.kv_cache.eight_bits import numbers_of, packed_shape
from semantic.adapters.mlx.kv_cache.paged import kernel_source, kernels
from semantic.adapters.mlx.kv_cache.paged.attention import DecodeStep, PrefillChunk
from semantic.adapters.mlx.kv_cache.paged.batch_metadata import BatchMetadata
from semantic.adapters.mlx.kv_cache.paged.dialect import METAL
from semantic.adapters.mlx.kv_cache.paged.kernels import HEAD_DIMS, PagedKernels, computable
from semantic.adapters.mlx.kv_cache.paged.page_pool import (
    PagedSequence,
    PageKind,
    PagePool,
    PageTable,
)
from semantic.adapters.mlx.kv_cache.spec_reader import LayerShape
from tests.support.clang_errors import errors_of
from tests.support.lanes import THOROUGH

METAL_IN_OPENCL = """
#pragma OPENCL EXTENSION cl_khr_fp16 : enable
#define device __global
#define constant __constant
#define threadgroup __local
#define thread __private
typedef unsigned long size_t;
typedef unsigned uint3 __attribute__((ext_vector_type(3)));
typedef unsigned uint4 __attribute__((ext_vector_type(4)));
typedef float float4 __attribute__((ext_vector_type(4)));
typedef half bfloat16_t;
namespace mem_flags { constexpr __constant int mem_threadgroup = 1; }
void threadgroup_barrier(int);
void simdgroup_barrier(int);
float simd_shuffle_xor(float, unsigned short);
float exp2(float);
float max(float, float);
float min(float, float);
float rint(float);
typedef unsigned uint;
typedef unsigned char uchar;
int max(int, int);
int min(int, int);
template <class A, class B> A as_type(B);
"""

ARGUMENTS = ("-x", "clcpp", "-cl-std=clc++2021", "-cl-no-stdinc")

SMALL = 8
"""MLX puts inputs of fewer elements into the constant address space."""
NAMES = {
    mx.bfloat16: "bfloat16_t", mx.float16: "half", mx.float32: "float", mx.int32: "int",
    mx.uint8: "uchar",
}  # fmt: skip
IDS = ("thread_position_in_threadgroup", "threadgroup_position_in_grid")

DTYPES = (mx.bfloat16, mx.float16, mx.float32)


@dataclass(frozen=True)
class Text:
    """A kernel as it was given to MLX."""

    inputs: Sequence[str]
    outputs: Sequence[str]
    source: str
    header: str

    def launched(self, inputs: Sequence[mx.array], outputs: Sequence[mx.Dtype]) -> str:
        """All of it for arrays such as these, as MLX writes it."""
        given: list[str] = []
        for name, array in zip(self.inputs, inputs, strict=True):
            space = "constant" if array.size < SMALL else "device"
            given.append(f"const {space} {NAMES[array.dtype]}* {name}")
            for about, dtype in (("shape", "int"), ("strides", "long")):
                if f"{name}_{about}" in self.source:
                    given.append(f"const constant {dtype}* {name}_{about}")
        given += [f"device {NAMES[t]}* {n}" for n, t in zip(self.outputs, outputs, strict=True)]
        given += [f"uint3 {name}" for name in IDS if name in self.source]
        arguments = ", ".join(given)
        return (
            f"{METAL_IN_OPENCL}{self.header}\n__kernel void it({arguments}) {{\n{self.source}\n}}"
        )


class Compiler:
    """Stands where MLX compiles kernels, and keeps what clang has to say of each launch."""

    def __init__(self) -> None:
        self.errors: list[str] = []
        self.n_launches = 0

    def metal_kernel(
        self,
        name: str,  # noqa: ARG002
        input_names: Sequence[str],
        output_names: Sequence[str],
        source: str,
        header: str,
        ensure_row_contiguous: bool,  # noqa: ARG002
    ) -> object:
        text = Text(input_names, output_names, source, header)

        def launch(
            inputs: Sequence[mx.array],
            output_shapes: Sequence[tuple[int, ...]],
            output_dtypes: Sequence[mx.Dtype],
            **_: object,
        ) -> list[mx.array]:
            self.n_launches += 1
            self.errors += errors_of(text.launched(inputs, output_dtypes), "it.clcpp", *ARGUMENTS)
            return [mx.zeros(s, t) for s, t in zip(output_shapes, output_dtypes, strict=True)]

        return launch


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    made = Compiler()
    monkeypatch.setattr(mx.fast, "metal_kernel", made.metal_kernel)
    kernels._built.cache_clear()
    kernels._built_attention.cache_clear()
    return made


WIDTHS = [*((dim, dim) for dim in HEAD_DIMS), (192, 128), (128, 192), (96, 64)]
"""Of keys and values."""

TOO_LARGE = [((512, 512), mx.float32), ((512, 64), mx.float32)]
"""What a thread group on Metal has no room for."""


def kind_of(
    widths: tuple[int, int],
    kv_heads: int,
    dtype: mx.Dtype,
    window: int | None,
    *,
    packed: bool = False,
) -> PageKind:
    ring = None if window is None else 3
    shape = LayerShape(kv_heads, *widths, dtype)
    return PageKind((0, 1), packed_shape(shape) if packed else shape, window, ring)


def sequence_in(pages: PagePool, n_tokens: int) -> PagedSequence:
    table = PageTable(pages)
    table.reserve(n_tokens)
    return PagedSequence([table])


def attend(
    kind: PageKind, group: int, lengths: tuple[int, ...], *, with_sinks: bool, latent: bool = False
) -> None:
    """One step of sequences with so many tokens, through the kernels for Metal."""
    shape = numbers_of(kind.shape)
    metal, pages = PagedKernels(kind, METAL), PagePool(kind)
    sequences = tuple(sequence_in(pages, length + 1) for length in lengths)
    n, n_heads = len(lengths), shape.kv_heads * group
    q = mx.zeros((n, n_heads, 1, shape.k_head_dim), shape.dtype)
    k, v = (
        mx.zeros((n, shape.kv_heads, 1, width), shape.dtype)
        for width in (shape.k_head_dim, shape.v_head_dim)
    )
    rope = mx.zeros((n, n_heads, 1, shape.v_head_dim), shape.dtype) if latent else None
    sinks = mx.zeros((n_heads,), shape.dtype) if with_sinks else None
    metadata = BatchMetadata(sequences, lengths)
    out = metal.attend(DecodeStep(q, k, v, metadata, 0, 0, 1, 1.0, sinks, None, rope=rope))
    assert out.shape == (n, n_heads, 1, shape.k_head_dim if latent else shape.v_head_dim)


def shapes(*widths: tuple[int, int]) -> list[object]:
    """Every width and every type; every second pair of them by default."""
    return [
        pytest.param(one, dtype, marks=[] if (i + j) % 2 == 0 else [pytest.mark.thorough])
        for i, one in enumerate(widths)
        for j, dtype in enumerate(DTYPES)
    ]


@pytest.mark.parametrize(("widths", "dtype"), shapes(*WIDTHS), ids=str)
def test_attention_compiles(compiler: Compiler, widths: tuple[int, int], dtype: mx.Dtype) -> None:
    ways = itertools.product(
        [(1, 1), (2, 3), (1, 8), (8, 4)], [None, 300], [False, True], [(5,), (700, 3, 300, 0)]
    )
    some = list(ways)[:: 1 if THOROUGH else 5]  # each value occurs
    for (kv_heads, group), window, with_sinks, lengths in some:
        kind = kind_of(widths, kv_heads, dtype, window)
        if not computable(kind, METAL):
            assert (widths, dtype) in TOO_LARGE
            pytest.skip("a thread group on Metal has no room for a tile")
        attend(kind, group, lengths, with_sinks=with_sinks)
    assert not compiler.errors, "\n".join(sorted(set(compiler.errors)))
    assert compiler.n_launches == 2 * len(some)


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=str)
@pytest.mark.parametrize("widths", [(512, 64), (256, 64)], ids=str)
def test_attention_to_latents_compiles(
    compiler: Compiler, widths: tuple[int, int], dtype: mx.Dtype
) -> None:
    for group, lengths in itertools.product([1, 16, 20], [(5,), (700, 3, 300, 0)]):
        attend(kind_of(widths, 1, dtype, None), group, lengths, with_sinks=False, latent=True)
    assert not compiler.errors, "\n".join(sorted(set(compiler.errors)))
    assert compiler.n_launches == 12


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 300])
def test_packed_rows_compile(compiler: Compiler, dtype: mx.Dtype, window: int | None) -> None:
    for widths, latent in (((64, 64), False), ((192, 128), False), ((256, 64), True)):
        kind = kind_of(widths, 2, dtype, window, packed=True)
        if not computable(kind, METAL):
            assert dtype == mx.float32
            continue
        attend(kind, 3, (700, 3), with_sinks=False, latent=latent)
        metal, pages = PagedKernels(kind, METAL), PagePool(kind)
        (table,) = sequence_in(pages, 600).tables
        k, v = (mx.zeros((1, 2, 40, width), dtype) for width in widths)
        for at, gather_from in ((0, 0), (560, 300)):
            metal.append(PrefillChunk(k, v, table, at, gather_from, 0, None))
        metal.store(pages, [1], mx.zeros((1, *kind.page_shape), mx.uint8))
    assert compiler.n_launches >= 5
    assert not compiler.errors, "\n".join(sorted(set(compiler.errors)))


@pytest.mark.parametrize(("widths", "dtype"), shapes(*WIDTHS, (512, 64)), ids=str)
@pytest.mark.parametrize("window", [None, 300])
def test_chunks_and_columns_compile(
    compiler: Compiler, widths: tuple[int, int], dtype: mx.Dtype, window: int | None
) -> None:
    kind = kind_of(widths, 2, dtype, window)
    if not computable(kind, METAL):
        assert (widths, dtype) in TOO_LARGE
        pytest.skip("a thread group on Metal has no room for a tile")
    metal, pages = PagedKernels(kind, METAL), PagePool(kind)
    for length in (600, 5000):  # few columns and many
        (table,) = sequence_in(pages, length).tables
        k, v = (mx.zeros((1, 2, 40, width), dtype) for width in widths)
        for at, gather_from in ((0, 0), (length - 40, length - 300)):
            metal.append(PrefillChunk(k, v, table, at, gather_from, 0, None))
    for n_pages in (1, 9):
        columns = list(range(n_pages))
        metal.store(pages, columns, mx.zeros((n_pages, *kind.page_shape), dtype))
        metal.copy(pages, columns, columns[::-1])
    assert compiler.n_launches >= 8
    assert not compiler.errors, "\n".join(sorted(set(compiler.errors)))


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("const DEV int* item", "const SHM int* item"),
        ("alignas(16) SHM float", "SHM alignas(16) float"),
        ("const float scale =", "const float scale"),
        ("SHUFFLE(d, 4)", "shuffle(d, 4)"),
    ],
)
def test_what_does_not_compile_is_found(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch, right: str, wrong: str
) -> None:
    assert kernel_source.ATTEND.count(right) == 1, right
    monkeypatch.setattr(kernel_source, "ATTEND", kernel_source.ATTEND.replace(right, wrong))
    attend(kind_of((64, 64), 2, mx.float16, None), 2, (300, 5), with_sinks=False)
    assert compiler.errors
