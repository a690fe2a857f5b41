// Merging attention states: (out, lse) of disjoint KV sets to that of their union.
//
// A thread owns 16 bytes of one row of `out`; the threads of a row lie side by side.
//   Memory   each state's 16 bytes are read once, as one access; the row's lse are read by all of
//            its threads at the same address, so L1 serves all but the first.
//   Compute  states fold from the first to the last (attention_state.cuh): the order is fixed, so
//            the bits are.
//   Writes   16 bytes of the merged row; the row's first thread also writes lse.
#pragma once

#include "attention_state.cuh"
#include "ptx.cuh"

namespace hf_cascade {

struct MergeParams {
  const void* out;     // [num_states, num_rows, head_dim]
  const float* lse;    // [num_states, num_rows], natural log; -inf is the empty state
  int64_t out_stride;  // from one state to the next, in bytes: two states given apart are
  int64_t lse_stride;  //   a stack with an odd stride
  void* merged_out;    // [num_rows, head_dim]
  float* merged_lse;   // [num_rows]
  int64_t num_rows;
  int num_states;
  int head_dim;
};

template <typename T>
__global__ void merge_states_kernel(const MergeParams params) {
  ptx::wait_for_previous_kernel();
  constexpr int kWidth = 16 / sizeof(T);
  struct alignas(16) Chunk {
    T value[kWidth];
  };
  const int chunks_per_row = params.head_dim / kWidth;
  const int64_t thread = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  const int64_t row = thread / chunks_per_row;
  if (row >= params.num_rows) return;

  Fold fold;
  float acc[kWidth] = {};
#pragma unroll 4
  for (int s = 0; s < params.num_states; ++s) {
    const auto* out_bytes = static_cast<const char*>(params.out) + s * params.out_stride;
    const auto* lse_bytes = reinterpret_cast<const char*>(params.lse) + s * params.lse_stride;
    const Chunk out = reinterpret_cast<const Chunk*>(out_bytes)[thread];
    const float lse = reinterpret_cast<const float*>(lse_bytes)[row];
    const Fold::Weights weights = fold.push(lse);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) acc[i] = combine(acc[i], to_float(out.value[i]), weights);
  }

  Chunk merged;
  const float normalizer = fold.normalizer();
#pragma unroll
  for (int i = 0; i < kWidth; ++i) merged.value[i] = from_float<T>(acc[i] * normalizer);
  static_cast<Chunk*>(params.merged_out)[thread] = merged;
  if (thread % chunks_per_row == 0) params.merged_lse[row] = fold.lse();
}

}  // namespace hf_cascade
