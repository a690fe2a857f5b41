// A matrix warp: attention of shared items, whose tiles the producer sends.
//
//   Owns      16 of an item's 128 query rows (each head of a group is a row) and sees every token
//             of the item. On sm_90a four matrix warps form a warpgroup, which owns 64 rows.
//   Computes  With wgmma or, if that has no instance of the shape, with mma.sync.
//   Writes    The rows to their targets.
#pragma once

#include <cstddef>

#include "attention_tile.cuh"
#include "packed_rows.cuh"
#include "target_row.cuh"

namespace hf_cascade {

template <typename Traits>
class MatrixWarp {
  using T = typename Traits::T;

 public:
  __device__ MatrixWarp(const AttentionParams& params, const SharedMemory<Traits>& shared,
                        const WorkHeader& header)
      : p_(params),
        shared_(shared),
        control_(shared.control()),
        lane_(threadIdx.x % 32),
        warp_(__shfl_sync(~0u, static_cast<int>(threadIdx.x / 32), 0)),
        num_stages_(shared.num_ring_stages(header)),
        first_full_(held_address(control_.full)),
        first_keys_(RowTile<Traits>::describe(shared.k(0))) {}

  __device__ void run() {
    for (;;) {
      Tile tile = next_tile();
      if (tile.flags & Tile::kStop) return;
      const bool has_rows = first_row() / Traits::kTogether * Traits::kTogether < tile.num_rows;
      if (Traits::kWarpgroupProducts && has_rows) {
        tile = attend_item(tile);
      } else {
        if constexpr (!Traits::kWarpgroupProducts) {
          if (has_rows) attend_tile(tile, stage_);
        }
        if (Traits::kQueriesInRegisters && !has_rows && tile.flags & Tile::kFirst) {
          release_queries();
        }
        release(stage_);
      }
      advance();
      if (tile.flags & Tile::kLast) finish(tile);
    }
  }

 private:
  // ------------------------------------------------------------------ the ring

  // An address that stays in a register. ptxas would compute it again for each use, which costs 50
  // clocks per tile; it can't recompute the result of a shuffle.
  static __device__ uint32_t held_address(const void* pointer) {
    return __shfl_sync(~0u, ptx::shared_address(pointer), 0);
  }

  __device__ uint32_t full(int stage) const { return first_full_ + 8 * stage; }
  __device__ uint32_t empty(int stage) const {
    constexpr uint32_t kAfterFull = offsetof(Control, empty) - offsetof(Control, full);
    return full(stage) + kAfterFull;
  }

  __device__ Tile next_tile() {
    ptx::barrier_wait(full(stage_), phase_);
    return read_tile();
  }

  __device__ Tile read_tile() {
    Tile tile = control_.tiles[stage_];
    tile.flags = __shfl_sync(~0u, tile.flags, 0);  // tells the compiler that warps don't diverge
    tile.num_rows = __shfl_sync(~0u, tile.num_rows, 0);
    tile.num_whole = __shfl_sync(~0u, tile.num_whole, 0);
    return tile;
  }

  __device__ void release(int stage) {
    __syncwarp();
    if (ptx::elect_lane()) ptx::barrier_arrive(empty(stage));
  }

  __device__ void advance() {
    if (++stage_ == num_stages_) {
      stage_ = 0;
      phase_ ^= 1;
    }
  }

  // ------------------------------------------------------------------ tiles

  // Whether all rows see all of the tile.
  static __device__ bool is_whole(const Tile& tile) {
    return tile.begin == 0 && tile.end == Traits::kKvTile && !(tile.flags & Tile::kCausal);
  }

  // limit[r]: the first token of the tile that this thread's r-th row does not see.
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
    if (tile.begin == 0 && tile.end == Traits::kKvTile) return;
    clear_rows<Traits, Traits::kKvTile>(shared_.v(stage_), tile.begin, tile.end);
  }

  using Scores = float[RowTile<Traits>::kScoreTiles][4];
  using Probabilities = uint32_t[RowTile<Traits>::kScoreTiles / 2][4];

  // The next stage, looked up while the products of this one are computed.
  struct Ahead {
    int stage;
    uint32_t phase;
    uint32_t keys;  // descriptor
    bool has_arrived;
  };

