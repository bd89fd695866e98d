"""The gated delta rule as one CUDA kernel: the recurrence of Qwen3-Next, Kimi Linear and others.

mlx-lm has a kernel for Metal only. `tests/integration/test_mlx_lm_contract.py` fails when mlx-lm
changes its function.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple, cast

import mlx.core as mx
from mlx_lm.models import gated_delta

from semantic.adapters.mlx.cuda.nvrtc import C_TYPES, NUMBERS, CudaKernel, Parameter

HOOKED_NAME = "gated_delta_ops"

Recurrence = Callable[..., tuple[mx.array, mx.array]]

_THREADS, _LANES = 128, 8
_ROWS = _THREADS // _LANES
_VECTOR = 4
_WIDEST = 256
_STAGED = 8192
"""The number of elements of keys and queries that fit into 32 KiB of shared memory."""
_TOLERANCE = 1e-2
"""The largest accepted error, relative to the result's norm. Half precision errs by 4e-3."""
_SELF_TEST = 2, 70
"""Rows and tokens of the self-test: more tokens than fit into shared memory at a time."""

_operations = cast(Recurrence, gated_delta.gated_delta_ops)


def install() -> None:
    """On CUDA, make mlx-lm's models compute the gated delta rule with our kernel. Idempotent."""
    setattr(gated_delta, HOOKED_NAME, compute)


class Rule(NamedTuple):
    """The parameters of a compiled kernel. If `vector`, each number of a key has its own decay."""

    k_heads: int
    v_heads: int
    k_dim: int
    v_dim: int
    dtype: mx.Dtype
    rate_dtype: mx.Dtype
    vector: bool

    @classmethod
    def of(cls, q: mx.array, v: mx.array, g: mx.array, beta: mx.array) -> Rule:
        """Return the rule for a call of `compute` with these arguments."""
        heads, widths = (q.shape[2], v.shape[2]), (q.shape[3], v.shape[3])
        return cls(*heads, *widths, q.dtype, beta.dtype, g.ndim == q.ndim)

    @property
    def computable(self) -> bool:
        """True if a kernel supports these types and widths."""
        known = self.dtype in C_TYPES and self.rate_dtype in C_TYPES
        even = self.k_dim % (_LANES * _VECTOR) == 0 and self.v_dim % _ROWS == 0
        return known and even and self.k_dim <= _WIDEST and self.v_heads % self.k_heads == 0


