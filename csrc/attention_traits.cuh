// Sizes of the attention kernel, and what its warps share. Knows CUDA only.
#pragma once

#include <cuda.h>  // CUtensorMap

#include "params.h"
#include "partial_state.cuh"
#include "ptx.cuh"
#include "stage_rule.cuh"

namespace hf_cascade {

// A CTA's warps: two warpgroups of matrix warps, then one of three leaf warps and the producer,
// which give some of their registers to the matrix warps (on sm_90a; 168 a thread before that).
constexpr int kMatrixWarps = 8;
constexpr int kMatrixThreads = 32 * kMatrixWarps;
constexpr int kWarpRows = kRowsPerTile / kMatrixWarps;  // of an item, a matrix warp's own
constexpr int kProducerWarp = kMatrixWarps + kLeafWarps;
constexpr int kAttentionThreads = 32 * (kProducerWarp + 1);
constexpr int kMatrixRegisters = 184;
constexpr int kOtherRegisters = 136;  // 2 * 184 + 136 = 3 * 168: more would wait forever
static_assert(kAttentionThreads == 384, "three warpgroups");
constexpr int kRingBarrier = 1;    // named, 0 is __syncthreads': the ring's mbarriers are there
constexpr int kMatrixBarrier = 2;  // nobody reads the ring any more
constexpr int kBoxValues =
    64;  // the copy engine moves 128 bytes a row: as wide as a swizzled row can be
constexpr int kMaxLeafBuffers = 4;  // of one leaf warp

// In shared memory a row is cut into panels of 64 values = 128 bytes = all 32 banks; the chunks of
// a panel row are swizzled by the row (chunk ^ row % 8), so 8 rows of one chunk, which ldmatrix
// reads together, lie in different banks. It is also the layout that wgmma calls 128-byte swizzle.
// A head_dim of 80 or 96 leaves the end of its second panel unused.
template <typename T_, int kHeadDim_>
struct AttentionTraits {
  using T = T_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kRowChunks = kHeadDim / 8;  // 16-byte chunks of one row of K, V or q
  static constexpr int kPanels = row_panels(kHeadDim);
  static constexpr int kKvTile = kv_tile_rows(kHeadDim);
  static constexpr int kTileBytes = kKvTile * kPanels * 128;
  static constexpr int kStageBytes = stage_bytes(kHeadDim);
  static constexpr int kBlockBytes = kBoxTokens * kPanels * 128;
  // A block is one copy if panels are whole.
  static constexpr int kBlockCopies = kHeadDim % 64 == 0 ? 1 : kPanels;
  static constexpr int kBufferBytes =
      2 * kLeafTokens / kBoxTokens * kBlockBytes;  // leaf warps': K, V
  // q: kRowsPerTile rows laid out like a tile.
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

// One KV tile on its way from the producer to the matrix warps, all they need to know of it.
struct alignas(16) Tile {
  enum Flags : int32_t { kFirst = 1, kLast = 2, kCausal = 4, kStop = 8 };
  int32_t flags;
  int32_t begin, end;  // the tile's tokens that are the item's; the others are padding
  int32_t head;        // kv head
  int32_t num_rows;    // query rows of the item
  int32_t targets;     // which of the two target tables
  int32_t visible;     // causal: the first row that the item's first query token does not see
  int32_t num_whole;   // how many tiles follow of which nothing need be known: all their tokens
                       //   count for all rows, and none is the item's last
};

// Up to 32 tokens of a leaf's item, in a buffer of a leaf warp's ring.
struct alignas(16) LeafTile {
  enum Flags : int32_t { kFirst = 1, kLast = 2 };
  int32_t flags;
  int32_t begin, end;  // the buffer's tokens that are the item's
  int32_t head;
  int32_t token;  // the item's
  Target target;
  int32_t padding[2];
};

struct LeafRing {
  uint64_t full[kMaxLeafBuffers];  // K and V have arrived
  LeafTile tiles[kMaxLeafBuffers];
};

struct Control {
  uint64_t full[kMostStages];   // K, V (and q) have arrived
  uint64_t empty[kMostStages];  // all matrix warps are done with the stage
  uint64_t queries_empty;       // all matrix warps are done with the item's q
  uint64_t targets_empty[2];
  Tile tiles[kMostStages];
  Target targets[2][kRowsPerTile];
  int32_t tokens[kRowsPerTile];  // the producer's: rows of q of its item, if not consecutive
  LeafRing leaf_rings[kMostLeafWarps];
};

constexpr int kItemWords = sizeof(Item) / sizeof(int32_t);
constexpr int kHeaderWords = sizeof(WorkHeader) / sizeof(int32_t);
static_assert(kItemWords + kHeaderWords <= 32, "a lane a word");

// From L2: what was written while this kernel was about to start is not looked for in L1.
__device__ __forceinline__ int32_t load_word(const Item* item, int word) {
  return __ldcg(reinterpret_cast<const int32_t*>(item) + word);
}

// Of an item whose words the warp's lanes hold; `offset` may differ from lane to lane.
__device__ __forceinline__ int32_t item_word(int32_t words, size_t offset) {
  return __shfl_sync(~0u, words, static_cast<int>(offset / sizeof(int32_t)));
}

// Of words that the warp's lanes hold, the header's after those of an item.
__device__ __forceinline__ WorkHeader find_header(int32_t words) {
  int32_t header[kHeaderWords];
#pragma unroll
  for (int i = 0; i < kHeaderWords; ++i) header[i] = __shfl_sync(~0u, words, kItemWords + i);
  return reinterpret_cast<const WorkHeader&>(header);
}

static_assert(sizeof(Control) <= kControlBytes, "num_stages leaves no more");

// Shared memory: the stages, of which the first are the matrix warps' ring (K then V) and the rest
// the leaf warps' buffers; then q of a shared item, and Control.
template <typename Traits>
struct SharedMemory {
  unsigned char* base;
  int num_stages;

