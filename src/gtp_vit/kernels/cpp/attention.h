// Attention in one pass: logits, key bias, softmax, exact sparsification, output and statistics, a head at a time. The
// map exists only as a block of rows in the cache, or as one head's whole map where its threshold must be found.
#pragma once
#include "parallel.h"
#include "products.h"
#include "threshold.h"
#include "workspace.h"

// Strides are in elements: of the image, the head and the token; a head's channels are contiguous.
struct Operand {
  const void* data;
  int64_t batch, head, token;
};

struct AttentionTask {
  Operand q, k, v;
  int64_t batch, heads;
  int query_tokens;  // tokens that q has
  int tokens;        // tokens that k and v have
  int depth;         // channels of a head
  int output_rows;   // the first so many queries get an output
  float scale;
  int64_t removed;    // sparsification: k of Section 3.2.4, 0 = none
  const float* size;  // [batch, tokens] or null: proportional attention adds its logarithm to a key's logits
  void* out;          // [batch, output_rows, heads * depth]
  int first;          // statistics leave out the tokens before this one
  float* diagonal;    // null, or the statistic: [batch, heads, tokens - first], or over the heads [batch, tokens - first]
  float* column_sums;
  float* class_row;
  int over_heads;  // 0: one statistic a head; 1: the largest; 2: the mean
};

// Logits -> exponentials, in place; the rows' factors to probabilities in `inverse`. Padding has bias -inf.
static void softmax_rows(float* map, int rows, int64_t ld, const float* bias, float* inverse) {
  for (int row = 0; row < rows; row++, map += ld) {
    Vector most = splat(-std::numeric_limits<float>::infinity());
    for (int64_t c = 0; c < ld; c += WIDTH) {
      const Vector logit = load(map + c) + load(bias + c);
      store(map + c, logit);
      most = logit > most ? logit : most;
    }
    const Vector highest = splat(max_of(most));
    Vector total = {};
    for (int64_t c = 0; c < ld; c += WIDTH) {
      const Vector value = exp_of(load(map + c) - highest);
      store(map + c, value);
      total += value;
    }
    inverse[row] = 1.0f / sum_of(total);
  }
}

static void add_column_sums(const float* map, int rows, int64_t ld, const float* factor, float* sums) {
  for (int64_t c = 0; c < ld; c += WIDTH) {
    Vector total = load(sums + c);
    for (int row = 0; row < rows; row++) total += factor[row] * load(map + row * ld + c);
    store(sums + c, total);
  }
}

static void scale_rows(float* map, int rows, int64_t ld, float* factor) {
  for (int row = 0; row < rows; row++, map += ld) {
    for (int64_t c = 0; c < ld; c += WIDTH) store(map + c, factor[row] * load(map + c));
    factor[row] = 1.0f;
  }
}

// Everything below the threshold becomes zero; NaN is not below anything.
static void zero_below(float* map, int rows, int64_t ld, float threshold) {
  for (int64_t at = 0; at < rows * ld; at += WIDTH) {
    const Vector value = load(map + at);
    store(map + at, value < splat(threshold) ? Vector{} : value);
  }
}