  __device__ Ahead look_ahead(bool asks) const {
    const bool wraps = stage_ + 1 == num_stages_;
    Ahead next;
    next.stage = wraps ? 0 : stage_ + 1;
    next.phase = phase_ ^ (wraps ? 1 : 0);
    next.keys = keys_of(next.stage);
    next.has_arrived = ptx::barrier_has_passed_if(asks, full(next.stage), next.phase);
    return next;
  }

  // Descriptors of a stage: K's, and the distance from it to V's.
  __device__ uint32_t keys_of(int stage) const {
    return first_keys_ + stage * (Traits::kStageBytes / 16);
  }
  static constexpr uint32_t kValuesAfterKeys = Traits::kTileBytes / 16;

  // All tiles of an item, by a warpgroup. The caller advances past the last tile's stage.
  //
  // A step computes q K^T of one tile and P V of the one before. The two warpgroups run
  // independently: making them take turns at the matrix units gained nothing.
  __device__ Tile attend_item(Tile tile) {
    if constexpr (Traits::kWarpgroupProducts) {
      load_queries();
      Scores score;
      Probabilities probability;
      float larger[2];
      int limit[2];
      find_limits(limit, tile);
      clear_tile_padding(tile);
      uint32_t keys = keys_of(stage_);
      wgmma::fence();
      rows_.start_keys(score, keys);
      wgmma::wait<0>();
      wgmma::settle(score);
      rows_.mask(score, tile.begin, limit);
      if (rows_.softmax.is_exceeded(score, larger, p_.scale_log2)) rows_.follow(larger);
      rows_.softmax.soften(score, p_.scale_log2);
      Ahead next = look_ahead(true);
      while (!(tile.flags & Tile::kLast)) {
        const int previous = stage_;  // P V of this stage is next
        const uint32_t values = keys + kValuesAfterKeys;
        stage_ = next.stage;
        phase_ = next.phase;
        keys = next.keys;
        if (!next.has_arrived) ptx::barrier_wait(full(stage_), phase_);
        rows_.softmax.add(score);  // after a branch: see Softmax::add
        rows_.pack_probabilities(probability, score);
        bool exceeded;
        if (tile.num_whole > 0) {
          --tile.num_whole;
          exceeded = take_step<false>(score, probability, larger, tile, keys, values, next);
        } else {
          tile = read_tile();
          exceeded = take_step<true>(score, probability, larger, tile, keys, values, next);
        }
        release(previous);
        if (exceeded) rows_.follow(larger);
        rows_.softmax.soften(score, p_.scale_log2);
      }
      rows_.softmax.add(score);
      rows_.pack_probabilities(probability, score);
      wgmma::fence();
      rows_.start_values(probability, keys + kValuesAfterKeys);
      wgmma::wait<0>();
      wgmma::settle(rows_.out);
      release(stage_);
    }
    return tile;
  }

  // Computes new scores while the old probabilities are multiplied by the previous stage's V; true
  // if a score exceeds its maximum. ptxas waits for all products at the first branch, so there is
  // none between the waits. It also hoists the last wait above the maxima unless a memory read that
  // depends on them lies between: the look-ahead at the next stage is that read. It asks only if no
  // maximum is exceeded; otherwise the caller waits for the stage.
  template <bool kMasked>
  __device__ bool take_step(Scores& score, const Probabilities& probability, float (&larger)[2],
                            const Tile& tile, uint32_t keys, uint32_t values, Ahead& next) {
    int limit[2];
    if constexpr (kMasked) {
      find_limits(limit, tile);
      clear_tile_padding(tile);
    }
    wgmma::fence();
    rows_.start_keys(score, keys);
    rows_.start_values(probability, values);
    wgmma::wait<1>();
    wgmma::settle(score);
    if constexpr (kMasked) rows_.mask(score, tile.begin, limit);
    const bool exceeded = rows_.softmax.is_exceeded(score, larger, p_.scale_log2);
    next = look_ahead(!exceeded);
    wgmma::wait<0>();
    wgmma::settle(rows_.out);
    return exceeded;
  }

  // One tile, by a single warp.
  __device__ void attend_tile(const Tile& tile, int stage) {
    if (tile.flags & Tile::kFirst) load_queries();
    const uint32_t k = shared_.k(stage), v = shared_.v(stage);
    int limit[2] = {};
    if (is_whole(tile)) {
      rows_.template attend<false>(shared_.q(), first_row(), k, v, 0, limit, p_.scale_log2);
    } else {
      find_limits(limit, tile);
      clear_tile_padding(tile);
      rows_.template attend<true>(shared_.q(), first_row(), k, v, tile.begin, limit, p_.scale_log2);
    }
  }

