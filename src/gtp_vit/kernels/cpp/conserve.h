// GTP+: residual + similarity + selection + merging + LayerNorm.
#pragma once
#include "products.h"
#include "reduce.h"

// With a probe features are averaged by size times (importance + WEIGHT_FLOOR) to the power WEIGHT_POWER.
static constexpr float WEIGHT_FLOOR = 0.1f, WEIGHT_POWER = 0.75f;
// Rows that are compared together: a panel of columns stays in the first-level cache while they pass it.
static constexpr int COMPARED = 4 * ROWS;

struct ConserveTask {
  int64_t batch;
  int tokens;  // before the reduction, prefix tokens included
  int prefix;  // tokens that always stay
  int channels;
  int removed;              // image tokens to remove
  const void* x;            // [batch, tokens, channels]
  const void* branch;       // the same: the attention branch, to be added
  const float* importance;  // [batch, tokens - prefix]; null with a probe
  const float* probe;       // [channels]: times a unit vector the logarithm of the token's squared sensitivity, or null
  const float* protect;     // [batch, tokens - prefix], not 0 = neither leaves nor receives; null = none
  const float* size;        // [batch, tokens - prefix]
  float floor;              // importance of a token that nobody attends to
  bool keep_norm;           // bring merged tokens to the largest of the norms involved
  const void* norm_weight;  // [channels], or null: no LayerNorm
  const void* norm_bias;
  float epsilon;
  void* x_out;       // [batch, tokens - removed, channels]
  void* normed_out;  // the same, after LayerNorm; null without
  float* size_out;   // [batch, tokens - removed - prefix]
  int64_t* kept;     // the same: which image tokens stay
  int64_t* gone;     // [batch, removed]
  int64_t* target;   // [batch, removed]: where each of them goes, as a place in `kept`
};

// What is known of one image between the steps. Rows are in the order of importance.
struct Ranked {
  float* rows;        // [rounded up to ROWS, channels]: unit vectors
  float* panels;      // the same as columns, packed for dot_tile
  float* similarity;  // [rounded up to ROWS, ld]: filled up to the diagonal
  float* length;      // [count]: norms, by token
  float* size;        // [count], by rank
  float* cost;        // [count], by token: its relative importance at first, then what it costs to merge it
  float* importance;  // [count], by token: what the probe predicts
  float* weight;      // [count], by token: its weight in an average, with a probe
  float* total;       // [count], by place among those that stay: weight of all that are averaged there
  int32_t* token;     // [count]: of each rank
  int32_t* rank;      // [count]: of each token
};

struct Layout {
  int count, rows, ld;
  static constexpr int PARTS = 11;
  size_t parts[PARTS];
  size_t total;
  explicit Layout(const ConserveTask& task) {
    count = task.tokens - task.prefix;
    rows = round_up(count, ROWS), ld = round_up(count, PANEL);
    const size_t sizes[3] = {(size_t)rows * task.channels, (size_t)ld * task.channels, (size_t)rows * ld};
    total = 0;
    for (int i = 0; i < PARTS; i++) {
      parts[i] = total;
      total += ((i < 3 ? sizes[i] : (size_t)count) + WIDTH - 1) / WIDTH * WIDTH;
    }
  }
  Ranked at(float* memory) const {
    return {memory + parts[0], memory + parts[1], memory + parts[2], memory + parts[3],
            memory + parts[4], memory + parts[5], memory + parts[6], memory + parts[7],
            memory + parts[8], (int32_t*)(memory + parts[9]), (int32_t*)(memory + parts[10])};
  }
};

// Is this image token a register, which neither leaves nor receives?
static bool is_protected(const ConserveTask& task, const Layout& layout, int64_t image, int token) {
  return task.protect && task.protect[image * layout.count + token] != 0;
}

// Mean importance of the tokens that are not protected.
static float mean_importance(const ConserveTask& task, const Layout& layout, int64_t image, const float* importance) {
  float sum = 0;
  int number = 0;
  for (int i = 0; i < layout.count; i++)
    if (!is_protected(task, layout, image, i)) sum += importance[i], number++;
  return sum / (float)number;
}

