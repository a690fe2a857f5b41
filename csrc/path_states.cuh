// The order of each sequence's states along its prefix. Knows CUDA only.
#pragma once

#include "cta_steps.cuh"
#include "work_items.cuh"

namespace hf_cascade {

constexpr int kNodesAtOnce = 4;

// Enters each read into the bits of its node; a thread a read.
__device__ inline void mark_reads(const ListTables& tables, const TreeParams& tree) {
  const int num_reads = tree.reader_indptr ? tree.reader_indptr[tree.num_nodes] : 0;
  for_all(num_reads, [&](int i) {
    const int node = find_item(tree.reader_indptr, tree.num_nodes, i);
    if (tree.kv_len[node] <= 0) {
      tables.read_states[i] = -1;
      return;
    }
    const int seq = tree.readers[i], word = seq / 32;
    const int64_t place = int64_t{tables.shared_ranks[node]} * tables.num_seq_words + word;
    atomicOr(&tables.read_bits[place], 1u << seq % 32);
    if (i == tree.reader_indptr[node] || tree.readers[i - 1] / 32 != word) {
      tables.first_reads[place] = i;
    }
  });
}

// Counts the states along each sequence's prefix, in the order of the nodes: a lane a sequence, and
// where sequences are few several warps, each with a run of the nodes. These go twice over them,
// for what comes before a run must be known.
__device__ inline void count_states(const ListTables& tables, int num_seqs) {
  __shared__ int32_t run_states[kMostListThreads];
  const int num_warps = static_cast<int>(blockDim.x) / 32;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int num_words = tables.num_seq_words, num_nodes = tables.num_shared_nodes;
  int runs_log2 = 0;  // as many as there are warps for; a power of two is easy to divide by
#pragma unroll 1
  while (max(1, num_words) << (runs_log2 + 1) <= num_warps) ++runs_log2;
  const int num_runs = 1 << runs_log2, run = warp & (num_runs - 1);
  const int run_length = (num_nodes + num_runs - 1) >> runs_log2;
  const int begin = min(num_nodes, run * run_length), end = min(num_nodes, begin + run_length);
#pragma unroll 1
  for (int pass = num_runs > 1 ? 0 : 1; pass < 2; ++pass) {
    for_each(warp >> runs_log2, num_words, num_warps >> runs_log2, [&](int word) {
      const int seq = 32 * word + lane;
      int states = 0;
      for_each(0, pass * run, 1,
               [&](int r) { states += run_states[(word * num_runs + r) * 32 + lane]; });
      // Most nodes are not read by most sequences: the bits of several are under way at a time.
      for_each(begin, end, kNodesAtOnce, [&](int start) {
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
          const int read = tables.first_reads[place] + __popc(bits[j] & ((1u << lane) - 1));
          tables.read_states[read] = states;  // in the last pass what it is to be
          states += tables.splits[start + j];
        }
      });
      if (pass == 0) {
        run_states[threadIdx.x] = states;
      } else if (run == num_runs - 1 && seq < num_seqs) {
        tables.prefix_states[seq] = states;
      }
    });
    __syncthreads();
  }
}

}  // namespace hf_cascade
