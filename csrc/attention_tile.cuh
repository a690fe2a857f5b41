// Attention of 16 query rows to the tokens of one KV tile, by one warp with mma.sync, or of 64
// by a warpgroup with wgmma.
//
//   Owns      16 rows: a thread holds rows lane / 4 and lane / 4 + 8, and of each the columns
//             2 * (lane % 4) + {0, 1} + 8 j (the accumulator layout of m16n8k16).
//   Computes  S = q K^T, online softmax in base 2, O += P V. P never leaves the registers: the
//             accumulator layout of S is the operand layout of P.
#pragma once

#include "attention_state.cuh"
#include "attention_traits.cuh"
#include "ptx.cuh"
#include "wgmma.cuh"

namespace hf_cascade {

template <typename Traits>
struct RowTile {
  static constexpr int kColumnTiles = Traits::kHeadDim / 8;
  static constexpr int kDepthSteps = Traits::kHeadDim / 16;

  float out[kColumnTiles][4];  // not normalized
  float maximum[2];            // what the exponents are relative to (`soften`)
  float sum[2];                // of this thread's columns
  uint32_t query[Traits::kQueriesInRegisters ? kDepthSteps : 1][4];

  __device__ void clear() {
#pragma unroll
    for (int j = 0; j < kColumnTiles; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) out[j][i] = 0.f;
    }
    maximum[0] = maximum[1] = negative_infinity();
    sum[0] = sum[1] = 0.f;
  }

  // q: the item's query rows, of which this warp has 16 from `first_row` on.
  static __device__ uint32_t query_address(uint32_t q, int first_row, int step) {
    const int lane = threadIdx.x % 32;
    return swizzled<kRowsPerTile>(q, first_row + lane % 16, 2 * step + lane / 16);
  }

  __device__ void load_queries(uint32_t q, int first_row) {
    if constexpr (Traits::kQueriesInRegisters) {
#pragma unroll
      for (int step = 0; step < kDepthSteps; ++step) {
        ptx::load_matrices(query[step], query_address(q, first_row, step));
      }
    }
  }

  // Some blocks of 16 tokens of a tile: where they are, and which of their tokens count.
  struct Blocks {
    int first, stride;  // blocks first, first + stride, ..
    int begin;          // tokens, counted through these blocks, from this one on
    int limit[2];       // and, for each row, before that one (row 0: lane / 4, row 1: that + 8)
  };

  template <int kCount, bool kMasked>
  __device__ void attend(uint32_t q, int first_row, uint32_t k, uint32_t v, const Blocks& blocks,
                         float scale_log2) {
    float score[2 * kCount][4];
    multiply_keys<kCount>(score, q, first_row, k, blocks);
    if constexpr (kMasked) mask<2 * kCount>(score, blocks.begin, blocks.limit);
    float keep[2];
    if (soften<2 * kCount>(score, keep, scale_log2)) rescale(keep);
    multiply_values<kCount>(score, v, blocks);
  }

