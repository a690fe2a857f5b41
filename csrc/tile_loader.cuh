// Filling a stage: where a tile's K, V and q come from, and the copies that bring them.
//
//   Owns     the ring of stages (waits for `empty`, fills, signals `full`) and q of one item.
//   Moves    kKvTile tokens of K and of V of one head, whose first is a slot divisible by 16; and
//            the item's rows of q. On sm_90 by the copy engine, but for rows of q that are not
//            consecutive; else 16 bytes a lane and cp.async.
#pragma once

#include "attention_traits.cuh"
#include "page_window.cuh"
#include "ptx.cuh"

namespace hf_cascade {

template <typename Traits>
class TileLoader {
 public:
  __device__ TileLoader(const AttentionParams& params, const SharedMemory<Traits>& shared)
      : p_(params), shared_(shared), control_(shared.control()), lane_(threadIdx.x % 32) {}

 protected:
  // K and V of a tile, whose row 0 is the node's slot `start`, the first of the window's `block`,
  // to the stage that is next.
  __device__ void load_keys_and_values(const Tile& tile, int start, int block) {
    wait_for_stage();
    load_tile(tile, start, block);
  }

  // The item's q, with its first tile. Its tokens are rows of q from first_token on or, where that
  // is -1, those that control_.tokens names.
  __device__ void load_queries(const Tile& tile, int first_token) {
    wait_for_queries();
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    if (first_token >= 0 && p_.has_q_map) {
      load_query_box(tile.head, first_token);
      return;
    }
#endif
    load_query_rows(tile, first_token);
    has_query_rows_ = true;
  }

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  // The copy engine. Rows outside the item's tokens hold whatever is near; the matrix warps mask K
  // and clear V (`clear_rows`).
  //
  // One lane issues all copies, unrolled: spread over lanes they cost 95 clocks each, for the
  // instruction takes its operands from the warp's uniform registers, one lane after the other.
  __device__ void load_tile(const Tile& tile, int start, int block) {
    constexpr int kBoxes = Traits::kBlocks, kBoxBytes = kBoxTokens * 128;
    uint64_t* full = &control_.full[stage_];
    const uint32_t k = shared_.k(stage_), v = shared_.v(stage_);
    int page[kBoxes], slot[kBoxes];
#pragma unroll
    for (int box = 0; box < kBoxes; ++box) {
      page[box] = window_.page_of(block + box);
      slot[box] = (start + box * kBoxTokens) & ((1 << p_.page_size_log2) - 1);
    }
    const int boxes = ceil_div(tile.end, kBoxTokens);
    if (ptx::elect_lane()) {
      ptx::barrier_expect_bytes(full, 2 * boxes * Traits::kPanels * kBoxBytes);
#pragma unroll
      for (int box = 0; box < kBoxes; ++box) {
        if (box >= boxes) break;
#pragma unroll
        for (int panel = 0; panel < Traits::kPanels; ++panel) {
          const int offset = panel * Traits::kKvTile * 128 + box * kBoxBytes;
          ptx::copy_box(k + offset, &p_.k_map, full, panel * kBoxValues, slot[box], tile.head,
                        page[box]);
          ptx::copy_box(v + offset, &p_.v_map, full, panel * kBoxValues, slot[box], tile.head,
                        page[box]);
        }
      }
    }
    __syncwarp();
  }