// Importance by the probe: root of size times predicted squared sensitivity. Also each token's weight in an average.
template <typename T>
static void predict_importance(const ConserveTask& task, const Layout& layout, int64_t image, const Ranked& ranked) {
  const int count = layout.count;
  const float* size = task.size + image * count;
  float mean = 0;
  for (int token = 0; token < count; token++) {
    const int64_t from = (image * task.tokens + task.prefix + token) * task.channels;
    const T* x = (const T*)task.x + from;
    const T* branch = (const T*)task.branch + from;
    Vector squares = {}, products = {};
    float squared = 0, product = 0;
    int c = 0;
    for (; c + WIDTH <= task.channels; c += WIDTH) {
      const Vector value = load(x + c) + load(branch + c);
      squares += value * value;
      products += value * load(task.probe + c);
    }
    for (; c < task.channels; c++) {
      const float value = load_one(x + c) + load_one(branch + c);
      squared += value * value;
      product += value * task.probe[c];
    }
    const float length = std::max(std::sqrt(sum_of(squares) + squared), 1e-12f);
    ranked.importance[token] = (sum_of(products) + product) / length;
    mean += ranked.importance[token];
  }
  mean /= (float)count;
  for (int token = 0; token < count; token++)
    ranked.importance[token] = std::exp(0.5f * (ranked.importance[token] - mean)) * std::sqrt(size[token]);
  mean = mean_importance(task, layout, image, ranked.importance);
  for (int token = 0; token < count; token++)
    ranked.weight[token] = size[token] * std::pow(ranked.importance[token] / mean + WEIGHT_FLOOR, WEIGHT_POWER);
}

// Sort by importance, the earlier of equal ones first.
template <typename T>
static void rank_tokens(const ConserveTask& task, const Layout& layout, int64_t image, const Ranked& ranked) {
  const int count = layout.count;
  if (task.probe) predict_importance<T>(task, layout, image, ranked);
  const float* importance = task.probe ? ranked.importance : task.importance + image * count;
  for (int i = 0; i < count; i++) ranked.token[i] = i;
  std::stable_sort(ranked.token, ranked.token + count, [&](int32_t one, int32_t other) {
    return order_of(importance[one]) > order_of(importance[other]);
  });
  const float mean = mean_importance(task, layout, image, importance);
  for (int rank = 0; rank < count; rank++) {
    const int token = ranked.token[rank];
    ranked.rank[token] = rank;
    ranked.cost[token] = importance[token] / mean + task.floor;
    ranked.size[rank] = task.size[image * count + token];
  }
}

// The unit vectors of PANEL ranks, as rows and as a panel of columns.
template <typename T>
static void normalise_rows(const ConserveTask& task, const Layout& layout, int64_t image, int first, const Ranked& ranked) {
  const int count = layout.count, last = std::min(first + PANEL, count);
  for (int rank = first; rank < last; rank++) {
    const int token = ranked.token[rank];
    const int64_t from = (image * task.tokens + task.prefix + token) * task.channels;
    const T* x = (const T*)task.x + from;
    const T* branch = (const T*)task.branch + from;
    float* row = ranked.rows + (int64_t)rank * task.channels;
    Vector squares = {};
    float rest = 0;
    int c = 0;
    for (; c + WIDTH <= task.channels; c += WIDTH) {
      const Vector value = load(x + c) + load(branch + c);
      store(row + c, value);
      squares += value * value;
    }
    for (; c < task.channels; c++) {
      row[c] = load_one(x + c) + load_one(branch + c);
      rest += row[c] * row[c];
    }
    const float length = std::max(std::sqrt(sum_of(squares) + rest), 1e-12f);
    ranked.length[token] = length;
    copy_row(row, task.channels, 1.0f / length, row);
  }
  if (last == count)
    std::memset(ranked.rows + (int64_t)count * task.channels, 0, (size_t)(layout.rows - count) * task.channels * sizeof(float));
  const int64_t from = (int64_t)first * task.channels;
  pack_keys(ranked.rows + from, task.channels, last - first, task.channels, ranked.panels + from);
}

