"""CUDA source text of a product of rows with weights of 16 bits.

A warp multiplies 16 outputs by 8 rows and sums over 16 features at a time. The order of features is
free, so that a lane takes 16 bytes as they lie in memory. The warps of a thread group take turns,
as the memory is fastest if a group reads long pieces of its outputs' weights.
"""

from __future__ import annotations

CHUNK = 32
"""The number of features with which a lane reads 16 bytes of a row."""

SLICE = 2
"""Chunks that a warp reads at once."""

# A step reads weights once, so the first-level cache keeps the rows instead.
PLAIN_HEAD = """
struct alignas(16) Four { unsigned at[4]; };

__device__ __forceinline__ Four read(const Four* from) {
  Four found;
  asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
    : "=r"(found.at[0]), "=r"(found.at[1]), "=r"(found.at[2]), "=r"(found.at[3]) : "l"(from));
  return found;
}
template <bool ALIGNED> __device__ __forceinline__ Four row_at(const Four* from) {
  if (ALIGNED) return *from;
  const unsigned short* one = (const unsigned short*)from;
  Four found;
#pragma unroll
  for (int i = 0; i < 4; ++i) found.at[i] = one[2 * i] | (unsigned)one[2 * i + 1] << 16;
  return found;
}

template <bool ALIGNED> __device__ __forceinline__ void multiply(
    const T* x, const T* weight, int features, int outputs, int rows, int first, int warp,
    float (&total)[COLUMNS][4]) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, n_chunks = features / 32;
  const Four* x_from[COLUMNS];
#pragma unroll
  for (int m = 0; m < COLUMNS; ++m)
    x_from[m] = (const Four*)(x + (size_t)min(8 * m + g, rows - 1) * features) + t;
  const Four* from[2];
#pragma unroll
  for (int h = 0; h < 2; ++h)
    from[h] = (const Four*)(weight + (size_t)min(first + 8 * h + g, outputs - 1) * features) + t;
  for (int start = warp * SLICE; start < n_chunks; start += WARPS * SLICE) {
    Four w[SLICE][2], ahead[SLICE];
#pragma unroll
    for (int s = 0; s < SLICE; ++s) {
      const int chunk = min(start + s, n_chunks - 1);
#pragma unroll
      for (int h = 0; h < 2; ++h) w[s][h] = read(from[h] + (size_t)chunk * 4);
      if (COLUMNS == 1) ahead[s] = row_at<ALIGNED>(x_from[0] + chunk * 4);
    }
#pragma unroll
    for (int s = 0; s < SLICE; ++s) {
      if (start + s >= n_chunks) break;
#pragma unroll
      for (int m = 0; m < COLUMNS; ++m) {
        Four b = ahead[s];
        if (COLUMNS > 1) b = row_at<ALIGNED>(x_from[m] + (start + s) * 4);
#pragma unroll
        for (int j = 0; j < 4; j += 2) {
          const unsigned a[] = {w[s][0].at[j], w[s][1].at[j], w[s][0].at[j + 1], w[s][1].at[j + 1]};
          MULTIPLY(total[m], a, b.at[j], b.at[j + 1])
        }
      }
    }
  }
}
"""

PLAIN_BODY = """
  __shared__ float space[WARPS][8][17];
  const int features = x_strides[0], outputs = weight_shape[0], rows = x_shape[0];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, first = blockIdx.x * 16;
  float total[COLUMNS][4] = {};
  if (((size_t)x & 15) == 0)
    multiply<true>(x, weight, features, outputs, rows, first, warp, total);
  else
    multiply<false>(x, weight, features, outputs, rows, first, warp, total);
  // Sum over the warps, always in the same order.
#pragma unroll
  for (int m = 0; m < COLUMNS; ++m) {
    __syncthreads();
#pragma unroll
    for (int n = 0; n < 4; ++n)
      space[warp][2 * (lane & 3) + (n & 1)][8 * (n >> 1) + (lane >> 2)] = total[m][n];
    __syncthreads();
    const int row = threadIdx.x / 16, output = threadIdx.x % 16, to = 8 * m + row;
    if (threadIdx.x < 128 && to < rows && first + output < outputs) {
      float sum = 0.0f;
#pragma unroll
      for (int one = 0; one < WARPS; ++one) sum += space[one][row][output];
      const size_t here = (size_t)to * outputs + first + output;
#if ADDS
      sum += (float)added[here];
#endif
      y[here] = T(sum);
    }
  }
"""
