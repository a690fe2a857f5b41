// Making the work list: which items a launch has, and where their partial states go.
//
// Once a step, for all layers. Every CTA finds the same tables (work_items.cuh), each writes its
// part of the list: that costs no more time than finding them once and saves a second launch.
//   Memory   the lengths and the readers, a few KB, once, to shared memory, where everything else
//            happens; a tree too large for it is one CTA's, which works in global memory.
//   Compute  the splits (split_choice.cuh), the order of states (path_states.cuh), and between
//            them prefix sums over nodes and over sequences; then a thread an item.
//   Writes   the WorkList, and 0 to the ticket counters of the launch that follows, if one does.
#pragma once

#include <algorithm>

#include "cta_steps.cuh"
#include "path_states.cuh"
#include "ptx.cuh"
#include "split_choice.cuh"
#include "stage_rule.cuh"
#include "tree_copy.cuh"

namespace hf_cascade {

constexpr int kMostListCtas = 64;
constexpr int kStaticBytes = 8 * 1024;  // at most, of shared memory, beside the tables

// Words of shared memory that the kernel takes to work there.
inline int64_t list_words(const TreeParams& tree) {
  ListTables tables;
  return find_inputs(tree).begins[kNumInputs] +
         place_tables(tables, nullptr, tree.num_seqs, tree.num_nodes, tree.num_reads);
}

template <bool kFits>
static __global__ void __launch_bounds__(kMostListThreads)
    work_list_kernel(const TreeParams given_tree, const __grid_constant__ Inputs inputs,
                     const WorkList work, const WorkShape shape, int32_t* scratch,
                     int32_t* ticket) {
  extern __shared__ int32_t memory[];
  __shared__ CandidateSums sums;
  __shared__ SplitChoice choice;
  const int thread = threadIdx.x, num_seqs = given_tree.num_seqs, num_nodes = given_tree.num_nodes;
  ptx::wait_for_previous_kernel();  // and nobody starts before our end: see append_kv.cuh

  ListTables tables;
  place_tables(tables, kFits ? memory + inputs.begins[kNumInputs] : scratch, num_seqs, num_nodes,
               given_tree.num_reads);
  for_all(int64_t{min(num_nodes, given_tree.num_reads)} * tables.num_seq_words,
          [&](int64_t i) { tables.read_bits[i] = 0; });
  for_all(static_cast<int>(sizeof(sums) / sizeof(int32_t)),
          [&](int i) { reinterpret_cast<int32_t*>(&sums)[i] = 0; });
  if (thread == 0) choice = {};
  if (blockIdx.x == 0 && thread < 2 && ticket) ticket[thread] = 0;
  const TreeParams tree = kFits ? copy_tree(given_tree, inputs, memory) : given_tree;
  __syncthreads();

  // Whether no sequence has several tokens, and whether no shared node grows in this very step: a
  // node may have readers and a token to come, in prompts of one token that are packed.
  bool one_token = true, still = true;
  for_all(num_seqs, [&](int b) {
    one_token &= tree.q_indptr[b + 1] - tree.q_indptr[b] <= 1;
    if (!tree.leaves) return;
    const int num_readers = num_readers_of(tree, tree.leaves[b]);
    still &= leaf_warps_read_leaves(shape) && (num_readers == 0 || is_single(num_readers, shape));
  });
  const bool is_decode = __syncthreads_and(one_token);
  const bool shared_are_still = __syncthreads_and(still);

  const auto is_shared = [&](int n) { return num_readers_of(tree, n) > 0 && tree.kv_len[n] > 0; };
  for_all(num_nodes, [&](int n) {
    tables.shared_ranks[n] = is_shared(n);
    tables.matrix_items[n] = 0;  // there are two sums at a time; this one is made below
  });
  sum_up(tables.shared_ranks, tables.matrix_items, num_nodes);
  tables.num_shared_nodes = tables.shared_ranks[num_nodes];
  for_all(num_nodes, [&](int n) {
    if (is_shared(n)) tables.shared_nodes[tables.shared_ranks[n]] = n;
  });
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

  for_all(tables.num_shared_nodes, [&](int i) {
    const Entry entry = find_entry(i, tree, tables, shape);
    const int split = entry.by_leaf_warps ? leaf_split : shared_split;
    const Cut cut =
        is_decode ? cut_node(entry.kv_len, split, shape.num_kv_heads, false) : Cut{entry.kv_len, 1};
    const int items = cut.splits * entry.columns;
    tables.lengths[i] = cut.length;
    tables.splits[i] = cut.splits;
    tables.matrix_items[i] = entry.by_leaf_warps ? 0 : items;
    tables.single_items[i] = entry.by_leaf_warps ? items : 0;
  });
  sum_up(tables.matrix_items, tables.single_items, tables.num_shared_nodes);
  count_states(tables, num_seqs);

  for_all(num_seqs, [&](int b) {
    const int prefix = tables.prefix_states[b];
    if (!is_decode) {
      tables.path_indptr[b] = prefix;
      tables.leaf_states[b] = num_columns(tree.q_indptr[b + 1] - tree.q_indptr[b], shape);
      return;
    }
    const Cut cut = cut_node(leaf_length(tree, b), leaf_split, shape.num_kv_heads, true);
    // A sequence with nothing to see still needs an item, to write the empty state.
    const int states = prefix + cut.splits > 0 ? cut.splits : 1;
    tables.leaf_lengths[b] = cut.length;
    tables.path_indptr[b] = prefix + states;
    tables.leaf_states[b] = states;
  });
  sum_up(tables.path_indptr, tables.leaf_states, num_seqs);

  // What is written: each CTA its part, a warp's worth at a time, so that all have some.
  const int first =
      (thread / 32 * static_cast<int>(gridDim.x) + static_cast<int>(blockIdx.x)) * 32 + thread % 32;
  const int step = static_cast<int>(gridDim.x * blockDim.x);
  for_each(first, num_seqs + 1, step, [&](int b) {
    work.path_indptr[b] = tables.path_indptr[b];
    if (!is_decode) work.leaf_items[b] = tables.leaf_states[b];
  });
  for_each(first, tree.reader_indptr ? tree.reader_indptr[num_nodes] : 0, step, [&](int read) {
    const int before = tables.read_states[read];
    if (before < 0) return;
    const int seq = tree.readers[read];
    if (!is_decode) {
      work.path[tables.path_indptr[seq] + before] = find_item(tree.reader_indptr, num_nodes, read);
      return;
    }
    const TokenTarget found = find_target(tree, tables, seq, before);
    work.path[read] = found.target;
    work.read_tokens[read] = found.token < 0 ? 0 : found.token;
  });

  const int num_matrix_items = tables.matrix_items[tables.num_shared_nodes];
  const int num_single_items = tables.single_items[tables.num_shared_nodes];
  const int num_leaf_items = tables.leaf_states[num_seqs] * shape.num_kv_heads;
  const int num_items = num_matrix_items + num_single_items + num_leaf_items;
  WorkHeader header = {};
  header.is_decode = is_decode;
  header.shared_are_still = shared_are_still;
  header.shared_split = shared_split;
  header.shape = launch_shape(shape.head_dim, shape.group_size);
  if (is_decode) {
    header.num_leaf_items = leaf_warps_read_leaves(shape) ? num_single_items + num_leaf_items : 0;
    header.num_shared_items = num_items - header.num_leaf_items;
  } else {
    header.num_shared_items = tables.leaf_states[num_seqs];
  }
  header.shared_stages = shared_stages(shape.num_stages, header.num_shared_items,
                                       header.num_leaf_items, choice.shared_us, choice.leaf_us);
  header.leaf_split = leaf_split;
  header.all_leaf_warps = all_leaf_warps_take(header.num_shared_items, header.num_leaf_items,
                                              choice.are_leaves_short, shape.num_ctas);
  if (blockIdx.x == 0 && thread == 0) *work.header = header;
  // CTAs look at the items that they would take first before they know how many there are: those
  // that do not exist are empty.
  const int num_shared = is_decode ? header.num_shared_items : 0;
  const int num_leaf = is_decode ? header.num_leaf_items : 0;
  const int most_shared = min(work.most_items - num_leaf, shape.num_ctas);
  const int most_leaf = min(work.most_items - num_shared, kMostLeafWarps * shape.num_ctas);
  for_each(num_shared + first, most_shared, step, [&](int i) { *work.shared_item(i) = {}; });
  for_each(num_leaf + first, most_leaf, step, [&](int i) { *work.leaf_item(i) = {}; });
  for_each(first, is_decode ? num_items : 0, step, [&](int i) {
    const int leaf = i - num_shared;
    *(leaf < 0 ? work.shared_item(i) : work.leaf_item(leaf)) = make_item(i, tree, tables, shape);
  });
  __threadfence();  // for an attention kernel that does not wait: see append_kv.cuh
}

// Threads of a CTA. All warps take all steps, in turns: where a tree is small, fewer are faster
// (benchmarks/NOTES.md, 17).
inline int num_list_threads(const TreeParams& tree) {
  const int most = std::max(tree.num_seqs, std::max(tree.num_nodes, tree.num_reads));
  int threads = kFewestListThreads;
  while (threads < kMostListThreads && threads < 2 * most) threads *= 2;
  return threads;
}

// CTAs for a list of at most so many items.
inline int num_list_ctas(int64_t most_items, int num_threads) {
  const int64_t found = (most_items - 1) / num_threads + 1;
  return static_cast<int>(found < kMostListCtas ? found : kMostListCtas);
}

}  // namespace hf_cascade
