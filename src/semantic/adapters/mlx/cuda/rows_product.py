"""Products of a decode step's rows with weights of 4, 8 or 16 bits, as one CUDA kernel.

MLX's kernels round differently with each number of rows, and read quantized weights once per row.
This one reads them once for up to 64 rows, and a row has the same bits beside any number of rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx

from semantic.adapters.mlx.cuda.nvrtc import C_TYPES, NUMBERS, CudaKernel, Parameter, capability
from semantic.adapters.mlx.cuda.plain_rows import CHUNK, PLAIN_BODY, PLAIN_HEAD, SLICE
from semantic.adapters.mlx.cuda.rows_source import MATRICES

_COLUMNS = (1, 2, 4, 8)
"""Tiles of 8 rows that a thread group computes. The bits of a row do not depend on it."""
MOST_ROWS = 8 * _COLUMNS[-1]
_NEEDED = 80  # compute capability 8.0 multiplies matrices of bfloat16
_BITS, _GROUPS = (4, 8), (32, 64, 128)
_PLAIN = 16
"""The bits of weights without scales."""
_CHUNK = 64
"""The number of features that a warp multiplies with one scale, at most a group's."""
_SLICE_BITS = 512
"""Bits of an output's weights that a warp reads at once."""
_WARPS = 8
"""Warps of a thread group, which share each sum."""
_FORMATS = {mx.bfloat16: (0x4300, 0x3F80, 0x4180), mx.float16: (0x6400, 0x3C00, 0x4C00)}
"""Each type's bits of a power of two with zeros where a nibble goes, of 1 and of 16."""


@dataclass(frozen=True, slots=True)
class Weights:
    """A layer's weights, (outputs, features). With scales, they are in MLX's affine
    quantization."""

    weight: mx.array
    scales: mx.array | None = None
    biases: mx.array | None = None
    bits: int = _PLAIN
    group: int = 0

    @property
    def dtype(self) -> mx.Dtype:
        """The type of the products' numbers."""
        return (self.weight if self.scales is None else self.scales).dtype

    @property
    def arrays(self) -> list[mx.array]:
        """The arrays that the kernel reads."""
        return [one for one in (self.weight, self.scales, self.biases) if one is not None]


def can_multiply(weights: Weights) -> bool:
    """Return whether the kernel knows the format of `weights` and this GPU's instructions."""
    if weights.scales is None:
        known = weights.weight.shape[1] % CHUNK == 0
    else:
        known = weights.bits in _BITS and weights.group in _GROUPS
    return known and weights.dtype in _FORMATS and capability() >= _NEEDED


