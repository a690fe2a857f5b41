// The producer warp: takes shared items and sends their tiles (tile_loader.cuh) to the matrix
// warps.
//
// It walks tiles, not items: while the matrix warps finish one item the next one's tiles are on
// their way.
//   Owns     the CTA's tickets for shared items, the item being sent, two target tables.
#pragma once

#include <cstddef>

#include "tile_loader.cuh"

namespace hf_cascade {

template <typename Traits>
class Producer : TileLoader<Traits> {
 public:
  using TileLoader<Traits>::TileLoader;

  // first_words: a lane's word of the CTA's first item, if there is one.
  __device__ void run(const WorkHeader& header, int32_t first_words) {
    // Where the kernel before us only appends to leaves, shared nodes' items begin beside it.
    is_early_ = p_.may_start_early;
    if (!is_early_) wait_for_previous_kernel();
    is_decode_ = header.is_decode;
    num_items_ = header.num_shared_items;
    num_stages_ = shared_.num_ring_stages(header);
    const bool is_still = is_decode_ && header.shared_are_still;
    next_ = first_words;
    if (is_still && next_ticket_ < num_items_) load_first_tile();
    while (next_ticket_ < num_items_) {
      if (!is_still) wait_if_early();
      const int ticket = take_item();
      if (is_decode_) {
        take_node(control_.item);
      } else {
        take_queries(ticket);
      }
      stream();
    }
    wait_if_early();
    if (num_items_ == 0) return;  // nobody waits for a tile
    Tile stop = {};
    stop.flags = Tile::kStop;
    wait_for_stage();
    hand_over(stop);
  }

 private:
  using Base = TileLoader<Traits>;

  // The merge that follows may start once all CTAs are here, and then rely on what we waited for.
  __device__ void wait_for_previous_kernel() {
    ptx::wait_for_previous_kernel();
    ptx::let_next_kernel_start();
  }

  __device__ bool wait_if_early() {
    if (!is_early_) return false;
    wait_for_previous_kernel();
    is_early_ = false;
    return true;
  }

  // ------------------------------------------------------------------ items

  // Makes the next item the current one, in shared memory, and returns its ticket. The item after
  // it is loaded, and the ticket of the one after that drawn, while this one streams. The first two
  // tickets of a CTA need no drawing.
  __device__ int take_item() {
    __syncwarp();
    if (lane_ < kItemWords) reinterpret_cast<int32_t*>(&control_.item)[lane_] = next_;
    __syncwarp();
    const int ticket = next_ticket_;
    delay(p_, ticket);
    next_ticket_ = __shfl_sync(~0u, drawn_, 0) + 2 * static_cast<int>(gridDim.x);
    next_ = load_item();
    if (!is_early_) draw_ticket();
    return ticket;
  }

  __device__ void draw_ticket() {
    if (lane_ == 0) drawn_ = ptx::count_up(p_.ticket);
  }

  // A lane a word of the item.
  __device__ int32_t load_item() const {
    if (!is_decode_ || next_ticket_ >= num_items_ || lane_ >= kItemWords) return 0;
    return load_word(p_.work.shared_item(next_ticket_), lane_);
  }

  // Decoding: the readers of a shared node, or one token's group that is too large for leaf warps.
  __device__ void take_node(const Item& item) {
    begin_item(item.head, item.num_tokens * p_.group_size, item.first_token);
    set_segment(item);
  }

  // Of a decoding launch's item, once its first K and V are sent for.
  __device__ void find_tokens(const Item& item) {
    for (int i = 0; i < kTokensPerLane; ++i) {
      const int t = lane_ + 32 * i;
      targets_[i] = item.target;
      tokens_[i] = 0;  // some row, for one token that does not exist
      if (item.first_read < 0 || t >= item.num_tokens) continue;
      targets_[i] = __ldcg(p_.work.path + item.first_read + t);
      if (first_token_ < 0) tokens_[i] = __ldcg(p_.work.read_tokens + item.first_read + t);
    }
  }

  __device__ void set_segment(const Item& item) {
    remaining_ = max(1, ceil_div(item.end_slot - align_slot(item.begin_slot), Traits::kKvTile));
    num_segments_ = 1;
    segment_ = {item.pages, item.begin_slot, item.end_slot, false, 0};
    static_assert(kItemPages % Traits::kBlocks == 0 && 32 % Traits::kBlocks == 0,
                  "no tile has pages of two windows");
    window_.send_for(run_of(segment_));
    window_.open(item.first_pages[lane_ % kItemPages]);
  }

