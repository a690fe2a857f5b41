// A leaf warp: takes leaves' items, fetches their KV and computes on it, without other warps.
//
//   Owns      A ring of buffers, each with 32 tokens of one head's K and V (16 KB at head_dim 128),
//             its tickets, and up to 8 query rows (leaf_rows.cuh). It shares nothing with other
//             warps, so it only ever waits for memory.
//   Moves     Tiles, not items: while it computes on one item, tiles of the next one are in flight.
//             So short leaves keep as many bytes in flight as long ones.
//   Computes  Beside the matrix warps: leaves are bound by memory, shared nodes with many rows by
//             the matrix units.
//   Writes    The item's rows to their target.
#pragma once

#include <cstddef>

#include "leaf_rows.cuh"
#include "packed_rows.cuh"
#include "page_window.cuh"
#include "target_row.cuh"

namespace hf_cascade {

// Arrivals that complete a buffer: one lane's, beside the copy engine's bytes; or each lane's
// copies.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
constexpr int kLeafArrivals = 1;
#else
constexpr int kLeafArrivals = 32;
#endif

// Called by the warp that will own the ring.
__device__ inline void init_leaf_ring(LeafRing& ring) {
  if (ptx::elect_lane()) {
#pragma unroll
    for (uint64_t& barrier : ring.full) ptx::barrier_init(&barrier, kLeafArrivals);
    ptx::fence_async_proxy();  // the copy engine completes phases of these
  }
  __syncwarp();
}

template <typename Traits>
class LeafWarp {
 public:
  // buffers: shared memory for num_buffers buffers.
  __device__ LeafWarp(const AttentionParams& params, const WorkHeader& header, LeafRing& ring,
                      unsigned char* buffers, int num_buffers)
      : p_(params),
        ring_(ring),
        lane_(threadIdx.x % 32),
        num_buffers_(num_buffers),
        buffers_(ptx::shared_address(buffers)) {
    num_items_ = header.num_leaf_items;
  }

  // The first ticket needs no drawing. Neighbouring items go to different multiprocessors.
  static __device__ int first_ticket(int place) {
    return place * static_cast<int>(gridDim.x) + static_cast<int>(blockIdx.x);
  }

  // For one of `num_places` warps per CTA that take leaves' items from the start. first_words: this
  // lane's word of the warp's first item. False if there is no item.
  __device__ bool start(int place, int num_places, int32_t first_words) {
    first_drawn_ = num_places * static_cast<int>(gridDim.x);
    ticket_ = first_ticket(place);
    words_ = first_words;
    is_early_ = p_.may_start_early;
    return ticket_ < num_items_;
  }

  // For a matrix warp that joins those later. False if there is no item.
  __device__ bool join(int num_places) {
    ptx::wait_for_previous_kernel();  // passes at once: the producer has waited already
    first_drawn_ = num_places * static_cast<int>(gridDim.x);
    become_next_item();
    return ticket_ < num_items_;
  }

  // Processes items until none is left.
  __device__ void run() {
    window_.send_for(run_of(words_));
    for (;;) {
      while (num_fetched_ < num_buffers_ && fetch_tile()) {
      }
      __syncwarp();  // makes visible what one lane stored of the tiles
      if (num_fetched_ == 0) break;
      look_ahead();
      wait_if_early();
      compute();
      __syncwarp();  // all lanes have read the buffer that the next tile overwrites
    }
  }

 private:
  // If the kernel before this one only appends to leaves, all their tokens but the last can be read
  // early; q cannot.
  __device__ void wait_if_early() {
    if (!is_early_) return;
    ptx::wait_for_previous_kernel();
    is_early_ = false;
  }

  // ------------------------------------------------------------------ items

  // Draws the next item's ticket when one tile of the current item is left to be fetched, and loads
  // the item's words, one per lane, a tile later. Drawn earlier, this warp would hold two items
  // while others found none. Only if items are too short to hide the draw is one ticket kept in
  // reserve.
  __device__ void look_ahead() {
    if (is_early_ || is_next_known_) return;
    if (is_drawn_) {
      load_next_item();
    } else if (!is_item_open_ || start_ + kLeafTokens >= end_slot_) {
      draw_ticket();
    }
  }

