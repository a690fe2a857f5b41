// Attention over the nodes of a KV tree, shared ones and leaves, in one launch.
//
// A persistent CTA, one a multiprocessor: 8 matrix warps and their producer take shared nodes'
// items, 3 leaf warps leaves' items, at the same time: leaves need memory, shared nodes with many
// rows matrix units. Both take work items by ticket until none is left; an item is (node, KV split,
// query tile, kv head).
//   Memory   K and V stream through rings in shared memory. A byte of a shared node comes from DRAM
//            once and serves up to 128 query rows (a group's heads are rows) a tile.
//   Writes   A query that has but one state: its row of `out` and `lse`. Else a float32 partial
//            state to its slot, for merge_paths.cuh, the kernel that follows.
#pragma once

#include "leaf_warp.cuh"
#include "matrix_warp.cuh"
#include "producer.cuh"

namespace hf_cascade {

// Rows of q that no sequence owns get the empty state.
template <typename Traits>
__device__ void clear_unowned_rows(const AttentionParams& p) {
  const int num_q_heads = p.num_kv_heads * p.group_size;
  const int64_t first = p.tree.q_indptr[p.tree.num_seqs];
  for (int64_t token = first + blockIdx.x; token < p.tree.num_tokens; token += gridDim.x) {
    uint32_t* out = reinterpret_cast<uint32_t*>(static_cast<typename Traits::T*>(p.out) +
                                                token * num_q_heads * Traits::kHeadDim);
    for (int i = threadIdx.x; i < num_q_heads * Traits::kHeadDim / 2; i += kMatrixThreads)
      out[i] = 0;
    for (int i = threadIdx.x; i < num_q_heads; i += kMatrixThreads) {
      p.lse[token * num_q_heads + i] = negative_infinity();
    }
  }
}

template <typename Traits>
__global__ void __launch_bounds__(kAttentionThreads, 1)
    cascade_attention_kernel(const __grid_constant__ AttentionParams params) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const SharedMemory<Traits> shared{memory, params.num_stages};
  Control& control = shared.control();
  if (threadIdx.x == 0) {
    for (int i = 0; i < params.num_stages; ++i) {
      ptx::barrier_init(&control.full[i], 33);
      ptx::barrier_init(&control.empty[i], kMatrixWarps);
    }
    for (uint64_t& barrier : control.granule_empty) ptx::barrier_init(&barrier, 1);
    for (uint64_t& barrier : control.targets_empty) ptx::barrier_init(&barrier, kMatrixWarps);
    for (LeafRing& ring : control.leaf_rings) {
      for (uint64_t& barrier : ring.full) ptx::barrier_init(&barrier, kLeafArrivals);
    }
    ptx::fence_async_proxy();  // the copy engine completes phases of these
  }
  __syncthreads();

  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x / 32), 0);
  if (warp < kMatrixWarps) {
    ptx::take_registers<kMatrixRegisters>();
    clear_unowned_rows<Traits>(params);
    MatrixWarp<Traits>(params, shared).run();
  } else {
    ptx::give_registers<kOtherRegisters>();
    if (warp == kProducerWarp) {
      Producer<Traits>(params, shared).run();
    } else {
      LeafWarp<Traits>(params, shared, warp - kMatrixWarps).run();
    }
  }
}

}  // namespace hf_cascade
