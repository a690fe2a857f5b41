// A leaf warp: takes leaves' items, fetches their KV and computes on it, all by itself.
//
//   Owns     a ring of slots of 16 tokens of K and V, one head's (8 KB at head_dim 128), its
//   tickets
//            and up to 8 query rows (leaf_rows.cuh). It shares nothing with other warps, so its
//            only waits are for memory.
//   Moves    blocks, not items: while it computes on one item the next one's blocks are on their
//            way, so short leaves keep as many bytes in flight as long ones do.
//   Computes two blocks at a time, beside the matrix warps: leaves are bound by memory, shared
//            nodes with many rows by the matrix units.
//   Writes   the item's rows to their target.
#pragma once

#include <cstddef>

#include "leaf_rows.cuh"
#include "target_row.cuh"

namespace hf_cascade {

// What completes a slot: the copy engine's bytes and lane 0, or each lane's copies.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
constexpr int kLeafArrivals = 1;
#else
constexpr int kLeafArrivals = 32;
#endif

template <typename Traits>
class LeafWarp {
 public:
  __device__ LeafWarp(const AttentionParams& params, const SharedMemory<Traits>& shared, int warp)
      : p_(params), ring_(shared.control().leaf_rings[warp]), lane_(threadIdx.x % 32) {
    const WorkHeader& header = *params.work.header;
    if (!params.may_start_early) ptx::wait_for_previous_kernel();
    num_items_ = header.num_leaf_items;
    items_ = params.work.items + header.num_shared_items;
    num_slots_ = shared.num_leaf_slots(header);
    slots_ = shared.leaf_slots(header, warp);
    num_leaf_warps_ = kLeafWarps * static_cast<int>(gridDim.x);
    // Neighbouring items on different multiprocessors.
    ticket_ = warp * static_cast<int>(gridDim.x) + static_cast<int>(blockIdx.x);
  }

  __device__ void run() {
    if (ticket_ >= num_items_) return;
    words_ = load_item(ticket_);
    next_ticket_ = ticket_ + num_leaf_warps_;
    next_words_ = load_item(next_ticket_);
    pages_ahead_ = load_pages(words_, 0);
    if (p_.may_start_early) ptx::wait_for_previous_kernel();  // the newest tokens, and q
    draw_ticket();
    for (;;) {
      while (num_fetched_ < num_slots_ && fetch_block()) {
      }
      __syncwarp();  // what lane 0 stored of the blocks
      if (num_fetched_ == 0) return;
      if (is_next_due_) take_next_item();
      compute();
      __syncwarp();  // all lanes have read the slots that the next blocks go to
    }
  }

 private:
  // ------------------------------------------------------------------ items

  // A lane a word. An item's words are loaded one item ahead, its ticket drawn two ahead; the first
  // two tickets of a warp need no drawing.
  static constexpr int kItemWords = sizeof(Item) / sizeof(int32_t);

  __device__ int32_t load_item(int ticket) const {
    if (ticket >= num_items_ || lane_ >= kItemWords) return 0;
    return reinterpret_cast<const int32_t*>(items_ + ticket)[lane_];
  }

  __device__ void draw_ticket() {
    if (lane_ == 0) drawn_ = atomicAdd(p_.ticket + 1, 1);
  }

  static __device__ int32_t word(int32_t words, size_t offset) {
    return __shfl_sync(~0u, words, static_cast<int>(offset / sizeof(int32_t)));
  }

  // The pages of blocks [first, first + 32) of the item, a lane a block.
  __device__ int32_t load_pages(int32_t words, int first) const {
    const int begin_slot = word(words, offsetof(Item, begin_slot));
    const int end_slot = word(words, offsetof(Item, end_slot));
    const int pages = word(words, offsetof(Item, pages));
    const int slot = align_slot(begin_slot) + (first + lane_) * kBoxTokens;
    return slot < end_slot ? p_.tree.kv_indices[pages + (slot >> p_.page_size_log2)] : 0;
  }

  __device__ void take_next_item() {
    is_next_due_ = false;
    ticket_ = next_ticket_;
    delay(p_, ~ticket_);
    words_ = next_words_;
    next_ticket_ = __shfl_sync(~0u, drawn_, 0) + 2 * num_leaf_warps_;
    next_words_ = load_item(next_ticket_);
    draw_ticket();
  }

