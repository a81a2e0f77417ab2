// Building the token graph: lists of neighbours from a matrix of similarities.
#pragma once
#include <algorithm>

#include "parallel.h"
#include "vector.h"
#include "workspace.h"

struct GraphTask {
  int64_t batch;
  int rows, columns;      // of the patch grid
  int spatial;            // 0, 4 or 8 spatial neighbours
  int semantic;           // semantic neighbours; 0 = none
  const float* similarity;  // [batch, patches, patches], or null without semantic neighbours
  int64_t* neighbours;      // [batch, patches, spatial + semantic]; `patches` = nobody
  float* root;              // [batch, patches]: degree^-1/2, 0 without neighbours
};

// The `wanted` most similar others, most similar first; of equal ones the earlier. NaN is similar to nobody.
static int most_similar(const float* similarity, int count, int self, int wanted, float* best, int64_t* found) {
  int have = 0;
  const auto offer = [&](int other) {
    const float value = similarity[other];
    if (other == self || !(value == value) || (have == wanted && value <= best[have - 1])) return;
    int place = have < wanted ? have++ : wanted - 1;
    for (; place > 0 && best[place - 1] < value; place--) best[place] = best[place - 1], found[place] = found[place - 1];
    best[place] = value, found[place] = other;
  };
  // Of the largest value in each lane, `wanted` are at least as large as the smallest of them: what is below that need
  // not be looked at one by one. This token itself may be one of them, so one more is taken.
  float bound = -std::numeric_limits<float>::infinity();
  int other = 0;
  if (wanted + 1 < WIDTH && count >= 2 * WIDTH) {
    Vector most = splat(bound);  // NaN never gets in: it is not larger than anything
    for (; other + WIDTH <= count; other += WIDTH) {
      const Vector value = load(similarity + other);
      most = value > most ? value : most;
    }
    float lanes[WIDTH];
    store(lanes, most);
    std::nth_element(lanes, lanes + wanted, lanes + WIDTH, [](float a, float b) { return a > b; });
    bound = lanes[wanted];
  }
  for (other = 0; other + WIDTH <= count; other += WIDTH)
    for (uint32_t bits = not_below(load(similarity + other), bound); bits; bits &= bits - 1)
      offer(other + __builtin_ctz(bits));
  for (; other < count; other++) offer(other);
  return have;
}

static void graph_row(const GraphTask& task, int64_t image, int patch, float* best) {
  const int patches = task.rows * task.columns, row = patch / task.columns, column = patch % task.columns;
  int64_t* list = task.neighbours + (image * patches + patch) * (task.spatial + task.semantic);
  int degree = 0, place = 0;
  for (int down = -1; down <= 1 && task.spatial; down++)
    for (int across = -1; across <= 1; across++) {
      if ((!down && !across) || (task.spatial == 4 && down && across)) continue;
      const int r = row + down, c = column + across;
      const bool there = r >= 0 && r < task.rows && c >= 0 && c < task.columns;
      list[place++] = there ? (int64_t)r * task.columns + c : patches;
      degree += there;
    }
  if (task.semantic) {
    int64_t* similar = list + task.spatial;
    const float* similarity = task.similarity + (image * patches + patch) * patches;
    const int have = most_similar(similarity, patches, patch, task.semantic, best, similar);
    for (int i = have; i < task.semantic; i++) similar[i] = patches;
    for (int i = 0; i < have; i++) {
      bool twice = false;
      for (int s = 0; s < task.spatial; s++) twice |= list[s] == similar[i];
      if (twice) similar[i] = patches;
      degree += !twice;
    }
  }
  task.root[image * patches + patch] = degree ? 1.0f / std::sqrt((float)degree) : 0.0f;
}

static bool graph(const GraphTask& task, int threads) {
  const int patches = task.rows * task.columns;
  std::atomic<bool> fine{true};
  constexpr int CHUNK = 64;
  const int chunks = (patches + CHUNK - 1) / CHUNK;
  parallel_for(task.batch * chunks, threads, [&](int64_t index) {
    static thread_local Workspace workspace;
    float* best = workspace.floats((size_t)task.semantic + 1);
    const int first = (int)(index % chunks) * CHUNK;
    for (int patch = first; best && patch < std::min(patches, first + CHUNK); patch++)
      graph_row(task, index / chunks, patch, best);
    if (!best) fine = false;
  });
  return fine;
}