  // Several query tokens a sequence (prefill): a tile of them walks its whole path, the prefix
  // in full and the leaf causally, and leaves no partial states.
  __device__ void take_queries(int ticket) {
    const int seq = find_item(p_.work.leaf_items, p_.tree.num_seqs, ticket);
    const int local = ticket - p_.work.leaf_items[seq];
    const int begin = p_.tree.q_indptr[seq];
    const int q_len = p_.tree.q_indptr[seq + 1] - begin;
    const int leaf = p_.tree.leaves ? p_.tree.leaves[seq] : -1;
    const int leaf_len = leaf < 0 ? 0 : p_.tree.kv_len[leaf];
    const int tile_tokens = tokens_per_tile(p_.group_size);
    const int num_tiles = ceil_div(q_len, tile_tokens);
    const int tile = num_tiles - 1 - local % num_tiles;  // the last see most: longest first
    const int first = tile * tile_tokens;
    const int num_tokens = min(tile_tokens, q_len - first);
    begin_item(local / num_tiles, num_tokens * p_.group_size, begin + first);
    for (int i = 0; i < kTokensPerLane; ++i) targets_[i] = ~(first_token_ + lane_ + 32 * i);
    // The segments are found one by one as they are streamed: the path's nodes, then the leaf.
    const int path_begin = p_.work.path_indptr[seq], path_end = p_.work.path_indptr[seq + 1];
    const int first_visible = leaf_len - q_len + first + 1;  // may be below 0
    const int leaf_end = leaf < 0 ? 0 : min(leaf_len, first_visible + num_tokens - 1);
    int tiles = leaf_end > 0 ? tiles_of(leaf, leaf_end) : 0;
    for (int i = path_begin; i < path_end; ++i) {
      const int node = p_.work.path[i];
      tiles += tiles_of(node, p_.tree.kv_len[node]);
    }
    remaining_ = max(1, tiles);
    path_begin_ = path_begin;
    path_length_ = path_end - path_begin;
    num_segments_ = max(1, path_length_ + (leaf_end > 0));
    segment_ = {};
    if (leaf_end > 0) {
      segment_ = segment_of(leaf, leaf_end);
      segment_.is_causal = true;
      segment_.seen = segment_.begin + first_visible;
    }
  }

  __device__ int tiles_of(int node, int end) const {
    return count_tiles(p_.tree.first_slot[node], 0, end, Traits::kKvTile);
  }

  // Consecutive slots of one node.
  struct Segment {
    int pages;       // the node's in kv_indices
    int begin, end;  // slots, counted from the first slot of the node's first page
    bool is_causal;  // the item's first query token sees the slots before this one, the next
    int seen;        //   one more, ..
  };

  __device__ Segment segment_of(int node, int end) const {
    const int first_slot = p_.tree.first_slot[node];
    return {p_.tree.kv_indptr[node], first_slot, first_slot + end, false, 0};
  }

  __device__ PageWindow::Run run_of(const Segment& segment) const {
    return {p_.tree.kv_indices + segment.pages, align_slot(segment.begin), segment.end,
            p_.page_size_log2};
  }

  __device__ void begin_item(int head, int num_rows, int first_token) {
    item_ = {};
    item_.flags = Tile::kFirst;
    item_.head = head;
    item_.num_rows = num_rows;
    next_targets_ ^= 1;
    item_.targets = next_targets_;
    first_token_ = first_token;
  }

  // ------------------------------------------------------------------ tiles

  // K and V of the CTA's first tile, before the rest of its item is looked at. (Not more of them:
  // the copy engine would bring q after all that it has been sent for by then.)
  __device__ void load_first_tile() {
    const int begin = item_word(next_, offsetof(Item, begin_slot)), start = align_slot(begin);
    Tile tile = {};
    tile.head = item_word(next_, offsetof(Item, head));
    tile.begin = begin - start;
    tile.end = min(Traits::kKvTile, item_word(next_, offsetof(Item, end_slot)) - start);
    window_.open(
        item_word(next_, offsetof(Item, first_pages) + lane_ % kItemPages * sizeof(int32_t)));
    load_keys_and_values(tile, start, 0);
    is_first_loaded_ = true;
  }

