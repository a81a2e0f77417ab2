// Agglomerative clustering of an image's tokens: the two nearest clusters join, a given number of times (ATC).
//
// Each cluster lives in the row of its first token. Of every row the nearest later cluster is remembered, so that a
// join looks at one entry a row and searches again only the rows whose nearest has changed.
#pragma once
#include <cstdint>

#include "parallel.h"
#include "workspace.h"

struct ClusterTask {
  int64_t batch;
  int tokens, removed, linkage;  // removed < tokens; linkage: 0 mean, 1 largest, 2 smallest of the members' distances
  const float* distance;         // [batch, tokens, tokens], symmetric
  int64_t *kept, *gone, *target;  // first tokens of the clusters; the others, and whose place in `kept` they share
};

static constexpr double NOWHERE = 4;  // the distance of tokens that are NaN; that of opposite ones is 2

// The clustering of one image, in its scratch space.
struct Clusters {
  int tokens;
  double* distance;  // [tokens, tokens]; of clusters that have joined an earlier one it is not up to date
  double* nearest;   // [tokens]: distance to the nearest later cluster
  double* size;      // [tokens]: 0 = it has joined an earlier one
  int64_t* partner;  // [tokens]: that nearest one; -1 = there is none
  int64_t* owner;    // [tokens]: the first token of its cluster

  static size_t doubles(int tokens) { return (size_t)tokens * tokens + 4 * (size_t)tokens; }

  void search(int row) {
    const double* from = distance + (int64_t)row * tokens;
    partner[row] = -1;
    for (int other = row + 1; other < tokens; other++) {
      if (size[other] == 0 || (partner[row] >= 0 && !(from[other] < nearest[row]))) continue;
      partner[row] = other;
      nearest[row] = from[other];
    }
  }

  int nearest_pair() const {
    int best = -1;
    for (int row = 0; row < tokens; row++)
      if (size[row] != 0 && partner[row] >= 0 && (best < 0 || nearest[row] < nearest[best])) best = row;
    return best;
  }

  void join(int first, int second, int linkage) {
    double* one = distance + (int64_t)first * tokens;
    const double* two = distance + (int64_t)second * tokens;
    const double own = size[first], added = size[second];
    size[second] = 0;
    size[first] = own + added;
    for (int other = 0; other < tokens; other++) {
      if (size[other] == 0 || other == first) continue;
      const double a = one[other], b = two[other];
      const double joined = linkage == 0 ? (a * own + b * added) / (own + added) : (linkage == 1) == (a > b) ? a : b;
      one[other] = distance[(int64_t)other * tokens + first] = joined;
    }
    search(first);
    for (int row = 0; row < second; row++) {
      if (size[row] == 0 || row == first) continue;
      if (partner[row] == first || partner[row] == second) {
        search(row);
      } else if (row < first) {  // rounding may bring the joined one nearer than either was
        const double now = one[row];
        if (now < nearest[row] || (now == nearest[row] && first < partner[row])) {
          partner[row] = first;
          nearest[row] = now;
        }
      }
    }
  }
};

static void cluster_image(const ClusterTask& task, int64_t image, double* scratch) {
  const int tokens = task.tokens;
  const int64_t pairs = (int64_t)tokens * tokens;
  int64_t* whole = (int64_t*)(scratch + pairs + 2 * tokens);
  Clusters clusters{tokens, scratch, scratch + pairs, scratch + pairs + tokens, whole, whole + tokens};
  int64_t* owner = clusters.owner;
  const float* given = task.distance + image * pairs;
  for (int64_t pair = 0; pair < pairs; pair++) scratch[pair] = given[pair] == given[pair] ? given[pair] : NOWHERE;
  for (int token = 0; token < tokens; token++) {
    clusters.size[token] = 1;
    owner[token] = token;
  }
  for (int token = 0; token < tokens; token++) clusters.search(token);
  for (int number = 0; number < task.removed; number++) {
    const int first = clusters.nearest_pair();
    const int second = (int)clusters.partner[first];
    clusters.join(first, second, task.linkage);
    for (int token = second; token < tokens; token++)
      if (owner[token] == second) owner[token] = first;
  }
  int64_t *kept = task.kept + image * (tokens - task.removed), *gone = task.gone + image * task.removed;
  int64_t *target = task.target + image * task.removed, *place = clusters.partner;
  for (int token = 0, stays = 0, goes = 0; token < tokens; token++) {
    if (owner[token] == token) {
      place[token] = stays;
      kept[stays++] = token;
    } else {  // its owner comes before it, so that one's place is known
      target[goes] = place[owner[token]];
      gone[goes++] = token;
    }
  }
}

// False if there is no memory.
static bool cluster(const ClusterTask& task, int threads) {
  std::atomic<bool> fine{true};
  parallel_for(task.batch, threads, [&](int64_t image) {
    static thread_local Workspace workspace;
    double* scratch = (double*)workspace.floats(2 * Clusters::doubles(task.tokens));
    if (scratch)
      cluster_image(task, image, scratch);
    else
      fine = false;
    workspace.trim();
  });
  return fine;
}
