"""What a CUDA kernel's text gets as names, and what a launch hands over for them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import pytest

from semantic.adapters.mlx.arrays import Heads
from semantic.adapters.mlx.cuda import nvrtc
from semantic.adapters.mlx.cuda.nvrtc import CudaKernel, Parameter

INPUTS = (Parameter("k", "T", n_strides=3), Parameter("table", "int", has_size=True))
OUTPUTS = (Parameter("out", "T"),)


def launched(
    monkeypatch: pytest.MonkeyPatch, inputs: list[mx.array | Heads]
) -> tuple[str, dict[str, object]]:
    """The text that is compiled, and the arguments of the launch."""
    texts: list[str] = []
    calls: list[dict[str, object]] = []

    def compiled(text: str, target: str) -> bytes:
        texts.append(text)
        return target.encode()

    def launch(**given: object) -> list[mx.array]:
        calls.append(given)
        return []

    monkeypatch.setattr(nvrtc, "_compilers", lambda: ThreadPoolExecutor(1))
    monkeypatch.setattr(nvrtc, "compile_cuda", compiled)
    monkeypatch.setattr(nvrtc, "architecture", lambda: "sm_90")
    monkeypatch.setattr(mx.fast, "precompiled_cuda_kernel", launch)
    kernel = CudaKernel("copy", INPUTS, OUTPUTS, "typedef float T;", "out[0] = k[0];")
    kernel(
        inputs=inputs, grid=(1, 1, 1), threadgroup=(1, 1, 1), output_shapes=[(1,)],
        output_dtypes=[mx.float32],
    )  # fmt: skip
    return texts[0], calls[0]


def test_heads_of_an_array_are_an_offset_and_the_strides_of_the_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole, table = mx.zeros((5, 12, 1, 16)), mx.zeros((7,), mx.int32)
    text, call = launched(monkeypatch, [Heads(whole, 8, 2), table])
    assert call["inputs"] == [whole, table]
    assert call["scalars"] == [8 * 16, 12 * 16, 16, 16, 7]
    assert call["compiled_source"] == b"sm_90"
    assert call["ensure_row_contiguous"] is True
    signature = text[text.index("(") : text.index(")")]
    names = [one.split()[-1] for one in signature.split(",")]
    assert names == [
        "k_all", "table", "out", "k_first", "k_stride_0", "k_stride_1", "k_stride_2", "table_size",
    ]  # fmt: skip


def test_an_array_begins_where_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    _, call = launched(monkeypatch, [mx.zeros((5, 2, 3, 16)), mx.zeros((1,), mx.int32)])
    assert call["scalars"] == [0, 2 * 3 * 16, 3 * 16, 16, 1]


def test_without_a_compiler_library_a_kernel_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "_LIBRARIES", ("libnone.so.1",))
    nvrtc._library.cache_clear()
    with pytest.raises(RuntimeError, match=r"libnone\.so\.1"):
        nvrtc.compile_cuda("", "sm_90")


def test_heads_have_the_shape_and_the_numbers_of_their_view() -> None:
    whole = mx.arange(2 * 6 * 1 * 4).reshape(2, 6, 1, 4)
    heads = Heads(whole, 3, 2)
    assert heads.shape == heads.view().shape == (2, 2, 1, 4)
    assert heads.dtype == whole.dtype
    assert mx.array_equal(heads.view(), whole[:, 3:5])
