"""CUDA source text of attention with matrix instructions.

Consecutive tokens of a sequence attend to almost the same keys, so a thread group reads these keys
once: `ATTEND_ROWS` for a chunk of a prompt, `ATTEND_RUN` for a decode step with drafts.
"""

from __future__ import annotations

from semantic.adapters.mlx.cuda import packed_rows

KEYS = 32
"""The number of keys per tile."""

WARP_QUERIES = 16
"""The number of queries per matrix instruction."""

# Write the run's tokens that an item holds to their pages.
_NEW_TOKENS = """
  for (int at = max(pos, item[1]); at < min(pos + n_rows, item[2]); at++) {
    S* page = (S*)pages + plan[table + (at >> 8)] * PAGE_SIZE;
    S* to_k = page + keys_at + (size_t)(at & 255) * RK;
    S* to_v = page + values_at + (size_t)(at & 255) * RV;
    const uint4* from_k = (const uint4*)(new_k + (at - fresh) * k_strides[0]);
    const uint4* from_v = (const uint4*)(new_v + (at - fresh) * v_strides[0]);
    PUT_BOTH(to_k, to_v, from_k, from_v, tid, ALL)
  }
"""

# Bring N tokens from `tile` on to a stage of `tiles`. Threads `me`, of SHARING ones, take turns.
_FETCH = """
#define FETCH(tile, stage)                                                                   \\
  if ((tile) < end) {                                                                        \\
    const S* page = pages + plan[table + ((tile) >> 8)] * PAGE_SIZE;                         \\
    const S* page_k = page + keys_at + ((tile) & 255) * RK;                                  \\
    const S* page_v = page + values_at + ((tile) & 255) * RV;                                \\
    uint4* to = tiles + (stage) * IN_TILE;                                                   \\
    for (int x = me; x < N * KV; x += SHARING) {                                             \\
      const int t = (tile) + x / KV;                                                         \\
      const uint4* new_t = (const uint4*)(new_k + (t - fresh) * k_strides[0]);               \\
      READ(to + x / KV * PITCH + x % KV, page_k, x, KV, new_t + x % KV, x % KV,              \\
           t < fresh, t >= begin && t < end, (tile) + N <= fresh)                            \\
    }                                                                                        \\
    for (int x = me; x < N * VV; x += SHARING) {                                             \\
      const int t = (tile) + x / VV;                                                         \\
      const uint4* new_t = (const uint4*)(new_v + (t - fresh) * v_strides[0]);               \\
      READ(to + N * PITCH + x / VV * V_PITCH + x % VV, page_v, x, VV, new_t + x % VV,        \\
           x % VV, t < fresh, t >= begin && t < end, (tile) + N <= fresh)                    \\
    }                                                                                        \\
  }                                                                                          \\
  COPIES_END;
"""

