// Loops over several threads: torch's own, so that both together never use more than torch.set_num_threads allows.
#pragma once
#include <atomic>
#include <cstdint>
#include <dlfcn.h>

// torch brings an OpenMP runtime (libgomp, or libomp which answers to the same name) and makes its symbols global.
// Calling that runtime by name, instead of linking one of our own, is what keeps a second pool of threads from
// competing with torch's. Where it is not found, the loop runs on the calling thread.
using GompParallel = void (*)(void (*)(void*), void*, unsigned, unsigned);

static GompParallel find_gomp_parallel() {
  static const GompParallel found = (GompParallel)dlsym(RTLD_DEFAULT, "GOMP_parallel");
  return found;
}

// body(index) for every index below count, on at most `threads` threads; tasks are taken one at a time, so that
// unequal ones even out.
template <typename Body>
static void parallel_for(int64_t count, int threads, const Body& body) {
  const GompParallel gomp_parallel = find_gomp_parallel();
  if (count < threads) threads = (int)count;
  if (threads <= 1 || !gomp_parallel) {
    for (int64_t index = 0; index < count; index++) body(index);
    return;
  }
  struct Shared {
    const Body* body;
    std::atomic<int64_t> next;
    int64_t count;
  } shared{&body, {0}, count};
  gomp_parallel(
      [](void* data) {
        Shared* shared = (Shared*)data;
        for (int64_t index; (index = shared->next.fetch_add(1)) < shared->count;) (*shared->body)(index);
      },
      &shared, (unsigned)threads, 0);
}
