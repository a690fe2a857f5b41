// Into how many KV splits a node is cut.
//
// Balanced, the default: of kNumCandidates lengths the one whose launch is estimated to be the
// shortest, one for the nodes that matrix warps read and one for those that leaf warps read.
// Batch invariant: a function of the node and the head count alone, so that a row's bits do not
// depend on its companions; unless the scratch is full and splits double.
//
// A split is named by one number in the header: tokens or, below 0, ~(how often the batch invariant
// length is doubled). What is estimated is rough, and only compared. Pure functions of numbers.
#pragma once

#include <cmath>

#include "stage_rule.cuh"

namespace hf_cascade {

constexpr int kSplitUnit = 64;  // tokens; splits are multiples
constexpr int kNumCandidates = 32;

// What the list depends on beside the tree.
struct WorkShape {
  int num_kv_heads;
  int group_size;
  int tile_tokens;  // query tokens of an item of matrix warps, at most
  int head_dim;
  int page_size_log2;
  int num_ctas;    // of the attention kernel
  int num_stages;  // of each of them
  int max_states;  // that the scratch has room for
  bool batch_invariant;
};

// ---------------------------------------------------------------------- lengths

// In units: 1, 2, 3, then four an octave to 16384 tokens; the last are for scratch that is small.
__host__ __device__ constexpr int candidate_units(int i) {
  if (i < 3) return i + 1;
  const int octave = (i - 3) / 4, quarter = (i - 3) % 4;
  if (i <= 27) return (4 + quarter) << octave;
  return i == 31 ? 1 << 24 : 512 << (2 * (i - 28));
}

// Division by a candidate, which is below 256 units or a power of two: exact to 2^24 units.
struct UnitDivider {
  uint32_t units, factor;  // of which the second is 2^32 / units, rounded up

  __host__ __device__ explicit UnitDivider(int candidate)
      : units(candidate_units(candidate)), factor(~0u / units + 1) {}

