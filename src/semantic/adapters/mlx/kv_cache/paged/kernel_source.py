"""Source text of the paged kernels: one body for CUDA and for Metal, in the macros of `dialect.py`.

`ATTEND` is split-KV decode attention: a thread group reads one item of work, a run of tokens of one
sequence for query heads of one KV head, straight from the pages, and writes the sequence's new
token to its page. `COMBINE` reduces the partial results of a sequence's items. `APPEND` writes the
tokens of a prefill chunk to pages and gathers what they attend to into contiguous arrays.
`WRITE_ROWS` writes one token per row of a batch. `STORE` and `COPY` move whole pages. Knows no MLX:
`kernels.py` binds the inputs.
"""

from __future__ import annotations

ITEM_INTS = 8
"""row, start, stop, page table, first, n_items, index, unused: see `split_kv.py`."""

THREADS = 128

AXES = 3
"""Axes of whose strides a kernel may know: rows, heads and tokens."""

_NUMBERS = "q k v pages sinks data out all_k all_v"
_INTEGERS = "plan positions layer page_table bounds targets indices pairs spans counters done"
TYPES = {
    **dict.fromkeys(_NUMBERS.split(), "T"),
    **dict.fromkeys(_INTEGERS.split(), "int"),
    **dict.fromkeys(("partial", "weight"), "float"),
    "after": "void",
}
"""C types of the kernels' inputs and outputs."""

# A thread group computes GT query heads of one KV head; its four warps alternate in tiles of TILE
# tokens. A warp reads keys with 8 lanes per token and values with NV lanes, 16 bytes per lane.
_SIZES = """
  constexpr int VEC = 16 / sizeof(T);
  constexpr int NV = D / VEC;
  constexpr int PARTS = (G + GT - 1) / GT;
  constexpr float NONE = -1e30f;
  constexpr float LOG2E = 1.4426950408889634f;
  const int head = gy / PARTS;
  const int g0 = (gy % PARTS) * GT;
"""