# A row of a tile is KV or VV vectors of 16 bytes, plus one vector of padding: at this odd distance,
# eight rows begin in different banks. `mma` multiplies 16 x 16 by 16 x 8 numbers; a lane holds two
# rows of a result.
ATTEND_ROWS = (
    """
  constexpr int D = DV;
  constexpr int PITCH = KV + 1, V_PITCH = VV + 1;
  constexpr int N = 32, ALL = 128, SHARING = ALL;
  constexpr int M = 64 * MT;
  constexpr int IN_TILE = N * (PITCH + V_PITCH);
  constexpr float NONE = -1e30f;
  constexpr float LOG2E = 1.4426950408889634f;
  const int head = gy;
  const int* item = plan + gx * 11;
  const int row = item[0], start = item[1], stop = item[2];
  const int first = item[4], n_splits = item[5], index = item[6], n_rows = item[7];
  const int table = item[3] - (start >> 8), n_before = item[10];
  const int pos = positions[row], fresh = pos - n_before;
  const int begin = WINDOW > 0 ? max(start, pos - WINDOW + 1) : start;
  const int end = min(stop, pos + n_rows);
  const int heads = H * G, n_queries = n_rows * G;
  const size_t keys_at = LAYER_SIZE * layer[0] + (size_t)256 * RK * head;
  const size_t values_at = LAYER_SIZE * layer[0] + ALL_KEYS + (size_t)256 * RV * head;
  const T* new_k = k + (size_t)(row - n_before) * k_strides[0] + (size_t)head * k_strides[1];
  const T* new_v = v + (size_t)(row - n_before) * v_strides[0] + (size_t)head * v_strides[1];
  const float scale = FLOAT_OF(layer[1]) * LOG2E;
  const int warp = tid >> 5, lane = tid & 31, me = tid;
  uint4* queries = space;            // [M][PITCH]
  uint4* tiles = space + M * PITCH;  // [stage]: keys, [N][PITCH], then values, [N][V_PITCH]

"""
    + _FETCH
    + _NEW_TOKENS
    + """
  int tile = begin - begin % N;
  FETCH(tile, 0)
  for (int x = tid; x < M * KV; x += ALL) {
    const int m = x / KV;
    uint4 vector = make_uint4(0, 0, 0, 0);
    if (m < n_queries) {
      const T* from = q + (row + m / G) * q_strides[0] + (head * G + m % G) * q_strides[1];
      vector = ((const uint4*)from)[x % KV];
    }
    queries[m * PITCH + x % KV] = vector;
  }

  float acc[MT][VV][4], top[MT][2], sum[MT][2];
  #pragma unroll
  for (int m = 0; m < MT; m++) {
    #pragma unroll
    for (int half = 0; half < 2; half++) { top[m][half] = NONE; sum[m][half] = 0.0f; }
    #pragma unroll
    for (int n = 0; n < VV; n++)
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
      for (int d = 0; d < KV; d += 2) {
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
          for (int n = 0; n < VV; n++) {
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
        for (int d = 0; d < VV; d += 2) {
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
      for (int n = 0; n < VV; n++)
        *(float2*)(partial + at * D + n * 8 + (lane & 3) * 2)
          = make_float2(acc[m][n][half * 2], acc[m][n][half * 2 + 1]);
    }
"""
)

