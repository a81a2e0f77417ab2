// The C interface that kernels/native.py calls: plain pointers and sizes, no torch and no Python header. One build of
// this file an instruction set; it works with every version of torch. Returns 0, or 1 if there was no memory.
#include "attention.h"
#include "graph.h"
#include "reduce.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT int gtp_vit_version() { return 1; }

EXPORT int gtp_vit_attention(const AttentionTask* task, int is_bfloat16, int threads) {
  return !(is_bfloat16 ? attention<bfloat16>(*task, threads) : attention<float>(*task, threads));
}

EXPORT int gtp_vit_reduce(const ReduceTask* task, int is_bfloat16, int threads) {
  return !(is_bfloat16 ? reduce<bfloat16>(*task, threads) : reduce<float>(*task, threads));
}

EXPORT int gtp_vit_graph(const GraphTask* task, int threads) { return !graph(*task, threads); }

// The k-th smallest of [rows, columns], for tests.
EXPORT float gtp_vit_kth_smallest(const float* data, int rows, int columns, int64_t ld, int64_t k, uint32_t* scratch) {
  return kth_smallest({data, rows, columns, ld}, k, scratch);
}
