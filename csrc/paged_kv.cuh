// The producer warp: takes work items and streams their q, K and V into the stages.
//
// It walks tiles, not items: while the consumers finish one item the next one's pages are on
// their way, so short suffixes keep as many bytes in flight as long prefixes do.
//   Owns     the ring of stages (waits for `empty`, fills, signals `full`), the 8 granules of q and
//            two tables of targets.
//   Moves    per tile kKvTile rows of K and of V, whose row 0 is a slot divisible by 16: on sm_90
//   by
//            the copy engine, else 16 bytes a lane and cp.async.
#pragma once

#include "attention_traits.cuh"

namespace hf_cascade {

template <typename Traits>
class Producer {
 public:
  __device__ Producer(const AttentionParams& params, const SharedMemory<Traits>& shared)
      : p_(params), shared_(shared), control_(shared.control()), lane_(threadIdx.x % 32) {}

  __device__ void run() {
    const WorkHeader header = *p_.work.header;
    const int num_items = header.num_shared_items + header.num_leaf_items;
    const int num_ctas = static_cast<int>(gridDim.x);
    // The item after this one is loaded, and the ticket of the one after that drawn, while this one
    // streams. The first two tickets need no drawing.
    int ticket = static_cast<int>(blockIdx.x), next_ticket = ticket + num_ctas;
    Item item = load(header, ticket, num_items);
    while (ticket < num_items) {
      int drawn = 0;
      if (lane_ == 0) drawn = atomicAdd(p_.counters, 1);
      const Item next = load(header, next_ticket, num_items);
      if (!header.is_decode) {
        take_queries(ticket);
      } else if (item.seq < 0) {
        take_shared(item);
      } else {
        take_leaf(item);
      }
      item = next;
      ticket = next_ticket;
      next_ticket = __shfl_sync(~0u, drawn, 0) + 2 * num_ctas;
    }
    Tile stop = {};
    stop.flags = Tile::kStop;
    wait_for_stage();
    hand_over(stop);
  }

 private:
  static constexpr int kRowsPerLane = Traits::kKvTile / 32;
  static constexpr int kTokensPerLane = kRowsPerTile / 32;

  // ------------------------------------------------------------------ items

  __device__ Item load(const WorkHeader& header, int ticket, int num_items) const {
    if (!header.is_decode || ticket >= num_items) return {};
    return p_.work.items[ticket];
  }

  __device__ void take_shared(const Item& item) {
    begin_item(item.head, item.num_tokens * p_.group_size, false);
    claim_targets();
    bool is_partial = false;
#pragma unroll
    for (int j = 0; j < kTokensPerLane; ++j) {
      const int t = lane_ + 32 * j;
      token_[j] = 0;
      if (t < item.num_tokens) {
        const int read = item.first_read + t, seq = p_.tree.readers[read];
        const int token = p_.tree.q_indptr[seq];
        const bool has_query = p_.tree.q_indptr[seq + 1] > token;
        const bool is_lone = p_.work.path_indptr[seq + 1] - p_.work.path_indptr[seq] == 1;
        const int slot = is_lone ? ~token : p_.work.path[read] + item.split;
        is_partial |= !is_lone;
        control_.targets[item_.targets][t] = {has_query ? seq : -1, slot};
        if (has_query) token_[j] = token;
      }
    }
    if (__any_sync(~0u, is_partial)) item_.flags |= Tile::kPartial;
    remaining_ = item.num_tiles;
    stream(item.pages, item.begin_slot, item.end_slot, 0);
  }

  __device__ void take_leaf(const Item& item) {
    begin_item(item.head, p_.group_size, p_.group_size <= kMaxLeafRows);
    if (item.slot >= 0) item_.flags |= Tile::kPartial;
    set_single_target({item.token < 0 ? -1 : item.seq, item.slot}, max(0, item.token));
    remaining_ = max(1, item.num_tiles);
    if (item.num_tiles == 0) return stream_nothing();
    stream(item.pages, item.begin_slot, item.end_slot, 0);
  }

