// Choosing the splits of a launch among the candidates of split_rule.cuh. Knows CUDA only.
#pragma once

#include "work_items.cuh"

namespace hf_cascade {

// What the candidates come to, each lane its own.
struct CandidateSums {
  int32_t shared_items[kNumCandidates], shared_states[kNumCandidates];
  int32_t leaf_items[kNumCandidates], leaf_states[kNumCandidates];
  NodeTotals shared, leaf;
  int32_t leaf_boxes;  // of kBoxTokens, like units
};

constexpr int kMostCounted = 1 << 25;  // a warp's sums stop here: more do not fit any scratch

__host__ __device__ inline int add_capped(int sum, int64_t more) {
  return more >= kMostCounted - sum ? kMostCounted : sum + static_cast<int>(more);
}

// By all warps: a warp a node, a lane a candidate.
__device__ inline void sum_candidates(CandidateSums& sums, const TreeParams& tree,
                                      const ListTables& tables, const WorkShape& shape) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const UnitDivider divider(lane);
  int shared_items = 0, shared_states = 0, leaf_items = 0, leaf_states = 0;
  NodeTotals shared = {0, 0}, leaf = {0, 0};
  int leaf_boxes = 0;
  const int num_entries = tables.num_shared_nodes + tree.num_seqs;
  const int num_warps = static_cast<int>(blockDim.x) / 32;
  for (int i = warp; i < num_entries; i += num_warps) {
    const Entry entry = find_entry(i, tree, tables, shape);
    const int units = units_of(entry.kv_len);
    const int splits = shape.batch_invariant
                           ? cut_node(entry.kv_len, ~lane, shape.num_kv_heads, entry.is_leaf).splits
                           : divider.ceil(units);
    const int counted = splits > 0 ? splits : 1;  // a sequence with nothing to see needs an item
    const int64_t items = int64_t{counted} * entry.columns;
    const int64_t states = int64_t{counted} * entry.states;
    if (entry.by_leaf_warps) {
      leaf_items = add_capped(leaf_items, items);
      leaf_states = add_capped(leaf_states, states);
      leaf.units = add_capped(leaf.units, int64_t{units} * entry.columns);
      leaf.longest = max(leaf.longest, units);
      const int boxes = ceil_div(entry.kv_len, kBoxTokens);
      leaf_boxes = add_capped(leaf_boxes, int64_t{boxes} * entry.columns);
    } else {
      shared_items = add_capped(shared_items, items);
      shared_states = add_capped(shared_states, states);
      shared.units = add_capped(shared.units, int64_t{units} * entry.columns);
      shared.longest = max(shared.longest, units);
    }
  }
  static_assert(kMostListThreads <= 32 * 32, "the sums of all warps must fit");
  if (shared_items > 0) {
    atomicAdd(&sums.shared_items[lane], shared_items);
    atomicAdd(&sums.shared_states[lane], shared_states);
  }
  if (leaf_items > 0) {
    atomicAdd(&sums.leaf_items[lane], leaf_items);
    atomicAdd(&sums.leaf_states[lane], leaf_states);
  }
  if (lane == 0) {
    atomicAdd(&sums.shared.units, shared.units);
    atomicMax(&sums.shared.longest, shared.longest);
    atomicAdd(&sums.leaf.units, leaf.units);
    atomicMax(&sums.leaf.longest, leaf.longest);
    atomicAdd(&sums.leaf_boxes, leaf_boxes);
  }
}

// The lane whose cost is the least, the first of them; costs are not negative.
__device__ inline int find_cheapest(float cost) {
  const uint32_t bits = __float_as_uint(cost);  // ordered like the costs
  const uint32_t least = __reduce_min_sync(~0u, bits);
  return __ffs(__ballot_sync(~0u, bits == least)) - 1;
}

// The splits, how long the two kinds of warp take with them, and whether leaves are, in the mean,
// no longer than a tile of a leaf warp.
struct SplitChoice {
  int32_t shared_split, leaf_split;
  float shared_us, leaf_us;
  bool are_leaves_short;
};

// By one warp.
__device__ inline SplitChoice choose_splits(const CandidateSums& sums, const WorkShape& shape) {
  const int lane = threadIdx.x % 32, units = candidate_units(lane);
  const int shared_states = sums.shared_states[lane], leaf_states = sums.leaf_states[lane];
  const float shared_time = shared_us(sums.shared_items[lane], units, sums.shared, shape);
  const int leaf_warps = sums.shared_items[0] == 0 ? kMostLeafWarps : kLeafWarps;
  const float memory_time = leaf_memory_us(sums.leaf_boxes, shape);
  const float leaf_time =
      leaf_us(sums.leaf_items[lane], units, sums.leaf, memory_time, leaf_warps, shape);
  constexpr float kLastResort = 1e30f;  // the last candidate always fits: one split a node
  SplitChoice result;
  int shared_choice, leaf_choice;
  if (shape.batch_invariant) {
    const bool fits = int64_t{shared_states} + leaf_states <= shape.max_states || lane == 31;
    shared_choice = leaf_choice = __ffs(__ballot_sync(~0u, fits)) - 1;
    result.shared_split = result.leaf_split = ~shared_choice;
  } else {
    const float leaf_cost =
        leaf_time + merge_us(kLeafStateBytes, leaf_states, units, sums.leaf, shape);
    const int least = sums.leaf_states[kNumCandidates - 1];
    const bool shared_fits = shared_states <= shape.max_states - least && lane > 0;
    const int leaf_items = sums.leaf_items[find_cheapest(leaf_cost)];
    const float beside = at_least(
        memory_time, leaf_rounds_us(leaf_items, sums.shared_items[lane], sums.leaf_boxes, shape));
    shared_choice = find_cheapest(
        shared_fits ? beside_us(shared_time, beside) +
                          merge_us(kSharedStateBytes, shared_states, units, sums.shared, shape)
                    : kLastResort);
    const int left = shape.max_states - sums.shared_states[shared_choice];
    leaf_choice = find_cheapest(leaf_states <= left ? leaf_cost : kLastResort);
    if (!leaf_warps_read_leaves(shape)) leaf_choice = shared_choice;
    result.shared_split = kSplitUnit * candidate_units(shared_choice);
    result.leaf_split = kSplitUnit * candidate_units(leaf_choice);
  }
  result.shared_us = __shfl_sync(~0u, shared_time, shared_choice);
  result.leaf_us = memory_time;
  const int num_leaves = sums.leaf_items[kNumCandidates - 1];  // (leaf, kv head): not split
  result.are_leaves_short = sums.leaf_boxes <= num_leaves * (kLeafTokens / kBoxTokens);
  return result;
}

}  // namespace hf_cascade
