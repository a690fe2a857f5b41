// Sizes of the attention kernel, and what its warps share. Knows CUDA only.
#pragma once

#include <cuda.h>  // CUtensorMap

#include "params.h"
#include "work_list.cuh"

namespace hf_cascade {

constexpr int kConsumerWarps = 8;
constexpr int kConsumers = 32 * kConsumerWarps;
// Registers are dealt out by warpgroups of four warps: the producer, and three warps that have
// nothing to do, give some of theirs to the consumers (on sm_90a; 168 a thread before that).
constexpr int kAttentionThreads = kConsumers + 128;
constexpr int kConsumerRegisters = 192;
constexpr int kProducerRegisters = 120;  // 2 * 192 + 120 = 3 * 168: more would wait forever
constexpr int kBoxValues =
    64;  // the copy engine moves 128 bytes a row: as wide as a swizzled row can be
constexpr int kMaxStages = 6;

template <typename T_, int kHeadDim_>
struct AttentionTraits {
  using T = T_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kRowChunks = kHeadDim / 8;  // 16-byte chunks of one row of K, V or q
  // In shared memory a row is cut into panels of 64 values = 128 bytes = all 32 banks; the chunks
  // of a panel row are swizzled by the row (chunk ^ row % 8), so 8 rows of one chunk, which
  // ldmatrix reads together, lie in different banks. It is also the layout that wgmma calls
  // 128-byte swizzle. A head_dim of 80 or 96 leaves the end of its second panel unused.
  static constexpr int kPanels = (kHeadDim + 63) / 64;
  static constexpr int kKvTile = kv_tile_rows(kHeadDim);
  static constexpr int kTileBytes = kKvTile * kPanels * 128;
  static constexpr int kStageBytes = 2 * kTileBytes;
  // q, kRowsPerTile rows laid out like a tile, is handed over 16 rows at a time.
  static constexpr int kGranuleRows = 16;
  static constexpr int kQueryBytes = kRowsPerTile * kPanels * 128;
  // Where registers allow it, q is loaded from shared memory once an item, not once a tile.
  // Shared nodes' products are wgmma's where there are instances of its shape.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  static constexpr bool kQueriesInRegisters = kHeadDim <= 128;
  static constexpr bool kWarpgroupProducts = kHeadDim == 64 || kHeadDim == 128;
#else
  static constexpr bool kQueriesInRegisters = kHeadDim <= 64;
  static constexpr bool kWarpgroupProducts = false;
#endif
  // Rows that are computed together: those of a warpgroup or of a warp.
  static constexpr int kTogether = kWarpgroupProducts ? 64 : 16;
  static constexpr int kBlocks = kKvTile / kBoxTokens;  // 16 rows each
};

// One KV tile on its way from the producer to the consumers, all they need to know of it.
struct alignas(16) Tile {
  enum Flags : int32_t { kFirst = 1, kLast = 2, kLeaf = 4, kCausal = 8, kStop = 16, kWhole = 32 };
  int32_t flags;
  int32_t begin, end;  // the tile's tokens that are the item's; the others are padding
  int32_t head;        // kv head; leaves: the first
  int32_t num_rows;    // query rows of the item; leaves: of each head
  int32_t first_warp;  // leaves: a consumer warp for each head, from this one on
  int32_t heads_log2;  // leaves: number of heads
  int32_t targets;     // which of the two target tables; leaves: unused
  int32_t visible;     // causal: the first row that the item's first query token does not see
  Target target;       // of a leaf
  int32_t padding[2];
};

// A leaf's item that tiles are being sent of.
struct alignas(16) LeafItem {
  int32_t num_tiles;   // still to be sent
  int32_t start_slot;  // of the next tile
  int32_t begin_slot, end_slot;
  int32_t pages;
  int32_t head;
  Target target;
  int32_t padding;
};

struct Control {
  uint64_t full[kMaxStages];   // K, V (and q) have arrived
  uint64_t empty[kMaxStages];  // all consumer warps are done with the stage
  uint64_t granule_empty[kRowsPerTile / 16];
  uint64_t targets_empty[2];
  Tile tiles[kMaxStages];
  Item item;                        // the producer's current one
  LeafItem leaves[kConsumerWarps];  // the producer's: one for each team of warps
  Target targets[2][kRowsPerTile];
  int32_t tokens[kRowsPerTile];  // the producer's: rows of q of its item
};

// Shared memory: the stages (K then V), q, and Control.
template <typename Traits>
struct SharedMemory {
  unsigned char* base;
  int num_stages;

  __device__ uint32_t k(int stage) const {
    return ptx::shared_address(base + stage * Traits::kStageBytes);
  }
  __device__ uint32_t v(int stage) const { return k(stage) + Traits::kTileBytes; }
  __device__ uint32_t q() const {
    return ptx::shared_address(base + num_stages * Traits::kStageBytes);
  }
  __device__ Control& control() const {
    return *reinterpret_cast<Control*>(base + num_stages * Traits::kStageBytes +
                                       Traits::kQueryBytes);
  }
  static constexpr int bytes(int num_stages) {
    return num_stages * Traits::kStageBytes + Traits::kQueryBytes +
           static_cast<int>(sizeof(Control));
  }
};

struct AttentionParams {
  // The pools as the copy engine sees them, by the logarithm of the heads it brings; sm_90 only.
  CUtensorMap k_map[kMaxHeadsLog2 + 1];
  CUtensorMap v_map[kMaxHeadsLog2 + 1];
  TreeParams tree;
  WorkList work;
  const void* q;          // [num_tokens, num_q_heads, head_dim], strides below
  const void* k_pool;     // [num_pages, num_kv_heads, page_size, head_dim]
  const void* v_pool;     // like k_pool
  void* out;              // [num_tokens, num_q_heads, head_dim]
  float* lse;             // [num_tokens, num_q_heads], natural log
  float* state_out;       // [num slots, num_q_heads, head_dim], partial states, normalized
  float* state_lse_log2;  // [num slots, num_q_heads]
  int32_t* ticket;        // [1], zero at the start: tickets drawn
  uint64_t num_pages;
  int64_t q_token_stride;  // in 16-byte chunks
  int64_t q_head_stride;
  int num_kv_heads;
  int group_size;
  int page_size_log2;
  int num_stages;
  bool may_start_early;  // the kernel before us is the append, and the work list older than it
  float scale_log2;      // sm_scale * log2(e)
};

// Address of a chunk within a tile of `kRows` rows (K, V or q).
template <int kRows>
__device__ __forceinline__ uint32_t swizzled(uint32_t tile, int row, int chunk) {
  return tile + (chunk / 8) * (kRows * 128) + row * 128 + (((chunk % 8) ^ (row % 8)) << 4);
}

}  // namespace hf_cascade
