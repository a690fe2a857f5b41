// The merge along the paths: each query row's partial states, folded.
//
// A warp owns one row (sequence, q head); a lane owns four of its values.
//   Memory   the row's states, just written by the attention kernel, from L2, kAtOnce of them under
//            way at a time: many where rows are few, so that a row waits once or twice; few where
//            rows are many, so that a multiprocessor holds more of them.
//   Compute  states fold in slot order, root to leaf: who wrote first does not show.
//   Writes   the row of `out` and its lse. Rows that have but one state were written by the
//            attention kernel itself.
//
// It is a kernel of its own, chained by programmatic launch. Folded in by whoever arrived last, the
// merges of a step's last item (128 rows) fell to one CTA while 131 stood idle
// (benchmarks/NOTES.md, section 8).
#pragma once

#include "attention_state.cuh"
#include "attention_traits.cuh"
#include "ptx.cuh"

namespace hf_cascade {

constexpr int kMergeThreads = 128;
constexpr int64_t kFewRows = 4096;

template <typename T, int kHeadDim, int kAtOnce>
__global__ void __launch_bounds__(kMergeThreads)
    merge_paths_kernel(const __grid_constant__ AttentionParams params) {
  ptx::let_next_kernel_start();
  // The work list is older than the kernel before us: these loads need not wait for it.
  const int num_q_heads = params.num_kv_heads * params.group_size;
  const int row = static_cast<int>((blockIdx.x * blockDim.x + threadIdx.x) / 32);
  const int seq = row / num_q_heads, q_head = row % num_q_heads, lane = threadIdx.x % 32;
  bool is_merged = false;
  int begin = 0, end = 0, token = 0;
  if (seq < params.tree.num_seqs && params.work.header->is_decode) {
    begin = params.work.path_indptr[seq];
    end = params.work.path_indptr[seq + 1];
    token = params.tree.q_indptr[seq];
    is_merged = end - begin > 1 && params.tree.q_indptr[seq + 1] > token;
  }
  ptx::wait_for_previous_kernel();
  if (!is_merged) return;

  for (int c = 4 * lane; c < kHeadDim; c += 128) {
    Fold<LogBase::kTwo> fold;
    float4 acc = {0.f, 0.f, 0.f, 0.f};
    for (int s = begin; s < end; s += kAtOnce) {
      float4 out[kAtOnce];
      float lse_log2[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        lse_log2[i] = negative_infinity();
        out[i] = {0.f, 0.f, 0.f, 0.f};
        if (s + i >= end) continue;
        const int64_t state = int64_t{s + i} * num_q_heads + q_head;
        lse_log2[i] = __ldcg(params.state_lse_log2 + state);
        out[i] = __ldcg(reinterpret_cast<const float4*>(params.state_out + state * kHeadDim + c));
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const auto w = fold.push(lse_log2[i]);
        acc.x = combine(acc.x, out[i].x, w);
        acc.y = combine(acc.y, out[i].y, w);
        acc.z = combine(acc.z, out[i].z, w);
        acc.w = combine(acc.w, out[i].w, w);
      }
    }
    const int64_t out_row = int64_t{token} * num_q_heads + q_head;
    const float n = fold.normalizer();
    const uint2 packed = {pack<T>(acc.x * n, acc.y * n), pack<T>(acc.z * n, acc.w * n)};
    *reinterpret_cast<uint2*>(static_cast<T*>(params.out) + out_row * kHeadDim + c) = packed;
    if (c == 0) params.lse[out_row] = fold.lse() * kLn2;
  }
}

}  // namespace hf_cascade
