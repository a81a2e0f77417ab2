// Residual + selection + propagation + compaction + LayerNorm in one pass over the features.
#pragma once
#include <algorithm>

#include "parallel.h"
#include "vector.h"
#include "workspace.h"

enum Outcome { FINE = 0, NO_MEMORY = 1, NO_SUCH_CELL = 2 };  // native.py has the same

struct ReduceTask {
  int64_t batch;
  int tokens;   // before the reduction, prefix tokens included
  int prefix;   // tokens that always stay
  int channels;
  int removed;  // image tokens to remove
  int patches;  // image tokens there were at the beginning: the graph's nodes
  int degree;   // entries of a node's list of neighbours
  const void* x;            // [batch, tokens, channels]
  const void* branch;       // the same: the attention branch, to be added
  const float* scores;      // [batch, tokens - prefix]
  const int64_t* position;  // [batch, tokens - prefix]: the patch of each image token
  const float* size;        // [batch, tokens], or null: all one
  const int64_t* neighbours;  // [batch or 1, patches, degree]: whom a node receives from; `patches` = nobody
  const float* root;          // [batch or 1, patches]: degree^-1/2
  int64_t graph_stride;       // 1 if every image has a graph of its own, 0 if all share one
  float alpha;
  const void* norm_weight;  // [channels], or null: no LayerNorm
  const void* norm_bias;
  float epsilon;
  void* x_out;            // [batch, tokens - removed, channels]
  void* normed_out;       // the same, after LayerNorm; null without
  int64_t* position_out;  // [batch, tokens - removed - prefix]
  float* size_out;        // [batch, tokens - removed], or null
};

// Scores in the order of unsigned numbers. NaN is the largest, and -0 equals 0.
static inline uint32_t order_of(float score) {
  if (score != score) return 0xffffffff;
  score += 0.0f;
  uint32_t bits;
  std::memcpy(&bits, &score, 4);
  return bits & 0x80000000 ? ~bits : bits | 0x80000000;
}

// Which image tokens of one image stay, and which leave; both in ascending order. Of equal scores the earlier stays.
static void select(const float* scores, int count, int removed, uint64_t* keys, int32_t* kept, int32_t* gone) {
  for (int i = 0; i < count; i++) keys[i] = (uint64_t)order_of(scores[i]) << 32 | (uint32_t)(count - i);
  std::nth_element(keys, keys + removed, keys + count);
  const uint64_t bound = keys[removed];  // the lowest that stays: keys are all different
  for (int i = 0; i < count; i++) {
    const uint64_t key = (uint64_t)order_of(scores[i]) << 32 | (uint32_t)(count - i);
    if (key < bound)
      *gone++ = i;
    else
      *kept++ = i;
  }
}

// A finished row of floats as output, and the LayerNorm of what was put out: of rounded numbers if T is bfloat16, as
// whoever computes the norm from the output would have it.
template <typename T>
static void finish_row(const float* row, int channels, T* out, const T* norm_weight, const T* norm_bias, float epsilon,
                       T* normed) {
  Vector total = {};
  float rest = 0;
  int c = 0;
  for (; c + WIDTH <= channels; c += WIDTH) {
    store(out + c, load(row + c));
    total += load(out + c);
  }
  for (; c < channels; c++) {
    store_one(out + c, row[c]);
    rest += load_one(out + c);
  }
  if (!normed) return;
  const float mean = (sum_of(total) + rest) / (float)channels;
  Vector squares = {};
  rest = 0;
  for (c = 0; c + WIDTH <= channels; c += WIDTH) {
    const Vector centred = load(out + c) - mean;
    squares += centred * centred;
  }
  for (; c < channels; c++) rest += (load_one(out + c) - mean) * (load_one(out + c) - mean);
  const float factor = 1.0f / std::sqrt((sum_of(squares) + rest) / (float)channels + epsilon);
  for (c = 0; c + WIDTH <= channels; c += WIDTH)
    store(normed + c, (load(out + c) - mean) * factor * load(norm_weight + c) + load(norm_bias + c));
  for (; c < channels; c++)
    store_one(normed + c, (load_one(out + c) - mean) * factor * load_one(norm_weight + c) + load_one(norm_bias + c));
}

// row = x + branch + sum of weights times givers' rows; then its LayerNorm.
template <typename T>
static void make_row(const T* x, const T* branch, int channels, const float* const* givers, const float* weights,
                     int num_givers, float* row, T* out, const T* norm_weight, const T* norm_bias, float epsilon, T* normed) {
  int c = 0;
  for (; c + WIDTH <= channels; c += WIDTH) {
    Vector value = load(x + c) + load(branch + c);
    for (int g = 0; g < num_givers; g++) value += weights[g] * load(givers[g] + c);
    store(row + c, value);
  }
  for (; c < channels; c++) {
    float value = load_one(x + c) + load_one(branch + c);
    for (int g = 0; g < num_givers; g++) value += weights[g] * givers[g][c];
    row[c] = value;
  }
  finish_row(row, channels, out, norm_weight, norm_bias, epsilon, normed);
}

// What is decided about one image before its rows are made.
struct Decision {
  int32_t* kept;     // [tokens - prefix - removed]
  int32_t* gone;     // [removed]
  int32_t* slot_of;  // [patches + 1]: which of the removed tokens a patch is, or -1
  float* features;   // [removed, channels]: x + branch of the removed tokens
};

