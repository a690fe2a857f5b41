// Attention over a KV tree in one launch: prefixes, suffixes and the merge along the paths.
//
// A persistent CTA, one a multiprocessor: 8 consumer warps, a producer (paged_kv.cuh), 3 mergers.
// It takes work items by ticket until none is left; an item is (node, KV split, query tile, kv
// head).
//   Memory   K and V tiles stream through a ring of stages of 32 KB. A byte of a shared node comes
//            from DRAM once and serves up to 128 query rows (a group's heads are rows) a tile.
//   Compute  Two ways, by the kind of node and never by the batch, which would change bits.
//            Shared node: a warp owns 16 of the item's 128 rows and sees every token of the tile.
//            Leaf (at most 8 rows, one sequence): each warp takes 16 tokens of the tile for all
//            rows; the warps' states are folded in warp order when the item ends.
//   Writes   A query that has but one state: its row of `out` and `lse`. Else a float32 partial
//            state to its slot; then the item counts itself in at the (sequence, kv head)'s
//            counter, and whoever completes the count folds the states in slot order. Nobody
//            waits for anybody, and no order of arrival shows in the result.
#pragma once

#include "attention_tile.cuh"
#include "paged_kv.cuh"
#include "state_merger.cuh"

namespace hf_cascade {

enum NamedBarrier { kConsumerBarrier = 1 };

template <typename Traits>
class Consumer {
  using T = typename Traits::T;

 public:
  __device__ Consumer(const AttentionParams& params, const SharedMemory<Traits>& shared)
      : p_(params),
        shared_(shared),
        control_(shared.control()),
        lane_(threadIdx.x % 32),
        warp_(__shfl_sync(~0u, static_cast<int>(threadIdx.x / 32), 0)),
        states_(params) {}

  __device__ void run() {
    for (;;) {
      Tile tile = next_tile();
      if (tile.flags & Tile::kStop) return stop_mergers();
      const bool is_leaf = tile.flags & Tile::kLeaf;
      const bool has_rows = 16 * warp_ / Traits::kTogether * Traits::kTogether < tile.num_rows;
      if (Traits::kWarpgroupProducts && !is_leaf && has_rows) {
        tile = attend_shared_item(tile);
      } else {
        if (is_leaf) {
          attend_leaf(tile, stage_);
        } else if (has_rows) {
          attend_shared(tile, stage_);
        }
        release(stage_);
      }
      advance();
      if (!(tile.flags & Tile::kLast)) continue;
      if (is_leaf) {
        finish_leaf(tile);
      } else {
        finish_shared(tile);
      }
    }
  }

 private:
  // ------------------------------------------------------------------ the ring

  __device__ Tile next_tile() {
    ptx::barrier_wait(&control_.full[stage_], phase_);
    Tile tile = control_.tiles[stage_];
    tile.flags = __shfl_sync(~0u, tile.flags, 0);  // the compiler learns that warps don't diverge
    tile.num_rows = __shfl_sync(~0u, tile.num_rows, 0);
    return tile;
  }

  __device__ void release(int stage) {
    __syncwarp();
    if (lane_ == 0) ptx::barrier_arrive(&control_.empty[stage]);
  }

  __device__ void advance() {
    if (++stage_ == shared_.num_stages) {
      stage_ = 0;
      phase_ ^= 1;
    }
  }

  // After the barrier nobody is about to report, so that a merger's phases can't be mistaken.
  __device__ void stop_mergers() {
    ptx::named_barrier_sync(kConsumerBarrier, kConsumers);
    for (int i = 0; warp_ == 0 && i < kMergers; ++i, ++arrivals_) report(-1, 0);
  }

  // ------------------------------------------------------------------ tiles

  __device__ void load_shared_queries(uint32_t granule, const Tile& tile) {
    rows_.load_queries(granule);
    rows_.clear();
    // The only reader of this granule: it arrives for all 8 warps. (Rows that do not exist, of a
    // warpgroup that has others, compute with what they find; nothing is made of it.)
    const bool has_rows = Traits::kGranuleRows * warp_ < tile.num_rows;
    if (Traits::kQueriesInRegisters && has_rows && lane_ < kConsumerWarps) {
      ptx::barrier_arrive(&control_.granule_empty[warp_]);
    }
  }