// Similarities of COMPARED ranks with those before them, and what it costs to merge each.
static void compare_rows(const ConserveTask& task, const Layout& layout, int64_t image, int first, const Ranked& ranked) {
  const int last = std::min(first + COMPARED, layout.count);
  for (int column = 0; column < last; column += PANEL)
    for (int row = std::max(first, column / ROWS * ROWS); row < last; row += ROWS)
      dot_tile<2>(ranked.rows + (int64_t)row * task.channels, task.channels,
                  ranked.panels + (int64_t)column * task.channels, ranked.similarity + (int64_t)row * layout.ld + column,
                  layout.ld);
  if (task.protect)  // infinitely far from all others
    for (int other = 0; other < last; other++)
      if (is_protected(task, layout, image, ranked.token[other]))
        for (int rank = first; rank < last; rank++)
          ranked.similarity[(int64_t)rank * layout.ld + other] = -std::numeric_limits<float>::infinity();
  for (int rank = first; rank < last; rank++) {
    const float* similarity = ranked.similarity + (int64_t)rank * layout.ld;
    const float own = ranked.size[rank];
    float least = std::numeric_limits<float>::infinity();
    for (int other = 0; other < rank; other++) {
      const float apart = std::max(1.0f - similarity[other], 0.0f);
      const float cost = apart * apart * (own * ranked.size[other] / (own + ranked.size[other]));
      least = cost < least ? cost : least;
    }
    float& cost = ranked.cost[ranked.token[rank]];
    cost *= std::sqrt(least);
    if (is_protected(task, layout, image, ranked.token[rank])) cost = std::numeric_limits<float>::infinity();
  }
}

// Who stays, who goes, and to whom: the most similar more important token that stays.
static void choose_receivers(const ConserveTask& task, const Layout& layout, int64_t image, const Ranked& ranked,
                             uint64_t* keys) {
  const int count = layout.count, stay = count - task.removed;
  int32_t* kept = (int32_t*)(keys + count);
  int32_t* gone = kept + stay;
  int32_t* slot = gone + task.removed;  // place in `kept` of each token, or -1
  select(ranked.cost, count, task.removed, keys, kept, gone);
  std::fill(slot, slot + count, -1);
  for (int i = 0; i < stay; i++) {
    slot[kept[i]] = i;
    task.kept[image * stay + i] = kept[i];
    task.size_out[image * stay + i] = task.size[image * count + kept[i]];
    if (task.probe) ranked.total[i] = ranked.weight[kept[i]];
  }
  for (int i = 0; i < task.removed; i++) {
    const int rank = ranked.rank[gone[i]];
    const float* similarity = ranked.similarity + (int64_t)rank * layout.ld;
    int best = -1;
    float highest = -2;  // less than any; NaN is similar to nobody
    for (int other = 0; other < rank; other++)
      if (slot[ranked.token[other]] >= 0 && similarity[other] > highest) best = other, highest = similarity[other];
    // Only NaN leaves a token without a receiver; the first one that stays takes it then.
    const int place = best < 0 ? 0 : slot[ranked.token[best]];
    task.gone[image * task.removed + i] = gone[i];
    task.target[image * task.removed + i] = place;
    task.size_out[image * stay + place] += task.size[image * count + gone[i]];
    if (task.probe) ranked.total[place] += ranked.weight[gone[i]];
  }
}

