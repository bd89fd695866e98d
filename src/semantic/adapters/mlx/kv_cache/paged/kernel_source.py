"""Source text of the paged kernels. It uses macros of `dialect.py` for CUDA and Metal.

`ATTEND` is split-KV decode attention, and `COMBINE` combines its partial results. `APPEND` writes a
prefill chunk to pages and gathers the tokens to which it attends.
"""

from __future__ import annotations

from semantic.adapters.mlx.kv_cache.paged.row_source import PACKED_ROWS, ROWS

ITEM_INTS = 11
"""The number of integers that describe an item of work; see `SplitPlan`."""

THREADS = 128

AXES = 3
"""The axes whose strides a kernel can use: rows, heads and tokens."""

_NUMBERS = "q rope k v sinks out all_k all_v"
_INTEGERS = "plan positions layer page_table bounds indices pairs spans counters done"
TYPES = {
    **dict.fromkeys(_NUMBERS.split(), "T"),
    **dict.fromkeys(_INTEGERS.split(), "int"),
    **dict.fromkeys(("pages", "data"), "S"),
    **dict.fromkeys(("partial", "weight"), "float"),
    "after": "void",
}
"""The C types of the kernels' inputs and outputs."""

# A page has keys of DK numbers and values of DV numbers. If keys are LATENT, values are their rope
# keys: a query is multiplied with both as if they were one, and only keys are summed. A row, one
# token of a head, has RK or RV elements.
PAGE = f"""
  constexpr int VEC = 16 / sizeof(T);
  constexpr int KV = DK / VEC, VV = DV / VEC;  // vectors of a key and of a value
  constexpr int RK = PACKED ? DK * 17 / 16 : DK, RV = PACKED ? DV * 17 / 16 : DV;
  constexpr size_t ALL_KEYS = (size_t)256 * H * RK;
  constexpr size_t LAYER_SIZE = ALL_KEYS + (size_t)256 * H * RV;
  constexpr size_t PAGE_SIZE = LAYER_SIZE * LAYERS;
#if PACKED
{PACKED_ROWS}
#else
{ROWS}
#endif
"""

# A thread group computes GT query heads of one KV head; its warps take turns with tiles of TILE
# tokens. To read a key, a warp uses 8 lanes per token; to read a value, NV lanes; 16 bytes per
# lane.
SIZES = (
    PAGE
    + """
  constexpr int NK = LATENT ? KV + VV : KV;  // vectors that a query is multiplied with
  constexpr int NV = LATENT ? KV : VV;       // vectors that are summed
  constexpr int D = NV * VEC;
  constexpr int PARTS = (G + GT - 1) / GT;
  constexpr float NONE = -1e30f;
  constexpr float LOG2E = 1.4426950408889634f;
  const int head = gy / PARTS;
  const int g0 = (gy % PARTS) * GT;
"""
)