  // If only some rows of a warpgroup exist, the others compute with whatever is in shared memory,
  // and their results are dropped.
  __device__ void load_queries() {
    rows_.load_queries(shared_.q(), first_row());
    rows_.clear();
    if (Traits::kQueriesInRegisters) release_queries();
  }

  // Every warp calls this once per item, even without rows: the next q replaces all rows at once.
  __device__ void release_queries() {
    __syncwarp();
    if (lane_ == 0) ptx::barrier_arrive(&control_.queries_empty);
  }

  __device__ int first_row() const { return kWarpRows * warp_; }

  // The item's row that is this thread's r-th.
  __device__ int row_of(int r) const { return first_row() + lane_ / 4 + 8 * r; }

  // ------------------------------------------------------------------ the end of an item

  __device__ void finish(const Tile& tile) {
    const Target* targets = control_.targets[tile.targets];
    if (!Traits::kQueriesInRegisters) release_queries();
    if (first_row() < tile.num_rows) {
      rows_.softmax.finish_sums();
      if constexpr (Traits::kHeadDim <= 128) {
        write_rows<0, 2>(tile, targets);
      } else {  // packing two rows at once would spill
        write_rows<0, 1>(tile, targets);
        write_rows<1, 1>(tile, targets);
      }
    }
    __syncwarp();
    if (lane_ == 0) ptx::barrier_arrive(&control_.targets_empty[tile.targets]);
  }

  // Writes kRows of the thread's two rows, from the kFirst-th on. Four lanes share a row; of every
  // 8 columns the lane with lane % 4 = i has columns 2 i and 2 i + 1.
  template <int kFirst, int kRows>
  __device__ void write_rows(const Tile& tile, const Target* targets) {
    constexpr int kSteps = Traits::kHeadDim / 8;
    const int quarter = lane_ % 4;
    int q_head[kRows];
    Target target[kRows];
    bool is_state[kRows];
    float normalizer[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int row = row_of(kFirst + r), t = row / p_.group_size;
      q_head[r] = tile.head * p_.group_size + row - t * p_.group_size;
      target[r] = row < tile.num_rows ? targets[t] : kNowhere;
      is_state[r] = target[r] >= 0;
      normalizer[r] = rows_.softmax.normalizer(kFirst + r);
    }
    const auto value = [&](int r, int j, int i) { return rows_.out[j][2 * (kFirst + r) + i]; };
    // Pairs of columns c and c + 8.
    const auto packed = pack_rows<kSteps, 1, 4>(is_state, normalizer, [&](int r, int i) {
      return make_float2(value(r, i / 2 * 2, i % 2), value(r, i / 2 * 2 + 1, i % 2));
    });
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (target[r] == kNowhere) continue;
      const TargetRow<Traits> row(p_, target[r], q_head[r]);
      const float lse_log2 = rows_.softmax.lse_log2(kFirst + r);
      if (is_state[r]) {
#pragma unroll
        for (int j = 0; j < kSteps; j += 2) {
          __stcg(reinterpret_cast<uint2*>(row.state(0) + 8 * j + 4 * quarter),
                 make_uint2(packed.pairs[r][j], packed.pairs[r][j + 1]));
        }
        if (quarter == 0) row.write_state_lse(0, {lse_log2, packed.scale[r]});
      } else {
#pragma unroll
        for (int j = 0; j < kSteps; ++j) {
          *reinterpret_cast<uint32_t*>(row.out(0) + 8 * j + 2 * quarter) =
              pack<T>(value(r, j, 0) * normalizer[r], value(r, j, 1) * normalizer[r]);
        }
        if (quarter == 0) row.write_lse(0, lse_log2);
      }
    }
  }

  const AttentionParams& p_;
  const SharedMemory<Traits>& shared_;
  Control& control_;
  const int lane_, warp_;
  const int num_stages_;       // of the ring
  const uint32_t first_full_;  // address of the first stage's barrier
  const uint32_t first_keys_;  // descriptor of its K
  RowTile<Traits> rows_;
  int stage_ = 0;
  uint32_t phase_ = 0;
};

}  // namespace hf_cascade
