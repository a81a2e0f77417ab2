// The exact k-th smallest of many non-negative floats, faster than sorting or partitioning them.
#pragma once
#include <algorithm>

#include "vector.h"

typedef uint32_t Pattern __attribute__((may_alias));  // the bits of a float

// Non-negative floats are ordered as their bit patterns are, and NaN, as a pattern, is above all of them.
static inline uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}
static inline float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// A matrix [rows, columns] with rows ld apart; columns past the last are not looked at.
struct Entries {
  const float* data;
  int rows, columns;
  int64_t ld;
};

// Appends the patterns in [low, high] to `found` and returns how many there are; counts those below `low`.
static int64_t collect(const Entries& entries, uint32_t low, uint32_t high, uint32_t* found, int64_t* below) {
  int64_t count = 0, smaller = 0;
  for (int row = 0; row < entries.rows; row++) {
    const Pattern* bits = (const Pattern*)(entries.data + row * entries.ld);
    int column = 0;
#if defined(__AVX512F__)
    const __m512i lows = _mm512_set1_epi32((int)low), highs = _mm512_set1_epi32((int)high);
    for (; column < entries.columns; column += 16) {
      const int left = entries.columns - column;
      const __mmask16 valid = left >= 16 ? 0xffff : (__mmask16)((1u << left) - 1);
      const __m512i values = _mm512_maskz_loadu_epi32(valid, bits + column);
      const __mmask16 under = _mm512_mask_cmplt_epu32_mask(valid, values, lows);
      const __mmask16 inside = _mm512_mask_cmple_epu32_mask(valid & ~under, values, highs);
      smaller += __builtin_popcount(under);
      // To a register first: a masked store to memory is far slower than a whole one on some processors.
      _mm512_storeu_si512(found + count, _mm512_maskz_compress_epi32(inside, values));
      count += __builtin_popcount(inside);
    }
#else
    for (; column < entries.columns; column++) {  // without branches: what comes is not predictable
      found[count] = bits[column];
      smaller += bits[column] < low;
      count += bits[column] >= low && bits[column] <= high;
    }
#endif
  }
  *below += smaller;
  return count;
}

// The smallest pattern t in [low, high] such that at least k of the `count` patterns are <= t.
static uint32_t bisect(const uint32_t* patterns, int64_t count, int64_t k, uint32_t low, uint32_t high) {
  while (low < high) {
    const uint32_t middle = low + (high - low) / 2;
    Ints hits = {};
    int64_t index = 0;
    for (; index + WIDTH <= count; index += WIDTH)
      hits -= (Ints)(*(const UnalignedBits*)(patterns + index) <= (Bits{} + middle));
    int64_t max_removable = 0;
    for (int lane = 0; lane < WIDTH; lane++) max_removable += hits[lane];
    for (; index < count; index++) max_removable += patterns[index] <= middle;
    if (max_removable >= k)
      high = middle;
    else
      low = middle + 1;
  }
  return low;
}

// The k-th smallest entry, k from 1. `scratch` has room for one more vector than there are entries.
//
// A sample says between which two values it must nearly certainly lie; one pass counts what is below and collects what
// is between, some ten percent; the rest is a search on bit patterns among those. If the sample misled, the collected
// range is widened to everything, so the result is exact in any case.
static float kth_smallest(const Entries& entries, int64_t k, uint32_t* scratch) {
  constexpr int MOST = 4096;
  constexpr uint32_t TOP = 0xffffffff;
  const int64_t total = (int64_t)entries.rows * entries.columns;
  const int size = total < 65536 ? 512 : MOST;  // looking at the sample should cost less than what it saves
  uint32_t low = 0, high = TOP;
  if (total > 4 * size) {
    uint32_t sample[MOST];
    for (int i = 0; i < size; i++) {
      const int64_t at = total * i / size;
      const int row = (int)(at / entries.columns);
      const int column = (int)((at + (int64_t)row * 37) % entries.columns);  // no fixed step along the diagonal
      sample[i] = bits_of(entries.data[row * entries.ld + column]);
    }
    const double share = (double)k / (double)total;
    const int middle = (int)(share * size), spread = (int)(3.5 * std::sqrt(size * share * (1 - share))) + 3;
    const int under = std::max(0, middle - spread), over = std::min(size - 1, middle + spread);
    std::nth_element(sample, sample + under, sample + size);
    if (middle - spread >= 0) low = sample[under];
    std::nth_element(sample + under, sample + over, sample + size);
    if (middle + spread < size) high = sample[over];
  }
  int64_t below = 0, count = collect(entries, low, high, scratch, &below);
  if (k <= below || k > below + count) {
    low = 0, high = TOP, below = 0;
    count = collect(entries, low, high, scratch, &below);
  }
  return float_of(bisect(scratch, count, k - below, low, high));
}