class Product:
    """A product of rows with a layer's weights."""

    def __init__(self, weights: Weights) -> None:
        """Start compiling the kernel for all numbers of rows."""
        self._weights = weights
        self._arrays = weights.arrays
        self._launches: dict[tuple[int, int], Callable[..., list[mx.array]]] = {}
        self.most = MOST_ROWS
        self._build(adds=False)

    @property
    def is_plain(self) -> bool:
        """True for weights without scales."""
        return self._weights.scales is None

    def will_add(self) -> None:
        """Start compiling the kernel that adds the product to other rows."""
        self._build(adds=True)

    def accepts(self, x: mx.array) -> bool:
        """Return whether `x` has the shape, (rows, 1, features), and the type of the kernel, and at
        most `most` rows."""
        one_token = x.shape[1:-1] == (1,)
        return one_token and x.shape[0] <= self.most and x.dtype == self._weights.dtype

    def __call__(self, x: mx.array, *h: mx.array) -> mx.array:
        """Return `x`, (rows, 1, features), times the transposed weights: (rows, 1, outputs). Add
        rows `h` to it, if given."""
        key = x.shape[0], len(h)
        launch = self._launches.get(key)
        if launch is None:
            launch = self._launches[key] = self._bind(x, *h)
        return launch(inputs=[x, *self._arrays, *h])[0]

    def _bind(self, x: mx.array, *h: mx.array) -> Callable[..., list[mx.array]]:
        weights, n_rows = self._weights, x.shape[0]
        n_outputs = weights.weight.shape[0]
        columns = next(n for n in _COLUMNS if 8 * n >= n_rows)
        n_groups = -(-n_outputs // (16 * _tiles(weights.bits, columns)))
        return build(weights.dtype, weights.bits, weights.group, columns, adds=bool(h)).bind(
            [x, *self._arrays, *h],
            grid=(n_groups * 32 * _WARPS, 1, 1),
            threadgroup=(32 * _WARPS, 1, 1),
            output_shapes=[(n_rows, 1, n_outputs)],
            output_dtypes=[x.dtype],
        )

    def _build(self, *, adds: bool) -> None:
        for columns in _COLUMNS:
            weights = self._weights
            build(weights.dtype, weights.bits, weights.group, columns, adds=adds)


@functools.cache
def build(dtype: mx.Dtype, bits: int, group: int, columns: int, *, adds: bool) -> CudaKernel:
    """Start compiling the kernel for up to 8 * `columns` rows at once."""
    number = C_TYPES[dtype]
    plain = bits == _PLAIN
    inputs = [
        Parameter("x", number, n_strides=1, has_size=True),
        Parameter("weight", number if plain else "unsigned", has_size=True),
    ]
    inputs += [] if plain else [Parameter("scales", number), Parameter("biases", number)]
    inputs += [Parameter("added", number)] if adds else []
    head, body = (PLAIN_HEAD, PLAIN_BODY) if plain else (HEAD, BODY)
    # A multiprocessor's registers should hold this number of thread groups.
    most_groups = (1 if columns == _COLUMNS[-1] else 2) + plain
    return CudaKernel(
        f"semantic_rows_{number}_{bits}_{group}_{columns}{'_added' * adds}",
        inputs,
        [Parameter("y", number)],
        _constants(dtype, bits, group, columns, adds=adds) + MATRICES + head,
        body,
        bounds=(32 * _WARPS, most_groups),
    )


def _tiles(bits: int, columns: int) -> int:
    """Return how many tiles of 16 outputs a thread group computes."""
    return 1 if columns == 1 or bits == _PLAIN else 2


def _constants(dtype: mx.Dtype, bits: int, group: int, columns: int, *, adds: bool) -> str:
    magic, one, sixteen = _FORMATS[dtype]
    sizes: dict[str, int | str] = {
        "HALF": int(dtype == mx.float16), "WARPS": _WARPS, "COLUMNS": columns, "ADDS": int(adds),
    }  # fmt: skip
    if bits == _PLAIN:
        sizes |= {"SLICE": SLICE}
    else:
        chunk = min(group, _CHUNK)
        sizes |= {
            "BITS": bits, "GROUP": group, "CHUNK": chunk,
            "SLICE": max(1, _SLICE_BITS // bits // chunk), "TILES": _tiles(bits, columns),
            "MAGIC": f"{magic * 0x10001:#x}u", "ONE": f"{one * 0x10001:#x}u",
            "SIXTEEN": f"{sixteen * 0x10001:#x}u",
        }  # fmt: skip
    lines = "".join(f"#define {key} {value}\n" for key, value in sizes.items())
    return f"{NUMBERS}typedef {C_TYPES[dtype]} T;\n{lines}"


# A warp multiplies 16 outputs by 8 rows and sums over 16 features at a time. Within a group, the
# order of the features is free, so that a lane takes the words as they lie in memory.
HEAD = """
#define WORDS (CHUNK * BITS / 128)  // per lane and chunk
#define VALUES (CHUNK / 4)          // per lane and chunk
#define AHEAD (COLUMNS == 1)        // all rows of a slice fit into registers
typedef unsigned short u16;

template <int N> struct alignas(N % 4 == 0 ? 16 : N % 2 == 0 ? 8 : 4) Words { unsigned at[N]; };

__device__ __forceinline__ unsigned minus_magic(unsigned pair) {
  unsigned found;
  asm("fma.rn." FORMAT "x2 %0, %1, %2, %3;"
      : "=r"(found) : "r"(pair), "r"(ONE), "r"(MAGIC | 0x80008000u));
  return found;
}
__device__ __forceinline__ unsigned nibbles(unsigned word, int shift) {
  return minus_magic((word >> shift & 0x000f000fu) | MAGIC);
}
__device__ __forceinline__ unsigned times_16_plus(unsigned high, unsigned low) {
  unsigned found;
  asm("fma.rn." FORMAT "x2 %0, %1, %2, %3;" : "=r"(found) : "r"(high), "r"(SIXTEEN), "r"(low));
  return found;
}
// Puts the numbers of a lane's words, as pairs in the order of `paired`, into row 8 * half of the
// operands of MULTIPLY.
__device__ __forceinline__ void expand(const Words<WORDS>& words, int half,
                                       unsigned (&operands)[VALUES / 4][4]) {
#pragma unroll
  for (int i = 0; i < WORDS; ++i) {
    const unsigned word = words.at[i];
#pragma unroll
    for (int j = 0; j < 16 / BITS; ++j) {
#if BITS == 4
      const unsigned pair = nibbles(word, 4 * j);
#else
      const unsigned pair = times_16_plus(nibbles(word, 8 * j + 4), nibbles(word, 8 * j));
#endif
      const int at = 16 / BITS * i + j;
      operands[at / 2][at % 2 * 2 + half] = pair;
    }
  }
}
__device__ __forceinline__ void load(const T* from, bool aligned, unsigned (&found)[VALUES / 2]) {
  if (aligned) {
#pragma unroll
    for (int i = 0; i < VALUES / 8; ++i) {
      const uint4 four = ((const uint4*)from)[i];
      found[4 * i] = four.x, found[4 * i + 1] = four.y;
      found[4 * i + 2] = four.z, found[4 * i + 3] = four.w;
    }
  } else {
#pragma unroll
    for (int i = 0; i < VALUES / 2; ++i)
      found[i] = ((const u16*)from)[2 * i] | (unsigned)((const u16*)from)[2 * i + 1] << 16;
  }
}
__device__ __forceinline__ void paired(const unsigned (&in)[VALUES / 2],
                                       unsigned (&out)[VALUES / 2]) {
#if BITS == 4
#pragma unroll
  for (int i = 0; i < VALUES / 8; ++i) {
    const unsigned* a = in + 4 * i;
    out[4 * i] = __byte_perm(a[0], a[2], 0x5410), out[4 * i + 1] = __byte_perm(a[0], a[2], 0x7632);
    out[4 * i + 2] = __byte_perm(a[1], a[3], 0x5410);
    out[4 * i + 3] = __byte_perm(a[1], a[3], 0x7632);
  }
#else
#pragma unroll
  for (int i = 0; i < VALUES / 4; ++i) {
    out[2 * i] = __byte_perm(in[2 * i], in[2 * i + 1], 0x5410);
    out[2 * i + 1] = __byte_perm(in[2 * i], in[2 * i + 1], 0x7632);
  }
#endif
}
"""

BODY = """
  __shared__ float space[WARPS][8][16 * TILES + 1];
  const int features = x_strides[0], outputs = weight_shape[0], rows = x_shape[0];
  const bool aligned = ((size_t)x & 15) == 0;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int first = blockIdx.x * 16 * TILES;
  const int n_chunks = features / CHUNK, groups = features / GROUP;
  const size_t row_words = (size_t)features * BITS / 32;

  const unsigned* from[TILES][2];
  int group_at[TILES][2];
#pragma unroll
  for (int i = 0; i < TILES; ++i)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int output = min(first + 16 * i + 8 * h + g, outputs - 1);
      from[i][h] = weight + output * row_words + t * WORDS;
      group_at[i][h] = output * groups;
    }
  const T* x_from[COLUMNS];
#pragma unroll
  for (int m = 0; m < COLUMNS; ++m)
    x_from[m] = x + (size_t)min(8 * m + g, rows - 1) * features + t * VALUES;

  float total[TILES][COLUMNS][4] = {};
  const unsigned ones[] = {ONE, ONE, ONE, ONE};
  // A warp adds up every WARPS-th slice of SLICE chunks. The last slice may have fewer.
  for (int start = warp * SLICE; start < n_chunks; start += WARPS * SLICE) {
    Words<WORDS> words[SLICE][TILES][2];
    T scale[SLICE][TILES][2], bias[SLICE][TILES][2];
    unsigned ahead[AHEAD ? SLICE : 1][VALUES / 2];
#pragma unroll
    for (int s = 0; s < SLICE; ++s) {
      const int chunk = min(start + s, n_chunks - 1);
#pragma unroll
      for (int i = 0; i < TILES; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int group = group_at[i][h] + chunk * CHUNK / GROUP;
          words[s][i][h] = *(const Words<WORDS>*)(from[i][h] + (size_t)chunk * 4 * WORDS);
          scale[s][i][h] = scales[group];
          bias[s][i][h] = biases[group];
        }
      if (AHEAD) load(x_from[0] + chunk * CHUNK, aligned, ahead[s]);
    }
#pragma unroll
    for (int s = 0; s < SLICE; ++s) {
      if (start + s >= n_chunks) break;
      unsigned w[TILES][VALUES / 4][4];
#pragma unroll
      for (int i = 0; i < TILES; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h) expand(words[s][i][h], h, w[i]);
#pragma unroll
      for (int m = 0; m < COLUMNS; ++m) {
        unsigned loaded[VALUES / 2], v[VALUES / 2];
        if (!AHEAD) load(x_from[m] + (start + s) * CHUNK, aligned, loaded);
        paired(AHEAD ? ahead[s] : loaded, v);
        float sums[4] = {};
#pragma unroll
        for (int j = 0; j < VALUES / 4; ++j) MULTIPLY(sums, ones, v[2 * j], v[2 * j + 1])
#pragma unroll
        for (int i = 0; i < TILES; ++i) {
          float c[4] = {};
#pragma unroll
          for (int j = 0; j < VALUES / 4; ++j) MULTIPLY(c, w[i][j], v[2 * j], v[2 * j + 1])
#pragma unroll
          for (int n = 0; n < 4; ++n)
            total[i][m][n] = fmaf((float)bias[s][i][n >> 1], sums[n],
                                  fmaf((float)scale[s][i][n >> 1], c[n], total[i][m][n]));
        }
      }
    }
  }
  // Sum over the warps, always in the same order.
#pragma unroll
  for (int m = 0; m < COLUMNS; ++m) {
    __syncthreads();
#pragma unroll
    for (int i = 0; i < TILES; ++i)
#pragma unroll
      for (int n = 0; n < 4; ++n)
        space[warp][2 * t + (n & 1)][16 * i + 8 * (n >> 1) + g] = total[i][m][n];
    __syncthreads();
    for (int at = threadIdx.x; at < 8 * 16 * TILES; at += 32 * WARPS) {
      const int row = at / (16 * TILES), output = at % (16 * TILES);
      float sum = 0.0f;
#pragma unroll
      for (int one = 0; one < WARPS; ++one) sum += space[one][row][output];
      const int to = 8 * m + row;
      if (to < rows && first + output < outputs) {
        const size_t here = (size_t)to * outputs + first + output;
#if ADDS
        sum += (float)added[here];
#endif
        y[here] = T(sum);
      }
    }
  }
"""
