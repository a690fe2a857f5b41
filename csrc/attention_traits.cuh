// Sizes of the attention kernel, and what its warps share. Knows CUDA only.
#pragma once

#include <cuda.h>  // CUtensorMap

#include "params.h"
#include "work_list.cuh"

namespace hf_cascade {

constexpr int kConsumerWarps = 8;
constexpr int kConsumers = 32 * kConsumerWarps;
constexpr int kMergers = 3;  // warps that count states in and merge, beside the one producer
// Registers are dealt out by warpgroups of four warps: the producer and the mergers give some of
// theirs to the consumers (on sm_90a; 168 a thread each way before that).
constexpr int kAttentionThreads = kConsumers + 32 * (1 + kMergers);
constexpr int kConsumerRegisters = 200;
constexpr int kProducerRegisters = 104;  // 2 * 200 + 104 = 3 * 168: more would wait forever
constexpr int kBoxValues =
    64;  // the copy engine moves 128 bytes a row: as wide as a swizzled row can be
constexpr int kMaxStages = 5;
constexpr int kTicketCounters = 1;  // counters: the next ticket, then one per (sequence, kv head)

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
  static constexpr int kKvTile = kHeadDim <= 128 ? 64 : 32;  // tokens; K + V take 32 KB a stage
  static constexpr int kTileBytes = kKvTile * kPanels * 128;
  static constexpr int kStageBytes = 2 * kTileBytes;
  static constexpr int kGranuleRows = 16;  // q is handed over 16 rows at a time
  static constexpr int kGranuleBytes = kGranuleRows * kPanels * 128;
  static constexpr int kGranules = kRowsPerTile / kGranuleRows;
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
  // Of a leaf's KV tile each warp takes 16 tokens; with fewer slices than warps, teams of warps
  // take tiles in turn.
  static constexpr int kSlices = kKvTile / 16;
  static constexpr int kTeams = kConsumerWarps / kSlices;
  static constexpr int kExchangeBytes = kConsumerWarps * kMaxLeafRows * kHeadDim * 4;
};

// Where the results for the query token `index` of an item go.
struct Target {
  int32_t seq;   // negative: nowhere (the sequence has no query token)
  int32_t slot;  // of the partial state; negative: ~token, the row of `out`
};

// One KV tile on its way from the producer to the consumers, all they need to know of it.
struct alignas(16) Tile {
  enum Flags : int32_t { kFirst = 1, kLast = 2, kLeaf = 4, kCausal = 8, kPartial = 16, kStop = 32 };
  int32_t flags;
  int32_t begin, end;  // the tile's rows that are tokens of this item; the others are padding
  int32_t index;       // within its item
  int32_t head;        // kv head
  int32_t num_rows;    // query rows of the item
  int32_t granule;     // a leaf's q
  int32_t targets;     // which of the two target tables; leaves: unused
  int32_t visible;     // causal: the first row that the item's first query token does not see
  Target target;       // of a leaf
  int32_t padding;
};

// A leaf's partial state that has been written: its merger counts it in.
struct Arrival {
  int32_t seq;  // negative: no more
  int32_t head;
};

struct Control {
  uint64_t full[kMaxStages];   // K, V (and q) have arrived
  uint64_t empty[kMaxStages];  // all consumer warps are done with the stage
  uint64_t granule_empty[kRowsPerTile / 16];
  uint64_t targets_empty[2];
  uint64_t exchange_full, exchange_empty;
  uint64_t arrival_full[kMergers], arrival_empty[kMergers];
  Tile tiles[kMaxStages];
  Target targets[2][kRowsPerTile];
  Arrival arrivals[kMergers];
  float exchange_maximum[kConsumerWarps][kMaxLeafRows];
  float exchange_sum[kConsumerWarps][kMaxLeafRows];
  uint32_t finished[kRowsPerTile / 32];  // bit t: query token t's states are complete
};

// Shared memory: the stages (K then V), q, the leaves' exchange, and Control.
template <typename Traits>
struct SharedMemory {
  unsigned char* base;
  int num_stages;

  __device__ uint32_t k(int stage) const {
    return ptx::shared_address(base + stage * Traits::kStageBytes);
  }
  __device__ uint32_t v(int stage) const { return k(stage) + Traits::kTileBytes; }
  __device__ uint32_t q(int granule) const {
    return ptx::shared_address(base + num_stages * Traits::kStageBytes +
                               granule * Traits::kGranuleBytes);
  }
  __device__ float* exchange() const {
    return reinterpret_cast<float*>(base + num_stages * Traits::kStageBytes +
                                    Traits::kGranules * Traits::kGranuleBytes);
  }
  __device__ Control& control() const {
    return *reinterpret_cast<Control*>(base + num_stages * Traits::kStageBytes + kFixedBytes);
  }
  static constexpr int kFixedBytes =
      Traits::kGranules * Traits::kGranuleBytes + Traits::kExchangeBytes;
  static constexpr int bytes(int num_stages) {
    return num_stages * Traits::kStageBytes + kFixedBytes + static_cast<int>(sizeof(Control));
  }
};

struct AttentionParams {
  CUtensorMap k_map;  // the pools as the copy engine sees them; sm_90 only
  CUtensorMap v_map;
  TreeParams tree;
  WorkList work;
  const void* q;          // [num_tokens, num_q_heads, head_dim], strides below
  const void* k_pool;     // [num_pages, num_kv_heads, page_size, head_dim]
  const void* v_pool;     // like k_pool
  void* out;              // [num_tokens, num_q_heads, head_dim]
  float* lse;             // [num_tokens, num_q_heads], natural log
  float* state_out;       // [num slots, num_q_heads, head_dim], partial states, normalized
  float* state_lse_log2;  // [num slots, num_q_heads]
  int32_t* counters;      // [1 + B * num_kv_heads], zero at the start
  uint64_t num_pages;
  int64_t q_token_stride;  // in 16-byte chunks
  int64_t q_head_stride;
  int num_kv_heads;
  int group_size;
  int page_size_log2;
  int num_stages;
  float scale_log2;  // sm_scale * log2(e)
};

// Address of a chunk within a tile of `kRows` rows (K, V, or a granule of q).
template <int kRows>
__device__ __forceinline__ uint32_t swizzled(uint32_t tile, int row, int chunk) {
  return tile + (chunk / 8) * (kRows * 128) + row * 128 + (((chunk % 8) ^ (row % 8)) << 4);
}

}  // namespace hf_cascade