ATTEND = (
    SIZES
    + """
  constexpr int K_LANE = (NK + 7) / 8;                // vectors of a key per lane
  constexpr int K_TURNS = TILE / 4;                   // tokens of a tile per 8 lanes
  constexpr int V_TOGETHER = NV < 32 ? 32 / NV : 1;   // values that a warp reads at once
  constexpr int V_LANE = (NV + 31) / 32;              // vectors of a value per lane
  constexpr int V_TURNS = (TILE + V_TOGETHER - 1) / V_TOGETHER;
  constexpr int KEYS_IN_TILE = TILE * NK;
  constexpr int IN_TILE = KEYS_IN_TILE + (LATENT ? 0 : TILE * NV);  // vectors
  constexpr int V_PITCH = LATENT ? NK : NV;

  const DEV int* item = plan + gx * 11;
  const int row = item[0], stop = item[2], split = item[8];
  const int first = item[4], n_splits = item[5], n_items = item[9];
  const int table = item[3] - (item[1] >> 8);  // where `plan` has the page of block 0
  const int pos = positions[row];
  const int fresh = pos - item[10];  // the step's first token of this sequence
  const int heads = H * G;
  const size_t keys_at = LAYER_SIZE * layer[0] + (size_t)256 * RK * head;
  const size_t values_at = LAYER_SIZE * layer[0] + ALL_KEYS + (size_t)256 * RV * head;
  const float scale = FLOAT_OF(layer[1]) * LOG2E;
  const DEV T* new_k = k + (size_t)(row - item[10]) * k_strides[0] + (size_t)head * k_strides[1];
  const DEV T* new_v = v + (size_t)(row - item[10]) * v_strides[0] + (size_t)head * v_strides[1];

  alignas(16) SHM float share_of[WARPS][TILE][GT];
  SHM float warp_top[WARPS][GT], warp_sum[WARPS][GT];

  const int warp = tid >> 5, lane = tid & 31, lane8 = lane & 7;
  NEAR uint4* mine = space + warp * (STAGES * IN_TILE);

#define FETCH(tile, stage)                                                                   \\
  if ((tile) < end) {                                                                        \\
    const DEV S* page = pages + plan[table + ((tile) >> 8)] * PAGE_SIZE;                     \\
    const DEV S* page_k = page + keys_at + ((tile) & 255) * RK;                              \\
    const DEV S* page_v = page + values_at + ((tile) & 255) * RV;                            \\
    NEAR uint4* to = mine + (stage) * IN_TILE;                                               \\
    for (int x = lane; x < TILE * KV; x += 32) {                                             \\
      const int t = (tile) + x / KV;                                                         \\
      const DEV uint4* new_t = (const DEV uint4*)(new_k + (t - fresh) * k_strides[0]);       \\
      READ(to + (LATENT ? x / KV * NK + x % KV : x), page_k, x, KV, new_t + x % KV, x % KV,  \\
           t < fresh, t >= begin && t < end, (tile) + TILE <= fresh)                         \\
    }                                                                                        \\
    for (int x = lane; x < TILE * VV; x += 32) {                                             \\
      const int t = (tile) + x / VV;                                                         \\
      const DEV uint4* new_t = (const DEV uint4*)(new_v + (t - fresh) * v_strides[0]);       \\
      READ(to + (LATENT ? x / VV * NK + KV + x % VV : KEYS_IN_TILE + x), page_v, x, VV,      \\
           new_t + x % VV, x % VV, t < fresh, t >= begin && t < end, (tile) + TILE <= fresh) \\
    }                                                                                        \\
  }                                                                                          \\
  COPIES_END;

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
        query[g][c * VEC + i] = real && at < DK ? (float)from[at] * scale : 0.0f;
#if LATENT
        if (real && at >= DK && at < DK + DV)
          query[g][c * VEC + i] = LOG2E * (float)rope[(size_t)row * rope_strides[0]
            + (size_t)(head * G + g0 + g) * rope_strides[1] + at - DK];
#endif
      }
  }
  if (item[1] <= pos && pos < stop && g0 == 0) {  // this item holds the new token
    DEV S* page = (DEV S*)pages + plan[table + (pos >> 8)] * PAGE_SIZE;
    DEV S* to_k = page + keys_at + (size_t)(pos & 255) * RK;
    DEV S* to_v = page + values_at + (size_t)(pos & 255) * RV;
    const DEV uint4* my_k = (const DEV uint4*)(new_k + item[10] * k_strides[0]);
    const DEV uint4* my_v = (const DEV uint4*)(new_v + item[10] * v_strides[0]);
    for (int x = tid; x < (KV + 31) / 32 * 32; x += WARPS * 32) PUT(to_k, KV, my_k, x)
    for (int x = tid; x < (VV + 31) / 32 * 32; x += WARPS * 32) PUT(to_v, VV, my_v, x)
  }

  const int v_group = NV < 32 ? lane / NV : 0, v_lane = NV < 32 ? lane % NV : lane;
  int index = item[6];
  for (int start = item[1]; start < stop; start += split, index++) {
    const int begin = WINDOW > 0 ? max(start, pos - WINDOW + 1) : start;
    const int end = min(start + split, pos + 1);
    int tile = begin - begin % TILE + warp * TILE;
    FETCH(tile, 0)
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
      const NEAR uint4* keys = mine + stage * IN_TILE;
      const NEAR uint4* values = keys + (LATENT ? 0 : KEYS_IN_TILE);
      float dot[K_TURNS][GT];
      #pragma unroll
      for (int j = 0; j < K_TURNS; j++) {
        const int t = (lane >> 3) + 4 * j;
        #pragma unroll
        for (int g = 0; g < GT; g++) dot[j][g] = 0.0f;
        #pragma unroll
        for (int c = 0; c < K_LANE; c++) {
          if (NK % 8 == 0 || c * 8 + lane8 < NK) {
            const uint4 raw = keys[t * NK + c * 8 + lane8];
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
            if (NV > 32 && NV % 32 != 0 && c * 32 + v_lane >= NV) continue;
            const uint4 raw = values[t * V_PITCH + c * 32 + v_lane];
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
            if (NV <= 32 || NV % 32 == 0 || c * 32 + v_lane < NV)
              joined[((warp * V_TOGETHER + v_group) * GT + g) * D + (c * 32 + v_lane) * VEC + i]
                = acc[g][c * VEC + i];
    BARRIER;
    for (int x = tid; x < GT * D; x += WARPS * 32) {
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

# If one launch also combines splits, the only split of a sequence writes the result itself.
DIRECT = """
      if (n_splits == 1) {
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
    BARRIER;
  }
"""


# On CUDA, the thread group that finishes last combines a sequence's splits in order, so the result
# does not depend on which thread group was last. Each group's fence takes a busy H100 70 ns, so
# items have several splits where the batch fills the device.
LAST_ONE = """
  if (n_splits == 1) return;
  SHM int arrived;
  if (n_items > 1) {
    if (tid == 0) {
      DEV int* counter = (DEV int*)counters + row * (H * PARTS) + gy;
      __threadfence();
      arrived = atomicAdd(counter, 1);
      __threadfence();
      if (arrived == n_items - 1) *counter = 0;
    }
    BARRIER;
    if (arrived != n_items - 1) return;
  }
"""

COMBINE_START = (
    SIZES
    + """
  const int row = gx, first = spans[row * 2], n_splits = spans[row * 2 + 1];
  const int heads = H * G;
"""
)

COMBINE = """
  SHM float share[GT][128], whole[GT];  // per split; a row has at most 128
  for (int g = tid >> 5; g < GT; g += WARPS) {
    const int query_head = head * G + min(g0 + g, G - 1);
    float tops[4], sums[4], high = NONE, all = 0.0f;
    #pragma unroll
    for (int j = 0; j < 4; j++) {
      const int i = (tid & 31) + 32 * j;
      const size_t one = ((size_t)(first + i) * heads + query_head) * 2;
      tops[j] = i < n_splits ? LATE(weight + one) : NONE;
      sums[j] = i < n_splits ? LATE(weight + one + 1) : 0.0f;
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
  for (int x = tid * 4; x < GT * D; x += WARPS * 128) {
    const int g = x / D, d = x % D;
    const int query_head = head * G + g0 + g;
    if (g0 + g < G) {
      const DEV float4* one
        = (const DEV float4*)(partial + ((size_t)first * heads + query_head) * D + d);
      float total[4] = {0.0f, 0.0f, 0.0f, 0.0f};
      #pragma unroll 8
      for (int i = 0; i < n_splits; i++) {
        const float4 part = LATE(one + (size_t)i * heads * (D / 4));
        const float mine = share[g][i];
        total[0] += mine * part.x, total[1] += mine * part.y;
        total[2] += mine * part.z, total[3] += mine * part.w;
      }
      #pragma unroll
      for (int i = 0; i < 4; i++)
        out[((size_t)row * heads + query_head) * D + d + i] = (T)(total[i] / whole[g]);
    }
  }
"""

# bounds: position of the first new token, number of new tokens, first position to keep in the
# pages, first position to gather, position after the last token to write. One thread per 16 bytes
# of keys and of values.
APPEND = (
    PAGE
    + """
  constexpr int NX = KV > VV ? KV : VV;
  const int at = bounds[0], n = bounds[1], keep_from = bounds[2], gather_from = bounds[3];
  const int write_to = bounds[4];
  const int x = gx * 128 + tid;
  const int t = (GATHER ? gather_from : at) + x / NX, lane = x % NX, head = gy;
  if (x == 0 && head == 0) done[0] = at + n;
  if (t >= at + n) return;
  const int block = min(t, write_to - 1) >> 8;  // padding has no page
  DEV S* page = (DEV S*)pages + LAYER_SIZE * layer[0]
    + page_table[RING ? block % page_table_shape[0] : block] * PAGE_SIZE;
  DEV S* page_k = page + (size_t)(256 * head + (t & 255)) * RK;
  DEV S* page_v = page + ALL_KEYS + (size_t)(256 * head + (t & 255)) * RV;
  const size_t new_t = t - at;  // if it is new
  const DEV uint4* from_k = (const DEV uint4*)(k + head * k_strides[1] + new_t * k_strides[2]);
  const DEV uint4* from_v = (const DEV uint4*)(v + head * v_strides[1] + new_t * v_strides[2]);
  const bool is_new = t >= at, kept = WRITE && is_new && t >= keep_from && t < write_to;
  const bool any_new = (GATHER ? gather_from : at) + (x | 31) / NX >= at;  // of this warp
  const size_t to = (size_t)head * (at + n - gather_from) + (t - gather_from);
  MOVE(page_k, KV, from_k, all_k)
  MOVE(page_v, VV, from_v, all_v)
"""
)

# Copy whole pages from a contiguous array to the pool, 16 bytes per thread.
STORE = (
    PAGE
    + """
  const size_t vectors = PAGE_SIZE * sizeof(S) / 16;
  const size_t x = (size_t)gx * 128 + tid;
  if (x == 0 && gy == 0) done[0] = 1;
  if (x < vectors)
    ((DEV uint4*)pages)[indices[gy] * vectors + x] = ((const DEV uint4*)data)[gy * vectors + x];
"""
)

# Copy whole pages from other pages of the pool.
COPY = (
    PAGE
    + """
  const size_t vectors = PAGE_SIZE * sizeof(S) / 16;
  const size_t x = (size_t)gx * 128 + tid;
  if (x == 0 && gy == 0) done[0] = 1;
  if (x < vectors) {
    DEV uint4* all = (DEV uint4*)pages;
    all[pairs[2 * gy + 1] * vectors + x] = all[pairs[2 * gy] * vectors + x];
  }
"""
)
