"""CUDA kernels compiled by NVRTC and launched through MLX.

`mx.fast.cuda_kernel` includes headers that take 1.5 s to compile, for every kernel and process.
Source text without headers compiles much faster.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypedDict, Unpack, cast

import mlx.core as mx

from semantic.adapters.mlx.arrays import Heads
from semantic.adapters.mlx.device import on_cuda

_LIBRARIES = ("libnvrtc.so.13", "libnvrtc.so.12")
_THREADS = 8
_LOG_SHOWN = 2000

# Two 16-bit types of our own, because CUDA's headers take longer to compile than the kernels.
NUMBERS = """
struct bfloat {
  unsigned short bits;
  bfloat() = default;
  __device__ explicit bfloat(float x) { asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x)); }
  __device__ operator float() const { return __uint_as_float((unsigned)bits << 16); }
};
struct half {
  unsigned short bits;
  half() = default;
  __device__ explicit half(float x) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x)); }
  __device__ operator float() const {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
  }
};
"""

C_TYPES = {mx.bfloat16: "bfloat", mx.float16: "half", mx.float32: "float"}
"""The C names of MLX's types in source text."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """A kernel's pointer parameter. The source text may use its strides as `NAME_strides[i]`. If
    `has_size`, the text may also use `NAME_shape[0]`."""

    name: str
    c_type: str
    n_strides: int = 0
    has_size: bool = False


class Launch(TypedDict):
    """A launch's sizes, as MLX takes them, and its results."""

    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]
    output_shapes: Sequence[tuple[int, ...]]
    output_dtypes: Sequence[mx.Dtype]


class CudaKernel:
    """A CUDA kernel. Its first call waits until the kernel is compiled."""

    def __init__(
        self,
        name: str,
        inputs: Sequence[Parameter],
        outputs: Sequence[Parameter],
        head: str,
        body: str,
        shared_bytes: int = 0,
        bounds: tuple[int, int] | None = None,
    ) -> None:
        """`body` becomes a C function with these parameters. `head` precedes the function. `bounds`
        are the threads of a group and how many groups the registers of a multiprocessor hold."""
        self._name = name
        self._inputs = tuple(inputs)
        self._shared_bytes = shared_bytes
        limits = "" if bounds is None else "__launch_bounds__({}, {}) ".format(*bounds)
        signature = f'extern "C" __global__ void {limits}{_signature(name, inputs, outputs)}'
        source = f"{head}\n{signature} {{\n{_start(inputs)}{body}\n}}\n"
        self._code = _compilers().submit(compile_cuda, source, architecture())

    def __call__(
        self, *, inputs: Sequence[mx.array | Heads], **launch: Unpack[Launch]
    ) -> list[mx.array]:
        """Return the kernel's outputs as arrays that are not evaluated yet. Raises RuntimeError if
        the source text does not compile."""
        given = [one.array if isinstance(one, Heads) else one for one in inputs]
        return self.bind(inputs, **launch)(inputs=given)

    def bind(
        self, like: Sequence[mx.array | Heads], **launch: Unpack[Launch]
    ) -> Callable[..., list[mx.array]]:
        """Return a launch for inputs of the shapes of `like`. It takes a list of arrays, `inputs`.
        Raises RuntimeError if the source text does not compile."""
        scalars: list[object] = []
        for parameter, one in zip(self._inputs, like, strict=True):
            if parameter.n_strides:
                strides = _strides(one)[: parameter.n_strides]
                first = one.first * strides[1] if isinstance(one, Heads) else 0
                scalars += [first, *strides]
            if parameter.has_size:
                scalars.append(one.shape[0])
        return functools.partial(
            mx.fast.precompiled_cuda_kernel,
            name=self._name,
            compiled_source=self._code.result(),
            scalars=scalars,
            shared_memory=self._shared_bytes,
            ensure_row_contiguous=True,
            **launch,
        )


def capability() -> int:
    """Return the compute capability of MLX's GPU, such as 90 for 9.0; 0 without CUDA."""
    if not on_cuda():
        return 0
    info = mx.device_info(mx.Device(mx.gpu))
    major, minor = info["compute_capability_major"], info["compute_capability_minor"]
    return 10 * cast(int, major) + cast(int, minor)


def architecture() -> str:
    """Return the architecture of MLX's GPU in NVRTC's notation, such as sm_90."""
    return f"sm_{capability()}"


def compile_cuda(source: str, target: str) -> bytes:
    """Compile a C function to machine code for `target`. Thread-safe. Raises RuntimeError with the
    compiler's messages."""
    nvrtc = _library()
    program = ctypes.c_void_p()
    _call("nvrtcCreateProgram", ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None)
    try:
        options = (ctypes.c_char_p * 1)(f"--gpu-architecture={target}".encode())
        if nvrtc.nvrtcCompileProgram(program, len(options), options):
            log = _bytes_of("nvrtcGetProgramLogSize", "nvrtcGetProgramLog", program)
            raise RuntimeError(log.decode(errors="replace")[:_LOG_SHOWN])
        return _bytes_of("nvrtcGetCUBINSize", "nvrtcGetCUBIN", program)
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _signature(name: str, inputs: Sequence[Parameter], outputs: Sequence[Parameter]) -> str:
    arguments = [f"const {one.c_type}* {one.name}{'_all' * bool(one.n_strides)}" for one in inputs]
    arguments += [f"{one.c_type}* {one.name}" for one in outputs]
    for one in inputs:
        if one.n_strides:
            arguments.append(f"int {one.name}_first")
            arguments += [f"int {one.name}_stride_{axis}" for axis in range(one.n_strides)]
        if one.has_size:
            arguments.append(f"int {one.name}_size")
    return f"{name}({', '.join(arguments)})"


def _start(inputs: Sequence[Parameter]) -> str:
    text = ""
    for one in inputs:
        name = one.name
        if one.n_strides:
            strides = ", ".join(f"{name}_stride_{axis}" for axis in range(one.n_strides))
            text += f"const {one.c_type}* {name} = {name}_all + {name}_first;\n"
            text += f"const size_t {name}_strides[] = {{{strides}}};\n"
        if one.has_size:
            text += f"const int {name}_shape[] = {{{name}_size}};\n"
    return text


def _strides(one: mx.array | Heads) -> list[int]:
    shape = one.array.shape if isinstance(one, Heads) else one.shape
    return [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]


@functools.cache
def _compilers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_THREADS, thread_name_prefix="compile")


@functools.cache
def _library() -> ctypes.CDLL:
    for name in _LIBRARIES:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise RuntimeError(f"MLX loaded none of {', '.join(_LIBRARIES)}")


def _bytes_of(size_call: str, call: str, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    _call(size_call, program, ctypes.byref(size))
    found = ctypes.create_string_buffer(size.value)
    _call(call, program, found)
    return found.raw


def _call(name: str, *arguments: object) -> None:
    code = cast(int, getattr(_library(), name)(*arguments))
    if code:
        raise RuntimeError(f"{name} failed with error {code} of NVRTC")
