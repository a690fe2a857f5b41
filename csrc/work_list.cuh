// Making the work list: which items a launch has, and where their partial states go.
//
// Once a step, for all layers. Every CTA finds the same tables (work_items.cuh), each writes its
// part of the list: that costs no more time than finding them once and saves a second launch.
//   Memory   the lengths and the readers, a few KB, once, to shared memory, where everything else
//            happens; a tree too large for it is one CTA's, which works in global memory.
//   Compute  a lane a candidate of a split length, a warp a node; a thread a read; a lane a
//   sequence
//            for the order of its states; prefix sums over nodes and sequences.
//   Writes   the WorkList, and 0 to the ticket counters of the launch that follows, if one does.
#pragma once

#include "cta_scan.cuh"
#include "ptx.cuh"
#include "stage_rule.cuh"
#include "work_items.cuh"

namespace hf_cascade {

constexpr int kWorkListThreads = 1024;
constexpr int kWorkListWarps = kWorkListThreads / 32;
constexpr int kMostListCtas = 64;
constexpr int kStaticBytes = 8 * 1024;  // at most, of shared memory, beside the tables

// ---------------------------------------------------------------------- inputs

constexpr int kNumInputs = 7;
constexpr int kLoadsAtOnce = 8;

// The arrays that are looked into more than once, as they lie one after the other in a copy.
struct Inputs {
  const int32_t* values[kNumInputs];
  int32_t begins[kNumInputs + 1];  // of each in the copy, and the end
};

__host__ __device__ inline Inputs find_inputs(const TreeParams& tree) {
  Inputs inputs = {{tree.q_indptr, tree.kv_indptr, tree.kv_len, tree.first_slot, tree.leaves,
                    tree.reader_indptr, tree.readers},
                   {}};
  const int lengths[kNumInputs] = {tree.num_seqs + 1, tree.num_nodes, tree.num_nodes,
                                   tree.num_nodes,    tree.num_seqs,  tree.num_nodes + 1,
                                   tree.num_reads};
  for (int k = 0; k < kNumInputs; ++k) {
    inputs.begins[k + 1] = inputs.begins[k] + (inputs.values[k] ? lengths[k] : 0);
  }
  return inputs;
}

// The tree with its arrays copied to `memory`, by the whole CTA. A thread's loads are under way
// together: one after the other they would take longer than all the rest.
__device__ inline TreeParams copy_tree(TreeParams tree, const Inputs& inputs, int32_t* memory) {
  for (int start = threadIdx.x; start < inputs.begins[kNumInputs];
       start += kLoadsAtOnce * kWorkListThreads) {
    int32_t loaded[kLoadsAtOnce];
#pragma unroll
    for (int j = 0; j < kLoadsAtOnce; ++j) {
      const int i = start + j * kWorkListThreads;
      if (i >= inputs.begins[kNumInputs]) break;
      const int32_t* source = inputs.values[0] + i;
#pragma unroll
      for (int k = 1; k < kNumInputs; ++k) {
        if (i >= inputs.begins[k]) source = inputs.values[k] + (i - inputs.begins[k]);
      }
      loaded[j] = *source;
    }
#pragma unroll
    for (int j = 0; j < kLoadsAtOnce; ++j) {
      const int i = start + j * kWorkListThreads;
      if (i < inputs.begins[kNumInputs]) memory[i] = loaded[j];
    }
  }
  const auto copy_of = [&](int k) {
    return inputs.values[k] ? memory + inputs.begins[k] : nullptr;
  };
  tree.q_indptr = copy_of(0);
  tree.kv_indptr = copy_of(1);
  tree.kv_len = copy_of(2);
  tree.first_slot = copy_of(3);
  tree.leaves = copy_of(4);
  tree.reader_indptr = copy_of(5);
  tree.readers = copy_of(6);
  return tree;
}

// Words of shared memory that the kernel takes to work there.
inline int64_t list_words(const TreeParams& tree) {
  ListTables tables;
  return find_inputs(tree).begins[kNumInputs] +
         place_tables(tables, nullptr, tree.num_seqs, tree.num_nodes, tree.num_reads);
}

// ---------------------------------------------------------------------- splits

// What the candidates come to, each lane its own.
struct CandidateSums {
  int32_t shared_items[kNumCandidates], shared_states[kNumCandidates];
  int32_t leaf_items[kNumCandidates], leaf_states[kNumCandidates];
  NodeTotals shared, leaf;
};

__host__ __device__ inline int add_capped(int sum, int64_t more) {
  return more >= kMostCounted - sum ? kMostCounted : sum + static_cast<int>(more);
}

// A node that takes part: `states` of it for each split.
struct Entry {
  int kv_len, columns, states;
  bool is_leaf, by_leaf_warps;
};

__host__ __device__ inline Entry find_entry(int i, const TreeParams& tree, const ListTables& tables,
                                            const WorkShape& shape) {
  if (i >= tables.num_shared_nodes) {
    const int kv_len = leaf_length(tree, i - tables.num_shared_nodes);
    return {kv_len, shape.num_kv_heads, 1, true, leaf_warps_read_leaves(shape)};
  }
  const int node = tables.shared_nodes[i], num_readers = num_readers_of(tree, node);
  const bool single = is_single(num_readers, shape);
  return {tree.kv_len[node], single ? shape.num_kv_heads : num_columns(num_readers, shape),
          num_readers, false, single};
}

__device__ inline void sum_candidates(CandidateSums& sums, const TreeParams& tree,
                                      const ListTables& tables, const WorkShape& shape) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const UnitDivider divider(lane);
  int shared_items = 0, shared_states = 0, leaf_items = 0, leaf_states = 0;
  NodeTotals shared = {0, 0}, leaf = {0, 0};
  const int num_entries = tables.num_shared_nodes + tree.num_seqs;
  for (int i = warp; i < num_entries; i += kWorkListWarps) {
    const Entry entry = find_entry(i, tree, tables, shape);
    const int units = units_of(entry.kv_len);
    const int splits = shape.batch_invariant
                           ? num_splits(entry.kv_len, ~lane, shape.num_kv_heads, entry.is_leaf)
                           : divider.ceil(units);
    const int counted = splits > 0 ? splits : 1;  // a sequence with nothing to see needs an item
    const int64_t items = int64_t{counted} * entry.columns;
    const int64_t states = int64_t{counted} * entry.states;
    if (entry.by_leaf_warps) {
      leaf_items = add_capped(leaf_items, items);
      leaf_states = add_capped(leaf_states, states);
      leaf.units = add_capped(leaf.units, int64_t{units} * entry.columns);
      leaf.longest = max(leaf.longest, units);
    } else {
      shared_items = add_capped(shared_items, items);
      shared_states = add_capped(shared_states, states);
      shared.units = add_capped(shared.units, int64_t{units} * entry.columns);
      shared.longest = max(shared.longest, units);
    }
  }
  // 32 warps add up to kMostCounted each at most.
  if (shared_items > 0) {
    atomicAdd(&sums.shared_items[lane], min(shared_items, kMostCounted / 2));
    atomicAdd(&sums.shared_states[lane], min(shared_states, kMostCounted / 2));
  }
  if (leaf_items > 0) {
    atomicAdd(&sums.leaf_items[lane], min(leaf_items, kMostCounted / 2));
    atomicAdd(&sums.leaf_states[lane], min(leaf_states, kMostCounted / 2));
  }
  if (lane == 0) {
    atomicAdd(&sums.shared.units, min(shared.units, kMostCounted / 2));
    atomicMax(&sums.shared.longest, shared.longest);
    atomicAdd(&sums.leaf.units, min(leaf.units, kMostCounted / 2));
    atomicMax(&sums.leaf.longest, leaf.longest);
  }
}

