// The order of each sequence's states along its prefix. Knows CUDA only.
#pragma once

#include "work_items.cuh"

namespace hf_cascade {

constexpr int kNodesAtOnce = 8;

// Enters each read into the bits of its node; a thread a read.
template <int kThreads>
__device__ void mark_reads(const ListTables& tables, const TreeParams& tree) {
  const int num_reads = tree.reader_indptr ? tree.reader_indptr[tree.num_nodes] : 0;
  for (int i = threadIdx.x; i < num_reads; i += kThreads) {
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
template <int kThreads>
__device__ void count_states(const ListTables& tables, int num_seqs) {
  constexpr int kWarps = kThreads / 32;
  __shared__ int32_t run_states[kThreads];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int num_words = tables.num_seq_words, num_nodes = tables.num_shared_nodes;
  const int num_runs = num_words >= kWarps ? 1 : kWarps / max(1, num_words);
  const int run = warp % num_runs, run_length = ceil_div(num_nodes, num_runs);
  const int begin = min(num_nodes, run * run_length), end = min(num_nodes, begin + run_length);
  // Calls visit(read, states before it) for what the lane's sequence reads. Most nodes are not read
  // by most sequences: the bits of several are under way at a time.
  const auto walk = [&](int word, int states, auto visit) {
    for (int start = begin; start < end; start += kNodesAtOnce) {
      uint32_t bits[kNodesAtOnce];
#pragma unroll
      for (int j = 0; j < kNodesAtOnce; ++j) {
        const int64_t place = int64_t{start + j} * num_words + word;
        bits[j] = start + j < end ? tables.read_bits[place] : 0;
      }
#pragma unroll
      for (int j = 0; j < kNodesAtOnce; ++j) {
        if (!(bits[j] >> lane & 1)) continue;
        const int64_t place = int64_t{start + j} * num_words + word;
        visit(tables.first_reads[place] + __popc(bits[j] & ((1u << lane) - 1)), states);
        states += tables.splits[start + j];
      }
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
  for (int word = first_word; word < num_words; word += kWarps / num_runs) {
    int before = 0;
    for (int r = 0; r < run; ++r) before += run_states[(word * num_runs + r) * 32 + lane];
    const int states =
        walk(word, before, [&](int read, int value) { tables.read_states[read] = value; });
    const int seq = 32 * word + lane;
    if (run == num_runs - 1 && seq < num_seqs) tables.prefix_states[seq] = states;
  }
}

}  // namespace hf_cascade
