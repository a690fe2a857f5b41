// Attention over the nodes of a KV tree, shared ones and leaves, in one launch.
//
// A persistent CTA, one a multiprocessor: 8 consumer warps and a producer (producer.cuh). It takes
// work items by ticket until none is left; an item is (node, KV split, query tile, kv head), of a
// leaf (leaf, KV split, some kv heads).
//   Memory   K and V tiles stream through a ring of stages. A byte of a shared node comes
//            from DRAM once and serves up to 128 query rows (a group's heads are rows) a tile.
//   Compute  Two ways, by the kind of node and never by the batch, which would change bits.
//            Shared node: a warp owns 16 of the item's 128 rows and sees every token of the tile.
//            Leaf (one sequence, at most 8 rows a head): a warp owns a head and sees every token,
//            16 at a time.
//   Writes   A query that has but one state: its row of `out` and `lse`. Else a float32 partial
//            state to its slot, for merge_paths.cuh, the kernel that follows.
#pragma once

#include "attention_tile.cuh"
#include "producer.cuh"

namespace hf_cascade {

constexpr int kFirstTurn = 1;  // named barriers: the turn of warpgroup 0, then that of 1

template <typename Traits>
class Consumer {
  using T = typename Traits::T;

 public:
  __device__ Consumer(const AttentionParams& params, const SharedMemory<Traits>& shared)
      : p_(params),
        shared_(shared),
        control_(shared.control()),
        lane_(threadIdx.x % 32),
        warp_(__shfl_sync(~0u, static_cast<int>(threadIdx.x / 32), 0)) {}