// The lane whose cost is the least, the first of them; costs are not negative.
__device__ inline int find_cheapest(float cost) {
  const uint32_t bits = __float_as_uint(cost);  // ordered like the costs
  const uint32_t least = __reduce_min_sync(~0u, bits);
  return __ffs(__ballot_sync(~0u, bits == least)) - 1;
}

// The splits, and how long the two kinds of warp take with them.
struct SplitChoice {
  int32_t shared_split, leaf_split;
  float shared_us, leaf_us;
};

// By one warp.
__device__ inline SplitChoice choose_splits(const CandidateSums& sums, const WorkShape& shape) {
  const int lane = threadIdx.x % 32, units = candidate_units(lane);
  const int shared_states = sums.shared_states[lane], leaf_states = sums.leaf_states[lane];
  const float shared_time = shared_us(sums.shared_items[lane], units, sums.shared, shape);
  const float leaf_time = leaf_us(sums.leaf_items[lane], units, sums.leaf, shape);
  constexpr float kLastResort = 1e30f;  // the last candidate always fits: one split a node
  SplitChoice result;
  int shared_choice, leaf_choice;
  if (shape.batch_invariant) {
    const bool fits = shared_states + leaf_states <= shape.max_states || lane == 31;
    shared_choice = leaf_choice = __ffs(__ballot_sync(~0u, fits)) - 1;
    result.shared_split = result.leaf_split = ~shared_choice;
  } else {
    const int least = sums.leaf_states[kNumCandidates - 1];
    const bool shared_fits = shared_states <= shape.max_states - least && lane > 0;
    shared_choice =
        find_cheapest(shared_fits ? shared_time + merge_us(shared_states, units, sums.shared, shape)
                                  : kLastResort);
    const int left = shape.max_states - sums.shared_states[shared_choice];
    leaf_choice = find_cheapest(leaf_states <= left
                                    ? leaf_time + merge_us(leaf_states, units, sums.leaf, shape)
                                    : kLastResort);
    if (!leaf_warps_read_leaves(shape)) leaf_choice = shared_choice;
    result.shared_split = kSplitUnit * candidate_units(shared_choice);
    result.leaf_split = kSplitUnit * candidate_units(leaf_choice);
  }
  result.shared_us = __shfl_sync(~0u, shared_time, shared_choice);
  result.leaf_us = leaf_memory_us(sums.leaf, shape);
  return result;
}

