// The C interface that kernels/native.py calls: plain pointers and sizes, no torch and no Python header. One build of
// this file an instruction set; it works with every version of torch. Returns an Outcome (reduce.h). Nothing is checked
// here but grid cells: kernels/checks.py has looked at everything else.
#include "attention.h"
#include "cluster.h"
#include "conserve.h"
#include "graph.h"
#include "reduce.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

// On how many threads a loop runs that may have so many: one where no OpenMP runtime is found.
EXPORT int gtp_vit_threads(int wanted) { return find_gomp_parallel() ? wanted : 1; }

EXPORT int gtp_vit_attention(const void* q, int64_t q_batch, int64_t q_head, int64_t q_token, const void* k,
                             int64_t k_batch, int64_t k_head, int64_t k_token, const void* v, int64_t v_batch,
                             int64_t v_head, int64_t v_token, int64_t batch, int64_t heads, int query_tokens, int tokens,
                             int depth, int output_rows, float scale, int64_t removed, const float* size, void* out,
                             int first, float* diagonal, float* column_sums, float* class_row, int over_heads, int is_bfloat16,
                             int threads) {
  const AttentionTask task{{q, q_batch, q_head, q_token},
                           {k, k_batch, k_head, k_token},
                           {v, v_batch, v_head, v_token},
                           batch, heads, query_tokens, tokens, depth, output_rows, scale, removed, size, out,
                           first, diagonal, column_sums, class_row, over_heads};
  return (is_bfloat16 ? attention<bfloat16>(task, threads) : attention<float>(task, threads)) ? FINE : NO_MEMORY;
}

EXPORT int gtp_vit_gtp_reduce(int64_t batch, int tokens, int prefix, int channels, int removed, int patches, int degree,
                          const void* x, const void* branch, const float* scores, const int64_t* position,
                          const float* size, const int64_t* neighbours, const float* root, int64_t graph_stride,
                          float alpha, const void* norm_weight, const void* norm_bias, float epsilon, void* x_out,
                          void* normed_out, int64_t* position_out, float* size_out, int is_bfloat16, int threads) {
  const ReduceTask task{batch, tokens, prefix, channels, removed, patches, degree, x, branch, scores, position, size,
                        neighbours, root, graph_stride, alpha, norm_weight, norm_bias, epsilon, x_out, normed_out,
                        position_out, size_out};
  return is_bfloat16 ? reduce<bfloat16>(task, threads) : reduce<float>(task, threads);
}

EXPORT int gtp_vit_gtp_plus_merge(int64_t batch, int tokens, int prefix, int channels, int removed, const void* x,
                            const void* branch, const float* importance, const float* probe, const float* protect,
                            const float* size, float floor, int keep_norm, const void* norm_weight, const void* norm_bias, float epsilon, void* x_out, void* normed_out,
                            float* size_out, int64_t* kept, int64_t* gone, int64_t* target, int is_bfloat16, int threads) {
  const ConserveTask task{batch, tokens, prefix, channels, removed, x, branch, importance, probe, protect, size, floor,
                          keep_norm != 0, norm_weight, norm_bias, epsilon, x_out, normed_out, size_out, kept, gone, target};
  return (is_bfloat16 ? conserve<bfloat16>(task, threads) : conserve<float>(task, threads)) ? FINE : NO_MEMORY;
}

EXPORT int gtp_vit_graph(int64_t batch, int rows, int columns, int spatial, int semantic, const float* similarity,
                         int64_t* neighbours, float* root, int threads) {
  const GraphTask task{batch, rows, columns, spatial, semantic, similarity, neighbours, root};
  return graph(task, threads) ? FINE : NO_MEMORY;
}

EXPORT int gtp_vit_cluster(int64_t batch, int tokens, int removed, int linkage, const float* distance, int64_t* kept,
                           int64_t* gone, int64_t* target, int threads) {
  const ClusterTask task{batch, tokens, removed, linkage, distance, kept, gone, target};
  return cluster(task, threads) ? FINE : NO_MEMORY;
}

// The k-th smallest of [rows, columns], for tests.
EXPORT float gtp_vit_kth_smallest(const float* data, int rows, int columns, int64_t ld, int64_t k, uint32_t* scratch) {
  return kth_smallest({data, rows, columns, ld}, k, scratch);
}