  // Several query tokens a sequence (prefill): a tile of them walks its whole path, the prefix
  // in full and the leaf causally, and leaves no partial states.
  __device__ void take_queries(int ticket) {
    const int seq = find_item(p_.work.leaf_items, p_.tree.num_seqs, ticket);
    const int local = ticket - p_.work.leaf_items[seq];
    const int first_token = p_.tree.q_indptr[seq];
    const int q_len = p_.tree.q_indptr[seq + 1] - first_token;
    const int leaf = p_.tree.leaves ? p_.tree.leaves[seq] : -1;
    const int leaf_len = leaf < 0 ? 0 : p_.tree.kv_len[leaf];
    const int tile_tokens = tokens_per_tile(p_.group_size);
    const int num_tiles = ceil_div(q_len, tile_tokens);
    const int tile = num_tiles - 1 - local % num_tiles;  // the last see most: longest first
    const int first = tile * tile_tokens;
    const int num_tokens = min(tile_tokens, q_len - first);
    begin_item(local / num_tiles, num_tokens * p_.group_size,
               q_len == 1 && p_.group_size <= kMaxLeafRows);
    if (item_.flags & Tile::kLeaf) {
      set_single_target({seq, ~first_token}, first_token);
    } else {
      claim_targets();
#pragma unroll
      for (int j = 0; j < kTokensPerLane; ++j) {
        const int t = lane_ + 32 * j;
        token_[j] = first_token + first + min(t, num_tokens - 1);
        if (t < num_tokens) control_.targets[item_.targets][t] = {seq, ~token_[j]};
      }
    }
    const int path_begin = p_.work.path_indptr[seq], path_end = p_.work.path_indptr[seq + 1];
    const int first_visible = max(0, leaf_len - q_len + first + 1);
    const int leaf_end = leaf < 0 ? 0 : min(leaf_len, first_visible + num_tokens - 1);
    int tiles = leaf_end > 0 ? tiles_of(leaf, leaf_end) : 0;
    for (int i = path_begin; i < path_end; ++i) {
      const int node = p_.work.path[i];
      tiles += tiles_of(node, p_.tree.kv_len[node]);
    }
    remaining_ = max(1, tiles);
    if (tiles == 0) return stream_nothing();
    for (int i = path_begin; i < path_end; ++i) {
      const int node = p_.work.path[i];
      stream_node(node, p_.tree.kv_len[node], 0);
    }
    if (leaf_end > 0) stream_node(leaf, leaf_end, first_visible);
  }

  __device__ int tiles_of(int node, int end) const {
    return count_tiles(p_.tree.first_slot[node], 0, end, Traits::kKvTile);
  }

  __device__ void stream_node(int node, int end, int first_visible) {
    const int first_slot = p_.tree.first_slot[node];
    const int seen_slot = first_visible > 0 ? first_slot + first_visible : 0;
    stream(p_.tree.kv_indptr[node], first_slot, first_slot + end, seen_slot);
  }

  __device__ void begin_item(int head, int num_rows, bool leaf_way) {
    item_ = {};
    item_.flags = Tile::kFirst | (leaf_way ? Tile::kLeaf : 0);
    item_.head = head;
    item_.num_rows = num_rows;
  }

  __device__ void claim_targets() {
    next_targets_ ^= 1;
    item_.targets = next_targets_;
    ptx::barrier_wait(&control_.targets_empty[next_targets_],
                      (targets_phases_ >> next_targets_) & 1);
    targets_phases_ ^= 1u << next_targets_;
  }

  __device__ void set_single_target(const Target& target, int token) {
    item_.target = target;
#pragma unroll
    for (int j = 0; j < kTokensPerLane; ++j) token_[j] = token;
    if (item_.flags & Tile::kLeaf) return;
    claim_targets();
    if (lane_ == 0) control_.targets[item_.targets][0] = target;
  }

  // ------------------------------------------------------------------ tiles

