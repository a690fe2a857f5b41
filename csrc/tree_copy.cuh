// The index arrays that are looked into more than once, brought to shared memory. Knows CUDA only.
#pragma once

#include "params.h"

namespace hf_cascade {

constexpr int kNumInputs = 7;
constexpr int kLoadsAtOnce = 4;

// The arrays that are looked into more than once, as they lie one after the other in a copy.
struct Inputs {
  const int32_t* values[kNumInputs];
  int32_t begins[kNumInputs + 1];  // of each in the copy, and the end
};

inline Inputs find_inputs(const TreeParams& tree) {
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
  const int num_threads = static_cast<int>(blockDim.x), end = inputs.begins[kNumInputs];
#pragma unroll 1
  for (int start = threadIdx.x; start < end; start += kLoadsAtOnce * num_threads) {
    int32_t loaded[kLoadsAtOnce];
#pragma unroll
    for (int j = 0; j < kLoadsAtOnce; ++j) {
      const int i = start + j * num_threads;
      int k = 0;
#pragma unroll
      for (int next = 1; next < kNumInputs; ++next) k += i >= inputs.begins[next];
      if (i < end) loaded[j] = inputs.values[k][i - inputs.begins[k]];
    }
#pragma unroll
    for (int j = 0; j < kLoadsAtOnce; ++j) {
      const int i = start + j * num_threads;
      if (i < end) memory[i] = loaded[j];
    }
  }
  tree.q_indptr = memory + inputs.begins[0];
  tree.kv_indptr = memory + inputs.begins[1];
  tree.kv_len = memory + inputs.begins[2];
  tree.first_slot = memory + inputs.begins[3];
  if (tree.leaves) tree.leaves = memory + inputs.begins[4];
  if (tree.reader_indptr) tree.reader_indptr = memory + inputs.begins[5];
  tree.readers = memory + inputs.begins[6];
  return tree;
}

}  // namespace hf_cascade