  __host__ __device__ int ceil(int value) const {
    if (units == 1) return value;
    return static_cast<int>((uint64_t{value + units - 1} * factor) >> 32);
  }
};

__host__ __device__ inline int units_of(int kv_len) { return ceil_div(kv_len, kSplitUnit); }

constexpr int kMinSplit = 256;       // tokens; half of it where kv heads are few
constexpr int kLongSplit = 1024;     // tokens; from here on more items pay more than fewer states
constexpr int kMinLeafSplits = 8;    // of a leaf, as far as they are no shorter than kMinSplit
constexpr int kLongestSplit = 4096;  // tokens; longer ones leave CTAs idle at the end

// The batch invariant length.
__host__ __device__ inline int invariant_length(int kv_len, int num_kv_heads, int doublings,
                                                bool is_leaf) {
  // For a lone sequence 64 items; 128 if they stay long.
  const int64_t work = int64_t{kv_len} * num_kv_heads;
  const int64_t of_64 = (work / 64 + 63) / 64 * 64, of_128 = (work / 128 + 63) / 64 * 64;
  const int64_t shortest = num_kv_heads >= 8 ? kMinSplit : kMinSplit / 2;
  int64_t length = of_64 <= kLongSplit ? of_64 : of_128 < kLongSplit ? kLongSplit : of_128;
  length = length < shortest ? shortest : length > kLongestSplit ? kLongestSplit : length;
  // One warp walks a leaf's split: many steps are long to wait for.
  const int64_t longest = kv_len / kMinLeafSplits > kMinSplit ? kv_len / kMinLeafSplits : kMinSplit;
  if (is_leaf && length > longest) length = (longest + 63) / 64 * 64;
  length <<= doublings;
  return static_cast<int>(length < (1 << 30) ? length : (1 << 30));
}

// How a node is cut.
struct Cut {
  int length;  // tokens of a split; the last one may be shorter
  int splits;
};

static __device__ __noinline__ Cut cut_node(int kv_len, int split, int num_kv_heads, bool is_leaf) {
  const int units = units_of(kv_len), most = split / kSplitUnit;
  int length = kSplitUnit * (units > 1 ? units : 1);
  if (split < 0) {
    length = invariant_length(kv_len, num_kv_heads, ~split, is_leaf);
  } else if (units > most) {
    length = kSplitUnit * ceil_div(units, ceil_div(units, most));  // equal ones
  }
  return {length, ceil_div(kv_len, length)};
}

// ---------------------------------------------------------------------- who reads a node

__host__ __device__ inline bool leaf_warps_read_leaves(const WorkShape& shape) {
  return shape.group_size <= kMaxLeafRows && shape.num_stages > 1;
}

// Of one reader, by leaf warps: the matrix units' 128 rows would nearly all be empty.
__host__ __device__ inline bool is_single(int num_readers, const WorkShape& shape) {
  return num_readers == 1 && leaf_warps_read_leaves(shape) && !shape.batch_invariant;
}

// ---------------------------------------------------------------------- estimates

constexpr float kTileUs = 0.89f;          // matrix warps, for 64 tokens
constexpr float kSharedItemTiles = 2.2f;  // start and end of an item, in such tiles
constexpr float kLeafUnitUs = 1.5f;       // a leaf warp, for 64 tokens
constexpr float kLeafItemUs = 1.5f;       // start and end of an item
constexpr float kFullGridUs = 3.f;        // no CTA without items, whose place the next kernel takes
constexpr float kMergeStateUs = 0.05f;    // a row's state, to be written and read
constexpr float kUsPerByte = 1.f / 4.4e6f;
// What a value of a partial state costs, as if it were so many bytes from memory: twice the 4 that
// are written and read; a leaf warp's, whose items have fewer rows, four times.
constexpr float kSharedStateBytes = 8.f, kLeafStateBytes = 16.f;

// What the nodes that one kind of warp reads add up to.
struct NodeTotals {
  int units;    // of every (node, query tile, kv head)
  int longest;  // units of a node
};

__device__ inline float at_least(float a, float b) { return a > b ? a : b; }

// Writing and reading the partial states, and for a row the trips to those of its longest node.
__device__ inline float merge_us(float bytes_a_value, int num_states, int split_units,
                                 NodeTotals nodes, const WorkShape& shape) {
  const float state_bytes =
      bytes_a_value * shape.head_dim * (shape.num_kv_heads * shape.group_size);
  const float trips =
      nodes.longest <= split_units ? 0.f : kMergeStateUs * __fdividef(nodes.longest, split_units);
  return num_states * state_bytes * kUsPerByte + trips;
}

__device__ inline float shared_us(int num_items, int split_units, NodeTotals nodes,
                                  const WorkShape& shape) {
  if (num_items == 0) return 0.f;
  const int longest = split_units < nodes.longest ? split_units : nodes.longest;
  const float mean = kSharedItemTiles + __fdividef(nodes.units, num_items);
  const float all = ceil_div(num_items, shape.num_ctas) * mean;
  return kTileUs * at_least(all, kSharedItemTiles + longest);
}

// boxes: of kBoxTokens, of every (node, kv head) that leaf warps read.
__device__ inline float leaf_memory_us(int boxes, const WorkShape& shape) {
  return static_cast<float>(boxes) * (kBoxTokens * 4.f) * shape.head_dim * kUsPerByte;
}

// Matrix warps beside leaf warps: less than their sum, more than the longer of the two.
__device__ inline float beside_us(float us, float other_us) {
  return cbrtf(us * us * us + other_us * other_us * other_us);
}

// memory_us: of the same leaves. num_leaf_warps: of a CTA, from the start.
__device__ inline float leaf_us(int num_items, int split_units, NodeTotals nodes, float memory_us,
                                int num_leaf_warps, const WorkShape& shape) {
  if (num_items == 0) return 0.f;
  const int longest = split_units < nodes.longest ? split_units : nodes.longest;
  const int num_warps = num_leaf_warps * shape.num_ctas;
  const float mean = kLeafItemUs + kLeafUnitUs * __fdividef(nodes.units, num_items);
  const float all = ceil_div(num_items, num_warps) * mean;
  const float last = kLeafItemUs + kLeafUnitUs * longest;
  const bool is_alone = num_leaf_warps == kMostLeafWarps;
  // Where memory is the limit some warps have nothing to do in the last round or, of one round, end
  // early, most of all beside those that could not begin with them.
  const int most_warps = kMostLeafWarps * shape.num_ctas;
  const float rounds = __fdividef(num_items, most_warps);
  const float in_last_round = ceil_div(num_items, most_warps) - rounds;
  const float idle = rounds > 1.f ? at_least(0.5f, in_last_round) : is_alone ? 0.4f : 0.5f;
  const bool is_full = is_alone && num_items >= shape.num_ctas;
  return (is_full ? kFullGridUs : 0.f) + at_least(at_least(all, last), memory_us + idle * last);
}

// By rounds, of as many items as there are warps for them from the start: shared nodes that are cut
// into fewer items leave CTAs to the leaves. A single round takes no longer than they do.
__device__ inline float leaf_rounds_us(int num_items, int num_shared_items, int boxes,
                                       const WorkShape& shape) {
  const int num_warps = first_leaf_warps(kLeafWarps, num_shared_items, shape.num_ctas);
  if (num_items <= num_warps) return 0.f;
  constexpr float kUnits = static_cast<float>(kBoxTokens) / kSplitUnit;  // of a box
  return ceil_div(num_items, num_warps) *
         (kLeafItemUs + kLeafUnitUs * kUnits * __fdividef(boxes, num_items));
}

}  // namespace hf_cascade
