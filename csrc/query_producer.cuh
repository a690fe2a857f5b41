// The producer warp of a launch in which some sequence has several query tokens (prefill). An item
// is a tile of a sequence's query tokens and covers its whole path, the prefix in full and the leaf
// causally. So there are no partial states.
//
//   Owns  The CTA's tickets for query tiles. The work list has only their number per sequence.
#pragma once

#include "item_tiles.cuh"

namespace hf_cascade {

template <typename Traits>
class QueryProducer : ItemTiles<Traits> {
 public:
  using ItemTiles<Traits>::ItemTiles;

  __device__ void run(const WorkHeader& header) {
    ptx::wait_for_previous_kernel();
    ptx::let_next_kernel_start();  // the merge, which finds nothing to do
    const int num_items = header.num_shared_items;
    num_stages_ = shared_.num_ring_stages(header);
    int ticket = static_cast<int>(blockIdx.x), drawn = 0;
    while (ticket < num_items) {
      if (lane_ == 0) drawn = ptx::count_up(p_.ticket);
      delay(p_, ticket);
      send_item(ticket);
      ticket = __shfl_sync(~0u, drawn, 0) + static_cast<int>(gridDim.x);
    }
    if (num_items > 0) send_stop();  // else no matrix warp waits for a tile
  }

 private:
  using Base = ItemTiles<Traits>;
  using Base::kTokensPerLane;
  using typename Base::Targets;

  __device__ void send_item(int ticket) {
    const int seq = find_item(p_.work.leaf_items, p_.tree.num_seqs, ticket);
    const int local = ticket - p_.work.leaf_items[seq];
    const int begin = p_.tree.q_indptr[seq];
    const int q_len = p_.tree.q_indptr[seq + 1] - begin;
    const int leaf = p_.tree.leaves ? p_.tree.leaves[seq] : -1;
    const int leaf_len = leaf < 0 ? 0 : p_.tree.kv_len[leaf];
    const int tile_tokens = tokens_per_tile(p_.group_size);
    const int num_query_tiles = ceil_div(q_len, tile_tokens);
    // The last tile sees most tokens; the longest item goes first.
    const int first = (num_query_tiles - 1 - local % num_query_tiles) * tile_tokens;
    const int num_tokens = min(tile_tokens, q_len - first);
    const int first_visible = leaf_len - q_len + first + 1;  // may be below 0
    const int leaf_end = leaf < 0 ? 0 : min(leaf_len, first_visible + num_tokens - 1);
    Segment leaf_segment = {};
    if (leaf_end > 0) {
      leaf_segment = segment_of(leaf, leaf_end);
      leaf_segment.is_causal = true;
      leaf_segment.seen = leaf_segment.begin + first_visible;
    }
    const int path_begin = p_.work.path_indptr[seq];
    const int path_length = p_.work.path_indptr[seq + 1] - path_begin;
    int num_tiles = leaf_end > 0 ? tiles_of(leaf, leaf_end) : 0;
    for (int i = 0; i < path_length; ++i) {
      const int node = p_.work.path[path_begin + i];
      num_tiles += tiles_of(node, p_.tree.kv_len[node]);
    }
    begin_item(local / num_query_tiles, num_tokens * p_.group_size, begin + first,
               max(1, num_tiles));
    // The path's nodes, then the leaf. If there is nothing to see, one empty tile.
    const int num_segments = max(1, path_length + (leaf_end > 0));
    for (int i = 0; i < num_segments; ++i) {
      Segment segment = leaf_segment;
      if (i < path_length) {
        const int node = p_.work.path[path_begin + i];
        segment = segment_of(node, p_.tree.kv_len[node]);
      }
      send_segment(segment);
    }
  }

  __device__ int tiles_of(int node, int end) const {
    return count_tiles(p_.tree.first_slot[node], end, Traits::kKvTile);
  }

  __device__ Segment segment_of(int node, int end) const {
    const int first_slot = p_.tree.first_slot[node];
    return {p_.tree.kv_indptr[node], first_slot, first_slot + end};
  }

  // Sends all tiles of a segment, at least one.
  __device__ void send_segment(const Segment& segment) {
    const PageWindow::Run run = segment.run(p_);
    window_.send_for(run);
    int start = run.start;
    do {
      const int block = (start - run.start) / kBoxTokens;
      window_.move_to(block, 0, [&] { return run; });
      const Tile tile = next_tile(segment, start);
      load_keys_and_values(tile, start, block);
      if (tile.flags & Tile::kFirst) load_queries(tile, first_token_);
      if (tile.flags & Tile::kLast) store_targets(find_targets(), 0);
      hand_over(tile);
      start += Traits::kKvTile;
    } while (start < segment.end);
  }

  // Every token's target is its row of `out`.
  __device__ Targets find_targets() const {
    Targets targets;
    for (int i = 0; i < kTokensPerLane; ++i) targets.of[i] = ~(first_token_ + lane_ + 32 * i);
    return targets;
  }

  using Base::begin_item;
  using Base::first_token_;
  using Base::hand_over;
  using Base::lane_;
  using Base::load_keys_and_values;
  using Base::load_queries;
  using Base::next_tile;
  using Base::num_stages_;
  using Base::p_;
  using Base::send_stop;
  using Base::shared_;
  using Base::store_targets;
  using Base::window_;
};

}  // namespace hf_cascade
