// The producer warp of a decoding launch: takes shared nodes' items and sends their tiles
// (tile_loader.cuh) to the matrix warps.
//
// It does not wait between items: while the matrix warps finish one, tiles of the next are in
// flight.
//   Owns  The CTA's tickets for shared items.
#pragma once

#include <cstddef>

#include "item_tiles.cuh"

namespace hf_cascade {

template <typename Traits>
class NodeProducer : ItemTiles<Traits> {
 public:
  using ItemTiles<Traits>::ItemTiles;

  // first_words: this lane's word of the CTA's first item, if there is one.
  __device__ void run(const WorkHeader& header, int32_t first_words) {
    // If the kernel before this one only appends to leaves, shared nodes' items can start beside
    // it.
    is_early_ = p_.may_start_early;
    if (!is_early_ || !header.shared_are_still) wait_for_previous_kernel();
    num_items_ = header.num_shared_items;
    num_stages_ = shared_.num_ring_stages(header);
    next_ = first_words;
    while (next_ticket_ < num_items_) send_item();
    if (is_early_) wait_for_previous_kernel();
    if (num_items_ > 0) send_stop();  // else no matrix warp waits for a tile
  }

 private:
  using Base = ItemTiles<Traits>;
  using Base::kTokensPerLane;
  using typename Base::Targets;

  // The merge can start once all CTAs are here; by then the kernel before this one has ended.
  __device__ void wait_for_previous_kernel() {
    ptx::wait_for_previous_kernel();
    ptx::let_next_kernel_start();
    is_early_ = false;
  }

  // ------------------------------------------------------------------ tickets

  // While the current item streams, loads the next item and draws the ticket of the one after that.
  // The first two tickets of a CTA follow from its index.
  __device__ void look_ahead() {
    next_ticket_ = __shfl_sync(~0u, drawn_, 0) + 2 * static_cast<int>(gridDim.x);
    next_ = 0;
    if (next_ticket_ < num_items_ && lane_ < kItemWords) {
      next_ = load_word(p_.work.shared_item(next_ticket_), lane_);
    }
    if (lane_ == 0) drawn_ = ptx::count_up(p_.ticket);
  }

  // ------------------------------------------------------------------ items

  // The readers of a shared node or, if first_read < 0, one token, whose group is too large for
  // leaf warps.
  struct Readers {
    int first_read, num_tokens;
    Target target;  // the one token's
    int split;

    __device__ bool has(int t) const { return first_read >= 0 && t < num_tokens; }
  };

  // The matrix warps wait for a CTA's first tile, so little code comes before it (see
  // cascade_attention.cuh) and the item's other preparations come after it. q comes before further
  // tiles: the copy engine works in order and would bring q after them.
  __device__ void send_item() {
    const int32_t words = next_;
    const auto word = [&](size_t offset) { return item_word(words, offset); };
    delay(p_, next_ticket_);
    const bool is_ahead = !is_early_;  // no ticket is drawn before the previous kernel has ended
    if (is_ahead) look_ahead();
    const Readers readers{word(offsetof(Item, first_read)), word(offsetof(Item, num_tokens)),
                          word(offsetof(Item, target)), word(offsetof(Item, split))};
    const Segment segment{word(offsetof(Item, pages)), word(offsetof(Item, begin_slot)),
                          word(offsetof(Item, end_slot))};
    const PageWindow::Run run = segment.run(p_);
    begin_item(word(offsetof(Item, head)), readers.num_tokens * p_.group_size,
               word(offsetof(Item, first_token)),
               max(1, ceil_div(segment.end - run.start, Traits::kKvTile)));
    static_assert(kItemPages % Traits::kBlocks == 0 && 32 % Traits::kBlocks == 0,
                  "no tile has pages of two windows");
    window_.open(word(offsetof(Item, first_pages) + lane_ % kItemPages * sizeof(int32_t)));

    window_.send_for(run);

    Tile tile = next_tile(segment, run.start);
    load_keys_and_values(tile, run.start, 0);
    const Targets targets = find_targets(readers);
    if (first_token_ < 0) find_tokens(readers);
    if (is_early_) wait_for_previous_kernel();  // it may write q
    load_queries(tile, first_token_);
    if (tile.flags & Tile::kLast) store_targets(targets, readers.split);
    hand_over(tile);
    if (!is_ahead) look_ahead();

    for (int start = run.start + Traits::kKvTile; remaining_ > 0; start += Traits::kKvTile) {
      const int block = (start - run.start) / kBoxTokens;
      window_.move_to(block, kItemPages, [&] { return run; });
      tile = next_tile(segment, start);
      load_keys_and_values(tile, start, block);
      if (tile.flags & Tile::kLast) store_targets(targets, readers.split);
      hand_over(tile);
    }
  }

  // The targets of the tokens' first splits.
  __device__ Targets find_targets(const Readers& readers) const {
    Targets targets;
    for (int i = 0; i < kTokensPerLane; ++i) {
      const int t = lane_ + 32 * i;
      targets.of[i] = readers.target;
      if (readers.has(t)) targets.of[i] = __ldcg(p_.work.path + readers.first_read + t);
    }
    return targets;
  }

  // Stores the item's rows of q in the CTA's table, if they are not consecutive.
  __device__ void find_tokens(const Readers& readers) {
    for (int i = 0; i < kTokensPerLane; ++i) {
      const int t = lane_ + 32 * i;
      control_.tokens[t] =  // any valid row for a token that does not exist
          readers.has(t) ? __ldcg(p_.work.read_tokens + readers.first_read + t) : 0;
    }
    __syncwarp();
  }

  using Base::begin_item;
  using Base::control_;
  using Base::first_token_;
  using Base::hand_over;
  using Base::lane_;
  using Base::load_keys_and_values;
  using Base::load_queries;
  using Base::next_tile;
  using Base::num_stages_;
  using Base::p_;
  using Base::remaining_;
  using Base::send_stop;
  using Base::shared_;
  using Base::store_targets;
  using Base::window_;

  bool is_early_ = false;  // the kernel before this one may still run
  int num_items_ = 0;
  int32_t next_ = 0;  // this lane's word of the next item
  int next_ticket_ = static_cast<int>(blockIdx.x);
  int drawn_ = static_cast<int>(blockIdx.x) - static_cast<int>(gridDim.x);  // the draw, in lane 0
};

}  // namespace hf_cascade