def compute(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    g: mx.array,
    beta: mx.array,
    state: mx.array | None = None,
    mask: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """Return the results and the new states, like mlx-lm's `gated_delta_ops`.

    `q` and `k` are (rows, tokens, k_heads, k_dim); `v` and results are (rows, tokens, v_heads,
    v_dim). `g` and `beta` are (rows, tokens, v_heads); `g` may be (..., k_dim). States are (rows,
    v_heads, v_dim, k_dim).
    """
    if state is None or (kernel := _kernel_of(q, k, v, g, beta, state)) is None:
        return _operations(q, k, v, g, beta, state, mask)
    if mask is not None:
        # Padding must leave a state unchanged: no decay and no write.
        real = mask[..., None]
        g = mx.where(real[..., None] if g.ndim == q.ndim else real, g, 1)
        beta = mx.where(real, beta, 0)
    return _launch(kernel, (q, k, v, g, beta, state))


def _kernel_of(
    q: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array, state: mx.array
) -> CudaKernel | None:
    if not (q.dtype == k.dtype == v.dtype and g.dtype == state.dtype == mx.float32):
        return None
    return right_kernel(Rule.of(q, v, g, beta))


@functools.cache
def right_kernel(rule: Rule) -> CudaKernel | None:
    """Return a rule's kernel; None if its results on this device are wrong."""
    if not rule.computable:
        return None
    kernel = build(rule)
    given = random_inputs(rule, *_SELF_TEST)
    try:
        found = _launch(kernel, given)
        right = all(_close(*pair) for pair in zip(found, by_token(*given), strict=True))
    except RuntimeError:  # the kernel does not compile, or a launch fails
        return None
    return kernel if right else None


def build(rule: Rule) -> CudaKernel:
    """Start compiling a rule's kernel."""
    number = C_TYPES[rule.dtype]
    constants = {
        "HK": rule.k_heads, "HV": rule.v_heads, "DK": rule.k_dim, "DV": rule.v_dim,
        "LANES": _LANES, "ROWS": _ROWS, "THREADS": _THREADS, "VECTOR": int(rule.vector),
        "TILE": _STAGED // rule.k_dim // (4 if rule.vector else 2),
    }  # fmt: skip
    head = (
        NUMBERS
        + f"typedef {number} T;\n"
        + "".join(f"#define {name} {value}\n" for name, value in constants.items())
    )
    name = "semantic_gated_delta_" + "_".join(str(part).rpartition(".")[2].lower() for part in rule)
    inputs = [
        Parameter("q", number), Parameter("k", number, n_strides=1), Parameter("v", number),
        Parameter("g", "float"), Parameter("beta", C_TYPES[rule.rate_dtype]),
        Parameter("state", "float"),
    ]  # fmt: skip
    return CudaKernel(
        name, inputs, [Parameter("y", number), Parameter("after", "float")], head, BODY
    )


def _launch(kernel: CudaKernel, given: tuple[mx.array, ...]) -> tuple[mx.array, mx.array]:
    v, state = given[2], given[-1]
    rows, _, heads, width = v.shape
    y, after = kernel(
        inputs=given,
        grid=(_THREADS * (width // _ROWS), rows * heads, 1),
        threadgroup=(_THREADS, 1, 1),
        output_shapes=[v.shape, state.shape],
        output_dtypes=[v.dtype, state.dtype],
    )
    return y, after


def random_inputs(rule: Rule, rows: int, tokens: int) -> tuple[mx.array, ...]:
    """Return random inputs for `compute`."""
    keys = iter(mx.random.split(mx.random.key(0), 6))
    per_head = (rows, tokens, rule.v_heads)
    of_key = (rows, tokens, rule.k_heads, rule.k_dim)
    q, k, v, state = (
        mx.random.normal(shape, key=next(keys))
        for shape in (of_key, of_key, (*per_head, rule.v_dim),
                      (rows, rule.v_heads, rule.v_dim, rule.k_dim))
    )  # fmt: skip
    g, beta = (
        mx.random.uniform(shape=shape, key=next(keys))
        for shape in ((*per_head, rule.k_dim) if rule.vector else per_head, per_head)
    )
    k = k / mx.linalg.norm(k, axis=-1, keepdims=True)
    return *(one.astype(rule.dtype) for one in (q, k, v)), g, beta.astype(rule.rate_dtype), state


def by_token(
    q: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    """Like `compute`, but token by token in MLX's operations."""
    times = v.shape[2] // k.shape[2]
    q, k = (mx.repeat(one, times, axis=2).astype(mx.float32) for one in (q, k))
    found = []
    for t in range(v.shape[1]):
        decay = g[:, t, :, None, None] if g.ndim < q.ndim else g[:, t, :, None]
        state = state * decay
        key = k[:, t, :, None]
        delta = (v[:, t] - (state * key).sum(axis=-1)) * beta[:, t, :, None]
        state = state + key * delta[..., None]
        found.append((state * q[:, t, :, None]).sum(axis=-1))
    return mx.stack(found, axis=1).astype(v.dtype), state


def _close(found: mx.array, expected: mx.array) -> bool:
    expected = expected.astype(mx.float32)
    gap = mx.linalg.norm(found.astype(mx.float32) - expected)
    return bool((gap <= _TOLERANCE * mx.linalg.norm(expected)).item())


# LANES threads hold one row of a state: the DK numbers that belong to one number of a value. Each
# thread holds four consecutive numbers at a time, so that threads read adjacent shared memory.
BODY = """
  constexpr int N = DK / LANES;
  __shared__ __align__(16) float keys[TILE * DK], queries[TILE * DK];
  __shared__ __align__(16) float decays[VECTOR ? TILE * DK : TILE];
  __shared__ float values[TILE * ROWS], rates[TILE];
  const int n_tokens = (int)(k_strides[0] / (HK * DK));
  const int n = blockIdx.y, head = n % HV, k_head = head / (HV / HK);
  const size_t first = (size_t)(n / HV) * n_tokens;
  const int row = threadIdx.x / LANES, lane = threadIdx.x % LANES;
  const int dv0 = blockIdx.x * ROWS;
  const size_t mine = ((size_t)n * DV + dv0 + row) * DK + lane * 4;

  float s[N];
#pragma unroll
  for (int j = 0; j < N; j += 4)
    *(float4*)(s + j) = *(const float4*)(state + mine + j * LANES);

  for (int start = 0; start < n_tokens; start += TILE) {
    const int count = min(TILE, n_tokens - start);
    __syncthreads();
    for (int at = threadIdx.x; at < count * DK; at += THREADS) {
      const size_t token = first + start + at / DK;
      const size_t from = (token * HK + k_head) * DK + at % DK;
      keys[at] = (float)k[from];
      queries[at] = (float)q[from];
      if (VECTOR) decays[at] = g[(token * HV + head) * DK + at % DK];
    }
    for (int at = threadIdx.x; at < count * ROWS; at += THREADS)
      values[at] = (float)v[((first + start + at / ROWS) * HV + head) * DV + dv0 + at % ROWS];
    for (int at = threadIdx.x; at < count; at += THREADS) {
      rates[at] = (float)beta[(first + start + at) * HV + head];
      if (!VECTOR) decays[at] = g[(first + start + at) * HV + head];
    }
    __syncthreads();
    for (int t = 0; t < count; ++t) {
      float key[N], sum = 0.0f;
#pragma unroll
      for (int j = 0; j < N; j += 4) {
        const int at = t * DK + j * LANES + lane * 4;
        *(float4*)(key + j) = *(const float4*)(keys + at);
        float4 decay;
        if (VECTOR) decay = *(const float4*)(decays + at);
        else decay.x = decay.y = decay.z = decay.w = decays[t];
        s[j] *= decay.x;
        s[j + 1] *= decay.y;
        s[j + 2] *= decay.z;
        s[j + 3] *= decay.w;
#pragma unroll
        for (int i = j; i < j + 4; ++i) sum += s[i] * key[i];
      }
#pragma unroll
      for (int mask = LANES / 2; mask; mask /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, mask);
      const float delta = (values[t * ROWS + row] - sum) * rates[t];
      float found = 0.0f;
#pragma unroll
      for (int j = 0; j < N; j += 4) {
        const float4 query = *(const float4*)(queries + t * DK + j * LANES + lane * 4);
#pragma unroll
        for (int i = j; i < j + 4; ++i) s[i] += key[i] * delta;
        found += s[j] * query.x + s[j + 1] * query.y + s[j + 2] * query.z + s[j + 3] * query.w;
      }
#pragma unroll
      for (int mask = LANES / 2; mask; mask /= 2)
        found += __shfl_xor_sync(0xffffffffu, found, mask);
      if (lane == 0)
        y[((first + start + t) * HV + head) * DV + dv0 + row] = T(found);
    }
  }
#pragma unroll
  for (int j = 0; j < N; j += 4) *(float4*)(after + mine + j * LANES) = *(float4*)(s + j);
"""