  __device__ void draw_ticket() {
    if (lane_ == 0 && first_drawn_ < num_items_) drawn_ = ptx::count_up(p_.ticket + 1);
    is_drawn_ = true;
  }

  __device__ void load_next_item() {
    next_ticket_ = __shfl_sync(~0u, drawn_, 0) + first_drawn_;
    is_drawn_ = false;
    next_words_ = 0;
    if (next_ticket_ < num_items_) {
      if (lane_ < kItemWords) next_words_ = load_word(p_.work.leaf_item(next_ticket_), lane_);
      if (is_short_) draw_ticket();
    }
    is_next_known_ = true;
  }

  // Draws and loads now what `look_ahead` has not.
  __device__ void become_next_item() {
    if (!is_next_known_) {
      if (!is_drawn_) draw_ticket();
      load_next_item();
    }
    ticket_ = next_ticket_;
    words_ = next_words_;
    is_next_known_ = false;
  }

  __device__ PageWindow::Run run_of(int32_t words) const {
    return {p_.tree.kv_indices + item_word(words, offsetof(Item, pages)),
            align_slot(item_word(words, offsetof(Item, begin_slot))),
            item_word(words, offsetof(Item, end_slot)), p_.page_size_log2};
  }

  __device__ void take_next_item() {
    is_next_due_ = false;
    wait_if_early();
    become_next_item();
    delay(p_, ~ticket_);
    if (ticket_ < num_items_) window_.send_for(run_of(words_));
  }

  __device__ void begin_item() {
    begin_slot_ = item_word(words_, offsetof(Item, begin_slot));
    end_slot_ = item_word(words_, offsetof(Item, end_slot));
    window_.open(
        item_word(words_, offsetof(Item, first_pages) + lane_ % kItemPages * sizeof(int32_t)));
    start_ = align_slot(begin_slot_);
    block_ = 0;
    is_short_ = start_ + 2 * kLeafTokens >= end_slot_;
  }

  // ------------------------------------------------------------------ tiles

  // Starts fetching the next tile; false if there is none.
  __device__ bool fetch_tile() {
    if (!is_item_open_) {
      if (is_next_due_) take_next_item();
      if (ticket_ >= num_items_) return false;
      begin_item();
      is_item_open_ = true;
    }
    window_.move_to(block_, kItemPages, [&] { return run_of(words_); });
    const int next_start = start_ + kLeafTokens;
    const bool is_last = next_start >= end_slot_;
    if (is_last && item_word(words_, offsetof(Item, grows))) wait_if_early();
    LeafTile tile = {};
    tile.flags = (block_ == 0 ? LeafTile::kFirst : 0) | (is_last ? LeafTile::kLast : 0);
    tile.begin = max(0, begin_slot_ - start_);
    tile.end = min(kLeafTokens, end_slot_ - start_);
    tile.head = item_word(words_, offsetof(Item, head));
    tile.token = item_word(words_, offsetof(Item, token));
    tile.target = item_word(words_, offsetof(Item, target));
    load(tile);
    fetch_buffer_ = after(fetch_buffer_);
    ++num_fetched_;
    start_ = next_start;
    block_ += LeafRows<Traits>::kBlocks;
    is_item_open_ = !is_last;
    is_next_due_ = is_last;
    return true;
  }