template <typename T>
static bool attend_head(const AttentionTask& task, int64_t index, Workspace& workspace) {
  const int64_t image = index / task.heads, head = index % task.heads;
  const int tokens = task.tokens, depth = task.depth;
  const bool sparse = task.removed > 0;
  const int64_t ld = round_up(tokens, WIDTH);
  const int width = round_up(depth, WIDTH);
  // Rows without output matter only where statistics or the threshold see them.
  const bool all_rows = sparse || task.diagonal || task.column_sums;
  const int rows = all_rows ? task.query_tokens : task.output_rows;
  // Work goes by blocks of rows, so that what is done to a block is done in the second-level cache.
  const int cached = round_up((int)std::max<int64_t>(ROWS, std::min<int64_t>(96, 65536 / ld)), ROWS);
  const int block = std::min(cached, round_up(rows, ROWS));
  const int stored_rows = sparse ? round_up(rows, block) : block;  // the threshold needs the whole map at once

  const size_t size_of_keys = (size_t)round_up(tokens, PANEL) * depth, size_of_values = (size_t)tokens * width;
  const size_t size_of_scratch = sparse ? (size_t)rows * tokens + WIDTH : 0;
  float* memory = workspace.floats(size_of_keys + size_of_values + 2 * ld + (size_t)stored_rows * (ld + 1) +
                                   (size_t)block * (depth + width) + size_of_scratch + 8 * WIDTH);
  if (!memory) return false;
  const auto take = [&memory](size_t count) {
    float* taken = memory;
    memory += (count + WIDTH - 1) / WIDTH * WIDTH;
    return taken;
  };
  float* map = take((size_t)stored_rows * ld);
  float* inverse = take(stored_rows);  // factors that make the rows of the map probabilities
  float* keys = take(size_of_keys);
  float* values = take(size_of_values);
  float* bias = take(ld);
  float* sums = take(ld);
  float* queries = take((size_t)block * depth);
  float* out = take((size_t)block * width);
  uint32_t* scratch = (uint32_t*)memory;

  const auto at = [&](const Operand& o) { return (const T*)o.data + image * o.batch + head * o.head; };
  pack_keys(at(task.k), task.k.token, tokens, depth, keys);
  pack_rows(at(task.v), task.v.token, tokens, depth, tokens, width, 1.0f, values);
  for (int64_t c = 0; c < ld; c++) {
    const float size = task.size && c < tokens ? task.size[image * tokens + c] : 1.0f;
    bias[c] = c < tokens ? std::log(size) : -std::numeric_limits<float>::infinity();
  }
  std::memset(sums, 0, ld * sizeof(float));
  const int left_out = task.first;
  const int64_t statistic = index * (tokens - left_out);  // where this head's statistics begin

  const auto make_rows = [&](int first, int count, float* map, float* inverse) {
    const int padded = round_up(count, ROWS);
    pack_rows(at(task.q) + first * task.q.token, task.q.token, count, depth, padded, depth, task.scale, queries);
    queries_times_keys(queries, padded, depth, keys, map, ld);
    softmax_rows(map, count, ld, bias, inverse);
    for (int row = count; row < padded; row++) std::memset(map + row * ld, 0, ld * sizeof(float));
  };
  const auto use_rows = [&](int first, int count, const float* map, const float* inverse) {
    if (task.column_sums) add_column_sums(map, count, ld, inverse, sums);
    if (task.diagonal)
      for (int row = std::max(0, left_out - first); row < count; row++)
        task.diagonal[statistic + first + row - left_out] = map[row * ld + first + row] * inverse[row];
    if (task.class_row && first == 0) copy_row(map + left_out, tokens - left_out, inverse[0], task.class_row + statistic);
    const int wanted = std::min(count, task.output_rows - first);
    if (wanted <= 0) return;
    map_times_values(map, ld, round_up(wanted, ROWS), tokens, values, width, out);
    T* target = (T*)task.out + ((image * task.output_rows + first) * task.heads + head) * depth;
    for (int row = 0; row < wanted; row++, target += task.heads * depth)
      copy_row(out + (int64_t)row * width, depth, inverse[row], target);
  };

  for (int first = 0; first < rows; first += block) {
    const int count = std::min(block, rows - first);
    float* here = sparse ? map + first * ld : map;
    float* factor = sparse ? inverse + first : inverse;
    make_rows(first, count, here, factor);
    if (sparse)
      scale_rows(here, count, ld, factor);
    else
      use_rows(first, count, here, factor);
  }
  if (sparse) {
    const float threshold = kth_smallest({map, rows, tokens, ld}, task.removed, scratch);
    for (int first = 0; first < rows; first += block) {
      const int count = std::min(block, rows - first);
      zero_below(map + first * ld, count, ld, threshold);
      use_rows(first, count, map + first * ld, inverse + first);
    }
  }
  if (task.column_sums) std::memcpy(task.column_sums + statistic, sums + left_out, (tokens - left_out) * sizeof(float));
  return true;
}

// A statistic of every head -> one over all heads; NaN in any head gives NaN.
static void over_heads(const float* each, const AttentionTask& task, float* out) {
  const int count = task.tokens - task.first;
  for (int64_t image = 0; image < task.batch; image++, out += count, each += task.heads * count)
    for (int token = 0; token < count; token++) {
      float most = each[token], sum = each[token];
      for (int64_t head = 1; head < task.heads; head++) {
        const float value = each[head * count + token];
        most = value > most || value != value ? value : most;
        sum += value;
      }
      out[token] = task.over_heads == 1 ? most : sum / (float)task.heads;
    }
}

template <typename T>
static bool attention(const AttentionTask& task, int threads) {
  AttentionTask each = task;
  Workspace shared;
  const size_t size = (size_t)task.batch * task.heads * (task.tokens - task.first);
  if (task.over_heads) {
    float* memory = shared.floats(3 * size);
    if (!memory) return false;
    if (task.diagonal) each.diagonal = memory;
    if (task.column_sums) each.column_sums = memory + size;
    if (task.class_row) each.class_row = memory + 2 * size;
  }
  std::atomic<bool> fine{true};
  parallel_for(task.batch * task.heads, threads, [&](int64_t index) {
    static thread_local Workspace workspace;
    if (!attend_head<T>(each, index, workspace)) fine = false;
    workspace.trim();
  });
  if (task.over_heads) {
    if (task.diagonal) over_heads(each.diagonal, task, task.diagonal);
    if (task.column_sums) over_heads(each.column_sums, task, task.column_sums);
    if (task.class_row) over_heads(each.class_row, task, task.class_row);
  }
  return fine;
}
