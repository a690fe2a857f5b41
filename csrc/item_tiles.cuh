// A work item of the matrix warps as its tiles, one after the other: what the two producers
// (node_producer.cuh, query_producer.cuh) have in common.
//
//   Owns  the item being sent and the two target tables.
#pragma once

#include "tile_loader.cuh"

namespace hf_cascade {

// Consecutive slots of one node.
struct Segment {
  int pages;       // the node's in kv_indices
  int begin, end;  // slots, counted from the first slot of the node's first page
  bool is_causal;  // the item's first query token sees the slots before `seen`, the next one more,
  int seen;        //   ..

  __device__ PageWindow::Run run(const AttentionParams& p) const {
    return {p.tree.kv_indices + pages, align_slot(begin), end, p.page_size_log2};
  }
};

template <typename Traits>
class ItemTiles : protected TileLoader<Traits> {
 protected:
  using TileLoader<Traits>::TileLoader;

  static constexpr int kTokensPerLane = kRowsPerTile / 32;
  struct Targets {
    Target of[kTokensPerLane];  // the item's tokens lane, lane + 32, ..
  };

  // num_tiles: of the item. first_token: its first row of q, -1 if its rows are not consecutive.
  __device__ void begin_item(int head, int num_rows, int first_token, int num_tiles) {
    item_ = {};
    item_.flags = Tile::kFirst;
    item_.head = head;
    item_.num_rows = num_rows;
    next_targets_ ^= 1;
    item_.targets = next_targets_;
    first_token_ = first_token;
    remaining_ = num_tiles;
  }

  // The item's next tile, of a segment from the slot `start` on.
  __device__ Tile next_tile(const Segment& segment, int start) {
    Tile tile = item_;
    item_.flags = 0;
    tile.begin = max(0, segment.begin - start);
    tile.end = min(Traits::kKvTile, segment.end - start);
    if (segment.is_causal) {
      tile.visible = segment.seen - start;
      if (tile.visible < tile.end) tile.flags |= Tile::kCausal;
    }
    if (--remaining_ == 0) tile.flags |= Tile::kLast;
    const int seen_by_all = segment.is_causal ? min(segment.seen, segment.end) : segment.end;
    tile.num_whole = max(0, min(remaining_ - 1, (seen_by_all - start) / Traits::kKvTile - 1));
    return tile;
  }

  // Before the item's last tile is handed over. Matrix warps look for targets when all else is
  // done.
  __device__ void store_targets(const Targets& found, int split) {
    Target* targets = this->control_.targets[item_.targets];
    ptx::barrier_wait(&this->control_.targets_empty[item_.targets],
                      (targets_phases_ >> item_.targets) & 1);
    targets_phases_ ^= 1u << item_.targets;
    for (int i = 0; i < kTokensPerLane; ++i) {
      const Target target = found.of[i];
      targets[this->lane_ + 32 * i] = target >= 0 ? target + split : target;
    }
  }

  // After the last item.
  __device__ void send_stop() {
    Tile stop = {};
    stop.flags = Tile::kStop;
    this->wait_for_stage();
    this->hand_over(stop);
  }

  Tile item_ = {};       // as its next tile starts out
  int first_token_ = 0;  // the item's
  int remaining_ = 0;    // its tiles that are still to be sent

 private:
  uint32_t targets_phases_ = ~0u;
  int next_targets_ = 0;
};

}  // namespace hf_cascade
