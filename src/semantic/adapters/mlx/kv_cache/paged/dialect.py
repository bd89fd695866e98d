"""The kernels' two languages, CUDA and Metal: their macros, and compilation."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import mlx.core as mx

from semantic.adapters.mlx.arrays import Heads, plain
from semantic.adapters.mlx.cuda.nvrtc import C_TYPES, NUMBERS, CudaKernel, Parameter
from semantic.adapters.mlx.device import on_cpu
from semantic.adapters.mlx.kv_cache.paged import kernel_source

Kernel = Callable[..., list[mx.array]]
"""A kernel that is called like MLX's kernels. An input may be `Heads` of an array."""


@dataclass(frozen=True, slots=True, eq=False)
class Dialect:
    """The kernel language of a device."""

    is_cuda: bool
    names: str  # text before a kernel
    ids: str  # text at the beginning of its body
    types: Mapping[mx.Dtype, str]
    stages: int  # tiles in flight per warp, the current one included
    space: int  # bytes of shared memory for the tiles
    fused: bool  # thread groups see each other's writes within a launch

    def build(
        self,
        name: str,
        constants: Sequence[tuple[str, int | mx.Dtype]],
        inputs: Sequence[str],
        outputs: Sequence[str],
        body: str,
        space: int = 0,
        bounds: tuple[int, int] | None = None,
    ) -> Kernel:
        """Compile a kernel with `constants`. It gets `space` bytes of shared memory, and `bounds`
        like `CudaKernel`."""
        text = "".join(
            f"#define {key} {value}\n"
            if isinstance(value, int)
            else f"typedef {self.types[value]} {key};\n"
            for key, value in constants
        )
        if self.is_cuda:
            declared = "  extern __shared__ uint4 space[];\n" if space else ""
            return self._cuda(
                name, inputs, outputs, text, declared + self.ids + body, space, bounds
            )
        declared = f"  threadgroup uint4 space[{space // 16}];\n" if space else ""
        return self._metal(name, inputs, outputs, self.ids + text + declared + body)

    def _cuda(
        self,
        name: str,
        inputs: Sequence[str],
        outputs: Sequence[str],
        constants: str,
        body: str,
        space: int,
        bounds: tuple[int, int] | None,
    ) -> Kernel:
        head = self.names + constants
        return CudaKernel(
            _versioned(name, head, body),
            [_parameter(one, body) for one in inputs],
            [_parameter(one, "") for one in outputs],
            head,
            body,
            space,
            bounds,
        )

    def _metal(
        self, name: str, inputs: Sequence[str], outputs: Sequence[str], source: str
    ) -> Kernel:
        # Shorten the text, because MLX passes it along with every launch.
        source = "\n".join(line.strip() for line in source.splitlines())
        names = _versioned(name, self.names, source), list(inputs), list(outputs)
        made = mx.fast.metal_kernel(
            *names, source=source, header=self.names, ensure_row_contiguous=False
        )

        def launch(*, inputs: Sequence[mx.array | Heads], **more: object) -> list[mx.array]:
            return cast(Kernel, made)(inputs=[plain(one) for one in inputs], **more)

        return launch


def _versioned(name: str, head: str, body: str) -> str:
    """Return a name that is unique to this text, because MLX caches kernels by name."""
    return f"semantic_{name}_{hashlib.sha256((head + body).encode()).hexdigest()[:12]}"


def _parameter(name: str, body: str) -> Parameter:
    return Parameter(
        name,
        kernel_source.TYPES[name],
        n_strides=kernel_source.AXES if f"{name}_strides" in body else 0,
        has_size=f"{name}_shape" in body,
    )


CUDA = Dialect(
    is_cuda=True,
    names=NUMBERS
    + """
#define DEV
#define LOC
#define SHM __shared__
#define NEAR
#define BARRIER __syncthreads()
#define WARP_BARRIER __syncwarp()
#define SHUFFLE(x, mask) __shfl_xor_sync(0xffffffffu, x, mask)
#define LATE(p) __ldcg(p)
#define exp2(x) exp2f(x)
#define FLOAT_OF(bits) __int_as_float(bits)
#define BITS_OF(x) __float_as_uint(x)
#define B16 bfloat
#define BYTE(word, b) (FLOAT_OF(__byte_perm(word, 0x4b000000u, 0x7440 + (b))) - 8388608.0f)
#define ZERO make_uint4(0, 0, 0, 0)
#define COPY16(to, from, real) \\
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: \\
    "r"((unsigned)__cvta_generic_to_shared(to)), "l"(from), "r"((real) ? 16 : 0) : "memory")
#define COPIES_END asm volatile("cp.async.commit_group;" ::: "memory")
#define COPIES_WAIT(left) asm volatile("cp.async.wait_group %0;" :: "n"(left) : "memory")
""",
    ids="""
  const int tid = threadIdx.x, gx = blockIdx.x, gy = blockIdx.y;
""",
    types={**C_TYPES, mx.uint8: "unsigned char"},
    stages=2,
    space=64 << 10,
    fused=True,
)

METAL = Dialect(
    is_cuda=False,
    names="""
#define DEV device
#define LOC thread
#define SHM threadgroup
#define NEAR threadgroup
#define BARRIER threadgroup_barrier(mem_flags::mem_threadgroup)
#define WARP_BARRIER simdgroup_barrier(mem_flags::mem_threadgroup)
#define SHUFFLE(x, mask) simd_shuffle_xor(x, mask)
#define LATE(p) (*(p))
#define FLOAT_OF(bits) as_type<float>(bits)
#define BITS_OF(x) as_type<uint>(x)
#define B16 bfloat16_t
#define BYTE(word, b) (float)((word) >> 8 * (b) & 255)
#define ZERO uint4(0)
#define COPY16(to, from, real) *(to) = (real) ? *(from) : ZERO
#define COPIES_END
#define COPIES_WAIT(left)
""",
    ids="""
  const int tid = thread_position_in_threadgroup.x;
  const int gx = threadgroup_position_in_grid.x, gy = threadgroup_position_in_grid.y;
""",
    types={mx.bfloat16: "bfloat16_t", mx.float16: "half", mx.float32: "float", mx.uint8: "uchar"},
    stages=1,
    space=16 << 10,
    fused=False,
)


def dialect_here() -> Dialect | None:
    """Return the dialect of MLX's default device; None for a CPU."""
    if on_cpu():
        return None
    return METAL if mx.metal.is_available() else CUDA