// ---------------------------------------------------------------------- states

// Enters each read into the bits of its node; a thread a read.
__device__ inline void mark_reads(const ListTables& tables, const TreeParams& tree) {
  const int num_reads = tree.reader_indptr ? tree.reader_indptr[tree.num_nodes] : 0;
  for (int i = threadIdx.x; i < num_reads; i += kWorkListThreads) {
    const int node = find_item(tree.reader_indptr, tree.num_nodes, i);
    if (tree.kv_len[node] <= 0) {
      tables.read_states[i] = -1;
      continue;
    }
    const int seq = tree.readers[i], word = seq / 32;
    const int64_t place = int64_t{tables.shared_ranks[node]} * tables.num_seq_words + word;
    atomicOr(&tables.read_bits[place], 1u << seq % 32);
    if (i == tree.reader_indptr[node] || tree.readers[i - 1] / 32 != word) {
      tables.first_reads[place] = i;
    }
  }
}

// Counts the states along each sequence's prefix, in the order of the nodes: a lane a sequence, and
// where sequences are few several warps, each with a run of the nodes.
__device__ inline void count_states(const ListTables& tables, int num_seqs) {
  __shared__ int32_t run_states[kWorkListThreads];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int num_words = tables.num_seq_words, num_nodes = tables.num_shared_nodes;
  const int num_runs = num_words >= kWorkListWarps ? 1 : kWorkListWarps / max(1, num_words);
  const int run = warp % num_runs, run_length = ceil_div(num_nodes, num_runs);
  const int begin = min(num_nodes, run * run_length), end = min(num_nodes, begin + run_length);
  // Calls visit(read, states before it) for what the lane's sequence reads.
  const auto walk = [&](int word, int states, auto visit) {
    for (int i = begin; i < end; ++i) {
      const int64_t place = int64_t{i} * num_words + word;
      const uint32_t bits = tables.read_bits[place];
      if (!(bits >> lane & 1)) continue;
      visit(tables.first_reads[place] + __popc(bits & ((1u << lane) - 1)), states);
      states += tables.splits[i];
    }
    return states;
  };
  const int first_word = warp / num_runs;
  if (num_runs > 1) {
    if (first_word < num_words) {
      run_states[threadIdx.x] = walk(first_word, 0, [](int, int) {});
    }
    __syncthreads();
  }
  for (int word = first_word; word < num_words; word += kWorkListWarps / num_runs) {
    int before = 0;
    for (int r = 0; r < run; ++r) before += run_states[(word * num_runs + r) * 32 + lane];
    const int states =
        walk(word, before, [&](int read, int value) { tables.read_states[read] = value; });
    const int seq = 32 * word + lane;
    if (run == num_runs - 1 && seq < num_seqs) tables.prefix_states[seq] = states;
  }
}