  __device__ void run() {
    for (;;) {
      Tile tile = next_tile();
      if (tile.flags & Tile::kStop) return;
      const bool is_leaf = tile.flags & Tile::kLeaf;
      const bool has_rows = 16 * warp_ / Traits::kTogether * Traits::kTogether < tile.num_rows;
      if (Traits::kWarpgroupProducts && !is_leaf && has_rows) {
        tile = attend_shared_item(tile);
      } else {
        if (is_leaf) {
          if (is_mine(tile)) attend_leaf(tile, stage_);
        } else if constexpr (!Traits::kWarpgroupProducts) {
          if (has_rows) attend_shared(tile, stage_);
        }
        release(stage_);
      }
      advance();
      if (!(tile.flags & Tile::kLast)) continue;
      if (is_leaf) {
        if (is_mine(tile)) finish_leaf(tile);
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

  // The same for a tile of the item that `tile` is of: what does not change is not read again.
  __device__ void continue_item(Tile& tile) {
    ptx::barrier_wait(&control_.full[stage_], phase_);
    const Tile& next = control_.tiles[stage_];
    tile.flags = __shfl_sync(~0u, next.flags, 0);
    if (tile.flags & Tile::kWhole) return;
    tile.begin = next.begin;
    tile.end = next.end;
    tile.visible = next.visible;
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

  // ------------------------------------------------------------------ tiles

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
    if (tile.flags & Tile::kWhole) return;
    rows_.clear_padding(shared_.v(stage_), 0, Traits::kKvTile, tile.begin, tile.end);
  }

  __device__ void mask_tile(float (&score)[RowTile<Traits>::kScoreTiles][4], const Tile& tile) {
    if (tile.flags & Tile::kWhole) return;
    int limit[2];
    find_limits(limit, tile);
    rows_.mask(score, tile.begin, limit);
  }

  // All tiles of an item, by a warpgroup. Leaves the last one's stage to be passed.
  //
  // A turn is K^T of one tile and P V of the one before. Where both warpgroups have rows they take
  // turns: while one keeps the matrix units busy the other computes probabilities.
  __device__ Tile attend_shared_item(Tile tile) {
    if constexpr (Traits::kWarpgroupProducts) {
      const bool has_partner = tile.num_rows > Traits::kTogether;
      load_shared_queries(tile);
      float score[RowTile<Traits>::kScoreTiles][4], keep[2];
      uint32_t probability[RowTile<Traits>::kScoreTiles / 2][4];
      clear_tile_padding(tile);
      if (has_partner && warpgroup() == 1) end_turn();
      if (has_partner) await_turn();
      wgmma::fence();
      rows_.start_keys(score, shared_.k(stage_));
      if (has_partner) end_turn();
      wgmma::wait<0>();
      wgmma::settle(score);
      mask_tile(score, tile);
      rows_.soften(score, keep, p_.scale_log2);
      rows_.pack_probabilities(probability, score);
      int previous = stage_;  // its P V is due
      while (!(tile.flags & Tile::kLast)) {
        advance();
        continue_item(tile);
        clear_tile_padding(tile);
        if (has_partner) await_turn();
        wgmma::fence();
        rows_.start_keys(score, shared_.k(stage_));
        rows_.start_values(probability, shared_.v(previous));
        if (has_partner) end_turn();
        wgmma::wait<1>();
        wgmma::settle(score);
        mask_tile(score, tile);
        const bool moves = rows_.soften(score, keep, p_.scale_log2);
        wgmma::wait<0>();
        wgmma::settle(rows_.out);
        release(previous);
        if (moves) rows_.rescale(keep);
        rows_.pack_probabilities(probability, score);
        previous = stage_;
      }
      if (has_partner) await_turn();
      wgmma::fence();
      rows_.start_values(probability, shared_.v(previous));
      if (has_partner && warpgroup() == 0) end_turn();  // the last turn ends with the item
      wgmma::wait<0>();
      wgmma::settle(rows_.out);
      release(previous);
    }
    return tile;
  }

  __device__ int warpgroup() const { return warp_ / 4; }
  __device__ void await_turn() { ptx::named_barrier_sync(kFirstTurn + warpgroup(), kConsumers); }
  __device__ void end_turn() {
    ptx::named_barrier_arrive(kFirstTurn + 1 - warpgroup(), kConsumers);
  }

  // One tile, by a warp alone.
  __device__ void attend_shared(const Tile& tile, int stage) {
    if (tile.flags & Tile::kFirst) load_shared_queries(tile);
    const uint32_t k = shared_.k(stage), v = shared_.v(stage);
    if (tile.flags & Tile::kWhole) {
      rows_.template attend<Traits::kBlocks, false>(shared_.q(), first_row(), k, v,
                                                    {0, 1, 0, {0, 0}}, p_.scale_log2);
    } else {
      int limit[2];
      find_limits(limit, tile);
      clear_tile_padding(tile);
      rows_.template attend<Traits::kBlocks, true>(
          shared_.q(), first_row(), k, v, {0, 1, tile.begin, {limit[0], limit[1]}}, p_.scale_log2);
    }
  }

  // Rows that do not exist, of a warpgroup that has others, compute with what they find; nothing is
  // made of it.
  __device__ void load_shared_queries(const Tile& tile) {
    rows_.load_queries(shared_.q(), first_row());
    rows_.clear();
    if (Traits::kQueriesInRegisters && first_row() < tile.num_rows) release_queries();
  }

  // Whether one of the leaf's heads is this warp's.
  __device__ bool is_mine(const Tile& tile) const {
    return (warp_ - tile.first_warp) >> tile.heads_log2 == 0;
  }

  // A tile's rows are blocks of 16 tokens, for each of which one block a head.
  __device__ void attend_leaf(const Tile& tile, int stage) {
    constexpr int kAtOnce = kLeafTokens / kBoxTokens;
    if (tile.flags & Tile::kFirst) {
      rows_.load_queries(shared_.q(), first_row());
      rows_.clear();
      if (Traits::kQueriesInRegisters) release_queries();
    }
    const int tile_tokens = Traits::kKvTile >> tile.heads_log2;
    for (int start = 0; start < tile_tokens && start < tile.end; start += kLeafTokens) {
      const typename RowTile<Traits>::Blocks blocks = {
          (start / kBoxTokens << tile.heads_log2) + warp_ - tile.first_warp,
          1 << tile.heads_log2,
          tile.begin - start,
          {tile.end - start, tile.end - start}};
      if (blocks.begin > 0 || blocks.limit[0] < kLeafTokens) {
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const int row = kBoxTokens * (blocks.first + i * blocks.stride);
          const int shift = row - kBoxTokens * i;  // from tokens to rows
          rows_.clear_padding(shared_.v(stage), row, row + kBoxTokens, blocks.begin + shift,
                              blocks.limit[0] + shift);
        }
      }
      rows_.template attend<kAtOnce, true>(shared_.q(), first_row(), shared_.k(stage),
                                           shared_.v(stage), blocks, p_.scale_log2);
    }
  }

  // A warp's own 16 rows of q.
  __device__ void release_queries() {
    __syncwarp();
    if (lane_ == 0) ptx::barrier_arrive(&control_.granule_empty[warp_]);
  }

  __device__ int first_row() const { return Traits::kGranuleRows * warp_; }

  // The item's row that this thread holds in its r-th half.
  __device__ int row_of(int r) const { return first_row() + lane_ / 4 + 8 * r; }

  // ------------------------------------------------------------------ the end of a shared item

  __device__ void finish_shared(const Tile& tile) {
    const Target* targets = control_.targets[tile.targets];
    if (first_row() < tile.num_rows) {
      if (!Traits::kQueriesInRegisters) release_queries();
      rows_.finish_sums();
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = row_of(r), t = row / p_.group_size;
        if (row >= tile.num_rows || targets[t] == kNowhere) continue;
        const int q_head = tile.head * p_.group_size + row - t * p_.group_size;
        write_row(targets[t], q_head, r);
      }
    }
    __syncwarp();
    if (lane_ == 0) ptx::barrier_arrive(&control_.targets_empty[tile.targets]);
  }

  __device__ void write_row(Target target, int q_head, int r) {
    const float normalizer = rows_.sum[r] == 0.f ? 0.f : 1.f / rows_.sum[r];
    const float lse_log2 = rows_.maximum[r] + log2f(rows_.sum[r]);
    const int num_q_heads = p_.num_kv_heads * p_.group_size;
    if (target >= 0) {
      const int64_t row = int64_t{target} * num_q_heads + q_head;
      float* out = p_.state_out + row * Traits::kHeadDim + 2 * (lane_ % 4);
#pragma unroll
      for (int j = 0; j < Traits::kHeadDim / 8; ++j) {
        __stcg(reinterpret_cast<float2*>(out + 8 * j),
               make_float2(rows_.out[j][2 * r] * normalizer, rows_.out[j][2 * r + 1] * normalizer));
      }
      if (lane_ % 4 == 0) __stcg(p_.state_lse_log2 + row, lse_log2);
    } else {
      const int64_t row = int64_t{~target} * num_q_heads + q_head;
      T* out = static_cast<T*>(p_.out) + row * Traits::kHeadDim + 2 * (lane_ % 4);
#pragma unroll
      for (int j = 0; j < Traits::kHeadDim / 8; ++j) {
        *reinterpret_cast<uint32_t*>(out + 8 * j) =
            pack<T>(rows_.out[j][2 * r] * normalizer, rows_.out[j][2 * r + 1] * normalizer);
      }
      if (lane_ % 4 == 0) p_.lse[row] = lse_log2 * kLn2;
    }
  }

  // ------------------------------------------------------------------ the end of a leaf's item

  __device__ void finish_leaf(const Tile& tile) {
    if (!Traits::kQueriesInRegisters) release_queries();
    rows_.finish_sums();
    const int row = lane_ / 4, head = tile.head + warp_ - tile.first_warp;
    if (row < tile.num_rows && tile.target != kNowhere) {
      write_row(tile.target, head * p_.group_size + row, 0);
    }
  }

  const AttentionParams& p_;
  const SharedMemory<Traits>& shared_;
  Control& control_;
  const int lane_, warp_;
  RowTile<Traits> rows_;
  int stage_ = 0;
  uint32_t phase_ = 0;
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
    for (uint64_t& barrier : control.granule_empty) ptx::barrier_init(&barrier, 1);
    for (uint64_t& barrier : control.targets_empty) ptx::barrier_init(&barrier, kConsumerWarps);
    ptx::fence_async_proxy();  // the copy engine completes phases of these
  }
  __syncthreads();

  if (threadIdx.x >= kConsumers) {
    ptx::give_registers<kProducerRegisters>();
    if (threadIdx.x < kConsumers + 32) Producer<Traits>(params, shared).run();
  } else {
    ptx::take_registers<kConsumerRegisters>();
    clear_unowned_rows<Traits>(params);
    Consumer<Traits>(params, shared).run();
  }
}

}  // namespace hf_cascade