ATTEND = (
    _SIZES
    + """
  constexpr int WARPS = 4;
  constexpr int K_LANE = (NV + 7) / 8;                // vectors of a key per lane
  constexpr int K_TURNS = TILE / 4;                   // tokens of a tile per 8 lanes
  constexpr int V_TOGETHER = NV < 32 ? 32 / NV : 1;   // values that a warp reads at once
  constexpr int V_LANE = (NV + 31) / 32;              // vectors of a value per lane
  constexpr int V_TURNS = (TILE + V_TOGETHER - 1) / V_TOGETHER;
  constexpr int IN_TILE = TILE * NV;                  // vectors of the keys of a tile

  const DEV int* item = plan + gx * 8;
  const int row = item[0], start = item[1], stop = item[2];
  const int first = item[4], n_items = item[5], index = item[6];
  const DEV int* page_table = plan + item[3];
  const int pos = positions[row];
  const int begin = WINDOW > 0 ? max(start, pos - WINDOW + 1) : start;
  const int end = min(stop, pos + 1);
  const int heads = H * G;
  const size_t head_size = (size_t)256 * D;
  const size_t page_size = head_size * (2 * H) * LAYERS;
  const size_t in_page = head_size * ((size_t)(2 * H) * layer[0] + head);
  const float scale = FLOAT_OF(layer[1]) * LOG2E;
  const DEV T* new_k = k + (size_t)row * k_strides[0] + (size_t)head * k_strides[1];
  const DEV T* new_v = v + (size_t)row * v_strides[0] + (size_t)head * v_strides[1];

  alignas(16) SHM float share_of[WARPS][TILE][GT];
  SHM float warp_top[WARPS][GT], warp_sum[WARPS][GT];

  const int warp = tid >> 5, lane = tid & 31, lane8 = lane & 7;
  NEAR uint4* mine = space + warp * (STAGES * 2 * IN_TILE);

#define FETCH(tile, stage)                                                                   \\
  if ((tile) < end) {                                                                        \\
    const DEV T* page = pages + page_table[((tile) >> 8) - (start >> 8)] * page_size         \\
      + in_page + (size_t)((tile) & 255) * D;                                              \\
    for (int x = lane; x < IN_TILE; x += 32) {                                               \\
      const int t = (tile) + x / NV;                                                         \\
      const bool real = t >= begin && t < end;                                               \\
      const bool is_new = t == pos;                                                          \\
      const DEV uint4* from_k = is_new ? (const DEV uint4*)new_k + x % NV                    \\
        : (const DEV uint4*)page + x;                                                        \\
      const DEV uint4* from_v = is_new ? (const DEV uint4*)new_v + x % NV                    \\
        : (const DEV uint4*)(page + head_size * H) + x;                                      \\
      COPY16(mine + (stage) * (2 * IN_TILE) + x, from_k, real);                              \\
      COPY16(mine + (stage) * (2 * IN_TILE) + IN_TILE + x, from_v, real);                    \\
    }                                                                                        \\
  }                                                                                          \\
  COPIES_END;

  int tile = begin - begin % TILE + warp * TILE;
  FETCH(tile, 0)

  float query[GT][K_LANE * VEC];
  #pragma unroll
  for (int g = 0; g < GT; g++) {
    const bool real = g0 + g < G;
    const DEV T* from = q + (size_t)row * q_strides[0] + (size_t)(head * G + g0 + g) * q_strides[1];
    #pragma unroll
    for (int c = 0; c < K_LANE; c++)
      #pragma unroll
      for (int i = 0; i < VEC; i++) {
        const int at = (c * 8 + lane8) * VEC + i;
        query[g][c * VEC + i] = real && at < D ? (float)from[at] * scale : 0.0f;
      }
  }
  if (end == pos + 1 && begin <= pos && g0 == 0) {  // this item holds the new token
    DEV T* page = (DEV T*)pages + page_table[(pos >> 8) - (start >> 8)] * page_size + in_page;
    DEV T* to_k = page + (size_t)(pos & 255) * D;
    for (int d = tid; d < D; d += 128) {
      to_k[d] = new_k[d];
      to_k[head_size * H + d] = new_v[d];
    }
  }

  const int v_group = NV < 32 ? lane / NV : 0, v_lane = NV < 32 ? lane % NV : lane;
  float acc[GT][V_LANE * VEC], top[GT], sum[GT];
  #pragma unroll
  for (int g = 0; g < GT; g++) {
    top[g] = NONE;
    sum[g] = 0.0f;
    #pragma unroll
    for (int i = 0; i < V_LANE * VEC; i++) acc[g][i] = 0.0f;
  }

  int stage = 0;
  for (; tile < end; tile += WARPS * TILE) {
    if (STAGES == 2) { FETCH(tile + WARPS * TILE, stage ^ 1) }
    COPIES_WAIT(STAGES - 1);
    WARP_BARRIER;
    const NEAR uint4* keys = mine + stage * (2 * IN_TILE);
    const NEAR uint4* values = keys + IN_TILE;
    float dot[K_TURNS][GT];
    #pragma unroll
    for (int j = 0; j < K_TURNS; j++) {
      const int t = (lane >> 3) + 4 * j;
      #pragma unroll
      for (int g = 0; g < GT; g++) dot[j][g] = 0.0f;
      #pragma unroll
      for (int c = 0; c < K_LANE; c++) {
        if (NV % 8 == 0 || c * 8 + lane8 < NV) {
          const uint4 raw = keys[t * NV + c * 8 + lane8];
          const LOC T* key = (const LOC T*)&raw;
          #pragma unroll
          for (int i = 0; i < VEC; i++) {
            const float x = (float)key[i];
            #pragma unroll
            for (int g = 0; g < GT; g++) dot[j][g] += query[g][c * VEC + i] * x;
          }
        }
      }
    }
    float high[GT];
    #pragma unroll
    for (int g = 0; g < GT; g++) high[g] = top[g];
    #pragma unroll
    for (int j = 0; j < K_TURNS; j++) {
      const int t = tile + (lane >> 3) + 4 * j;
      const bool real = t >= begin && t < end;
      #pragma unroll
      for (int g = 0; g < GT; g++) {
        float d = dot[j][g];
        d += SHUFFLE(d, 4);
        d += SHUFFLE(d, 2);
        d += SHUFFLE(d, 1);
        dot[j][g] = real ? d : NONE;
        high[g] = max(high[g], dot[j][g]);
      }
    }
    #pragma unroll
    for (int g = 0; g < GT; g++) {
      high[g] = max(high[g], SHUFFLE(high[g], 8));
      high[g] = max(high[g], SHUFFLE(high[g], 16));
      const float shrink = exp2(top[g] - high[g]);
      top[g] = high[g];
      sum[g] *= shrink;
      #pragma unroll
      for (int i = 0; i < V_LANE * VEC; i++) acc[g][i] *= shrink;
      #pragma unroll
      for (int j = 0; j < K_TURNS; j++) {
        const float p = dot[j][g] > NONE ? exp2(dot[j][g] - high[g]) : 0.0f;
        sum[g] += p;
        if (lane8 == 0) share_of[warp][(lane >> 3) + 4 * j][g] = p;
      }
    }
    WARP_BARRIER;
    #pragma unroll
    for (int j = 0; j < V_TURNS; j++) {
      const int t = v_group + V_TOGETHER * j;
      if (v_group < V_TOGETHER && (TILE % V_TOGETHER == 0 || t < TILE)) {
        float p[GT];
        #pragma unroll
        for (int g = 0; g < GT; g++) p[g] = share_of[warp][t][g];
        #pragma unroll
        for (int c = 0; c < V_LANE; c++) {
          const uint4 raw = values[t * NV + c * 32 + v_lane];
          const LOC T* value = (const LOC T*)&raw;
          #pragma unroll
          for (int i = 0; i < VEC; i++) {
            const float x = (float)value[i];
            #pragma unroll
            for (int g = 0; g < GT; g++) acc[g][c * VEC + i] += p[g] * x;
          }
        }
      }
    }
    WARP_BARRIER;
    if (STAGES == 1) { FETCH(tile + WARPS * TILE, 0) }
    stage ^= STAGES - 1;
  }
  COPIES_WAIT(0);
  #pragma unroll
  for (int g = 0; g < GT; g++) {
    sum[g] += SHUFFLE(sum[g], 8);
    sum[g] += SHUFFLE(sum[g], 16);
    if (lane == 0) { warp_top[warp][g] = top[g]; warp_sum[warp][g] = sum[g]; }
  }
  BARRIER;
  NEAR float* joined = (NEAR float*)space;  // [GROUPS][GT][D]
  if (v_group < V_TOGETHER)
    #pragma unroll
    for (int g = 0; g < GT; g++)
      #pragma unroll
      for (int c = 0; c < V_LANE; c++)
        #pragma unroll
        for (int i = 0; i < VEC; i++)
          joined[((warp * V_TOGETHER + v_group) * GT + g) * D + (c * 32 + v_lane) * VEC + i]
            = acc[g][c * VEC + i];
  BARRIER;
  for (int x = tid; x < GT * D; x += 128) {
    const int g = x / D, d = x % D;
    const int query_head = head * G + g0 + g;
    if (g0 + g >= G) continue;
    float high = NONE, total = 0.0f, all = 0.0f;
    for (int w = 0; w < WARPS; w++) high = max(high, warp_top[w][g]);
    for (int w = 0; w < WARPS; w++) {
      const float part = exp2(warp_top[w][g] - high);
      all += warp_sum[w][g] * part;
      for (int i = 0; i < V_TOGETHER; i++)
        total += part * joined[((w * V_TOGETHER + i) * GT + g) * D + d];
    }
"""
)

