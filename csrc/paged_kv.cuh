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
    int ticket = static_cast<int>(blockIdx.x);
    while (ticket < num_items) {
      // Asked for now, needed after this item: its latency is hidden.
      int next = 0;
      if (lane_ == 0) next = atomicAdd(p_.counters, 1);
      take(header, ticket);
      ticket = __shfl_sync(~0u, next, 0) + static_cast<int>(gridDim.x);
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

  // Tickets are handed out in order. Shared items are the longest and come first, except that
  // the first `num_mixed_leaf_items` leaves are spread evenly between them.
  __device__ void take(const WorkHeader& header, int ticket) {
    const int64_t shared = header.num_shared_items;
    const int64_t mixed = shared + header.num_mixed_leaf_items;
    if (ticket >= mixed) return take_leaf(header, ticket - static_cast<int>(shared));
    const int shared_before = static_cast<int>(ticket * shared / mixed);
    if ((ticket + 1) * shared / mixed > shared_before) {
      take_shared(header, shared_before);
    } else {
      take_leaf(header, ticket - shared_before);
    }
  }

  __device__ void take_shared(const WorkHeader& header, int index) {
    const int i = find_item(p_.work.shared_items, header.num_shared_nodes, index);
    int rest = index - p_.work.shared_items[i];
    const int node = p_.work.shared_nodes[i];
    const int reads_begin = p_.tree.reader_indptr[node];
    const int num_readers = p_.tree.reader_indptr[node + 1] - reads_begin;
    const int kv_len = p_.tree.kv_len[node];
    const int tile_tokens = tokens_per_tile(p_.group_size);
    const int num_tiles = ceil_div(num_readers, tile_tokens);
    const int tile = rest % num_tiles;
    rest /= num_tiles;
    const int split = rest / p_.num_kv_heads;
    const int length = split_length(kv_len, p_.num_kv_heads, header.split_shift);
    const int first_read = reads_begin + tile * tile_tokens;
    const int num_tokens = min(tile_tokens, num_readers - tile * tile_tokens);

    begin_item(rest % p_.num_kv_heads, num_tokens * p_.group_size, false);
    claim_targets();
    bool is_partial = false;
#pragma unroll
    for (int j = 0; j < kTokensPerLane; ++j) {
      const int t = lane_ + 32 * j;
      token_[j] = 0;
      if (t < num_tokens) {
        const int seq = p_.tree.readers[first_read + t];
        token_[j] = p_.tree.q_indptr[seq];
        const bool has_query = p_.tree.q_indptr[seq + 1] > token_[j];
        const Target target = target_of(seq, token_[j], p_.work.path[first_read + t] + split);
        is_partial |= target.slot >= 0;
        control_.targets[item_.targets][t] = {has_query ? seq : -1, target.slot};
        if (!has_query) token_[j] = 0;
      }
    }
    if (__any_sync(~0u, is_partial)) item_.flags |= Tile::kPartial;
    const int begin = split * length, end = min(kv_len, begin + length);
    remaining_ = count_tiles(node, begin, end);
    stream(node, begin, end, 0);
  }

  __device__ void take_leaf(const WorkHeader& header, int index) {
    const int seq = find_item(p_.work.leaf_items, p_.tree.num_seqs, index);
    const int items_begin = p_.work.leaf_items[seq];
    const int local = index - items_begin;
    const int token = p_.tree.q_indptr[seq];
    const int q_len = p_.tree.q_indptr[seq + 1] - token;
    const int node = p_.tree.leaves ? p_.tree.leaves[seq] : -1;
    const int kv_len = node < 0 ? 0 : p_.tree.kv_len[node];
    if (!header.is_decode) return take_queries(seq, token, q_len, node, kv_len, local);

    const int num_splits = (p_.work.leaf_items[seq + 1] - items_begin) / p_.num_kv_heads;
    const int split = local / p_.num_kv_heads;
    const int slot = p_.work.path_indptr[seq + 1] - num_splits + split;
    const bool leaf_way = p_.group_size <= kMaxLeafRows;
    begin_item(local % p_.num_kv_heads, p_.group_size, leaf_way);
    Target target = target_of(seq, token, slot);
    if (target.slot >= 0) item_.flags |= Tile::kPartial;
    if (q_len == 0) target.seq = -1;
    set_single_target(target, q_len == 0 ? 0 : token);

    const int length = split_length(kv_len, p_.num_kv_heads, header.split_shift);
    const int begin = split * length, end = min(kv_len, begin + length);
    remaining_ = begin < end ? count_tiles(node, begin, end) : 1;
    if (begin >= end) return stream_nothing();
    stream(node, begin, end, 0);
  }

  // Several query tokens a sequence (prefill): a tile of them walks its whole path, the prefix
  // in full and the leaf causally, and leaves no partial states.
  __device__ void take_queries(int seq, int first_token, int q_len, int leaf, int leaf_len,
                               int local) {
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
    int tiles = leaf_end > 0 ? count_tiles(leaf, 0, leaf_end) : 0;
    for (int i = path_begin; i < path_end; ++i) {
      tiles += count_tiles(p_.work.path[i], 0, p_.tree.kv_len[p_.work.path[i]]);
    }
    remaining_ = max(1, tiles);
    if (tiles == 0) return stream_nothing();
    for (int i = path_begin; i < path_end; ++i) {
      const int node = p_.work.path[i];
      stream(node, 0, p_.tree.kv_len[node], 0);
    }
    if (leaf_end > 0) stream(leaf, 0, leaf_end, first_visible);
  }

  __device__ Target target_of(int seq, int token, int slot) const {
    const int num_states = p_.work.path_indptr[seq + 1] - p_.work.path_indptr[seq];
    return {seq, num_states > 1 ? slot : ~token};
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

  // Tiles of tokens [begin, end) of a node; they start at multiples of 16 slots.
  __device__ int count_tiles(int node, int begin, int end) const {
    if (begin >= end) return 0;
    const int first_slot = p_.tree.first_slot[node];
    return ceil_div(first_slot + end - aligned(first_slot + begin), Traits::kKvTile);
  }

  static __device__ int aligned(int slot) { return slot / kBoxTokens * kBoxTokens; }

  // Sends those tiles. first_visible > 0: causal, the item's first query token sees that many
  // tokens of the node.
  __device__ void stream(int node, int begin, int end, int first_visible) {
    const int32_t* pages = p_.tree.kv_indices + p_.tree.kv_indptr[node];
    const int first_slot = p_.tree.first_slot[node];
    const int end_slot = first_slot + end;
    for (int start = aligned(first_slot + begin); start < end_slot; start += Traits::kKvTile) {
      Tile tile = item_;
      tile.begin = max(0, first_slot + begin - start);
      tile.end = min(Traits::kKvTile, end_slot - start);
      if (first_visible > 0) {
        tile.visible = first_slot + first_visible - start;
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

  __device__ void load_tile(const Tile& tile, const Source& source) {
    constexpr int kCopies = 2 * kBoxes * Traits::kPanels;
    static_assert(kCopies <= 32);
    constexpr int kBoxBytes = kBoxTokens * 128;
    uint64_t* full = &control_.full[stage_];
    const int boxes = ceil_div(tile.end, kBoxTokens);
    if (lane_ == 0) ptx::barrier_expect_bytes(full, 2 * boxes * Traits::kPanels * kBoxBytes);
    __syncwarp();
    if (lane_ >= kCopies || source.page < 0) return;
    const int box = lane_ % kBoxes, panel = lane_ / kBoxes % Traits::kPanels;
    const bool is_v = lane_ >= kCopies / 2;
    const uint32_t target = (is_v ? shared_.v(stage_) : shared_.k(stage_)) +
                            panel * Traits::kKvTile * 128 + box * kBoxBytes;
    ptx::copy_box(target, is_v ? &p_.v_map : &p_.k_map, full, panel * kBoxValues, source.slot,
                  tile.head, source.page);
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
