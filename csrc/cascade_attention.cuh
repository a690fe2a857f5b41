// Attention over the nodes of a KV tree, shared ones and leaves, in one launch.
//
// A persistent CTA, one a multiprocessor: 8 matrix warps and their producer take shared nodes'
// items, 3 leaf warps (leaf_warps.cuh: or 2, or 6) leaves' items, at the same time: leaves need
// memory, shared nodes with many rows matrix units. Both take work items by ticket until none is
// left; an item is (node, KV split, query tile, kv head).
//   Memory   K and V stream through rings in shared memory. A byte of a shared node comes from DRAM
//            once and serves up to 128 query rows (a group's heads are rows) a tile.
//   Writes   A query that has but one state: its row of `out` and `lse`. Else a float32 partial
//            state to its place, for merge_paths.cuh, the kernel that follows.
#pragma once

#include "leaf_warps.cuh"
#include "matrix_warp.cuh"
#include "producer.cuh"

namespace hf_cascade {

constexpr int kMatrixBarrier = 1;  // named; 0 is __syncthreads'

// Matrix warps that do not become leaf warps when they are done.
constexpr int kFirstSpareWarp = kMostLeafWarps - kLeafWarps;

// Rows of q that no sequence owns get the empty state, by the spare warps.
template <typename Traits>
__device__ void clear_unowned_rows(const AttentionParams& p) {
  constexpr int kStep = kMatrixThreads - 32 * kFirstSpareWarp;
  const int place = static_cast<int>(threadIdx.x) - 32 * kFirstSpareWarp;
  const int num_q_heads = p.num_kv_heads * p.group_size;
  const int64_t first = p.tree.q_indptr[p.tree.num_seqs] + blockIdx.x;
  if (first >= p.tree.num_tokens) return;
  if (p.may_start_early) ptx::wait_for_previous_kernel();  // others may still read what lies there
  for (int64_t token = first; token < p.tree.num_tokens; token += gridDim.x) {
    uint32_t* out = reinterpret_cast<uint32_t*>(static_cast<typename Traits::T*>(p.out) +
                                                token * num_q_heads * Traits::kHeadDim);
    for (int i = place; i < num_q_heads * Traits::kHeadDim / 2; i += kStep) out[i] = 0;
    for (int i = place; i < num_q_heads; i += kStep) {
      p.lse[token * num_q_heads + i] = negative_infinity();
    }
  }
}

// Each by a thread: one after the other they would take as long as a trip to L2.
__device__ inline void init_barriers(Control& control) {
  const int i = threadIdx.x;
  if (i < kMostStages) {
    ptx::barrier_init(&control.full[i], 33);
    ptx::barrier_init(&control.empty[i], kMatrixWarps);
  }
  if (i == 0) ptx::barrier_init(&control.queries_empty, kMatrixWarps);
  if (i < 2) ptx::barrier_init(&control.targets_empty[i], kMatrixWarps);
  if (i < kMostLeafWarps * kMaxLeafBuffers) {
    LeafRing& ring = control.leaf_rings[i / kMaxLeafBuffers];
    ptx::barrier_init(&ring.full[i % kMaxLeafBuffers], kLeafArrivals);
  }
  if (i < 32) ptx::fence_async_proxy();  // the copy engine completes phases of these
}
static_assert(kMostLeafWarps * kMaxLeafBuffers <= 32 && kMostStages <= 32, "the first warp's");

__device__ inline void prefetch_maps(const AttentionParams& params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  if (threadIdx.x == 32) ptx::prefetch_map(&params.k_map);
  if (threadIdx.x == 64) ptx::prefetch_map(&params.v_map);
  if (threadIdx.x == 96) ptx::prefetch_map(&params.leaf_k_map);
  if (threadIdx.x == 128) ptx::prefetch_map(&params.leaf_v_map);
  if (threadIdx.x == 160 && params.has_q_map) ptx::prefetch_map(&params.q_map);
#endif
}

// The item that a warp will take first, if it is one that takes items and there are so many: a lane
// a word. Where it lies needs no header, so both are under way together.
template <typename Traits>
__device__ int32_t load_first_item(const AttentionParams& p, int warp) {
  const int lane = threadIdx.x % 32;
  const bool is_producer = warp == kProducerWarp;
  const int place = LeafWarps<Traits>::place_of(warp);
  if (!is_producer && place >= kMostLeafWarps) return 0;
  const int i = is_producer ? static_cast<int>(blockIdx.x) : LeafWarp<Traits>::first_ticket(place);
  if (i >= p.work.most_items || lane >= kItemWords) return 0;
  return load_word(is_producer ? p.work.shared_item(i) : p.work.leaf_item(i), lane);
}

template <typename Traits>
__global__ void __launch_bounds__(kAttentionThreads, 1)
    cascade_attention_kernel(const __grid_constant__ AttentionParams params) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const SharedMemory<Traits> shared{memory, params.num_stages};
  if (!params.may_start_early) ptx::wait_for_previous_kernel();
  // Their latency passes beside what follows.
  const WorkHeader header = load_header(params.work.header);
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x / 32), 0);
  const int32_t first_words = load_first_item<Traits>(params, warp);
  init_barriers(shared.control());
  prefetch_maps(params);
  __syncthreads();

  // The host can tell a foreign list by its size alone. Its rows would not fit our tables.
  if (header.shape != launch_shape(Traits::kHeadDim, params.group_size)) __trap();

  const LeafWarps<Traits> leaf_warps(params, shared, header);
  if (warp < kMatrixWarps) {
    ptx::take_registers<kMatrixRegisters>();
    if (header.num_shared_items > 0) {
      MatrixWarp<Traits>(params, shared, header).run();
      ptx::named_barrier_sync(kMatrixBarrier, kMatrixThreads);  // nobody reads the ring any more
    }
    if (warp >= kFirstSpareWarp) {
      clear_unowned_rows<Traits>(params);
      return;
    }
  } else {
    ptx::give_registers<kOtherRegisters>();
    if (warp == kProducerWarp) {
      Producer<Traits>(params, shared).run(header, first_words);
      return;
    }
  }
  leaf_warps.run(warp, first_words);
}

}  // namespace hf_cascade