# Where items are combined in the same launch, the only item of a sequence writes the result itself.
DIRECT = """
    if (n_items == 1) {
#if SINKS
      const float sink = (float)sinks[query_head] * LOG2E;
      const float higher = max(high, sink);
      const float shrink = exp2(high - higher);
      all = all * shrink + exp2(sink - higher);
      total *= shrink;
#endif
      out[((size_t)row * heads + query_head) * D + d] = (T)(total / all);
      continue;
    }
"""

ATTEND_END = """
    const size_t at = (size_t)(first + index) * heads + query_head;
    partial[at * D + d] = total;
    if (d == 0) { weight[at * 2] = high; weight[at * 2 + 1] = all; }
  }
"""


# On CUDA the thread group that ends last combines a sequence's items, in the order of the items:
# the result does not depend on which one was last.
LAST_ONE = """
  if (n_items == 1) return;
  SHM int arrived;
  BARRIER;
  if (tid == 0) {
    DEV int* counter = (DEV int*)counters + row * (H * PARTS) + gy;
    __threadfence();
    arrived = atomicAdd(counter, 1);
    __threadfence();
    if (arrived == n_items - 1) *counter = 0;
  }
  BARRIER;
  if (arrived != n_items - 1) return;
"""

COMBINE_START = (
    _SIZES
    + """
  const int row = gx, first = spans[row * 2], n_items = spans[row * 2 + 1];
  const int heads = H * G;
"""
)

COMBINE = """
  SHM float share[GT][128], whole[GT];  // per item; a row has at most 128
  for (int g = tid >> 5; g < GT; g += 4) {
    const int query_head = head * G + min(g0 + g, G - 1);
    float tops[4], sums[4], high = NONE, all = 0.0f;
    #pragma unroll
    for (int j = 0; j < 4; j++) {
      const int i = (tid & 31) + 32 * j;
      const size_t one = ((size_t)(first + i) * heads + query_head) * 2;
      tops[j] = i < n_items ? LATE(weight + one) : NONE;
      sums[j] = i < n_items ? LATE(weight + one + 1) : 0.0f;
      high = max(high, tops[j]);
    }
    for (int mask = 16; mask; mask >>= 1) high = max(high, SHUFFLE(high, mask));
#if SINKS
    const float sink = (float)sinks[query_head] * LOG2E;
    high = max(high, sink);
#endif
    #pragma unroll
    for (int j = 0; j < 4; j++) {
      const float part = exp2(tops[j] - high);
      share[g][(tid & 31) + 32 * j] = part;
      all += sums[j] * part;
    }
    for (int mask = 16; mask; mask >>= 1) all += SHUFFLE(all, mask);
#if SINKS
    all += exp2(sink - high);
#endif
    if ((tid & 31) == 0) whole[g] = all;
  }
  BARRIER;
  #pragma unroll
  for (int x = tid; x < GT * D; x += 128) {
    const int g = x / D, d = x % D;
    const int query_head = head * G + g0 + g;
    if (g0 + g < G) {
      const DEV float* one = partial + ((size_t)first * heads + query_head) * D + d;
      float total = 0.0f;
      #pragma unroll 8
      for (int i = 0; i < n_items; i++) total += share[g][i] * LATE(one + (size_t)i * heads * D);
      out[((size_t)row * heads + query_head) * D + d] = (T)(total / whole[g]);
    }
  }
"""

