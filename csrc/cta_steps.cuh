// What all threads of a CTA do together: loops and prefix sums. Knows CUDA only.
//
// All of it is rolled up and there once: a kernel that runs once a step finds its code in memory,
// some 40 ns a line of 8 instructions (benchmarks/NOTES.md, 16).
#pragma once

#include <cstdint>

namespace hf_cascade {

constexpr int kFewestListThreads = 128, kMostListThreads = 512;  // of a CTA

// Calls visit(i) for i = first, first + step, .. below n.
template <typename Index, typename Visit>
__device__ void for_each(Index first, Index n, Index step, Visit visit) {
#pragma unroll 1
  for (Index i = first; i < n; i += step) visit(i);
}

// The same for 0 .. n - 1, a thread a value, by all threads.
template <typename Index, typename Visit>
__device__ void for_all(Index n, Visit visit) {
  for_each<Index>(threadIdx.x, n, blockDim.x, visit);
}

// Replaces two arrays of n values by their exclusive prefix sums, of n + 1.
//   Compute  each warp adds up 32 values and, once all warps have, the sums of those before it.
// Called by all threads, whose earlier writes it sees; all may read the sums afterwards.
static __device__ __noinline__ void sum_up(int32_t* first, int32_t* second, int n) {
  __shared__ int32_t warp_sums[2][32];
  const int num_threads = static_cast<int>(blockDim.x), num_warps = num_threads / 32;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int32_t* const arrays[2] = {first, second};
  int32_t total[2] = {0, 0};
  // Inclusive sums over the lanes of a warp.
  const auto add_below = [&](int32_t (&sum)[2]) {
#pragma unroll 1
    for (int step = 1; step < 32; step *= 2) {
#pragma unroll
      for (int32_t& value : sum) {
        const int32_t below = __shfl_up_sync(~0u, value, step);
        if (lane >= step) value += below;
      }
    }
  };
  __syncthreads();
#pragma unroll 1
  for (int start = 0; start < n; start += num_threads) {
    const int i = start + static_cast<int>(threadIdx.x);
    int32_t own[2], sum[2], before[2];
#pragma unroll
    for (int k = 0; k < 2; ++k) sum[k] = own[k] = i < n ? arrays[k][i] : 0;
    add_below(sum);
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      if (lane == 31) warp_sums[k][warp] = sum[k];
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < 2; ++k) before[k] = lane < num_warps ? warp_sums[k][lane] : 0;
    add_below(before);
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const int32_t below = __shfl_sync(~0u, before[k], warp > 0 ? warp - 1 : 0);
      if (i < n) arrays[k][i] = total[k] + sum[k] - own[k] + (warp > 0 ? below : 0);
      total[k] += __shfl_sync(~0u, before[k], 31);
    }
    __syncthreads();
  }
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    if (threadIdx.x == 0) arrays[k][n] = total[k];
  }
  __syncthreads();
}

}  // namespace hf_cascade
