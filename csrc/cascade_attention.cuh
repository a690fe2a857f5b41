// Attention over the nodes of a KV tree, shared ones and leaves, in one launch.
//
// CTAs are persistent, one per multiprocessor. 8 matrix warps and their producer take shared nodes'
// items; at the same time 3 leaf warps (or 2, or 6: leaf_warps.cuh) take leaves' items. Leaves need
// memory, shared nodes with many rows need matrix units. Both take work items by ticket until none
// is left; an item is (node, KV split, query tile, kv head).
//   Memory   K and V stream through rings in shared memory. A byte of a shared node comes from DRAM
//            once and serves up to 128 query rows (each head of a group is a row) per tile.
//   Writes   If a query has a single state, its row of `out` and `lse`. Else a partial state, for
//            the kernel that follows, merge_paths.cuh.
//
// The first run of code fetches instructions from DRAM, so shorter code is faster. In a model every
// launch is such a first run, because a layer's weights have passed through L2 since the last one:
// 1 to 3 of a launch's 10 to 20 us are waits for instructions. So the code of a decoding launch
// lies side by side, in the order of this file, and prefill's producer comes last
// (benchmarks/NOTES.md, 16).
#pragma once

#include "leaf_warps.cuh"
#include "matrix_warp.cuh"
#include "node_producer.cuh"
#include "query_producer.cuh"

namespace hf_cascade {

// The first of the matrix warps that never become leaf warps.
constexpr int kFirstSpareWarp = kMostLeafWarps - kLeafWarps;

// The spare warps write the empty state to rows of q that no sequence owns.
template <typename Traits>
__device__ void clear_unowned_rows(const AttentionParams& p) {
  constexpr int kStep = kMatrixThreads - 32 * kFirstSpareWarp;
  const int place = static_cast<int>(threadIdx.x) - 32 * kFirstSpareWarp;
  const int num_q_heads = p.num_kv_heads * p.group_size;
  const int64_t first = p.tree.q_indptr[p.tree.num_seqs] + blockIdx.x;
  if (first >= p.tree.num_tokens) return;
  if (p.may_start_early) ptx::wait_for_previous_kernel();  // earlier kernels may still read `out`
  for (int64_t token = first; token < p.tree.num_tokens; token += gridDim.x) {
    uint32_t* out = reinterpret_cast<uint32_t*>(static_cast<typename Traits::T*>(p.out) +
                                                token * num_q_heads * Traits::kHeadDim);
    for (int i = place; i < num_q_heads * Traits::kHeadDim / 2; i += kStep) out[i] = 0;
    for (int i = place; i < num_q_heads; i += kStep) {
      p.lse[token * num_q_heads + i] = negative_infinity();
    }
  }
}

// One lane initializes all barriers: with a barrier per lane they would run one after the other,
// and in a loop.
__device__ inline void init_ring(Control& control) {
  if (ptx::elect_lane()) {
#pragma unroll
    for (int i = 0; i < kMostStages; ++i) {
      ptx::barrier_init(&control.full[i], 33);
      ptx::barrier_init(&control.empty[i], kMatrixWarps);
    }
    ptx::barrier_init(&control.queries_empty, kMatrixWarps);
    for (uint64_t& barrier : control.targets_empty) ptx::barrier_init(&barrier, kMatrixWarps);
    ptx::fence_async_proxy();  // the copy engine completes phases of these
  }
  __syncwarp();
}

__device__ inline void prefetch_maps(const AttentionParams& params, int warp) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  if (!ptx::elect_lane()) return;
  if (warp == 3) ptx::prefetch_map(&params.k_map);
  if (warp == 4) ptx::prefetch_map(&params.v_map);
  if (warp == 5) ptx::prefetch_map(&params.leaf_k_map);
  if (warp == 6) ptx::prefetch_map(&params.leaf_v_map);
  if (warp == 7 && params.has_q_map) ptx::prefetch_map(&params.q_map);
#endif
}

// All that a warp needs to begin, in one load of a word per lane: the first kItemWords lanes have
// its first item, if the warp takes items and the list has room for that many; the next lanes have
// the header. The item's address does not depend on the header. (With a separate load of the
// header, the same for all lanes, ptxas would wait for that before it issued the other.)
template <typename Traits>
__device__ int32_t load_first_words(const AttentionParams& p, int warp) {
  const int lane = threadIdx.x % 32, place = LeafWarps<Traits>::place_of(warp);
  const int32_t* word = nullptr;
  if (lane < kItemWords) {
    const bool is_producer = warp == kProducerWarp;
    const int i =
        is_producer ? static_cast<int>(blockIdx.x) : LeafWarp<Traits>::first_ticket(place);
    if ((is_producer || place < kMostLeafWarps) && i < p.work.most_items) {
      const Item* item = is_producer ? p.work.shared_item(i) : p.work.leaf_item(i);
      word = reinterpret_cast<const int32_t*>(item) + lane;
    }
  } else if (lane < kItemWords + kHeaderWords) {
    word = reinterpret_cast<const int32_t*>(p.work.header) + lane - kItemWords;
  }
  return word ? __ldcg(word) : 0;
}

template <typename Traits>
__global__ void __launch_bounds__(kAttentionThreads, 1)
    cascade_attention_kernel(const __grid_constant__ AttentionParams params) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const SharedMemory<Traits> shared{memory, params.num_stages};
  if (!params.may_start_early) ptx::wait_for_previous_kernel();
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x / 32), 0);
  const int32_t first_words = load_first_words<Traits>(params, warp);

  // Work that does not need these words hides their latency. Leaf warps and the producer do not
  // wait for other warps.
  const int place = LeafWarps<Traits>::place_of(warp);
  if (warp == kProducerWarp) {
    init_ring(shared.control());
    ptx::named_barrier_arrive(kRingBarrier, kMatrixThreads + 32);
  } else if (place < kMostLeafWarps) {
    init_leaf_ring(shared.control().leaf_rings[place]);
  } else {
    prefetch_maps(params, warp);
  }
  if (warp < kMatrixWarps) ptx::named_barrier_sync(kRingBarrier, kMatrixThreads + 32);

  const WorkHeader header = find_header(first_words);
  // A work list made for another shape would overflow the tables; the host checks only its size.
  if (header.shape != launch_shape(Traits::kHeadDim, params.group_size)) __trap();

  if (warp < kMatrixWarps) {
    ptx::take_registers<kMatrixRegisters>();
    if (header.num_shared_items > 0) {
      MatrixWarp<Traits>(params, shared, header).run();
      ptx::named_barrier_sync(kMatrixBarrier, kMatrixThreads);  // all are done with the ring
    }
    if (warp >= kFirstSpareWarp) {
      clear_unowned_rows<Traits>(params);
      return;
    }
  } else {
    ptx::give_registers<kOtherRegisters>();
    if (warp == kProducerWarp && header.is_decode) {
      NodeProducer<Traits>(params, shared).run(header, first_words);
      return;
    }
  }
  if (header.is_decode) {
    LeafWarps<Traits>(params, shared, header).run(warp, first_words);
  } else if (warp == kProducerWarp) {
    QueryProducer<Traits>(params, shared).run(header);
  }
}

}  // namespace hf_cascade
