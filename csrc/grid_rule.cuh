// How many CTAs the attention kernel has. Knows CUDA only.
//
// One on every multiprocessor, but for a few: where the merge has so few rows that its CTAs all fit
// on a handful of multiprocessors, those are left to it. It is launched early, and with room it
// stands ready when attention ends, instead of finding every multiprocessor full until then: 1.5 to
// 2.5 us of a lone row's 10 to 20 (benchmarks/NOTES.md, 11), which no memory bandwidth pays for.
#pragma once

#include "tiles.cuh"

namespace hf_cascade {

constexpr int kRoomyRows = 32;  // of the merge: (query token, head); of more, none was faster
constexpr int kRowsPerMultiprocessor =
    8;  // CTAs of four warps and 64 registers at most, a row each

// num_rows: of the merge. has_early_launch: of the GPU, see checks.h.
constexpr int num_attention_ctas(int num_multiprocessors, int64_t num_rows, bool has_early_launch) {
  if (!has_early_launch || num_rows > kRoomyRows) return num_multiprocessors;
  const int left =
      num_multiprocessors - ceil_div(static_cast<int>(num_rows), kRowsPerMultiprocessor);
  return left < 1 ? 1 : left;
}

}  // namespace hf_cascade