  // Zeros into V rows [first, last) of the tile outside [begin, end): there 0 * V must be 0. Each
  // warp clears all that it will read, so none has to wait for another.
  static __device__ void clear_padding(uint32_t v, int first, int last, int begin, int end) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // elsewhere padding is copied as zeros
    const int lane = threadIdx.x % 32;
    for (int i = first * Traits::kPanels * 8 + lane; i < last * Traits::kPanels * 8; i += 32) {
      const int row = i / (Traits::kPanels * 8), chunk = i % (Traits::kPanels * 8);
      if (row < begin || row >= end) {
        ptx::store_zeros_16(swizzled<Traits::kKvTile>(v, row, chunk));
      }
    }
    ptx::fence_async_proxy();
    __syncwarp();
#endif
  }

  // The same for whole tiles, in steps, by a warpgroup for its 64 rows (wgmma.cuh): the products
  // are asynchronous, so that P V of one tile runs beside the softmax of the next.
  static constexpr int kScoreTiles = Traits::kKvTile / 8;
  static constexpr int kPanelBytes = Traits::kKvTile * 128;

  __device__ void start_keys(float (&score)[kScoreTiles][4], uint32_t k) {
    const uint64_t tile = wgmma::descriptor(k, kPanelBytes);
#pragma unroll
    for (int step = 0; step < kDepthSteps; ++step) {
      wgmma::multiply_keys<typename Traits::T>(
          score, query[step], tile + (step / 4 * kPanelBytes + step % 4 * 32) / 16, step > 0);
    }
    wgmma::commit();
  }

  __device__ void start_values(const uint32_t (&probability)[kScoreTiles / 2][4], uint32_t v) {
    const uint64_t tile = wgmma::descriptor(v, kPanelBytes);
#pragma unroll
    for (int t = 0; t < kScoreTiles / 2; ++t) {
      wgmma::multiply_values<typename Traits::T>(out, probability[t], tile + t * 16 * 128 / 16);
    }
    wgmma::commit();
  }

  static __device__ void pack_probabilities(uint32_t (&probability)[kScoreTiles / 2][4],
                                            const float (&score)[kScoreTiles][4]) {
#pragma unroll
    for (int t = 0; t < kScoreTiles / 2; ++t) {
      pack_operand(probability[t], score[2 * t], score[2 * t + 1]);
    }
  }

  template <int kTiles>
  static __device__ void mask(float (&score)[kTiles][4], int begin, const int (&limit)[2]) {
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int token = 8 * j + 2 * (threadIdx.x % 4) + i % 2;
        if (token < begin || token >= limit[i / 2]) score[j][i] = negative_infinity();
      }
    }
  }

  // Scores to probabilities, 2^(score * scale_log2 - maximum). The maximum follows the scores only
  // when one exceeds it by 2^8: float32 has room for that, the quotient of `out` and `sum` is the
  // same, and `out` seldom has to be rescaled. True if it has to be now, by `keep`.
  template <int kTiles>
  __device__ bool soften(float (&score)[kTiles][4], float (&keep)[2], float scale_log2) {
    constexpr float kSlack = 8.f;
    float offset[2];
    bool moves = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float larger = negative_infinity();
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
        larger = fmaxf(larger, fmaxf(score[j][2 * r], score[j][2 * r + 1]));
      }
      larger = fmaxf(larger, __shfl_xor_sync(~0u, larger, 1));
      larger = fmaxf(larger, __shfl_xor_sync(~0u, larger, 2));
      larger *= scale_log2;
      keep[r] = 1.f;
      if (larger > maximum[r] + kSlack) {
        keep[r] = ptx::exp2_approx(maximum[r] - larger);
        maximum[r] = larger;
        sum[r] *= keep[r];
        moves = true;
      }
      // A row that has seen nothing yet: -inf - -inf would be NaN.
      offset[r] = maximum[r] == negative_infinity() ? 0.f : maximum[r];
    }
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        score[j][i] = ptx::exp2_approx(fmaf(score[j][i], scale_log2, -offset[i / 2]));
        sum[i / 2] += score[j][i];
      }
    }
    return __any_sync(~0u, moves);
  }

  __device__ void rescale(const float (&keep)[2]) {
#pragma unroll
    for (int j = 0; j < kColumnTiles; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) out[j][i] *= keep[i / 2];
    }
  }

  // Sums over the four threads that share a row.
  __device__ void finish_sums() {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sum[r] += __shfl_xor_sync(~0u, sum[r], 1);
      sum[r] += __shfl_xor_sync(~0u, sum[r], 2);
    }
  }

 private:
  // The accumulators of 16 tokens as the left operand of a product.
  static __device__ void pack_operand(uint32_t (&a)[4], const float (&left)[4],
                                      const float (&right)[4]) {
    using T = typename Traits::T;
    a[0] = pack<T>(left[0], left[1]);
    a[1] = pack<T>(left[2], left[3]);
    a[2] = pack<T>(right[0], right[1]);
    a[3] = pack<T>(right[2], right[3]);
  }

  // Of few tokens the products form long chains: twice as many of half the length hide their
  // latency.
  template <int kCount>
  __device__ void multiply_keys(float (&score)[2 * kCount][4], uint32_t q, int first_row,
                                uint32_t k, const Blocks& blocks) {
    constexpr int kChains = kCount <= 2 ? 2 : 1;
    float sum[kChains][2 * kCount][4] = {};
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int step = 0; step < kDepthSteps; ++step) {
      uint32_t loaded[4];
      if constexpr (!Traits::kQueriesInRegisters) {
        ptx::load_matrices(loaded, query_address(q, first_row, step));
      }
      const uint32_t (&a)[4] = Traits::kQueriesInRegisters ? query[step] : loaded;
      float (&chain)[2 * kCount][4] = sum[step % kChains];
#pragma unroll
      for (int t = 0; t < kCount; ++t) {
        uint32_t b[4];  // tokens 0..7 then 8..15, for each the two halves of the 16 columns
        const int token = 16 * (blocks.first + t * blocks.stride) + lane % 8 + lane / 16 * 8;
        ptx::load_matrices(b, swizzled<Traits::kKvTile>(k, token, 2 * step + lane / 8 % 2));
        ptx::multiply_add<typename Traits::T>(chain[2 * t], a, b[0], b[1]);
        ptx::multiply_add<typename Traits::T>(chain[2 * t + 1], a, b[2], b[3]);
      }
    }
#pragma unroll
    for (int j = 0; j < 2 * kCount; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        score[j][i] = sum[0][j][i] + (kChains > 1 ? sum[kChains - 1][j][i] : 0.f);
    }
  }

  template <int kCount>
  __device__ void multiply_values(const float (&score)[2 * kCount][4], uint32_t v,
                                  const Blocks& blocks) {
    using T = typename Traits::T;
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int t = 0; t < kCount; ++t) {
      uint32_t a[4];
      pack_operand(a, score[2 * t], score[2 * t + 1]);
#pragma unroll
      for (int j = 0; j < kColumnTiles / 2; ++j) {
        uint32_t b[4];  // columns 0..7 then 8..15, for each the two halves of the 16 tokens
        const int token = 16 * (blocks.first + t * blocks.stride) + lane % 16;
        ptx::load_matrices_transposed(b, swizzled<Traits::kKvTile>(v, token, 2 * j + lane / 16));
        ptx::multiply_add<T>(out[2 * j], a, b[0], b[1]);
        ptx::multiply_add<T>(out[2 * j + 1], a, b[2], b[3]);
      }
    }
  }
};

}  // namespace hf_cascade