// A row of the new sequence.
template <typename T>
static void make_merged(const ConserveTask& task, const Layout& layout, int64_t image, int row_out, const Ranked& ranked,
                        float* row) {
  const int count = layout.count, stay = count - task.removed, left = task.tokens - task.removed;
  const int channels = task.channels;
  const int place = row_out - task.prefix;
  const int64_t source = place < 0 ? row_out : task.prefix + task.kept[image * stay + place];
  const int64_t from = (image * task.tokens + source) * channels, to = (image * left + row_out) * channels;
  const T* x = (const T*)task.x + from;
  const T* branch = (const T*)task.branch + from;
  const T* weight = (const T*)task.norm_weight;
  const T* bias = (const T*)task.norm_bias;
  T* out = (T*)task.x_out + to;
  T* normed = task.normed_out ? (T*)task.normed_out + to : nullptr;
  // What features are averaged by: sizes, or with a probe weights.
  const float* weight_of = task.probe ? ranked.weight : task.size + image * count;
  const float* totals = task.probe ? ranked.total : task.size_out + image * stay;
  const float total = place < 0 ? 1 : totals[place];
  const float own = place < 0 ? 1 : weight_of[source - task.prefix];
  if (total == own) {
    make_row(x, branch, channels, nullptr, nullptr, 0, row, out, weight, bias, task.epsilon, normed);
    return;
  }
  float longest = ranked.length[source - task.prefix];
  const auto add = [&](const T* x, const T* branch, float share, bool first) {
    int c = 0;
    for (; c + WIDTH <= channels; c += WIDTH) {
      const Vector value = share * (load(x + c) + load(branch + c));
      store(row + c, first ? value : load(row + c) + value);
    }
    for (; c < channels; c++) row[c] = (first ? 0.0f : row[c]) + share * (load_one(x + c) + load_one(branch + c));
  };
  add(x, branch, own / total, true);
  for (int i = 0; i < task.removed; i++) {
    if (task.target[image * task.removed + i] != place) continue;
    const int64_t giver = task.gone[image * task.removed + i];
    const int64_t at = (image * task.tokens + task.prefix + giver) * channels;
    add((const T*)task.x + at, (const T*)task.branch + at, weight_of[giver] / total, false);
    longest = std::max(longest, ranked.length[giver]);
  }
  if (task.keep_norm) {
    float squares = 0;
    for (int c = 0; c < channels; c++) squares += row[c] * row[c];
    const float factor = longest / std::max(std::sqrt(squares), 1e-12f);
    copy_row(row, channels, factor, row);
  }
  finish_row(row, channels, out, weight, bias, task.epsilon, normed);
}

// All of one image. Its memory is the thread's own and small enough to stay in the second-level cache.
template <typename T>
static bool conserve_image(const ConserveTask& task, const Layout& layout, int64_t image, int threads) {
  static thread_local Workspace workspace;
  float* memory = workspace.floats(layout.total + 4 * (size_t)layout.count + WIDTH);
  if (!memory) return false;
  const Ranked ranked = layout.at(memory);
  rank_tokens<T>(task, layout, image, ranked);
  parallel_for(layout.ld / PANEL, threads,
               [&](int64_t panel) { normalise_rows<T>(task, layout, image, (int)panel * PANEL, ranked); });
  // Later rows have more before them: they come first, so that no thread is left with the largest block.
  const int blocks = (layout.rows + COMPARED - 1) / COMPARED;
  parallel_for(blocks, threads, [&](int64_t number) {
    compare_rows(task, layout, image, (blocks - 1 - (int)number) * COMPARED, ranked);
  });
  choose_receivers(task, layout, image, ranked, (uint64_t*)(memory + layout.total));
  const size_t floats = (size_t)task.channels + WIDTH;
  const bool fine = for_rows(1, task.tokens - task.removed, floats, threads, [&](int64_t, int target, float* row) {
    make_merged<T>(task, layout, image, target, ranked, row);
  });
  workspace.trim();
  return fine;
}

// An image a thread, or all threads for one image where there are fewer images.
template <typename T>
static bool conserve(const ConserveTask& task, int threads) {
  const Layout layout(task);
  const bool few = task.batch < threads;
  std::atomic<bool> fine{true};
  parallel_for(task.batch, few ? 1 : threads, [&](int64_t image) {
    if (!conserve_image<T>(task, layout, image, few ? threads : 1)) fine = false;
  });
  return fine;
}
