"""The kernels' text for CUDA compiles, as clang reads CUDA without its headers.

NVRTC's own judgement, and what the kernels compute, is tested in `tests/gpu`.
"""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import pytest

from semantic.adapters.mlx.cuda import nvrtc, rows_source
from semantic.adapters.mlx.kv_cache.eight_bits import packed_shape
from semantic.adapters.mlx.kv_cache.paged import kernels
from semantic.adapters.mlx.kv_cache.paged.dialect import CUDA
from semantic.adapters.mlx.kv_cache.paged.kernels import PagedKernels
from semantic.adapters.mlx.kv_cache.paged.page_pool import PageKind
from semantic.adapters.mlx.kv_cache.spec_reader import LayerShape
from tests.support.clang_errors import errors_of

HEADER = """
#define __device__ __attribute__((device))
#define __global__ __attribute__((global))
#define __shared__ __attribute__((shared))
#define __launch_bounds__(...) __attribute__((launch_bounds(__VA_ARGS__)))
#define __align__(n) __attribute__((aligned(n)))
typedef unsigned long size_t;
struct uint4 { unsigned x, y, z, w; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
struct Index { int x, y, z; };
extern __device__ Index threadIdx, blockIdx;
__device__ uint4 make_uint4(unsigned, unsigned, unsigned, unsigned);
__device__ float2 make_float2(float, float);
__device__ float4 make_float4(float, float, float, float);
__device__ void __syncthreads();
__device__ void __syncwarp();
__device__ void __threadfence();
__device__ float __shfl_xor_sync(unsigned, float, int);
template <class T> __device__ T __ldcg(const T*);
__device__ int atomicAdd(int*, int);
__device__ float exp2f(float);
__device__ float fabsf(float);
__device__ float rint(float);
__device__ float __int_as_float(int);
__device__ float __uint_as_float(unsigned);
__device__ unsigned __float_as_uint(float);
__device__ unsigned __byte_perm(unsigned, unsigned, unsigned);
__device__ unsigned long __cvta_generic_to_shared(const void*);
__device__ int max(int, int);
__device__ float max(float, float);
__device__ int min(int, int);
__device__ float min(float, float);
"""
ARGUMENTS = [
    "-x",
    "cuda",
    "--cuda-device-only",
    "-nocudainc",
    "-nocudalib",
    "-std=c++17",
    "-Wno-narrowing",
]


@pytest.fixture
def errors(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Stands where NVRTC compiles: what clang has to say, with the line it says it of."""
    said: list[str] = []

    def compile_cuda(source: str, target: str) -> bytes:
        said.extend(errors_of(HEADER + source, "it.cu", *ARGUMENTS, f"--cuda-gpu-arch={target}"))
        return b""

    monkeypatch.setattr(nvrtc, "compile_cuda", compile_cuda)
    monkeypatch.setattr(nvrtc, "architecture", lambda: "sm_90")
    monkeypatch.setattr(kernels, "capability", lambda: 90)
    forget()
    yield said
    forget()


def forget() -> None:
    for cached in (kernels._built, kernels._built_attention, kernels._built_row_attention):
        cached.cache_clear()


def prepare(
    widths: tuple[int, int], dtype: mx.Dtype, *, window: int | None = None, packed: bool = False,
    latent: bool = False, group: int = 4,
) -> int:  # fmt: skip
    """Compile what a device with CUDA prepares; returns the number of kernels."""
    shape = LayerShape(2, *widths, dtype)
    if packed:
        shape = packed_shape(shape)
    kind = PageKind((0, 1), shape, window, None if window is None else 3)
    waiting: list[nvrtc.CudaKernel] = []
    init = nvrtc.CudaKernel.__init__

    def keep(self: nvrtc.CudaKernel, *given: object, **named: object) -> None:
        init(self, *given, **named)  # type: ignore[arg-type]
        waiting.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nvrtc.CudaKernel, "__init__", keep)
        PagedKernels(kind, CUDA).prepare(2 * group, (False, True), latent=latent)
    for kernel in waiting:
        kernel._code.result()
    return len(waiting)


@pytest.mark.parametrize("packed", [False, True], ids=["numbers", "packed"])
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32], ids=str)
def test_kernels_compile(errors: list[str], dtype: mx.Dtype, packed: bool) -> None:
    n_kernels = 0
    for widths, window in (
        ((64, 64), None),
        ((128, 128), 300),
        ((192, 128), None),
        ((256, 256), 9),
    ):
        n_kernels += prepare(widths, dtype, window=window, packed=packed)
    n_kernels += prepare((512, 64), dtype, packed=packed, latent=True, group=16)
    assert not errors, "\n".join(sorted(set(errors)))
    assert n_kernels >= 5 * 4


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("lowest[half][g] += mine", "lowest[half] += mine"),
        ('MULTIPLY_AS("f16", of_group[g], numbers', 'MULTIPLY_AS("f16", of_group[g], number'),
    ],
)
def test_what_does_not_compile_is_found(
    errors: list[str], monkeypatch: pytest.MonkeyPatch, right: str, wrong: str
) -> None:
    text = rows_source.ATTEND_RUN
    assert text.count(right) == 1
    monkeypatch.setattr(rows_source, "ATTEND_RUN", text.replace(right, wrong))
    prepare((128, 128), mx.bfloat16, packed=True)
    assert errors
