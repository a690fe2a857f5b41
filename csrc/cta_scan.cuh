// Prefix sums by a whole CTA. Knows CUDA only.
#pragma once

#include <cstdint>

namespace hf_cascade {

// Two sums at a time.
struct Pair {
  int32_t first, second;
};

// Exclusive prefix sums of `value(i)`, a Pair, for i < n, into first[0 .. n] and second[0 .. n].
//   Compute  each warp adds up 32 values and, once all warps have, the sums of those before it.
// Called by all threads; what `value` wrote and the sums may be read by all of them afterwards.
template <int kThreads, typename Value>
__device__ void exclusive_sums(int32_t* first, int32_t* second, int n, Value value) {
  constexpr int kWarps = kThreads / 32;
  static_assert(kWarps == 32, "a lane a warp");
  __shared__ Pair warp_sums[kWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const auto add_below = [&](Pair& sum) {
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int32_t a = __shfl_up_sync(~0u, sum.first, step);
      const int32_t b = __shfl_up_sync(~0u, sum.second, step);
      if (lane >= step) {
        sum.first += a;
        sum.second += b;
      }
    }
  };
  Pair total = {0, 0};
  for (int start = 0; start < n; start += kThreads) {
    const int i = start + static_cast<int>(threadIdx.x);
    const Pair own = i < n ? value(i) : Pair{0, 0};
    Pair sum = own;
    add_below(sum);
    if (lane == 31) warp_sums[warp] = sum;
    __syncthreads();
    Pair before = warp_sums[lane];
    add_below(before);
    const int source = warp > 0 ? warp - 1 : 0;
    const Pair below = {__shfl_sync(~0u, before.first, source),
                        __shfl_sync(~0u, before.second, source)};
    if (i < n) {
      first[i] = total.first + sum.first - own.first + (warp > 0 ? below.first : 0);
      second[i] = total.second + sum.second - own.second + (warp > 0 ? below.second : 0);
    }
    total.first += __shfl_sync(~0u, before.first, 31);
    total.second += __shfl_sync(~0u, before.second, 31);
    __syncthreads();
  }
  if (threadIdx.x == 0) {
    first[n] = total.first;
    second[n] = total.second;
  }
  __syncthreads();
}

}  // namespace hf_cascade