  // All tiles of the item, at least one: an item with nothing to see gets an empty tile.
  __device__ void stream() {
    for (int i = 0; i < num_segments_; ++i) {
      Segment segment = segment_;
      if (!is_decode_ && i < path_length_) {
        const int node = p_.work.path[path_begin_ + i];
        segment = segment_of(node, p_.tree.kv_len[node]);
      }
      const PageWindow::Run run = run_of(segment);
      if (!is_decode_) window_.send_for(run);
      int start = run.start;
      do {
        Tile tile = item_;
        tile.begin = max(0, segment.begin - start);
        tile.end = min(Traits::kKvTile, segment.end - start);
        if (segment.is_causal) {
          tile.visible = segment.seen - start;
          if (tile.visible < tile.end) tile.flags |= Tile::kCausal;
        }
        if (--remaining_ == 0) tile.flags |= Tile::kLast;
        const int seen_by_all = segment.is_causal ? min(segment.seen, segment.end) : segment.end;
        tile.num_whole = max(0, min(remaining_ - 1, (seen_by_all - start) / Traits::kKvTile - 1));
        const int block = (start - run.start) / kBoxTokens;
        window_.move_to(block, is_decode_ ? kItemPages : 0, [&] { return run; });
        send(tile, start, block);
        item_.flags &= ~Tile::kFirst;
        start += Traits::kKvTile;
      } while (start < segment.end);
    }
  }

  __device__ void send(const Tile& tile, int start, int block) {
    if (!is_first_loaded_) load_keys_and_values(tile, start, block);
    is_first_loaded_ = false;
    if (tile.flags & Tile::kFirst) {
      if (is_decode_) find_tokens(control_.item);
      send_queries(tile);
    }
    if (tile.flags & Tile::kLast) store_targets();
    hand_over(tile);
  }

  // The kernel before us may be the one that makes q.
  __device__ void send_queries(const Tile& tile) {
    if (wait_if_early()) draw_ticket();  // which take_item could not
    if (first_token_ < 0) {
      for (int i = 0; i < kTokensPerLane; ++i) control_.tokens[lane_ + 32 * i] = tokens_[i];
      __syncwarp();
    }
    load_queries(tile, first_token_);
  }

  // Matrix warps look for the targets when all else is done, so their loads have all of the item's
  // time.
  __device__ void store_targets() {
    Target* targets = control_.targets[item_.targets];
    ptx::barrier_wait(&control_.targets_empty[item_.targets],
                      (targets_phases_ >> item_.targets) & 1);
    targets_phases_ ^= 1u << item_.targets;
    for (int i = 0; i < kTokensPerLane; ++i) {
      // Only a decoding launch has partial states.
      const int split = targets_[i] >= 0 ? control_.item.split : 0;
      targets[lane_ + 32 * i] = targets_[i] + split;
    }
  }

  using Base::control_;
  using Base::hand_over;
  using Base::is_decode_;
  using Base::lane_;
  using Base::load_keys_and_values;
  using Base::load_queries;
  using Base::num_stages_;
  using Base::p_;
  using Base::shared_;
  using Base::wait_for_stage;
  using Base::window_;

  Tile item_ = {};        // the current item, as its next tile starts out
  Segment segment_ = {};  // the item's only one or, not decoding, its last: the leaf
  int num_segments_ = 0;
  int path_begin_ = 0, path_length_ = 0;  // not decoding: the segments before it
  int remaining_ = 0;                     // tiles of the item that are still to be sent
  bool is_first_loaded_ = false;          // K and V of the next tile have been sent for
  bool is_early_ = false;                 // the kernel before us may still run
  int num_items_ = 0;
  int first_token_ = 0;  // the item's, as Item has it
  static constexpr int kTokensPerLane = kRowsPerTile / 32;
  Target targets_[kTokensPerLane];  // of the item's tokens lane, lane + 32, ..
  int32_t tokens_[kTokensPerLane];  // rows of q; where they are not consecutive
  int32_t next_ = 0;                // the lane's word of the next item
  int next_ticket_ = static_cast<int>(blockIdx.x);
  int drawn_ = static_cast<int>(blockIdx.x) - static_cast<int>(gridDim.x);  // lane 0's
  uint32_t targets_phases_ = ~0u;
  int next_targets_ = 0;
};

}  // namespace hf_cascade
