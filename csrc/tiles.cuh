// Sizes that the work list and the attention kernel have in common. Knows CUDA only.
#pragma once

#include <cstdint>

namespace hf_cascade {

constexpr int kBoxTokens = 16;     // tiles start at multiples of this many slots: no page is
                                   // smaller, and the copy engine moves that many at a time
constexpr int kRowsPerTile = 128;  // query rows of one item of matrix warps
constexpr int kMaxLeafRows = 8;    // query rows of one item of a leaf warp
constexpr int kLeafTokens = 32;    // that a leaf warp fetches and computes on at a time
constexpr int kLeafWarps = 3;      // of a CTA beside matrix warps
constexpr int kMostLeafWarps = 6;  // where matrix warps have nothing to do, some of them help

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

// Rows of K, and of V, that a stage of the attention kernel holds: 32 KB for both. Of 128 rows,
// three stages are too few where memory is the limit, and gain nothing elsewhere
// (benchmarks/NOTES.md, 8).
__host__ __device__ constexpr int kv_tile_rows(int head_dim) { return head_dim <= 128 ? 64 : 32; }

__host__ __device__ constexpr int tokens_per_tile(int group_size) {
  return kRowsPerTile / group_size;
}

__host__ __device__ constexpr int align_slot(int slot) { return slot / kBoxTokens * kBoxTokens; }

// KV tiles that cover a node's first `tokens`; a tile starts at a multiple of 16 slots.
__host__ __device__ constexpr int count_tiles(int first_slot, int tokens, int kv_tile) {
  if (tokens <= 0) return 0;
  return ceil_div(first_slot + tokens - align_slot(first_slot), kv_tile);
}

// Of a launch, what its work list can't be used without.
__host__ __device__ constexpr int launch_shape(int head_dim, int group_size) {
  return head_dim << 16 | group_size;
}

// The largest i < n with sums[i] <= value.
__host__ __device__ inline int find_item(const int32_t* sums, int n, int value) {
  int low = 0;
  while (n > 1) {
    const int half = n / 2;
    if (sums[low + half] <= value) low += half;
    n -= half;
  }
  return low;
}

}  // namespace hf_cascade
