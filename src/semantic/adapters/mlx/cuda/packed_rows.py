"""CUDA source text of a run of rows that attends to packed rows; see `eight_bits`.

Matrix instructions multiply the bytes as they are, since 16-bit floats hold them. Each group's step
and lowest number enter the sums: a key's after its products, a value's by other shares.
"""

from __future__ import annotations

# Bring 16 rows of keys and of values from `tile` on to a stage of `tiles`: as many vectors of bytes
# as a row has bytes.
FETCH = """
#define FETCH(tile, stage)                                                                   \\
  if ((tile) < end) {                                                                        \\
    const S* page = pages + plan[table + ((tile) >> 8)] * PAGE_SIZE;                         \\
    const uint4* page_k = (const uint4*)(page + keys_at + ((tile) & 255) * RK);              \\
    const uint4* page_v = (const uint4*)(page + values_at + ((tile) & 255) * RV);            \\
    uint4* to = tiles + (stage) * IN_TILE;                                                   \\
    _Pragma("unroll")                                                                        \\
    for (int x = lane; x < RK + RV; x += 32)                                                 \\
      COPY16(to + x, x < RK ? page_k + x : page_v + (x - RK), true);                         \\
    if ((tile) + 16 > fresh) {                                                               \\
      COPIES_END;                                                                            \\
      COPIES_WAIT(0);                                                                        \\
      WARP_BARRIER;                                                                          \\
      for (int t = max(fresh, tile); t < min((tile) + 16, end); t++) {                       \\
        S* row_k = (S*)to + (t - (tile)) * RK;                                               \\
        S* row_v = (S*)(to + RK) + (t - (tile)) * RV;                                        \\
        const uint4* from_k = (const uint4*)(new_k + (t - fresh) * k_strides[0]);            \\
        const uint4* from_v = (const uint4*)(new_v + (t - fresh) * v_strides[0]);            \\
        PUT_BOTH(row_k, row_v, from_k, from_v, lane, 32)                                     \\
      }                                                                                      \\
    }                                                                                        \\
  }                                                                                          \\
  COPIES_END;

#define STEP_IN(scales) FLOAT_OF((scales) << 16)
#define LOWEST_IN(scales) FLOAT_OF((scales) & 0xffff0000u)
#define BYTES_AS_HALVES(low, high, word) \\
  asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(low) \\
    : "r"(__byte_perm(word, 0x64646464u, 0x4140)), "r"(0x64006400u)); \\
  asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(high) \\
    : "r"(__byte_perm(word, 0x64646464u, 0x4342)), "r"(0x64006400u));
"""