  // Tiles of slots [begin, end) of the node whose pages begin at kv_indices[pages]. seen > 0:
  // causal, the item's first query token sees the slots before that one.
  __device__ void stream(int first_page, int begin, int end, int seen) {
    const int32_t* pages = p_.tree.kv_indices + first_page;
    for (int start = align_slot(begin); start < end; start += Traits::kKvTile) {
      Tile tile = item_;
      tile.begin = max(0, begin - start);
      tile.end = min(Traits::kKvTile, end - start);
      if (seen > 0) {
        tile.visible = seen - start;
        if (tile.visible < tile.end) tile.flags |= Tile::kCausal;
      }
      send(tile, pages, start);
    }
  }

  __device__ void stream_nothing() {
    Tile tile = item_;
    send(tile, nullptr, 0);
  }

  // Sends a tile whose row 0 is the node's slot `start`.
  __device__ void send(Tile& tile, const int32_t* pages, int start) {
    // Its latency passes while we wait for the stage.
    const Source source = find_source(tile, pages, start);
    wait_for_stage();
    if (tile.flags & Tile::kFirst) load_queries(tile);
    load_tile(tile, source);
    if (--remaining_ == 0) tile.flags |= Tile::kLast;
    hand_over(tile);
    item_.flags &= ~Tile::kFirst;
    ++item_.index;
  }

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  // The copy engine: a lane a box of 16 tokens and 64 values. Rows outside the item's tokens hold
  // whatever is near; the consumers mask K and clear V (`clear_padding`).
  static constexpr int kBoxes = Traits::kKvTile / kBoxTokens;

  struct Source {
    int page, slot;  // of the lane's box
  };

  __device__ Source find_source(const Tile& tile, const int32_t* pages, int start) const {
    const int row = lane_ % kBoxes * kBoxTokens;
    if (row >= tile.end) return {-1, 0};
    const int slot = start + row;
    return {pages[slot >> p_.page_size_log2], slot & ((1 << p_.page_size_log2) - 1)};
  }