  __device__ bool is_whole(const Tile& tile) const {
    return tile.begin == 0 && tile.end == Traits::kKvTile;
  }

  // Per row of this thread: the first row of the tile that it does not see.
  __device__ void find_limits(int (&limit)[2], const Tile& tile) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      limit[r] = tile.end;
      if (tile.flags & Tile::kCausal) {
        limit[r] = min(tile.end, tile.visible + row_of(r) / p_.group_size);
      }
    }
  }

  __device__ void clear_tile_padding(const Tile& tile) {
    if (is_whole(tile)) return;
    rows_.clear_padding(shared_.v(stage_), 0, Traits::kKvTile, tile.begin, tile.end);
  }

  __device__ void mask_tile(float (&score)[RowTile<Traits>::kScoreTiles][4], const Tile& tile) {
    if (is_whole(tile) && !(tile.flags & Tile::kCausal)) return;
    int limit[2];
    find_limits(limit, tile);
    rows_.mask(score, 0, tile.begin, limit);
  }

  // All tiles of an item, by a warpgroup. Leaves the last one's stage to be passed.
  __device__ Tile attend_shared_item(Tile tile) {
    if constexpr (Traits::kWarpgroupProducts) {
      load_shared_queries(shared_.q(warp_), tile);
      float score[RowTile<Traits>::kScoreTiles][4], keep[2];
      uint32_t probability[RowTile<Traits>::kScoreTiles / 2][4];
      clear_tile_padding(tile);
      wgmma::fence();
      rows_.start_keys(score, shared_.k(stage_));
      wgmma::wait<0>();
      wgmma::settle(score);
      mask_tile(score, tile);
      rows_.soften(score, keep, p_.scale_log2);
      rows_.pack_probabilities(probability, score);
      int previous = stage_;  // its P V is due
      while (!(tile.flags & Tile::kLast)) {
        advance();
        tile = next_tile();
        clear_tile_padding(tile);
        wgmma::fence();
        rows_.start_keys(score, shared_.k(stage_));
        rows_.start_values(probability, shared_.v(previous));
        wgmma::wait<1>();
        wgmma::settle(score);
        mask_tile(score, tile);
        rows_.soften(score, keep, p_.scale_log2);
        wgmma::wait<0>();
        wgmma::settle(rows_.out);
        release(previous);
        rows_.rescale(keep);
        rows_.pack_probabilities(probability, score);
        previous = stage_;
      }
      wgmma::fence();
      rows_.start_values(probability, shared_.v(previous));
      wgmma::wait<0>();
      wgmma::settle(rows_.out);
      release(previous);
    }
    return tile;
  }

  // One tile, by a warp alone.
  __device__ void attend_shared(const Tile& tile, int stage) {
    const uint32_t granule = shared_.q(warp_);
    if (tile.flags & Tile::kFirst) load_shared_queries(granule, tile);
    constexpr int kAll = Traits::kSlices;
    const uint32_t k = shared_.k(stage), v = shared_.v(stage);
    if (is_whole(tile) && !(tile.flags & Tile::kCausal)) {
      rows_.template attend<kAll, false>(granule, k, v, 0, 0, {0, 0}, p_.scale_log2);
    } else {
      int limit[2];
      find_limits(limit, tile);
      if (!is_whole(tile)) rows_.clear_padding(v, 0, Traits::kKvTile, tile.begin, tile.end);
      rows_.template attend<kAll, true>(granule, k, v, 0, tile.begin, limit, p_.scale_log2);
    }
  }

  __device__ void attend_leaf(const Tile& tile, int stage) {
    const uint32_t granule = shared_.q(tile.granule);
    if (tile.flags & Tile::kFirst) {
      rows_.load_queries(granule);
      rows_.clear();
      if (Traits::kQueriesInRegisters && lane_ == 0) {
        ptx::barrier_arrive(&control_.granule_empty[tile.granule]);
      }
    }
    const int slice = warp_ % Traits::kSlices;
    if (tile.index % Traits::kTeams != warp_ / Traits::kSlices) return;
    if (16 * slice >= tile.end || 16 * slice + 16 <= tile.begin) return;
    const int limit[2] = {tile.end, tile.end};
    if (16 * slice < tile.begin || 16 * slice + 16 > tile.end) {
      rows_.clear_padding(shared_.v(stage), 16 * slice, 16 * slice + 16, tile.begin, tile.end);
    }
    rows_.template attend<1, true>(granule, shared_.k(stage), shared_.v(stage), slice, tile.begin,
                                   limit, p_.scale_log2);
  }

  // The item's row that this thread holds in its r-th half.
  __device__ int row_of(int r) const { return Traits::kGranuleRows * warp_ + lane_ / 4 + 8 * r; }

  // ------------------------------------------------------------------ the end of a shared item

  __device__ void finish_shared(const Tile& tile) {
    const Target* targets = control_.targets[tile.targets];
    const int num_tokens = tile.num_rows / p_.group_size;
    if (Traits::kGranuleRows * warp_ < tile.num_rows) {
      if (!Traits::kQueriesInRegisters && lane_ < kConsumerWarps) {
        ptx::barrier_arrive(&control_.granule_empty[warp_]);
      }
      rows_.finish_sums();
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = row_of(r), t = row / p_.group_size;
        if (row >= tile.num_rows || targets[t].seq < 0) continue;
        const int q_head = tile.head * p_.group_size + row - t * p_.group_size;
        write_row(targets[t], q_head, r);
      }
    }
    if (tile.flags & Tile::kPartial) count_in(tile, targets, num_tokens);
    __syncwarp();
    if (lane_ == 0) ptx::barrier_arrive(&control_.targets_empty[tile.targets]);
  }

  __device__ void write_row(const Target& target, int q_head, int r) {
    const float normalizer = rows_.sum[r] == 0.f ? 0.f : 1.f / rows_.sum[r];
    const float lse_log2 = rows_.maximum[r] + log2f(rows_.sum[r]);
    const int num_q_heads = p_.num_kv_heads * p_.group_size;
    if (target.slot >= 0) {
      const int64_t row = int64_t{target.slot} * num_q_heads + q_head;
      float* out = p_.state_out + row * Traits::kHeadDim + 2 * (lane_ % 4);
#pragma unroll
      for (int j = 0; j < Traits::kHeadDim / 8; ++j) {
        __stcg(reinterpret_cast<float2*>(out + 8 * j),
               make_float2(rows_.out[j][2 * r] * normalizer, rows_.out[j][2 * r + 1] * normalizer));
      }
      if (lane_ % 4 == 0) __stcg(p_.state_lse_log2 + row, lse_log2);
    } else {
      const int64_t row = int64_t{~target.slot} * num_q_heads + q_head;
      T* out = static_cast<T*>(p_.out) + row * Traits::kHeadDim + 2 * (lane_ % 4);
#pragma unroll
      for (int j = 0; j < Traits::kHeadDim / 8; ++j) {
        *reinterpret_cast<uint32_t*>(out + 8 * j) =
            pack<T>(rows_.out[j][2 * r] * normalizer, rows_.out[j][2 * r + 1] * normalizer);
      }
      if (lane_ % 4 == 0) p_.lse[row] = lse_log2 * kLn2;
    }
  }

  // All consumers. A thread a query token counts in, and the warps share the merges that fall due.
  __device__ void count_in(const Tile& tile, const Target* targets, int num_tokens) {
    ptx::named_barrier_sync(kConsumerBarrier, kConsumers);  // the states are written
    const int t = static_cast<int>(threadIdx.x);
    bool completes = false;
    if (t < num_tokens && targets[t].seq >= 0 && targets[t].slot >= 0) {
      completes = states_.arrive(targets[t].seq, tile.head);
    }
    const uint32_t finished = __ballot_sync(~0u, completes);
    if (lane_ == 0 && t < kRowsPerTile) control_.finished[warp_] = finished;
    ptx::named_barrier_sync(kConsumerBarrier, kConsumers);
    for (int row = warp_; row < tile.num_rows; row += kConsumerWarps) {
      const int i = row / p_.group_size;
      if (!(control_.finished[i / 32] >> (i % 32) & 1)) continue;
      states_.merge_head(targets[i].seq, tile.head * p_.group_size + row % p_.group_size);
    }
  }

  // ------------------------------------------------------------------ the end of a leaf's item

  // The warps' states meet in shared memory. One warp, another each time, folds and writes them;
  // the others go on to the next item, so the latency of writing and counting in is hidden.
  __device__ void finish_leaf(const Tile& tile) {
    if (!Traits::kQueriesInRegisters && lane_ == 0) {
      ptx::barrier_arrive(&control_.granule_empty[tile.granule]);
    }
    const bool reports = tile.flags & Tile::kPartial && tile.target.seq >= 0;
    rows_.finish_sums();
    ptx::barrier_wait(&control_.exchange_empty, (leaf_items_ & 1) ^ 1);
    const int row = lane_ / 4;
    if (row < tile.num_rows) {
      float* out = exchanged(warp_, row) + 2 * (lane_ % 4);
#pragma unroll
      for (int j = 0; j < Traits::kHeadDim / 8; ++j) {
        *reinterpret_cast<float2*>(out + 8 * j) = make_float2(rows_.out[j][0], rows_.out[j][1]);
      }
      if (lane_ % 4 == 0) {
        control_.exchange_maximum[warp_][row] = rows_.maximum[0];
        control_.exchange_sum[warp_][row] = rows_.sum[0];
      }
    }
    __syncwarp();
    if (lane_ == 0) ptx::barrier_arrive(&control_.exchange_full);
    if (leaf_items_ % kConsumerWarps == static_cast<uint32_t>(warp_)) {
      ptx::barrier_wait(&control_.exchange_full, leaf_items_ & 1);
      fold_leaf(tile);
      if (reports) report(tile.target.seq, tile.head);
    }
    ++leaf_items_;
    arrivals_ += reports;
  }

  __device__ void fold_leaf(const Tile& tile) {
    const Target target = tile.target;
    const int num_q_heads = p_.num_kv_heads * p_.group_size;
    for (int row = 0; row < tile.num_rows; ++row) {
      float maximum = negative_infinity();
#pragma unroll
      for (int w = 0; w < kConsumerWarps; ++w) {
        maximum = fmaxf(maximum, control_.exchange_maximum[w][row]);
      }
      const float offset = maximum == negative_infinity() ? 0.f : maximum;
      float weight[kConsumerWarps], sum = 0.f;
#pragma unroll
      for (int w = 0; w < kConsumerWarps; ++w) {
        weight[w] = ptx::exp2_approx(control_.exchange_maximum[w][row] - offset);
        sum += weight[w] * control_.exchange_sum[w][row];
      }
      const float normalizer = sum == 0.f ? 0.f : 1.f / sum;
      const float lse_log2 = maximum + log2f(sum);
      const int q_head = tile.head * p_.group_size + row;
      const int64_t state_row = int64_t{target.slot} * num_q_heads + q_head;
      const int64_t out_row = int64_t{~target.slot} * num_q_heads + q_head;
      for (int c = 4 * lane_; c < Traits::kHeadDim; c += 128) {
        float4 acc = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
        for (int w = 0; w < kConsumerWarps; ++w) {
          const float4 part = *reinterpret_cast<const float4*>(exchanged(w, row) + c);
          acc.x += weight[w] * part.x;
          acc.y += weight[w] * part.y;
          acc.z += weight[w] * part.z;
          acc.w += weight[w] * part.w;
        }
        const float4 out = {acc.x * normalizer, acc.y * normalizer, acc.z * normalizer,
                            acc.w * normalizer};
        if (target.seq < 0) continue;
        if (target.slot >= 0) {
          __stcg(reinterpret_cast<float4*>(p_.state_out + state_row * Traits::kHeadDim + c), out);
        } else {
          write_out<Traits>(p_, out_row, c, out);
        }
      }
      if (lane_ == 0 && target.seq >= 0) {
        if (target.slot >= 0) {
          __stcg(p_.state_lse_log2 + state_row, lse_log2);
        } else {
          p_.lse[out_row] = lse_log2 * kLn2;
        }
      }
    }
    __syncwarp();
    if (lane_ == 0) ptx::barrier_arrive(&control_.exchange_empty);
  }

  // To the merger whose turn it is.
  __device__ void report(int seq, int head) {
    const uint32_t merger = arrivals_ % kMergers;
    ptx::barrier_wait(&control_.arrival_empty[merger], (arrivals_ / kMergers & 1) ^ 1);
    __syncwarp();  // the lanes' parts of the state are written
    if (lane_ == 0) {
      control_.arrivals[merger] = {seq, head};
      ptx::barrier_arrive(&control_.arrival_full[merger]);
    }
  }

  __device__ float* exchanged(int warp, int row) const {
    return shared_.exchange() + (warp * kMaxLeafRows + row) * Traits::kHeadDim;
  }

  const AttentionParams& p_;
  const SharedMemory<Traits>& shared_;
  Control& control_;
  const int lane_, warp_;
  RowTile<Traits> rows_;
  StateMerger<Traits> states_;
  int stage_ = 0;
  uint32_t phase_ = 0;
  uint32_t leaf_items_ = 0;
  uint32_t arrivals_ = 0;  // states reported to the mergers, by any warp
};