  __device__ uint32_t k(int stage) const {
    return ptx::shared_address(base + stage * Traits::kStageBytes);
  }
  __device__ uint32_t v(int stage) const { return k(stage) + Traits::kTileBytes; }
  __device__ int num_ring_stages(const WorkHeader& header) const {
    return header.shared_stages < num_stages ? header.shared_stages : num_stages;
  }
  __device__ uint32_t q() const { return k(num_stages); }
  __device__ Control& control() const {
    return *reinterpret_cast<Control*>(base + num_stages * Traits::kStageBytes +
                                       Traits::kQueryBytes);
  }
  static constexpr int bytes(int num_stages) {
    return num_stages * Traits::kStageBytes + Traits::kQueryBytes + kControlBytes;
  }
};

struct AttentionParams {
  CUtensorMap k_map, v_map;  // the pools as the copy engine sees them, for stages; sm_90 only
  CUtensorMap leaf_k_map, leaf_v_map;  // and for leaf warps' buffers
  CUtensorMap q_map;                   // q, for shared items; if has_q_map
  TreeParams tree;
  const void* q;           // [num_tokens, num_q_heads, head_dim], strides below
  const void* k_pool;      // [num_pages, num_kv_heads, page_size, head_dim]
  const void* v_pool;      // like k_pool
  void* out;               // [num_tokens, num_q_heads, head_dim]
  float* lse;              // [num_tokens, num_q_heads], natural log
  __half* state_out;       // [num states, num_q_heads, head_dim], see partial_state.cuh
  LseAndScale* state_lse;  // [num states, num_q_heads]
  int32_t* ticket;         // [2], zero at the start: tickets drawn, of shared and of leaves' items
  uint64_t num_pages;
  int64_t q_token_stride;  // in 16-byte chunks
  int64_t q_head_stride;
  // What a CTA needs first lies together: a first look at a line of these costs a trip to L2.
  WorkList work;
  bool may_start_early;  // the kernel before us is the append, and the work list older than it
  bool has_q_map;
  int num_stages;
  int group_size;
  int num_kv_heads;
  int query_rows;  // of an item of matrix warps, at most
  int page_size_log2;
  float scale_log2;     // sm_scale * log2(e)
  uint32_t delay_seed;  // see forced_schedule.h; 0: no delays
};

// Address of a chunk within a tile of `kRows` rows (K, V or q).
template <int kRows>
__device__ __forceinline__ uint32_t swizzled(uint32_t tile, int row, int chunk) {
  return tile + (chunk / 8) * (kRows * 128) + row * 128 + (((chunk % 8) ^ (row % 8)) << 4);
}

// A wait before `ticket`'s item that only tests ask for.
__device__ __forceinline__ void delay(const AttentionParams& p, uint32_t ticket) {
  if (p.delay_seed == 0) return;
  const uint32_t mixed = (p.delay_seed ^ ticket * 2654435761u) * 2246822519u;
#pragma unroll 1
  for (uint32_t i = 0; i < mixed >> 28; ++i) __nanosleep(1000);
}

// Zeros into a tile's rows outside [begin, end), by a warp for itself: in V, where 0 * V must be 0.
template <typename Traits, int kRows>
__device__ __forceinline__ void clear_rows(uint32_t tile, int begin, int end) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // elsewhere padding is copied as zeros
  constexpr int kChunks = Traits::kPanels * 8;
  for (int i = threadIdx.x % 32; i < kRows * kChunks; i += 32) {
    const int row = i / kChunks, chunk = i % kChunks;
    if (row < begin || row >= end) ptx::store_zeros_16(swizzled<kRows>(tile, row, chunk));
  }
  ptx::fence_async_proxy();
  __syncwarp();
#endif
}

}  // namespace hf_cascade