# A product sums over columns and tokens in any order: a lane takes columns that are neighbours, and
# tokens with which 16 lanes read all banks of shared memory (a row of 128 is 17 x 8 bytes). All
# warps share the queries, divided by a power of two, so that they fit 16-bit floats.
QUERIES = """
#define KEY_TOKEN(half) ((half) * 2 + (lane >> 2 & 1) + (lane & 8) + (lane >> 4) * 4)
#define TOKEN(half, i) ((half) * 2 + (lane & 1) * 8 + (lane & 2) * 2 + (i))
#define QUERY_PAIR(d) (32 * ((d) / 8) + 8 * (lane & 3) + (d) % 8)
#define COLUMN(n, i) (64 * ((n) / 8) + 8 * ((lane & 3) * 2 + (i)) + (n) % 8)
  __shared__ uint4 query[KV / 2][32];
  float scale_of[2], total[2][DK / 64];  // of each group
  {
    __align__(16) unsigned its_query[KV / 2][4];
    #pragma unroll
    for (int half = 0; half < 2; half++) {
      const int m = half * 8 + (lane >> 2), g = g0 + m % GT;
      const T* from = q + (row + m / GT) * q_strides[0] + (head * G + g) * q_strides[1];
      const bool real = m < n_queries && g < G;
      float most = 0.0f;
      #pragma unroll
      for (int d = 0; d < KV; d++) {
        const unsigned two = real ? ((const unsigned*)from)[QUERY_PAIR(d)] : 0;
        its_query[d / 2][d % 2 * 2 + half] = two;
        for (int i = 0; i < 2; i++) most = max(most, fabsf((float)((const T*)&two)[i]));
      }
      most = max(most, SHUFFLE(most, 1));
      most = max(most, SHUFFLE(most, 2));
      const unsigned power = BITS_OF(most) & 0x7f800000u;
      scale_of[half] = scale * FLOAT_OF(power);
      #pragma unroll
      for (int g = 0; g < DK / 64; g++) {
        float all = 0.0f;
        #pragma unroll
        for (int c = 0; c < 8; c++) {
          unsigned& two = its_query[4 * g + c / 2][c % 2 * 2 + half];
          const T* numbers = (const T*)&two;
          const float unit = FLOAT_OF(0x7f000000u - power);
          const float a = (float)numbers[0] * unit, b = (float)numbers[1] * unit;
          PACK_AS("f16", two, a, b)
          all += a + b;
        }
        all += SHUFFLE(all, 1);
        total[half][g] = all + SHUFFLE(all, 2);
      }
    }
    #pragma unroll
    for (int d = 0; d < KV / 2; d++)
      if (d % WARPS == warp)
        query[d][lane] = *(const uint4*)its_query[d];
    BARRIER;
  }
"""
SCORES = """
      const S* keys = (const S*)(tiles + stage * IN_TILE);
      #pragma unroll
      for (int half = 0; half < 2; half++) {
        float of_group[DK / 64][4] = {};
        #pragma unroll
        for (int g = 0; g < DK / 64; g++) {
          const unsigned* words = (const unsigned*)(keys + KEY_TOKEN(half) * RK);
          #pragma unroll
          for (int c = 0; c < 4; c++) {
            const unsigned word = words[16 * g + 4 * (lane & 3) + c];
            unsigned low, high;
            BYTES_AS_HALVES(low, high, word)
            const uint4 mine = query[4 * g + c][lane];
            const unsigned* numbers = (const unsigned*)&mine;
            MULTIPLY_AS("f16", of_group[g], numbers, low, high)
          }
        }
        #pragma unroll
        for (int j = 0; j < 2; j++) {
          const S* row = keys + TOKEN(half, j) * RK;
          const unsigned* scales = (const unsigned*)(row + DK);
          #pragma unroll
          for (int g = 0; g < DK / 64; g++) {
            const float step = STEP_IN(scales[g]), low = LOWEST_IN(scales[g]);
            score[half][j] += step * of_group[g][j] + low * total[0][g];
            score[half][2 + j] += step * of_group[g][2 + j] + low * total[1][g];
          }
        }
      }
"""
SUM = """
      const S* values = (const S*)(tiles + stage * IN_TILE + RK);
      #pragma unroll
      for (int g = 0; g < DV / 64; g++) {
        float part[2][4];
        #pragma unroll
        for (int j = 0; j < 4; j++) {
          const int t = TOKEN(j / 2, j % 2);
          const bool real = tile + t >= begin && tile + t < end;
          const unsigned scales = real ? ((const unsigned*)(values + t * RV + DV))[g] : 0;
          #pragma unroll
          for (int half = 0; half < 2; half++) {
            const float mine = score[j / 2][half * 2 + j % 2];
            part[half][j] = mine * STEP_IN(scales);
            lowest[half][g] += mine * LOWEST_IN(scales);
          }
        }
        unsigned share[2][4];
        #pragma unroll
        for (int i = 0; i < 4; i++) {
          const float* two = part[i % 2] + i / 2 * 2;
          PACK_AS("bf16", share[0][i], two[0], two[1])
          const unsigned both = share[0][i];
          PACK_AS("bf16", share[1][i], two[0] - STEP_IN(both), two[1] - LOWEST_IN(both))
        }
        #pragma unroll
        for (int w = 0; w < 2; w++) {
          unsigned word[4];  // of four tokens
          #pragma unroll
          for (int j = 0; j < 4; j++) {
            const S* row = values + TOKEN(j / 2, j % 2) * RV;
            word[j] = ((const unsigned*)row)[16 * g + 2 * (lane >> 2) + w];
          }
          #pragma unroll
          for (int b = 0; b < 4; b++) {
            unsigned low, high;
            PACK_AS("bf16", low, BYTE(word[0], b), BYTE(word[1], b))
            PACK_AS("bf16", high, BYTE(word[2], b), BYTE(word[3], b))
            MULTIPLY_AS("bf16", acc[8 * g + 4 * w + b], share[0], low, high)
            MULTIPLY_AS("bf16", acc[8 * g + 4 * w + b], share[1], low, high)
          }
        }
      }
"""