# One new token per row to its page: one thread per 16 bytes of keys and of values.
WRITE_ROWS = """
  constexpr int VEC = 16 / sizeof(T);
  constexpr int NV = D / VEC;
  const int x = gx * 128 + tid, row = x / NV, lane = x % NV, head = gy;
  const size_t head_size = (size_t)256 * D;
  if (x == 0 && head == 0) done[0] = 1;
  if (row >= targets_shape[0]) return;
  DEV T* page = (DEV T*)pages + head_size * ((size_t)(2 * H) * layer[0] + head)
    + targets[row] * (head_size * (2 * H) * LAYERS) + (size_t)(positions[row] & 255) * D;
  ((DEV uint4*)page)[lane]
    = ((const DEV uint4*)(k + row * k_strides[0] + head * k_strides[1]))[lane];
  ((DEV uint4*)(page + head_size * H))[lane]
    = ((const DEV uint4*)(v + row * v_strides[0] + head * v_strides[1]))[lane];
"""

# bounds: position of the first new token, number of new tokens, first position to keep in the
# pages, first position to gather, position after the last token to write. One thread per 16 bytes
# of keys and of values.
APPEND = """
  constexpr int VEC = 16 / sizeof(T);
  constexpr int NV = D / VEC;
  const int at = bounds[0], n = bounds[1], keep_from = bounds[2], gather_from = bounds[3];
  const int write_to = bounds[4];
  const int x = gx * 128 + tid;
  const int t = (GATHER ? gather_from : at) + x / NV, lane = x % NV, head = gy;
  const size_t head_size = (size_t)256 * D;
  if (x == 0 && head == 0) done[0] = at + n;
  if (t >= at + n) return;
  const int block = min(t, write_to - 1) >> 8;  // padding has no page
  DEV T* page = (DEV T*)pages + head_size * ((size_t)(2 * H) * layer[0] + head)
    + page_table[RING ? block % page_table_shape[0] : block] * (head_size * (2 * H) * LAYERS)
    + (size_t)(t & 255) * D;
  DEV uint4* page_k = (DEV uint4*)page;
  DEV uint4* page_v = (DEV uint4*)(page + head_size * H);
  uint4 key, value;
  if (t >= at) {
    const size_t new_t = t - at;
    key = ((const DEV uint4*)(k + head * k_strides[1] + new_t * k_strides[2]))[lane];
    value = ((const DEV uint4*)(v + head * v_strides[1] + new_t * v_strides[2]))[lane];
    if (WRITE && t >= keep_from && t < write_to) { page_k[lane] = key; page_v[lane] = value; }
  } else {
    key = page_k[lane];
    value = page_v[lane];
  }
  if (GATHER) {
    const size_t to = ((size_t)head * (at + n - gather_from) + (t - gather_from)) * NV + lane;
    ((DEV uint4*)all_k)[to] = key;
    ((DEV uint4*)all_v)[to] = value;
  }
"""

# Whole pages, from a contiguous array to the pool: 16 bytes per thread.
STORE = """
  const size_t vectors = (size_t)2 * H * LAYERS * 256 * D * sizeof(T) / 16;
  const size_t x = (size_t)gx * 128 + tid;
  if (x == 0 && gy == 0) done[0] = 1;
  if (x < vectors)
    ((DEV uint4*)pages)[indices[gy] * vectors + x] = ((const DEV uint4*)data)[gy * vectors + x];
"""

# Whole pages, from other pages of the pool.
COPY = """
  const size_t vectors = (size_t)2 * H * LAYERS * 256 * D * sizeof(T) / 16;
  const size_t x = (size_t)gx * 128 + tid;
  if (x == 0 && gy == 0) done[0] = 1;
  if (x < vectors) {
    DEV uint4* all = (DEV uint4*)pages;
    all[pairs[2 * gy + 1] * vectors + x] = all[pairs[2 * gy] * vectors + x];
  }
"""