# A run has up to 16 queries: GT query heads of each of its rows. Warp w computes the tiles whose
# number is w modulo WARPS, whatever the run, so a row has the same bits in all runs. Shares are
# summed as two 16-bit numbers, since one would round more than the result does.
ATTEND_RUN = (
    """
  constexpr int PITCH = KV + 1, V_PITCH = VV + 1;
  constexpr int N = 16, SHARING = 32;
  constexpr int IN_TILE = PACKED ? RK + RV : N * (PITCH + V_PITCH);
  constexpr int STRIDE = 16 * WARPS, ALL = 32 * WARPS;
  const int* item = plan + gx * 11;
  const int row = item[0], stop = item[2], split = item[8], n_before = item[10];
  const int first = item[4], n_splits = item[5], n_rows = item[7], n_items = item[9];
  const int table = item[3] - (item[1] >> 8);  // where `plan` has the page of block 0
  const int pos = positions[row], fresh = pos - n_before, past = pos + n_rows;
  const int heads = H * G, n_queries = n_rows * GT;
  const size_t keys_at = LAYER_SIZE * layer[0] + (size_t)256 * RK * head;
  const size_t values_at = LAYER_SIZE * layer[0] + ALL_KEYS + (size_t)256 * RV * head;
  const float scale = FLOAT_OF(layer[1]) * LOG2E;
  const T* new_k = k + (size_t)(row - n_before) * k_strides[0] + (size_t)head * k_strides[1];
  const T* new_v = v + (size_t)(row - n_before) * v_strides[0] + (size_t)head * v_strides[1];
  const int warp = tid >> 5, lane = tid & 31, me = lane;
  uint4* tiles = space + warp * (2 * IN_TILE);
  __shared__ float warp_top[WARPS][16], warp_sum[WARPS][16];

#if PACKED
"""
    + packed_rows.FETCH
    + """
#else
"""
    + _FETCH
    + """
#define TOKEN(half, i) ((half) * 8 + (lane & 3) * 2 + (i))
#define QUERY_PAIR(d) ((d) * 4 + (lane & 3))
#define COLUMN(n, i) ((n) * 8 + (lane & 3) * 2 + (i))
#endif
#if PACKED
"""
    + packed_rows.QUERIES
    + """
#else
  unsigned query[KV / 2][4];
  const float scale_of[] = {scale, scale};
  #pragma unroll
  for (int half = 0; half < 2; half++) {
    const int m = half * 8 + (lane >> 2), g = g0 + m % GT;
    const T* from = q + (row + m / GT) * q_strides[0] + (head * G + g) * q_strides[1];
    const bool real = m < n_queries && g < G;
    #pragma unroll
    for (int d = 0; d < KV; d++)
      query[d / 2][d % 2 * 2 + half] = real ? ((const unsigned*)from)[QUERY_PAIR(d)] : 0;
  }
#endif
  if (g0 == 0) {
"""
    + _NEW_TOKENS
    + """
  }
  const int k_lane = ((lane & 7) + ((lane >> 4) << 3)) * PITCH + ((lane >> 3) & 1);
  const int v_lane = 16 * PITCH + (lane & 15) * V_PITCH + (lane >> 4);
  int index = item[6];
  for (int start = item[1]; start < stop; start += split, index++) {
    const int begin = WINDOW > 0 ? max(start, pos - WINDOW + 1) : start;
    const int end = min(start + split, past);
    int first_tile = begin - begin % STRIDE + warp * 16;
    if (first_tile + 16 <= begin) first_tile += STRIDE;
    float acc[VV][4] = {}, top[2] = {NONE, NONE}, sum[2] = {};
#if PACKED
    float lowest[2][DV / 64] = {};
#endif
    // A tile comes while the warp computes the one before. `FETCH` is long: here it is once.
    for (int next = first_tile, stage = 1; next < end + STRIDE; next += STRIDE, stage ^= 1) {
      FETCH(next, stage ^ 1)
      if (next == first_tile) continue;
      const int tile = next - STRIDE;
      COPIES_WAIT(1);
      WARP_BARRIER;
      float score[2][4] = {};
#if PACKED
"""
    + packed_rows.SCORES
    + """
#else
      const unsigned k_at = SHARED_AT(tiles + stage * IN_TILE + k_lane);
      const unsigned v_at = SHARED_AT(tiles + stage * IN_TILE + v_lane);
      #pragma unroll
      for (int d = 0; d < KV; d += 2) {
        unsigned b[4];
        LOAD_MATRIX(b, k_at + d * 16)
        MULTIPLY(score[0], query[d / 2], b[0], b[1])
        MULTIPLY(score[1], query[d / 2], b[2], b[3])
      }
#endif
      #pragma unroll
      for (int half = 0; half < 2; half++) {
        const int at = pos + (half * 8 + (lane >> 2)) / GT;
        float high = top[half];
        #pragma unroll
        for (int i = 0; i < 4; i++) {
          const int t = tile + TOKEN(i / 2, i % 2);
          const bool seen = t <= at && (WINDOW == 0 || t > at - WINDOW);
          float& x = score[i / 2][half * 2 + i % 2];
          x = seen ? x * scale_of[half] : NONE;
          high = max(high, x);
        }
        high = max(high, SHUFFLE(high, 1));
        high = max(high, SHUFFLE(high, 2));
        const float shrink = exp2(top[half] - high);
        top[half] = high;
        sum[half] *= shrink;
        #pragma unroll
        for (int i = 0; i < 4; i++) {
          float& x = score[i / 2][half * 2 + i % 2];
          x = x > NONE ? exp2(x - high) : 0.0f;
          sum[half] += x;
        }
        if (shrink == 1.0f) continue;
        #pragma unroll
        for (int n = 0; n < VV; n++) {
          acc[n][half * 2] *= shrink;
          acc[n][half * 2 + 1] *= shrink;
        }
#if PACKED
        #pragma unroll
        for (int g = 0; g < DV / 64; g++) lowest[half][g] *= shrink;
#endif
      }
#if PACKED
"""
    + packed_rows.SUM
    + """
#else
      unsigned share[2][4];
      #pragma unroll
      for (int i = 0; i < 4; i++) {
        const float* two = score[i / 2] + i % 2 * 2;
        PACK(share[0][i], two[0], two[1])
        const T* rounded = (const T*)&share[0][i];
        PACK(share[1][i], two[0] - (float)rounded[0], two[1] - (float)rounded[1])
      }
      #pragma unroll
      for (int d = 0; d < VV; d += 2) {
        unsigned b[4];
        LOAD_TRANSPOSED(b, v_at + d * 16)
        #pragma unroll
        for (int i = 0; i < 2; i++) {
          MULTIPLY(acc[d], share[i], b[0], b[1])
          MULTIPLY(acc[d + 1], share[i], b[2], b[3])
        }
      }
#endif
      WARP_BARRIER;
    }
    COPIES_WAIT(0);
#if PACKED
    #pragma unroll
    for (int half = 0; half < 2; half++)
      #pragma unroll
      for (int g = 0; g < DV / 64; g++) {
        lowest[half][g] += SHUFFLE(lowest[half][g], 1);
        lowest[half][g] += SHUFFLE(lowest[half][g], 2);
        #pragma unroll
        for (int n = 8 * g; n < 8 * g + 8; n++) {
          acc[n][half * 2] += lowest[half][g];
          acc[n][half * 2 + 1] += lowest[half][g];
        }
      }
#endif
    #pragma unroll
    for (int half = 0; half < 2; half++) {
      sum[half] += SHUFFLE(sum[half], 1);
      sum[half] += SHUFFLE(sum[half], 2);
      const int m = half * 8 + (lane >> 2);
      if ((lane & 3) == 0) { warp_top[warp][m] = top[half]; warp_sum[warp][m] = sum[half]; }
    }
    BARRIER;
    float* joined = (float*)space;  // [WARPS][16][D]
    #pragma unroll
    for (int n = 0; n < VV; n++)
      #pragma unroll
      for (int i = 0; i < 4; i++)
        joined[(warp * 16 + i / 2 * 8 + (lane >> 2)) * D + COLUMN(n, i % 2)] = acc[n][i];
    BARRIER;
    for (int x = tid; x < n_queries * D; x += ALL) {
      const int m = x / D, d = x % D;
      const int query_head = head * G + g0 + m % GT;
      if (g0 + m % GT >= G) continue;
      const int its_row = row + m / GT, its_first = first + m / GT * n_splits;
      const int row = its_row, first = its_first;
      float high = NONE, total = 0.0f, all = 0.0f;
      for (int w = 0; w < WARPS; w++) high = max(high, warp_top[w][m]);
      for (int w = 0; w < WARPS; w++) {
        const float part = exp2(warp_top[w][m] - high);
        all += warp_sum[w][m] * part;
        total += part * joined[(w * 16 + m) * D + d];
      }
"""
)

