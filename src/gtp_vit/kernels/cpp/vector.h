// Vectors of floats without intrinsics: GCC and Clang turn these types into AVX-512, AVX2 or whatever the file is
// compiled for, so one source serves all instruction sets.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#if defined(__AVX512F__)
#include <immintrin.h>
constexpr int WIDTH = 16;  // floats in a vector
constexpr int ROWS = 12;   // rows of a matrix product's tile: ROWS x 2 sums fill the 32 registers
#elif defined(__AVX2__)
constexpr int WIDTH = 8;
constexpr int ROWS = 6;
#else
constexpr int WIDTH = 4;
constexpr int ROWS = 6;
#endif

typedef float Vector __attribute__((vector_size(WIDTH * 4)));
typedef int32_t Ints __attribute__((vector_size(WIDTH * 4)));
typedef uint32_t Bits __attribute__((vector_size(WIDTH * 4)));
typedef float UnalignedVector __attribute__((vector_size(WIDTH * 4), aligned(4), may_alias));
typedef uint32_t UnalignedBits __attribute__((vector_size(WIDTH * 4), aligned(4), may_alias));
typedef uint16_t UnalignedHalves __attribute__((vector_size(WIDTH * 2), aligned(2), may_alias));
typedef uint16_t Halves __attribute__((vector_size(WIDTH * 2)));

struct bfloat16 {
  uint16_t bits;
};

static inline int round_up(int value, int step) { return (value + step - 1) / step * step; }
static inline Vector splat(float value) { return Vector{} + value; }

static inline Vector load(const float* p) { return *(const UnalignedVector*)p; }
static inline void store(float* p, Vector v) { *(UnalignedVector*)p = v; }

static inline Vector load(const bfloat16* p) {
  return (Vector)(__builtin_convertvector(*(const UnalignedHalves*)p, Bits) << 16);
}

static inline void store(bfloat16* p, Vector v) {
  const Bits bits = (Bits)v;
  const Bits rounded = bits + 0x7fff + ((bits >> 16) & 1);  // to nearest, ties to even
  const Bits quiet_nan = (bits >> 16) | 0x40;
  *(UnalignedHalves*)p = __builtin_convertvector(v == v ? rounded >> 16 : quiet_nan, Halves);
}

static inline float load_one(const float* p) { return *p; }
static inline float load_one(const bfloat16* p) {
  const uint32_t bits = (uint32_t)p->bits << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
static inline void store_one(float* p, float value) { *p = value; }
static inline void store_one(bfloat16* p, float value) {
  bfloat16 row[WIDTH];
  store(row, splat(value));
  *p = row[0];
}

// out[i] = factor * in[i], in any of the two types.
template <typename From, typename To>
static inline void copy_row(const From* in, int count, float factor, To* out) {
  int i = 0;
  for (; i + WIDTH <= count; i += WIDTH) store(out + i, factor * load(in + i));
  for (; i < count; i++) store_one(out + i, factor * load_one(in + i));
}

static inline float sum_of(Vector v) {
  float total = 0;
  for (int lane = 0; lane < WIDTH; lane++) total += v[lane];
  return total;
}

// One bit for every number that is not below the bound; NaN is not below anything.
static inline uint32_t not_below(Vector v, float bound) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask((__m512)v, _mm512_set1_ps(bound), _CMP_NLT_UQ);
#else
  const Ints below = v < splat(bound);
  uint32_t bits = 0;
  for (int lane = 0; lane < WIDTH; lane++) bits |= (uint32_t)(below[lane] == 0) << lane;
  return bits;
#endif
}

static inline float max_of(Vector v) {
  float most = v[0];
  for (int lane = 1; lane < WIDTH; lane++) most = v[lane] > most ? v[lane] : most;
  return most;
}

// e^x for x <= 0 to about one unit in the last place; 0 where that is hardly a normal number any more; NaN stays NaN.
static inline Vector exp_of(Vector x) {
  const Vector lowest = splat(-87.3f);
  const Vector clamped = x < lowest ? lowest : x;
  const Vector round = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
  const Vector shifted = clamped * 1.44269504088896341f + round;
  const Vector n = shifted - round;
  Vector r = clamped - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  Vector p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  const Ints exponent = ((Ints)shifted - (Ints)round + 127) << 23;  // the low bits of `shifted` are n itself
  return x < lowest ? Vector{} : p * (Vector)exponent;
}
