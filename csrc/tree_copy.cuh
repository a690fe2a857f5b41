// The index arrays that are looked into more than once, brought to shared memory. Knows CUDA only.
#pragma once

#include "params.h"

namespace hf_cascade {

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
template <int kThreads>
__device__ TreeParams copy_tree(TreeParams tree, const Inputs& inputs, int32_t* memory) {
  for (int start = threadIdx.x; start < inputs.begins[kNumInputs];
       start += kLoadsAtOnce * kThreads) {
    int32_t loaded[kLoadsAtOnce];
#pragma unroll
    for (int j = 0; j < kLoadsAtOnce; ++j) {
      const int i = start + j * kThreads;
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
      const int i = start + j * kThreads;
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

}  // namespace hf_cascade