// False if a token lies in a cell that the graph does not have: nothing is read or written there.
template <typename T>
static bool decide(const ReduceTask& task, int64_t image, const Decision& decision, uint64_t* keys) {
  const int count = task.tokens - task.prefix;
  for (int token = 0; token < count; token++)
    if ((uint64_t)task.position[image * count + token] >= (uint64_t)task.patches) return false;
  select(task.scores + image * count, count, task.removed, keys, decision.kept, decision.gone);
  std::fill(decision.slot_of, decision.slot_of + task.patches + 1, -1);
  for (int slot = 0; slot < task.removed; slot++) {
    const int token = decision.gone[slot];
    decision.slot_of[task.position[image * count + token]] = slot;
    const int64_t row = (image * task.tokens + task.prefix + token) * task.channels;
    const T* x = (const T*)task.x + row;
    const T* branch = (const T*)task.branch + row;
    float* features = decision.features + (int64_t)slot * task.channels;
    for (int c = 0; c < task.channels; c++) features[c] = load_one(x + c) + load_one(branch + c);
  }
  return true;
}

// Row `target` of the new sequence: who it is, what it receives, how large it becomes. False if it has a neighbour
// that the graph does not have.
template <typename T>
static bool make_token(const ReduceTask& task, int64_t image, int target, const Decision& decision,
                       const float** givers, float* weights, float* row) {
  const int count = task.tokens - task.prefix, left = task.tokens - task.removed;
  const bool is_prefix = target < task.prefix;
  const int source = is_prefix ? target : task.prefix + decision.kept[target - task.prefix];
  const float* sizes = task.size ? task.size + image * task.tokens : nullptr;
  float size = sizes ? sizes[source] : 1.0f;
  int num_givers = 0;
  if (!is_prefix) {
    const int64_t patch = task.position[image * count + source - task.prefix];
    task.position_out[image * (left - task.prefix) + target - task.prefix] = patch;
    const int64_t nodes = image * task.graph_stride * task.patches;
    const int64_t* list = task.neighbours + (nodes + patch) * task.degree;
    const float* root = task.root + nodes;
    for (int i = 0; i < task.degree; i++) {
      if ((uint64_t)list[i] > (uint64_t)task.patches) return false;
      const int slot = decision.slot_of[list[i]];
      if (slot < 0) continue;
      const float weight = task.alpha * root[patch] * root[list[i]];
      givers[num_givers] = decision.features + (int64_t)slot * task.channels;
      weights[num_givers++] = weight;
      size += weight * (sizes ? sizes[task.prefix + decision.gone[slot]] : 1.0f);
    }
  }
  if (task.size_out) task.size_out[image * left + target] = size;
  const int64_t from = (image * task.tokens + source) * task.channels, to = (image * left + target) * task.channels;
  make_row((const T*)task.x + from, (const T*)task.branch + from, task.channels, givers, weights, num_givers, row,
           (T*)task.x_out + to, (const T*)task.norm_weight, (const T*)task.norm_bias, task.epsilon,
           task.normed_out ? (T*)task.normed_out + to : nullptr);
  return true;
}

// body(image, row, scratch) for every row of every image, in chunks of neighbouring rows; scratch has room for so many
// floats. False if there was no memory.
template <typename Body>
static bool for_rows(int64_t batch, int rows, size_t floats, int threads, const Body& body) {
  constexpr int CHUNK = 32;  // rows of a task
  const int chunks = (rows + CHUNK - 1) / CHUNK;
  std::atomic<bool> fine{true};
  parallel_for(batch * chunks, threads, [&](int64_t index) {
    static thread_local Workspace workspace;
    const int64_t image = index / chunks;
    const int first = (int)(index % chunks) * CHUNK, end = std::min(rows, first + CHUNK);
    float* scratch = workspace.floats(floats);
    if (!scratch) {
      fine = false;
      return;
    }
    for (int row = first; row < end; row++) body(image, row, scratch);
  });
  return fine;
}

template <typename T>
static Outcome reduce(const ReduceTask& task, int threads) {
  const int count = task.tokens - task.prefix, left = task.tokens - task.removed;
  const size_t size_of_features = (size_t)task.removed * task.channels;
  const size_t size_of_indices = (size_t)count + task.patches + 1;
  const size_t per_image_values = size_of_features + size_of_indices;
  Workspace shared;
  float* memory = shared.floats(task.batch * per_image_values + 16);
  if (!memory) return NO_MEMORY;
  const auto decision_of = [&](int64_t image) {
    float* features = memory + image * per_image_values;
    int32_t* kept = (int32_t*)(features + size_of_features);
    return Decision{kept, kept + (count - task.removed), kept + count, features};
  };
  std::atomic<Outcome> outcome{FINE};
  parallel_for(task.batch, threads, [&](int64_t image) {
    static thread_local Workspace workspace;
    uint64_t* keys = (uint64_t*)workspace.floats(2 * (size_t)count);
    if (!keys)
      outcome = NO_MEMORY;
    else if (!decide<T>(task, image, decision_of(image), keys))
      outcome = NO_SUCH_CELL;
  });
  if (outcome != FINE) return outcome;
  const size_t floats = (size_t)task.channels + 3 * (size_t)task.degree + 2 * WIDTH;
  const bool fine = for_rows(task.batch, left, floats, threads, [&](int64_t image, int target, float* row) {
    const float** givers = (const float**)(row + round_up(task.channels, WIDTH));
    float* weights = (float*)(givers + task.degree);
    if (!make_token<T>(task, image, target, decision_of(image), givers, weights, row)) outcome = NO_SUCH_CELL;
  });
  return fine ? outcome.load() : NO_MEMORY;
}