  // With the copy engine, rows of the buffer outside the tile's tokens hold other data; `compute`
  // clears them in V.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  __device__ void load(const LeafTile& tile) {
    constexpr int kBlocks = LeafRows<Traits>::kBlocks;
    uint64_t* full = &ring_.full[fetch_buffer_];
    const uint32_t k = k_buffer(fetch_buffer_), v = v_buffer(fetch_buffer_);
    int page[kBlocks], slot[kBlocks];
#pragma unroll
    for (int c = 0; c < kBlocks; ++c) {
      page[c] = window_.page_of(block_ + c);
      slot[c] = (start_ + c * kBoxTokens) & ((1 << p_.page_size_log2) - 1);
    }
    const int blocks = ceil_div(tile.end, kBoxTokens);  // 0 for an empty item
    if (ptx::elect_lane()) {
      ring_.tiles[fetch_buffer_] = tile;
      ptx::barrier_expect_bytes(full, 2 * blocks * Traits::kBlockBytes);
#pragma unroll
      for (int c = 0; c < kBlocks; ++c) {
        if (c >= blocks) break;
#pragma unroll
        for (int i = 0; i < Traits::kBlockCopies; ++i) {
          const int offset = c * Traits::kBlockBytes + i * kBoxTokens * 128;
          ptx::copy_box(k + offset, &p_.leaf_k_map, full, i * kBoxValues, slot[c], 0, tile.head,
                        page[c]);
          ptx::copy_box(v + offset, &p_.leaf_v_map, full, i * kBoxValues, slot[c], 0, tile.head,
                        page[c]);
        }
      }
      ptx::barrier_arrive(full);
    }
    __syncwarp();
  }
#else
  __device__ void load(const LeafTile& tile) {
    if (lane_ == 0) ring_.tiles[fetch_buffer_] = tile;
    const uint32_t k = k_buffer(fetch_buffer_), v = v_buffer(fetch_buffer_);
    const char* k_pool = static_cast<const char*>(p_.k_pool);
    const char* v_pool = static_cast<const char*>(p_.v_pool);
#pragma unroll
    for (int c = 0; c < LeafRows<Traits>::kBlocks; ++c) {
      const int page = window_.page_of(block_ + c);
      const int slot = (start_ + c * kBoxTokens) & ((1 << p_.page_size_log2) - 1);
      const int64_t first_row =
          ((int64_t{page} * p_.num_kv_heads + tile.head) << p_.page_size_log2) + slot;
#pragma unroll
      for (int i = 0; i < kBoxTokens * Traits::kRowChunks / 32; ++i) {
        const int row = (32 * i + lane_) / Traits::kRowChunks;
        const int chunk = (32 * i + lane_) % Traits::kRowChunks;
        const int token = c * kBoxTokens + row;
        const bool exists = token >= tile.begin && token < tile.end;
        const int64_t source = ((first_row + row) * Traits::kRowChunks + chunk) * 16;
        const uint32_t place = c * Traits::kBlockBytes + swizzled<kBoxTokens>(0, row, chunk);
        ptx::copy_async_16(k + place, k_pool + source, exists);
        ptx::copy_async_16(v + place, v_pool + source, exists);
      }
    }
    ptx::barrier_arrive_after_copies(&ring_.full[fetch_buffer_]);
  }
#endif

  // Computes on the oldest tile.
  __device__ void compute() {
    const LeafTile tile = ring_.tiles[buffer_];
    if (tile.flags & LeafTile::kFirst) {
      rows_.clear();
      rows_.load_queries(query_row(tile));
    }
    ptx::barrier_wait(&ring_.full[buffer_], (phases_ >> buffer_) & 1);
    phases_ ^= 1u << buffer_;
    if (tile.begin > 0 || tile.end < kLeafTokens) {
#pragma unroll
      for (int c = 0; c < LeafRows<Traits>::kBlocks; ++c) {
        clear_rows<Traits, kBoxTokens>(v_buffer(buffer_) + c * Traits::kBlockBytes,
                                       tile.begin - c * kBoxTokens, tile.end - c * kBoxTokens);
      }
    }
    rows_.attend(k_buffer(buffer_), v_buffer(buffer_), tile.begin, tile.end, p_.scale_log2);
    if (tile.flags & LeafTile::kLast) finish(tile);
    buffer_ = after(buffer_);
    --num_fetched_;
  }

