// The two matrix products of attention, on operands packed so that every load is contiguous.
#pragma once
#include "vector.h"

constexpr int PANEL = 2 * WIDTH;  // columns of a panel of keys

// Four rows of four numbers, rows and columns exchanged.
template <typename T>
static inline void transpose_four(const T* in, int64_t stride, float* out) {
  typedef float Quad __attribute__((vector_size(16), aligned(4), may_alias));
  Quad row[4];
  for (int r = 0; r < 4; r++)
    row[r] = Quad{load_one(in + r * stride), load_one(in + r * stride + 1), load_one(in + r * stride + 2), load_one(in + r * stride + 3)};
  for (int c = 0; c < 4; c++) *(Quad*)(out + c * PANEL) = Quad{row[0][c], row[1][c], row[2][c], row[3][c]};
}

// Keys [tokens, depth] -> panels [tokens / PANEL][depth][PANEL]; columns past the last token are zero.
template <typename T>
static void pack_keys(const T* keys, int64_t stride, int tokens, int depth, float* panels) {
  for (int first = 0; first < tokens; first += PANEL, panels += (int64_t)depth * PANEL) {
    const int columns = tokens - first < PANEL ? tokens - first : PANEL;
    if (columns < PANEL) std::memset(panels, 0, (size_t)depth * PANEL * sizeof(float));
    int column = 0;
    for (; column + 4 <= columns; column += 4) {
      const T* key = keys + (int64_t)(first + column) * stride;
      int d = 0;
      for (; d + 4 <= depth; d += 4) transpose_four(key + d, stride, panels + d * PANEL + column);
      for (; d < depth; d++)
        for (int c = 0; c < 4; c++) panels[(int64_t)d * PANEL + column + c] = load_one(key + c * stride + d);
    }
    for (; column < columns; column++) {
      const T* key = keys + (int64_t)(first + column) * stride;
      for (int d = 0; d < depth; d++) panels[d * PANEL + column] = load_one(key + d);
    }
  }
}

// Rows [count, depth] -> [rows, width], times scale; the rest is zero. width >= depth, rows >= count.
template <typename T>
static void pack_rows(const T* source, int64_t stride, int count, int depth, int rows, int width, float scale, float* out) {
  for (int row = 0; row < count; row++, out += width) {
    copy_row(source + row * stride, depth, scale, out);
    std::memset(out + depth, 0, (width - depth) * sizeof(float));
  }
  std::memset(out, 0, (size_t)(rows - count) * width * sizeof(float));
}

// logits [ROWS, VECTORS * WIDTH] = queries [ROWS, depth] times a panel of keys, or the first half of one.
template <int VECTORS>
static inline void dot_tile(const float* queries, int depth, const float* panel, float* logits, int64_t ld) {
  Vector sums[ROWS][VECTORS] = {};
  for (int d = 0; d < depth; d++) {
    Vector key[VECTORS];
    for (int v = 0; v < VECTORS; v++) key[v] = load(panel + d * PANEL + v * WIDTH);
    for (int row = 0; row < ROWS; row++) {
      const float query = queries[row * depth + d];
      for (int v = 0; v < VECTORS; v++) sums[row][v] += query * key[v];
    }
  }
  for (int row = 0; row < ROWS; row++)
    for (int v = 0; v < VECTORS; v++) store(logits + row * ld + v * WIDTH, sums[row][v]);
}

// logits [rows, ld] = queries [rows, depth] times all keys; rows is a multiple of ROWS, ld of WIDTH.
static void queries_times_keys(const float* queries, int rows, int depth, const float* panels, float* logits, int64_t ld) {
  // One panel of keys stays in the first-level cache while all rows pass it.
  int64_t first = 0;
  for (; first + PANEL <= ld; first += PANEL, panels += (int64_t)depth * PANEL)
    for (int row = 0; row < rows; row += ROWS)
      dot_tile<2>(queries + (int64_t)row * depth, depth, panels, logits + row * ld + first, ld);
  for (int row = 0; row < rows && first < ld; row += ROWS)
    dot_tile<1>(queries + (int64_t)row * depth, depth, panels, logits + row * ld + first, ld);
}

// out [TILE_ROWS, VECTORS * WIDTH] = map [TILE_ROWS, tokens] times as many columns of the values.
template <int TILE_ROWS, int VECTORS>
static inline void weigh_tile(const float* map, int64_t ld, int tokens, const float* values, int64_t width, float* out) {
  Vector sums[TILE_ROWS][VECTORS] = {};
  for (int token = 0; token < tokens; token++, values += width) {
    Vector value[VECTORS];
    for (int v = 0; v < VECTORS; v++) value[v] = load(values + v * WIDTH);
    for (int row = 0; row < TILE_ROWS; row++) {
      const float weight = map[row * ld + token];
      for (int v = 0; v < VECTORS; v++) sums[row][v] += weight * value[v];
    }
  }
  for (int row = 0; row < TILE_ROWS; row++)
    for (int v = 0; v < VECTORS; v++) store(out + row * width + v * WIDTH, sums[row][v]);
}

// out [rows, width] = map [rows, tokens] times values [tokens, width]; rows is a multiple of ROWS, width of WIDTH.
static void map_times_values(const float* map, int64_t ld, int rows, int tokens, const float* values, int width, float* out) {
  constexpr int WIDE = ROWS == 12 ? 4 : 2, WIDE_ROWS = 6;  // 6 x 4 sums in 32 registers, 6 x 2 in 16
  for (int row = 0; row < rows; row += WIDE_ROWS) {
    const float* rows_of_map = map + row * ld;
    float* rows_of_out = out + (int64_t)row * width;
    int column = 0;
    for (; column + WIDE * WIDTH <= width; column += WIDE * WIDTH)
      weigh_tile<WIDE_ROWS, WIDE>(rows_of_map, ld, tokens, values + column, width, rows_of_out + column);
    for (; column + WIDTH <= width; column += WIDTH)
      weigh_tile<WIDE_ROWS, 1>(rows_of_map, ld, tokens, values + column, width, rows_of_out + column);
  }
}