  __device__ void begin_item() {
    begin_slot_ = word(words_, offsetof(Item, begin_slot));
    end_slot_ = word(words_, offsetof(Item, end_slot));
    head_ = word(words_, offsetof(Item, head));
    token_ = word(words_, offsetof(Item, token));
    target_ = word(words_, offsetof(Item, target));
    block_ = 0;
    num_blocks_ = max(1, ceil_div(end_slot_ - align_slot(begin_slot_), kBoxTokens));
  }

  // ------------------------------------------------------------------ blocks

  // Sends for the next block; false if there is none.
  __device__ bool fetch_block() {
    if (block_ == num_blocks_) {
      if (is_next_due_) take_next_item();
      if (ticket_ >= num_items_) return false;
      begin_item();
    }
    if (block_ % 32 == 0) {
      pages_ = pages_ahead_;
      const bool has_more = block_ + 32 < num_blocks_;
      pages_ahead_ = load_pages(has_more ? words_ : next_words_, has_more ? block_ + 32 : 0);
    }
    const int start = align_slot(begin_slot_) + block_ * kBoxTokens;
    LeafBlock block;
    block.begin = max(0, begin_slot_ - start);
    block.end = min(kBoxTokens, end_slot_ - start);
    block.head = head_;
    block.token = token_;
    block.target = target_;
    block.flags = (block_ == 0 ? LeafBlock::kFirst : 0) |
                  (block_ % 2 == 0 && block_ + 1 < num_blocks_ ? LeafBlock::kPaired : 0) |
                  (block_ + 1 == num_blocks_ ? LeafBlock::kLast : 0);
    if (lane_ == 0) ring_.blocks[fetch_slot_] = block;
    load_block(block, __shfl_sync(~0u, pages_, block_ % 32), start);
    fetch_slot_ = after(fetch_slot_);
    ++num_fetched_;
    if (++block_ == num_blocks_) is_next_due_ = true;
    return true;
  }

  // Rows of the slot outside the block's tokens hold whatever is near; `compute` clears them in V.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  __device__ void load_block(const LeafBlock& block, int page, int start) {
    uint64_t* full = &ring_.full[fetch_slot_];
    if (ptx::elect_lane()) {
      if (block.end > 0) {
        constexpr int kPanelBytes = kBoxTokens * 128;
        const int offset = start & ((1 << p_.page_size_log2) - 1);
        const uint32_t k = k_slot(fetch_slot_), v = v_slot(fetch_slot_);
        ptx::barrier_expect_bytes(full, 2 * Traits::kPanels * kPanelBytes);
#pragma unroll
        for (int panel = 0; panel < Traits::kPanels; ++panel) {
          ptx::copy_box(k + panel * kPanelBytes, &p_.k_map, full, panel * kBoxValues, offset,
                        block.head, page);
          ptx::copy_box(v + panel * kPanelBytes, &p_.v_map, full, panel * kBoxValues, offset,
                        block.head, page);
        }
      }
      ptx::barrier_arrive(full);
    }
    __syncwarp();
  }
#else
  __device__ void load_block(const LeafBlock& block, int page, int start) {
    const int offset = start & ((1 << p_.page_size_log2) - 1);
    const int64_t first_row =
        ((int64_t{page} * p_.num_kv_heads + block.head) << p_.page_size_log2) + offset;
    const uint32_t k = k_slot(fetch_slot_), v = v_slot(fetch_slot_);
#pragma unroll
    for (int i = 0; i < kBoxTokens * Traits::kRowChunks / 32; ++i) {
      const int row = (32 * i + lane_) / Traits::kRowChunks;
      const int chunk = (32 * i + lane_) % Traits::kRowChunks;
      const bool exists = row >= block.begin && row < block.end;
      const int64_t source = ((first_row + row) * Traits::kRowChunks + chunk) * 16;
      const uint32_t place = swizzled<kBoxTokens>(0, row, chunk);
      ptx::copy_async_16(k + place, static_cast<const char*>(p_.k_pool) + source, exists);
      ptx::copy_async_16(v + place, static_cast<const char*>(p_.v_pool) + source, exists);
    }
    ptx::barrier_arrive_after_copies(&ring_.full[fetch_slot_]);
  }
#endif

