// Finished query rows in 16 bits, as partial_state.cuh has it.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "partial_state.cuh"

namespace hf_cascade {

__device__ __forceinline__ float power_of_two(int exponent) {
  return __int_as_float((exponent + 127) << 23);
}

// Rows as they are stored.
template <int kPairs, int kRows>
struct PackedRows {
  uint32_t pairs[kRows][kPairs];
  float scale[kRows];
};

// Of a warp's rows each lane has kPairs pairs of values of kRows, value(row, i), and the lanes that
// differ from it in the bits from kFirstLane to below kEndLane have the rest of these. They are
// stored times normalizer[row], if exists[row]. What becomes of a row depends on nothing else.
template <int kPairs, int kFirstLane, int kEndLane, int kRows, typename Value>
__device__ __forceinline__ PackedRows<kPairs, kRows> pack_rows(const bool (&exists)[kRows],
                                                               const float (&normalizer)[kRows],
                                                               Value value) {
  PackedRows<kPairs, kRows> packed;
  bool counts[kRows];
  int exponent[kRows] = {};
#pragma unroll
  for (int row = 0; row < kRows; ++row) counts[row] = exists[row];
#pragma unroll 1  // hardly ever more than once
  for (;;) {
    float largest[kRows];
    bool fits = true;
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      const float factor = normalizer[row] * power_of_two(-exponent[row]);
      __half2 most = __float2half2_rn(0.f);
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        const float2 pair = value(row, i);
        const __half2 both = __floats2half2_rn(pair.x * factor, pair.y * factor);
        packed.pairs[row][i] = reinterpret_cast<const uint32_t&>(both);
        most = __hmax2(most, __habs2(both));
      }
      largest[row] = fmaxf(__low2float(most), __high2float(most));
      fits &= !counts[row] | ((largest[row] >= kLeastLargest) & (largest[row] <= kMostLargest));
    }
    // A lane's share of a row that fits nearly always does.
    if (__all_sync(~0u, fits)) break;
    bool changes = false;
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
#pragma unroll
      for (int lane = kFirstLane; lane < kEndLane; lane *= 2) {
        largest[row] = fmaxf(largest[row], __shfl_xor_sync(~0u, largest[row], lane));
      }
      int more = counts[row] ? rescaling(largest[row], exponent[row]) : 0;
      if (counts[row] && largest[row] > kMostLargest && more == 0) {
        more = -exponent[row];  // infinite: its other values are to stay what they are
        counts[row] = false;
      }
      exponent[row] += more;
      changes |= more != 0;
    }
    if (!__any_sync(~0u, changes)) break;
  }
#pragma unroll
  for (int row = 0; row < kRows; ++row) packed.scale[row] = power_of_two(exponent[row]);
  return packed;
}

}  // namespace hf_cascade