  // One lane issues all copies, unrolled: spread over lanes they cost 95 clocks each, for the
  // instruction takes its operands from the warp's uniform registers, one lane after the other.
  __device__ void load_tile(const Tile& tile, const Source& source) {
    constexpr int kBoxBytes = kBoxTokens * 128;
    uint64_t* full = &control_.full[stage_];
    const uint32_t k = shared_.k(stage_), v = shared_.v(stage_);
    int page[kBoxes], slot[kBoxes];
#pragma unroll
    for (int box = 0; box < kBoxes; ++box) {
      page[box] = __shfl_sync(~0u, source.page, box);
      slot[box] = __shfl_sync(~0u, source.slot, box);
    }
    const int boxes = ceil_div(tile.end, kBoxTokens);
    if (ptx::elect_lane()) {
      ptx::barrier_expect_bytes(full, 2 * boxes * Traits::kPanels * kBoxBytes);
#pragma unroll
      for (int box = 0; box < kBoxes; ++box) {
        if (page[box] < 0) continue;
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
#else
  // 16 bytes a lane and copy. Rows outside the item's tokens are zeros, so that 0 * V is 0 whatever
  // the pool holds there.
  struct Source {
    uint32_t row_chunk[kRowsPerLane];  // where the lane's rows begin, in 16-byte chunks
  };

  __device__ Source find_source(const Tile& tile, const int32_t* pages, int start) const {
    Source source = {};
#pragma unroll
    for (int j = 0; j < kRowsPerLane; ++j) {
      const int row = lane_ + 32 * j, slot = start + row;
      if (row < tile.begin || row >= tile.end) continue;
      const uint32_t page = pages[slot >> p_.page_size_log2];
      const uint32_t pool_row = ((page * p_.num_kv_heads + tile.head) << p_.page_size_log2) +
                                (slot & ((1 << p_.page_size_log2) - 1));
      source.row_chunk[j] = pool_row * Traits::kRowChunks;
    }
    return source;
  }

  __device__ void load_tile(const Tile& tile, const Source& source) {
    const char* k_pool = static_cast<const char*>(p_.k_pool);
    const char* v_pool = static_cast<const char*>(p_.v_pool);
    const uint32_t k = shared_.k(stage_), v = shared_.v(stage_);
#pragma unroll
    for (int i = 0; i < Traits::kKvTile * Traits::kRowChunks / 32; ++i) {
      const int row = (32 * i + lane_) / Traits::kRowChunks;
      const int chunk = (32 * i + lane_) % Traits::kRowChunks;
      // 32 rows are a whole number of rounds, so a round's rows all belong to one register.
      const uint32_t begin =
          __shfl_sync(~0u, source.row_chunk[32 * i / Traits::kRowChunks / 32], row % 32);
      const int64_t offset = (int64_t{begin} + chunk) * 16;
      const uint32_t place = swizzled<Traits::kKvTile>(0, row, chunk);
      const bool exists = row >= tile.begin && row < tile.end;
      ptx::copy_async_16(k + place, k_pool + offset, exists);
      ptx::copy_async_16(v + place, v_pool + offset, exists);
    }
  }
#endif

  // Row r of the item is query token r / group_size, head r % group_size of the group.
  __device__ void load_queries(Tile& tile) {
    const char* q = static_cast<const char*>(p_.q);
    const int num_granules = ceil_div(tile.num_rows, Traits::kGranuleRows);
    if (tile.flags & Tile::kLeaf) {
      leaf_granule_ = (leaf_granule_ + 1) % Traits::kGranules;
      tile.granule = item_.granule = leaf_granule_;
    }
    for (int g = 0; g < num_granules; ++g) {
      const int granule = tile.flags & Tile::kLeaf ? leaf_granule_ : g;
      ptx::barrier_wait(&control_.granule_empty[granule], (granule_phases_ >> granule) & 1);
      granule_phases_ ^= 1u << granule;
      const uint32_t target = shared_.q(granule);
#pragma unroll
      for (int i = 0; i < Traits::kGranuleRows * Traits::kRowChunks / 32; ++i) {
        const int row = (32 * i + lane_) / Traits::kRowChunks;
        const int chunk = (32 * i + lane_) % Traits::kRowChunks;
        const int item_row = g * Traits::kGranuleRows + row;
        const int t = item_row / p_.group_size;
        int token = 0;
#pragma unroll
        for (int j = 0; j < kTokensPerLane; ++j) {
          const int candidate = __shfl_sync(~0u, token_[j], t % 32);
          if (t / 32 == j) token = candidate;
        }
        const int head = item_.head * p_.group_size + item_row - t * p_.group_size;
        const int64_t offset = token * p_.q_token_stride + head * p_.q_head_stride + chunk;
        const bool exists = item_row < tile.num_rows;
        ptx::copy_async_16(swizzled<Traits::kGranuleRows>(target, row, chunk),
                           q + (exists ? offset * 16 : 0), exists);
      }
    }
  }

  // ------------------------------------------------------------------ the ring

  // Barriers start in phase 0; waiting for parity 1 passes at once, so a fresh ring is empty.
  __device__ void wait_for_stage() { ptx::barrier_wait(&control_.empty[stage_], phase_ ^ 1); }

  // The consumers wait for 33 arrivals: each lane's copies, and lane 0 for what it stored.
  __device__ void hand_over(const Tile& tile) {
    if (lane_ == 0) control_.tiles[stage_] = tile;
    ptx::barrier_arrive_after_copies(&control_.full[stage_]);
    __syncwarp();  // the targets that other lanes stored come before lane 0's arrival
    if (lane_ == 0) ptx::barrier_arrive(&control_.full[stage_]);
    if (++stage_ == shared_.num_stages) {
      stage_ = 0;
      phase_ ^= 1;
    }
  }

  const AttentionParams& p_;
  const SharedMemory<Traits>& shared_;
  Control& control_;
  const int lane_;
  Tile item_ = {};  // the current item, as its next tile starts out
  int remaining_ = 0;
  int token_[kTokensPerLane] = {};  // rows of q: of the item's query token lane + 32 j
  int stage_ = 0;
  uint32_t phase_ = 0;
  uint32_t granule_phases_ = ~0u;  // bit g: the parity to wait for before filling granule g
  uint32_t targets_phases_ = ~0u;
  int next_targets_ = 0;
  int leaf_granule_ = 0;
};

}  // namespace hf_cascade
