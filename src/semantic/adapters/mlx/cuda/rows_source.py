"""CUDA source text of attention for several prompt tokens of a sequence.

Consecutive tokens attend to almost the same keys, so a thread group reads these keys once.
"""

from __future__ import annotations

KEYS = 32
"""The number of keys per tile."""

WARP_QUERIES = 16
"""The number of queries per matrix instruction."""

# A row of a tile is NK or NV vectors of 16 bytes, plus one vector of padding: at this odd distance,
# eight rows begin in different banks. `mma` multiplies 16 x 16 by 16 x 8 numbers; a lane holds two
# rows of a result.
ATTEND_ROWS = """
  constexpr int VEC = 16 / sizeof(T);
  constexpr int NK = DK / VEC, NV = DV / VEC;
  constexpr int D = DV;
  constexpr int PITCH = NK + 1, V_PITCH = NV + 1;
  constexpr int N = 32;
  constexpr int M = 64 * MT;
  constexpr int IN_TILE = N * (PITCH + V_PITCH);
  constexpr float NONE = -1e30f;
  constexpr float LOG2E = 1.4426950408889634f;
  const int head = gy;
  const int* item = plan + gx * 10;
  const int row = item[0], start = item[1], stop = item[2];
  const int first = item[4], n_splits = item[5], index = item[6], n_rows = item[7];
  const int* page_table = plan + item[3];
  const int pos = positions[row];
  const int begin = WINDOW > 0 ? max(start, pos - WINDOW + 1) : start;
  const int end = min(stop, pos + n_rows);
  const int heads = H * G, n_queries = n_rows * G;
  const size_t layer_size = (size_t)256 * H * (DK + DV);
  const size_t page_size = layer_size * LAYERS;
  const size_t keys_at = layer_size * layer[0] + (size_t)256 * DK * head;
  const size_t values_at = layer_size * layer[0] + (size_t)256 * (H * DK + DV * head);
  const float scale = FLOAT_OF(layer[1]) * LOG2E;
  const int warp = tid >> 5, lane = tid & 31;
  uint4* queries = space;            // [M][PITCH]
  uint4* tiles = space + M * PITCH;  // [stage]: keys, [N][PITCH], then values, [N][V_PITCH]

#define FETCH(tile, stage)                                                                   \\
  if ((tile) < end) {                                                                        \\
    const T* page = pages + page_table[((tile) >> 8) - (start >> 8)] * page_size;            \\
    const uint4* page_k = (const uint4*)(page + keys_at) + ((tile) & 255) * NK;              \\
    const uint4* page_v = (const uint4*)(page + values_at) + ((tile) & 255) * NV;            \\
    uint4* to = tiles + (stage) * IN_TILE;                                                   \\
    for (int x = tid; x < N * NK; x += 128) {                                                \\
      const int t = (tile) + x / NK;                                                         \\
      COPY16(to + x / NK * PITCH + x % NK, page_k + x, t >= begin && t < end);               \\
    }                                                                                        \\
    for (int x = tid; x < N * NV; x += 128) {                                                \\
      const int t = (tile) + x / NV;                                                         \\
      COPY16(to + N * PITCH + x / NV * V_PITCH + x % NV, page_v + x, t >= begin && t < end); \\
    }                                                                                        \\
  }                                                                                          \\
  COPIES_END;

  int tile = begin - begin % N;
  FETCH(tile, 0)
  for (int x = tid; x < M * NK; x += 128) {
    const int m = x / NK;
    uint4 vector = make_uint4(0, 0, 0, 0);
    if (m < n_queries) {
      const T* from = q + (row + m / G) * q_strides[0] + (head * G + m % G) * q_strides[1];
      vector = ((const uint4*)from)[x % NK];
    }
    queries[m * PITCH + x % NK] = vector;
  }

  float acc[MT][NV][4], top[MT][2], sum[MT][2];
  #pragma unroll
  for (int m = 0; m < MT; m++) {
    #pragma unroll
    for (int half = 0; half < 2; half++) { top[m][half] = NONE; sum[m][half] = 0.0f; }
    #pragma unroll
    for (int n = 0; n < NV; n++)
      #pragma unroll
      for (int i = 0; i < 4; i++) acc[m][n][i] = 0.0f;
  }
  const int mine = warp * 16 * MT;
  const bool busy = mine < n_queries;
  const unsigned q_at = SHARED_AT(queries + (mine + (lane & 15)) * PITCH + (lane >> 4));
  const int k_lane = ((lane & 7) + ((lane >> 4) << 3)) * PITCH + ((lane >> 3) & 1);
  const int v_lane = (lane & 15) * V_PITCH + (lane >> 4);

  int stage = 0;
  for (; tile < end; tile += N, stage ^= 1) {
    FETCH(tile + N, stage ^ 1)
    COPIES_WAIT(1);
    BARRIER;
    if (busy) {
      const unsigned k_at = SHARED_AT(tiles + stage * IN_TILE + k_lane);
      const unsigned v_at = SHARED_AT(tiles + stage * IN_TILE + N * PITCH + v_lane);
      float score[MT][N / 8][4];
      #pragma unroll
      for (int m = 0; m < MT; m++)
        #pragma unroll
        for (int n = 0; n < N / 8; n++)
          #pragma unroll
          for (int i = 0; i < 4; i++) score[m][n][i] = 0.0f;
      #pragma unroll
      for (int d = 0; d < NK; d += 2) {
        unsigned a[MT][4], b[4];
        #pragma unroll
        for (int m = 0; m < MT; m++) LOAD_MATRIX(a[m], q_at + (m * 16 * PITCH + d) * 16)
        #pragma unroll
        for (int n = 0; n < N / 8; n += 2) {
          LOAD_MATRIX(b, k_at + (n * 8 * PITCH + d) * 16)
          #pragma unroll
          for (int m = 0; m < MT; m++) {
            MULTIPLY(score[m][n], a[m], b[0], b[1])
            MULTIPLY(score[m][n + 1], a[m], b[2], b[3])
          }
        }
      }
      #pragma unroll
      for (int m = 0; m < MT; m++)
        #pragma unroll
        for (int half = 0; half < 2; half++) {
          const int at = pos + (mine + m * 16 + half * 8 + (lane >> 2)) / G;
          float high = top[m][half];
          #pragma unroll
          for (int n = 0; n < N / 8; n++)
            #pragma unroll
            for (int i = 0; i < 2; i++) {
              const int t = tile + n * 8 + (lane & 3) * 2 + i;
              const bool seen = t <= at && t < end && (WINDOW == 0 || t > at - WINDOW);
              float& x = score[m][n][half * 2 + i];
              x = seen ? x * scale : NONE;
              high = max(high, x);
            }
          high = max(high, SHUFFLE(high, 1));
          high = max(high, SHUFFLE(high, 2));
          const float shrink = exp2(top[m][half] - high);
          top[m][half] = high;
          float total = 0.0f;
          #pragma unroll
          for (int n = 0; n < N / 8; n++)
            #pragma unroll
            for (int i = 0; i < 2; i++) {
              float& x = score[m][n][half * 2 + i];
              x = x > NONE ? exp2(x - high) : 0.0f;
              total += x;
            }
          sum[m][half] = sum[m][half] * shrink + total;
          #pragma unroll
          for (int n = 0; n < NV; n++) {
            acc[m][n][half * 2] *= shrink;
            acc[m][n][half * 2 + 1] *= shrink;
          }
        }
      #pragma unroll
      for (int n = 0; n < N / 8; n += 2) {
        unsigned a[MT][4], b[4];
        #pragma unroll
        for (int m = 0; m < MT; m++) {
          PACK(a[m][0], score[m][n][0], score[m][n][1])
          PACK(a[m][1], score[m][n][2], score[m][n][3])
          PACK(a[m][2], score[m][n + 1][0], score[m][n + 1][1])
          PACK(a[m][3], score[m][n + 1][2], score[m][n + 1][3])
        }
        #pragma unroll
        for (int d = 0; d < NV; d += 2) {
          LOAD_TRANSPOSED(b, v_at + (n * 8 * V_PITCH + d) * 16)
          #pragma unroll
          for (int m = 0; m < MT; m++) {
            MULTIPLY(acc[m][d], a[m], b[0], b[1])
            MULTIPLY(acc[m][d + 1], a[m], b[2], b[3])
          }
        }
      }
    }
    BARRIER;
  }
  COPIES_WAIT(0);
  #pragma unroll
  for (int m = 0; m < MT; m++)
    #pragma unroll
    for (int half = 0; half < 2; half++) {
      float all = sum[m][half];
      all += SHUFFLE(all, 1);
      all += SHUFFLE(all, 2);
      const int query = mine + m * 16 + half * 8 + (lane >> 2);
      if (query >= n_queries) continue;
      const int result = first + query / G * n_splits + index;
      const size_t at = (size_t)result * heads + head * G + query % G;
      if ((lane & 3) == 0) { weight[at * 2] = top[m][half]; weight[at * 2 + 1] = all; }
      #pragma unroll
      for (int n = 0; n < NV; n++)
        *(float2*)(partial + at * D + n * 8 + (lane & 3) * 2)
          = make_float2(acc[m][n][half * 2], acc[m][n][half * 2 + 1]);
    }
"""

# Matrix instructions for 16-bit numbers, from compute capability 8.0 on.
MATRICES = """
#if HALF
#define FORMAT "f16"
#else
#define FORMAT "bf16"
#endif
#define SHARED_AT(p) ((unsigned)__cvta_generic_to_shared(p))
#define LOAD_MATRIX(to, at) \\
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];" \\
    : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(at) : "memory");
#define LOAD_TRANSPOSED(to, at) \\
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];" \\
    : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(at) : "memory");
#define MULTIPLY(to, a, b0, b1) \\
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." FORMAT "." FORMAT ".f32 " \\
    "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \\
    : "+f"(to[0]), "+f"(to[1]), "+f"(to[2]), "+f"(to[3]) \\
    : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#define PACK(to, low, high) \\
  asm("cvt.rn." FORMAT "x2.f32 %0, %1, %2;" : "=r"(to) : "f"(high), "f"(low));
"""