EACH_ROW = """
  for (int r = 0; r < n_rows; r++) {
    const int its_row = row + r, its_first = first + r * n_splits;
    const int row = its_row, first = its_first;
"""
EACH_ROW_END = """
    BARRIER;
  }
"""

# Matrix instructions for 16-bit numbers, from compute capability 8.0 on; and a new token's rows of
# keys and values, written by the same text, as long text takes long to fetch.
MATRICES = """
#define PUT_BOTH(row_k, row_v, from_k, from_v, me, n) \\
  _Pragma("unroll 1") \\
  for (int which_ = 0; which_ < 2; which_++) { \\
    S* row_ = which_ ? row_v : row_k; \\
    const uint4* from_ = which_ ? from_v : from_k; \\
    const int size_ = which_ ? VV : KV; \\
    for (int x = me; x < (size_ + 31) / 32 * 32; x += n) PUT(row_, size_, from_, x) \\
  }
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
#define MULTIPLY_AS(format, to, a, b0, b1) \\
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." format "." format ".f32 " \\
    "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \\
    : "+f"(to[0]), "+f"(to[1]), "+f"(to[2]), "+f"(to[3]) \\
    : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#define PACK_AS(format, to, low, high) \\
  asm("cvt.rn." format "x2.f32 %0, %1, %2;" : "=r"(to) : "f"(high), "f"(low));
#define MULTIPLY(to, a, b0, b1) MULTIPLY_AS(FORMAT, to, a, b0, b1)
#define PACK(to, low, high) PACK_AS(FORMAT, to, low, high)
"""