// Rows of q that no sequence owns get the empty state.
template <typename Traits>
__device__ void clear_unowned_rows(const AttentionParams& p) {
  const int num_q_heads = p.num_kv_heads * p.group_size;
  const int64_t first = p.tree.q_indptr[p.tree.num_seqs];
  for (int64_t token = first + blockIdx.x; token < p.tree.num_tokens; token += gridDim.x) {
    uint32_t* out = reinterpret_cast<uint32_t*>(static_cast<typename Traits::T*>(p.out) +
                                                token * num_q_heads * Traits::kHeadDim);
    for (int i = threadIdx.x; i < num_q_heads * Traits::kHeadDim / 2; i += kConsumers) out[i] = 0;
    for (int i = threadIdx.x; i < num_q_heads; i += kConsumers) {
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
      ptx::barrier_init(&control.empty[i], kConsumerWarps);
    }
    for (uint64_t& barrier : control.granule_empty) ptx::barrier_init(&barrier, kConsumerWarps);
    for (uint64_t& barrier : control.targets_empty) ptx::barrier_init(&barrier, kConsumerWarps);
    ptx::barrier_init(&control.exchange_full, kConsumerWarps);
    ptx::barrier_init(&control.exchange_empty, 1);
    for (uint64_t& barrier : control.arrival_full) ptx::barrier_init(&barrier, 1);
    for (uint64_t& barrier : control.arrival_empty) ptx::barrier_init(&barrier, 1);
  }
  __syncthreads();
  ptx::let_next_kernel_start();
  ptx::wait_for_previous_kernel();

  if (threadIdx.x >= kConsumers) {
    ptx::give_registers<kProducerRegisters>();
    const int merger = static_cast<int>(threadIdx.x - kConsumers) / 32 - 1;
    if (merger < 0) {
      Producer<Traits>(params, shared).run();
    } else {
      merge_arrivals<Traits>(params, control, merger);
    }
  } else {
    ptx::take_registers<kConsumerRegisters>();
    clear_unowned_rows<Traits>(params);
    Consumer<Traits>(params, shared).run();
  }
}

}  // namespace hf_cascade