  // As many tokens as an item can have; nothing is made of those that this one, or q, does not
  // have.
  __device__ void load_query_box(int head, int first_token) {
    constexpr int kPanelBytes = kRowsPerTile * 128;
    uint64_t* full = &control_.full[stage_];
    if (has_query_rows_) {
      ptx::fence_async_proxy();  // before the copy engine's writes
      __syncwarp();
      has_query_rows_ = false;
    }
    if (ptx::elect_lane()) {
      ptx::barrier_expect_bytes(full, p_.query_rows * Traits::kPanels * 128);
#pragma unroll
      for (int panel = 0; panel < Traits::kPanels; ++panel) {
        ptx::copy_box(shared_.q() + panel * kPanelBytes, &p_.q_map, full, panel * kBoxValues,
                      head * p_.group_size, first_token);
      }
    }
    __syncwarp();
  }
#else
  // 16 bytes a lane and copy. Rows outside the item's tokens are zeros, so that 0 * V is 0 whatever
  // the pool holds there.
  __device__ void load_tile(const Tile& tile, int start, int block) {
    // Where the lane's rows begin, in 16-byte chunks, and whether they are tokens of the item.
    constexpr int kRowsPerLane = Traits::kKvTile / 32;
    uint32_t row_chunk[kRowsPerLane], exists = 0;
#pragma unroll
    for (int j = 0; j < kRowsPerLane; ++j) {
      const int token = lane_ + 32 * j;
      const uint32_t page = window_.page_of(block + token / kBoxTokens);
      const uint32_t pool_row = ((page * p_.num_kv_heads + tile.head) << p_.page_size_log2) +
                                ((start + token) & ((1 << p_.page_size_log2) - 1));
      row_chunk[j] = pool_row * Traits::kRowChunks;
      exists |= uint32_t{token >= tile.begin && token < tile.end} << j;
    }
    const char* k_pool = static_cast<const char*>(p_.k_pool);
    const char* v_pool = static_cast<const char*>(p_.v_pool);
    const uint32_t k = shared_.k(stage_), v = shared_.v(stage_);
#pragma unroll
    for (int i = 0; i < Traits::kKvTile * Traits::kRowChunks / 32; ++i) {
      const int row = (32 * i + lane_) / Traits::kRowChunks;
      const int chunk = (32 * i + lane_) % Traits::kRowChunks;
      // 32 rows are a whole number of rounds, so a round's rows all belong to one register.
      const uint32_t begin =
          __shfl_sync(~0u, row_chunk[32 * i / Traits::kRowChunks / 32], row % 32);
      const bool row_exists =
          __shfl_sync(~0u, exists, row % 32) >> (32 * i / Traits::kRowChunks / 32) & 1;
      const int64_t offset = (int64_t{begin} + chunk) * 16;
      const uint32_t place = swizzled<Traits::kKvTile>(0, row, chunk);
      ptx::copy_async_16(k + place, k_pool + offset, row_exists);
      ptx::copy_async_16(v + place, v_pool + offset, row_exists);
    }
  }
#endif

  // 16 bytes a lane and copy. Rows that the item does not have keep what they hold: nothing is made
  // of them.
  __device__ void load_query_rows(const Tile& tile, int first_token) {
    // Lanes beyond these rows (head_dim 80 and 96) copy what others do.
    constexpr int kRowsAtOnce = 32 / Traits::kRowChunks;
    const int lane_row = lane_ / Traits::kRowChunks, chunk = lane_ % Traits::kRowChunks;
    // Row r of the item is query token r / group_size, head r % group_size of the group.
    const int group_reciprocal = ceil_div(1 << 16, p_.group_size);
#pragma unroll 4
    for (int row = lane_row; row < tile.num_rows; row += kRowsAtOnce) {
      const int t = (row * group_reciprocal) >> 16;  // exact: both are 128 at most
      const int head = tile.head * p_.group_size + row - t * p_.group_size;
      const int token = first_token < 0 ? control_.tokens[t] : first_token + t;
      const int64_t source_chunk = token * p_.q_token_stride + head * p_.q_head_stride + chunk;
      ptx::copy_async_16(swizzled<kRowsPerTile>(shared_.q(), row, chunk),
                         static_cast<const char*>(p_.q) + source_chunk * 16, true);
    }
  }

  // Until the matrix warps have taken the item before's.
  __device__ void wait_for_queries() {
    ptx::barrier_wait(&control_.queries_empty, query_phase_ ^ 1);
    query_phase_ ^= 1;
  }

  // ------------------------------------------------------------------ the ring

  // Barriers start in phase 0; waiting for parity 1 passes at once, so a fresh ring is empty.
  __device__ void wait_for_stage() { ptx::barrier_wait(&control_.empty[stage_], phase_ ^ 1); }

  // The matrix warps wait for 33 arrivals: each lane's copies, and lane 0 for what it stored.
  __device__ void hand_over(const Tile& tile) {
    if (lane_ == 0) control_.tiles[stage_] = tile;
    ptx::barrier_arrive_after_copies(&control_.full[stage_]);
    __syncwarp();  // the targets that other lanes stored come before lane 0's arrival
    if (lane_ == 0) ptx::barrier_arrive(&control_.full[stage_]);
    if (++stage_ == num_stages_) {
      stage_ = 0;
      phase_ ^= 1;
    }
  }

  const AttentionParams& p_;
  const SharedMemory<Traits>& shared_;
  Control& control_;
  const int lane_;
  PageWindow window_;
  bool has_query_rows_ = false;  // q's place holds what load_query_rows wrote
  int num_stages_ = 0;           // of the ring
  int stage_ = 0;
  uint32_t phase_ = 0;
  uint32_t query_phase_ = 0;  // of queries_empty, the one that the current item's q begins in
};

}  // namespace hf_cascade