  // The oldest block, or the oldest two of one item.
  __device__ void compute() {
    LeafBlock block = ring_.blocks[slot_];
    if (block.flags & LeafBlock::kFirst) {
      rows_.clear();
      rows_.load_queries(query_row(block));
    }
    if (num_slots_ > 1 && block.flags & LeafBlock::kPaired) {
      const int second = after(slot_);
      const LeafBlock next = ring_.blocks[second];
      await(slot_, block);
      await(second, next);
      rows_.template attend<2>({k_slot(slot_), k_slot(second)}, {v_slot(slot_), v_slot(second)},
                               {block.begin, next.begin}, {block.end, next.end}, p_.scale_log2);
      slot_ = after(second);
      num_fetched_ -= 2;
      block = next;
    } else {
      await(slot_, block);
      rows_.template attend<1>({k_slot(slot_)}, {v_slot(slot_)}, {block.begin}, {block.end},
                               p_.scale_log2);
      slot_ = after(slot_);
      --num_fetched_;
    }
    if (block.flags & LeafBlock::kLast) finish(block);
  }

  __device__ void await(int slot, const LeafBlock& block) {
    ptx::barrier_wait(&ring_.full[slot], (phases_ >> slot) & 1);
    phases_ ^= 1u << slot;
    if (block.begin > 0 || block.end < kBoxTokens) {
      clear_rows<Traits, kBoxTokens>(v_slot(slot), block.begin, block.end);
    }
  }

  // The query row of this thread: row lane / 4 of the group; null where there is none.
  __device__ const void* query_row(const LeafBlock& block) const {
    const int row = lane_ / 4;
    if (row >= p_.group_size || block.token < 0) return nullptr;
    const int64_t chunk =
        block.token * p_.q_token_stride + (block.head * p_.group_size + row) * p_.q_head_stride;
    return static_cast<const char*>(p_.q) + chunk * 16;
  }

  __device__ void finish(const LeafBlock& block) {
    rows_.softmax.finish_sums();
    if (block.token < 0) return;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = 2 * (lane_ % 4) + r;
      if (row >= p_.group_size) continue;
      const TargetRow<Traits> target(p_, block.target, block.head * p_.group_size + row);
      const float normalizer = rows_.softmax.normalizer(r);
#pragma unroll
      for (int j = 0; j < LeafRows<Traits>::kDepthSteps; ++j) {
        target.write(16 * j + lane_ / 4, rows_.out[j][r] * normalizer);
        target.write(16 * j + lane_ / 4 + 8, rows_.out[j][2 + r] * normalizer);
      }
      if (lane_ / 4 == 0) target.write_lse(rows_.softmax.lse_log2(r));
    }
  }

  __device__ int after(int slot) const { return slot + 1 == num_slots_ ? 0 : slot + 1; }
  __device__ uint32_t k_slot(int slot) const { return slots_ + slot * Traits::kSlotBytes; }
  __device__ uint32_t v_slot(int slot) const { return k_slot(slot) + Traits::kSlotBytes / 2; }

  const AttentionParams& p_;
  LeafRing& ring_;
  const int lane_;
  int num_items_, num_slots_, num_leaf_warps_;
  const Item* items_;
  uint32_t slots_;  // shared memory

  int ticket_, next_ticket_ = 0;
  int32_t words_ = 0, next_words_ = 0;  // the lane's word of these items
  int drawn_ = 0;                       // lane 0's
  bool is_next_due_ = false;            // all blocks of the item are sent for
  // The item whose blocks are being fetched.
  int begin_slot_ = 0, end_slot_ = 0, head_ = 0, token_ = 0;
  Target target_ = kNowhere;
  int block_ = 0, num_blocks_ = 0;
  int32_t pages_ = 0, pages_ahead_ = 0;  // of 32 blocks, and of the 32 after them
  int fetch_slot_ = 0, slot_ = 0;        // the next to fill, the next to compute on
  int num_fetched_ = 0;
  uint32_t phases_ = 0;  // bit s: the parity to wait for at slot s
  LeafRows<Traits> rows_;
};

}  // namespace hf_cascade
