// The merge along the paths: each query row's partial states, combined.
//
// A warp owns one row (sequence, q head); a lane owns a state's weight, and four values of the row.
//   Memory   the row's states, just written by the attention kernel, from L2: their lse and the
//   first
//            kAtOnce of their rows are under way at the same time, so a row of few states waits
//            once.
//   Compute  weights 2^(lse - maximum) by all lanes at once, then the weighted sum in slot order,
//   root
//            to leaf: who wrote first does not show.
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

// The weights of up to 32 more states: a lane's own, and what those seen before are worth now.
struct MergeWeights {
  float maximum = negative_infinity(), sum = 0.f;

  __device__ float push(float lse_log2, float& keep) {
    float larger = lse_log2;
#pragma unroll
    for (int lane = 16; lane > 0; lane /= 2) {
      larger = fmaxf(larger, __shfl_xor_sync(~0u, larger, lane));
    }
    larger = fmaxf(larger, maximum);
    // All empty so far: -inf - -inf would be NaN.
    const float offset = larger == negative_infinity() ? 0.f : larger;
    keep = ptx::exp2_approx(maximum - offset);
    const float weight = ptx::exp2_approx(lse_log2 - offset);
    float total = weight;
#pragma unroll
    for (int lane = 16; lane > 0; lane /= 2) total += __shfl_xor_sync(~0u, total, lane);
    sum = sum * keep + total;
    maximum = larger;
    return weight;
  }
};

constexpr int64_t kFewRows = 4096;

// kAtOnce: many where rows are few; few where rows are many, so that a multiprocessor holds more.
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

  constexpr int kParts = (kHeadDim + 127) / 128;  // of four values a lane
  const auto state_row = [&](int s) { return int64_t{s} * num_q_heads + q_head; };
  const auto load = [&](int s, int part) {
    const int column = 128 * part + 4 * lane;
    if (s >= end || column >= kHeadDim) return float4{0.f, 0.f, 0.f, 0.f};
    const float* place = params.state_out + state_row(s) * kHeadDim + column;
    return __ldcg(reinterpret_cast<const float4*>(place));
  };
  MergeWeights weights;
  float4 acc[kParts] = {};
  for (int group = begin; group < end; group += 32) {
    const int own = group + lane;
    const float lse =
        own < end ? __ldcg(params.state_lse_log2 + state_row(own)) : negative_infinity();
    float keep = 0.f, weight = 0.f;
    for (int first = 0; first < 32 && group + first < end; first += kAtOnce) {
      float4 out[kAtOnce][kParts];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
        for (int part = 0; part < kParts; ++part) out[i][part] = load(group + first + i, part);
      }
      if (first == 0) {
        weight = weights.push(lse, keep);
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          acc[part].x *= keep, acc[part].y *= keep, acc[part].z *= keep, acc[part].w *= keep;
        }
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const float w = __shfl_sync(~0u, weight, first + i);
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          acc[part].x = fmaf(w, out[i][part].x, acc[part].x);
          acc[part].y = fmaf(w, out[i][part].y, acc[part].y);
          acc[part].z = fmaf(w, out[i][part].z, acc[part].z);
          acc[part].w = fmaf(w, out[i][part].w, acc[part].w);
        }
      }
    }
  }
  const int64_t out_row = int64_t{token} * num_q_heads + q_head;
  const float n = weights.sum == 0.f ? 0.f : 1.f / weights.sum;
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    const int column = 128 * part + 4 * lane;
    if (column >= kHeadDim) continue;
    const uint2 packed = {pack<T>(acc[part].x * n, acc[part].y * n),
                          pack<T>(acc[part].z * n, acc[part].w * n)};
    *reinterpret_cast<uint2*>(static_cast<T*>(params.out) + out_row * kHeadDim + column) = packed;
  }
  if (lane == 0) params.lse[out_row] = (weights.maximum + log2f(weights.sum)) * kLn2;
}

}  // namespace hf_cascade