  // This thread's query row, lane / 4 of the group; null if there is none.
  __device__ const void* query_row(const LeafTile& tile) const {
    const int row = lane_ / 4;
    if (row >= p_.group_size || tile.token < 0) return nullptr;
    const int64_t chunk =
        tile.token * p_.q_token_stride + (tile.head * p_.group_size + row) * p_.q_head_stride;
    return static_cast<const char*>(p_.q) + chunk * 16;
  }

  // Writes the finished rows. The 8 lanes with the same lane % 4 share a row; of every 16 values
  // the lane with lane / 4 = i has i and i + 8. (Both rows share one branch to keep the code short,
  // see cascade_attention.cuh.)
  __device__ void finish(const LeafTile& tile) {
    using T = typename Traits::T;
    constexpr int kSteps = LeafRows<Traits>::kDepthSteps;
    const int first_row = 2 * (lane_ % 4), eighth = lane_ / 4;
    rows_.softmax.finish_sums();
    if (tile.token < 0) return;
    const bool exists[2] = {first_row < p_.group_size, first_row + 1 < p_.group_size};
    const float normalizer[2] = {rows_.softmax.normalizer(0), rows_.softmax.normalizer(1)};
    const auto value = [&](int r, int j) {
      return make_float2(rows_.out[j][r], rows_.out[j][2 + r]);
    };
    const TargetRow<Traits> first(p_, tile.target, tile.head * p_.group_size + first_row);
    if (tile.target >= 0) {
      const auto packed = pack_rows<kSteps, 4, 32>(exists, normalizer, value);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (!exists[r]) continue;
        __half* state = first.state(r);
#pragma unroll
        for (int j = 0; j < kSteps; ++j) {
          __stcg(reinterpret_cast<uint32_t*>(state + 16 * j + 2 * eighth), packed.pairs[r][j]);
        }
        if (eighth == 0) first.write_state_lse(r, {rows_.softmax.lse_log2(r), packed.scale[r]});
      }
    } else {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (!exists[r]) continue;
        T* out = first.out(r);
#pragma unroll
        for (int j = 0; j < kSteps; ++j) {
          const float2 pair = value(r, j);
          out[16 * j + eighth] = from_float<T>(pair.x * normalizer[r]);
          out[16 * j + eighth + 8] = from_float<T>(pair.y * normalizer[r]);
        }
        if (eighth == 0) first.write_lse(r, rows_.softmax.lse_log2(r));
      }
    }
  }

  __device__ int after(int buffer) const { return buffer + 1 == num_buffers_ ? 0 : buffer + 1; }
  __device__ uint32_t k_buffer(int i) const { return buffers_ + i * Traits::kBufferBytes; }
  __device__ uint32_t v_buffer(int i) const { return k_buffer(i) + Traits::kBufferBytes / 2; }

  const AttentionParams& p_;
  LeafRing& ring_;
  const int lane_;
  const int num_buffers_;
  const uint32_t buffers_;
  int num_items_;
  bool is_early_ = false;  // the kernel before this one may still run

  int ticket_ = 0, next_ticket_ = 0, first_drawn_ = 0;
  int32_t words_ = 0, next_words_ = 0;  // this lane's word of these items
  int drawn_ = 0;                       // the draw's result, in lane 0
  bool is_drawn_ = false;               // and `load_next_item` has not read it
  bool is_next_known_ = false;          // the next item's words are being loaded
  bool is_short_ = false;               // the current item has two tiles at most
  bool is_next_due_ = false;            // all tiles of the current item are being fetched
  // The item whose tiles are being fetched.
  bool is_item_open_ = false;
  int begin_slot_ = 0, end_slot_ = 0;
  int start_ = 0;  // slot of the next tile
  int block_ = 0;  // number, within the item, of the block of 16 tokens that starts there
  PageWindow window_;
  int fetch_buffer_ = 0, buffer_ = 0;  // the next to fill, the next to compute on
  int num_fetched_ = 0;
  uint32_t phases_ = 0;  // bit i: the parity to wait for at buffer i
  LeafRows<Traits> rows_;
};

}  // namespace hf_cascade
