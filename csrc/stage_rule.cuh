// How the stages of a CTA of the attention kernel are divided, and among how many leaf warps. Knows
// CUDA only.
#pragma once

#include "tiles.cuh"

namespace hf_cascade {

constexpr int kMostStages = 6;
constexpr int kControlBytes = 3 * 1024;  // what a CTA shares beside the stages and q

__host__ __device__ constexpr int row_panels(int head_dim) { return (head_dim + 63) / 64; }

// K and V of one tile, in rows of whole panels of 128 bytes.
__host__ __device__ constexpr int stage_bytes(int head_dim) {
  return 2 * kv_tile_rows(head_dim) * row_panels(head_dim) * 128;
}

// Stages that a CTA has room for beside q, in so many bytes of shared memory.
__host__ __device__ constexpr int num_stages(int head_dim, int shared_bytes) {
  const int queries = kRowsPerTile * row_panels(head_dim) * 128;
  const int found = (shared_bytes - queries - kControlBytes) / stage_bytes(head_dim);
  return found > kMostStages ? kMostStages : found;
}

// Stages for the matrix warps; the others are the leaf warps'. Half of them, or one more if the
// matrix warps have as much to do: not that they needed it, but leaf warps with less take less from
// them (benchmarks/NOTES.md, 10; the factor is from the sweep in 12).
__host__ __device__ constexpr int shared_stages(int num_stages, int num_shared_items,
                                                int num_leaf_items, float shared_us,
                                                float leaf_us) {
  if (num_shared_items == 0) return 0;
  if (num_leaf_items == 0) return num_stages;
  int stages = (num_stages + 1) / 2;
  if (shared_us > 0.97f * leaf_us) ++stages;
  return stages < 1 ? 1 : stages >= num_stages ? num_stages - 1 : stages;
}

// Warps that take leaves' items from the start: `own` of each CTA and, of those without a shared
// item, the matrix warps that join them.
__host__ __device__ constexpr int first_leaf_warps(int own, int num_shared_items, int num_ctas) {
  const int idle_ctas = num_shared_items < num_ctas ? num_ctas - num_shared_items : 0;
  return own * num_ctas + (kMostLeafWarps - kLeafWarps) * idle_ctas;
}

// Whether all leaf warps of a CTA take items, or fewer with more buffers each, whose next tile is
// on its way while they compute. Fewer are better for a single round of items, and for two rounds
// if all would need two as well; but not where an item is a single tile (benchmarks/NOTES.md, 17).
__host__ __device__ constexpr bool all_leaf_warps_take(int num_shared_items, int num_leaf_items,
                                                       bool are_leaves_short, int num_ctas) {
  const bool are_alone = num_shared_items == 0;
  const int all = first_leaf_warps(kLeafWarps, num_shared_items, num_ctas);
  const int few = are_alone ? all / 2 : all - num_ctas;
  if (num_leaf_items <= few) return false;
  const bool two_rounds_anyway = num_leaf_items > all && num_leaf_items <= 2 * few;
  return are_leaves_short || !two_rounds_anyway;
}

}  // namespace hf_cascade
