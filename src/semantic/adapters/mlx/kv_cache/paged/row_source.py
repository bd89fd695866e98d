"""Source text that reads and writes the rows of pages, for CUDA and Metal. A row is one token of a
head, in numbers or packed in bytes.
"""

from __future__ import annotations

# `READ` brings vector `i` of a token to shared memory, from its row in a page, or from `given` if
# it is in none yet. The rows of a tile begin at `page`, and `x` counts their vectors. `PUT` writes
# a new token's vector to its row; `MOVE` writes and gathers it. All lanes of a warp call them.
ROWS = """
#define READ(to, page, x, size, given, i, old, real, all_old) \\
  COPY16(to, (old) ? (const DEV uint4*)(page) + (x) : (given), real);
#define PUT(row, size, given, i) \\
  if ((i) < (size)) ((DEV uint4*)(row))[i] = (given)[i];
#define MOVE(row, size, given, gathered) \\
  if (lane < (size)) { \\
    const uint4 vector_ = is_new ? (given)[lane] : ((const DEV uint4*)(row))[lane]; \\
    if (kept) ((DEV uint4*)(row))[lane] = vector_; \\
    if (GATHER) ((DEV uint4*)(gathered))[to * (size) + lane] = vector_; \\
  }
"""

# The same for packed rows; see `eight_bits`. The vectors of a group are in neighbouring lanes.
PACKED_ROWS = """
#define NUMBERS_OF(vector) ((LOC T*)&(vector))
#define STEP_OF(vector, step, low) \\
  float low = (float)NUMBERS_OF(vector)[0], step = low; \\
  for (int j_ = 1; j_ < VEC; j_++) { \\
    const float number_ = (float)NUMBERS_OF(vector)[j_]; \\
    low = min(low, number_); \\
    step = max(step, number_); \\
  } \\
  for (int mask_ = 32 / VEC; mask_; mask_ >>= 1) { \\
    low = min(low, SHUFFLE(low, mask_)); \\
    step = max(step, SHUFFLE(step, mask_)); \\
  } \\
  low = (float)(B16)low; \\
  step = (float)(B16)((step - low) / 255.0f); \\
  if (step == 0.0f) step = 1.0f;
#define LEVELS_OF(vector, level, step, low) \\
  float level[VEC]; \\
  for (int j_ = 0; j_ < VEC; j_++) \\
    level[j_] = min(max(rint(((float)NUMBERS_OF(vector)[j_] - low) / step), 0.0f), 255.0f);
#define ROUND(vector, level, step, low) \\
  for (int j_ = 0; j_ < VEC; j_++) NUMBERS_OF(vector)[j_] = (T)(level[j_] * step + low);
#define PACK_ROW(row, size, i, level, step, low) { \\
    DEV unsigned* words_ = (DEV unsigned*)(row); \\
    for (int w_ = 0; w_ < VEC / 4; w_++) { \\
      unsigned four_ = 0; \\
      for (int b_ = 0; b_ < 4; b_++) \\
        four_ |= (unsigned)level[4 * w_ + b_] << 8 * b_; \\
      words_[(i) * (VEC / 4) + w_] = four_; \\
    } \\
    if ((i) * VEC % 64 == 0) \\
      words_[(size) * VEC / 4 + (i) * VEC / 64] \\
        = BITS_OF(step) >> 16 | (BITS_OF(low) & 0xffff0000u); \\
  }
#define UNPACK(to, row, size, i) { \\
    const DEV unsigned* words_ = (const DEV unsigned*)(row); \\
    const unsigned both_ = words_[(size) * VEC / 4 + (i) * VEC / 64]; \\
    const float step_ = FLOAT_OF(both_ << 16), low_ = FLOAT_OF(both_ & 0xffff0000u); \\
    uint4 found_; \\
    for (int w_ = 0; w_ < VEC / 4; w_++) { \\
      const unsigned four_ = words_[(i) * (VEC / 4) + w_]; \\
      for (int b_ = 0; b_ < 4; b_++) \\
        NUMBERS_OF(found_)[4 * w_ + b_] = (T)(BYTE(four_, b_) * step_ + low_); \\
    } \\
    to = found_; \\
  }
#define READ(to, page, x, size, given, i, old, real, all_old) { \\
    const DEV S* row_ = (page) + (x) / (size) * ((size) * VEC * 17 / 16); \\
    uint4 vector_ = ZERO; \\
    if (all_old) { \\
      if (real) UNPACK(vector_, row_, size, i) \\
    } else { \\
      if ((real) && !(old)) vector_ = *(given); \\
      STEP_OF(vector_, new_step, new_low) \\
      LEVELS_OF(vector_, level_, new_step, new_low) \\
      ROUND(vector_, level_, new_step, new_low) \\
      if ((real) && (old)) UNPACK(vector_, row_, size, i) \\
    } \\
    *(to) = vector_; \\
  }
#define PUT(row, size, given, i) { \\
    uint4 vector_ = ZERO; \\
    if ((i) < (size)) vector_ = (given)[i]; \\
    STEP_OF(vector_, new_step, new_low) \\
    LEVELS_OF(vector_, level_, new_step, new_low) \\
    if ((i) < (size)) PACK_ROW(row, size, i, level_, new_step, new_low) \\
  }
#define MOVE(row, size, given, gathered) { \\
    uint4 vector_ = ZERO; \\
    if (any_new) { \\
      if (is_new && lane < (size)) vector_ = (given)[lane]; \\
      STEP_OF(vector_, new_step, new_low) \\
      LEVELS_OF(vector_, level_, new_step, new_low) \\
      if (kept && lane < (size)) PACK_ROW(row, size, lane, level_, new_step, new_low) \\
      ROUND(vector_, level_, new_step, new_low) \\
    } \\
    if (!is_new && lane < (size)) UNPACK(vector_, row, size, lane) \\
    if (GATHER && lane < (size)) ((DEV uint4*)(gathered))[to * (size) + lane] = vector_; \\
  }
"""