// ---------------------------------------------------------------------- the kernel

template <bool kFits>
static __global__ void __launch_bounds__(kWorkListThreads)
    work_list_kernel(const TreeParams given_tree, const WorkList work, const WorkShape shape,
                     int32_t* scratch, int32_t* ticket) {
  extern __shared__ int32_t memory[];
  __shared__ CandidateSums sums;
  __shared__ SplitChoice choice;
  const int thread = threadIdx.x, num_seqs = given_tree.num_seqs, num_nodes = given_tree.num_nodes;
  ptx::wait_for_previous_kernel();
  ptx::let_next_kernel_start();

  const Inputs inputs = find_inputs(given_tree);
  const TreeParams tree = kFits ? copy_tree(given_tree, inputs, memory) : given_tree;
  ListTables tables;
  place_tables(tables, kFits ? memory + inputs.begins[kNumInputs] : scratch, num_seqs, num_nodes,
               tree.num_reads);
  const int64_t num_bit_words = int64_t{min(num_nodes, tree.num_reads)} * tables.num_seq_words;
  for (int64_t i = thread; i < num_bit_words; i += kWorkListThreads) tables.read_bits[i] = 0;
  for (int i = thread; i < static_cast<int>(sizeof(sums) / sizeof(int32_t));
       i += kWorkListThreads) {
    reinterpret_cast<int32_t*>(&sums)[i] = 0;
  }
  if (thread == 0) choice = {};
  if (blockIdx.x == 0 && thread < 2 && ticket) ticket[thread] = 0;
  __syncthreads();

  bool one_token = true;
  for (int b = thread; b < num_seqs; b += kWorkListThreads) {
    one_token &= tree.q_indptr[b + 1] - tree.q_indptr[b] <= 1;
  }
  const bool is_decode = __syncthreads_and(one_token);
  // A node may have readers and yet grow in this very step: prompts of one token, packed.
  bool still = true;
  for (int b = thread; tree.leaves && b < num_seqs; b += kWorkListThreads) {
    const int num_readers = num_readers_of(tree, tree.leaves[b]);
    still &= leaf_warps_read_leaves(shape) && (num_readers == 0 || is_single(num_readers, shape));
  }
  const bool shared_are_still = __syncthreads_and(still);

  const auto is_shared = [&](int n) {
    return num_readers_of(tree, n) > 0 && tree.kv_len[n] > 0 ? 1 : 0;
  };
  // The second sums are not needed here, and are overwritten.
  exclusive_sums<kWorkListThreads>(tables.shared_ranks, tables.matrix_items, num_nodes,
                                   [&](int n) { return Pair{is_shared(n), 0}; });
  tables.num_shared_nodes = tables.shared_ranks[num_nodes];
  for (int n = thread; n < num_nodes; n += kWorkListThreads) {
    if (is_shared(n)) tables.shared_nodes[tables.shared_ranks[n]] = n;
  }
  mark_reads(tables, tree);
  __syncthreads();

  if (is_decode) {
    sum_candidates(sums, tree, tables, shape);
    __syncthreads();
    if (thread < 32) {
      const SplitChoice chosen = choose_splits(sums, shape);
      if (thread == 0) choice = chosen;
    }
    __syncthreads();
  }
  const int shared_split = choice.shared_split, leaf_split = choice.leaf_split;

  exclusive_sums<kWorkListThreads>(
      tables.matrix_items, tables.single_items, tables.num_shared_nodes, [&](int i) {
        const Entry entry = find_entry(i, tree, tables, shape);
        const int split = entry.by_leaf_warps ? leaf_split : shared_split;
        const int length =
            is_decode ? split_length(entry.kv_len, split, shape.num_kv_heads, false) : entry.kv_len;
        const int splits = ceil_div(entry.kv_len, length);
        tables.lengths[i] = length;
        tables.splits[i] = splits;
        const int items = splits * entry.columns;
        return entry.by_leaf_warps ? Pair{0, items} : Pair{items, 0};
      });
  count_states(tables, num_seqs);
  __syncthreads();

  exclusive_sums<kWorkListThreads>(tables.path_indptr, tables.leaf_states, num_seqs, [&](int b) {
    const int prefix = tables.prefix_states[b];
    if (!is_decode) {
      const int q_len = tree.q_indptr[b + 1] - tree.q_indptr[b];
      return Pair{prefix, num_columns(q_len, shape)};
    }
    const int kv_len = leaf_length(tree, b);
    const int length = split_length(kv_len, leaf_split, shape.num_kv_heads, true);
    const int leaf = ceil_div(kv_len, length);
    tables.leaf_lengths[b] = length;
    // A sequence with nothing to see still needs an item, to write the empty state.
    const int states = prefix + leaf > 0 ? leaf : 1;
    return Pair{prefix + states, states};
  });

  // What is written: each CTA its part, a warp's worth at a time, so that all have some.
  const int first =
      (thread / 32 * static_cast<int>(gridDim.x) + static_cast<int>(blockIdx.x)) * 32 + thread % 32;
  const int step = static_cast<int>(gridDim.x) * kWorkListThreads;
  for (int b = first; b <= num_seqs; b += step) {
    work.path_indptr[b] = tables.path_indptr[b];
    if (!is_decode) work.leaf_items[b] = tables.leaf_states[b];
  }
  const int num_reads = tree.reader_indptr ? tree.reader_indptr[num_nodes] : 0;
  for (int read = first; read < num_reads; read += step) {
    const int before = tables.read_states[read];
    if (before < 0) continue;
    const int seq = tree.readers[read], begin = tables.path_indptr[seq];
    if (!is_decode) {
      work.path[begin + before] = find_item(tree.reader_indptr, num_nodes, read);
      continue;
    }
    const int token = tree.q_indptr[seq];
    const bool has_query = tree.q_indptr[seq + 1] > token;
    const bool is_lone = tables.path_indptr[seq + 1] - begin == 1;
    work.path[read] = !has_query ? kNowhere : is_lone ? ~token : begin + before;
    work.read_tokens[read] = has_query ? token : 0;
  }

  const int num_matrix_items = tables.matrix_items[tables.num_shared_nodes];
  const int num_single_items = tables.single_items[tables.num_shared_nodes];
  const int num_leaf_items = tables.leaf_states[num_seqs] * shape.num_kv_heads;
  const int num_items = num_matrix_items + num_single_items + num_leaf_items;
  WorkHeader header = {};
  header.is_decode = is_decode;
  header.shared_are_still = shared_are_still;
  header.shared_split = shared_split;
  header.leaf_split = leaf_split;
  if (is_decode) {
    header.num_leaf_items = leaf_warps_read_leaves(shape) ? num_single_items + num_leaf_items : 0;
    header.num_shared_items = num_items - header.num_leaf_items;
  } else {
    header.num_shared_items = tables.leaf_states[num_seqs];
  }
  header.shared_stages = shared_stages(shape.num_stages, header.num_shared_items,
                                       header.num_leaf_items, choice.shared_us, choice.leaf_us);
  if (blockIdx.x == 0 && thread == 0) *work.header = header;
  if (!is_decode) return;
  for (int i = first; i < num_items; i += step) {
    work.items[i] = make_item(i, tree, tables, shape);
  }
}

// CTAs for a list of at most so many items.
inline int num_list_ctas(int64_t most_items) {
  const int64_t found = (most_items - 1) / kWorkListThreads + 1;
  return static_cast<int>(found < kMostListCtas ? found : kMostListCtas);
}

}  // namespace hf_cascade
