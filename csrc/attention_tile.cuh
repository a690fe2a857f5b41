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
#include "softmax.cuh"
#include "wgmma.cuh"

namespace hf_cascade {

template <typename Traits>
struct RowTile {
  static constexpr int kColumnTiles = Traits::kHeadDim / 8;
  static constexpr int kDepthSteps = Traits::kHeadDim / 16;

  float out[kColumnTiles][4];  // not normalized
  Softmax<ScoreLayout::kScoresByRow> softmax;
  uint32_t query[Traits::kQueriesInRegisters ? kDepthSteps : 1][4];

  __device__ void clear() {
#pragma unroll
    for (int j = 0; j < kColumnTiles; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) out[j][i] = 0.f;
    }
    softmax.clear();
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

  // A whole tile; begin and limit as in `mask`.
  template <bool kMasked>
  __device__ void attend(uint32_t q, int first_row, uint32_t k, uint32_t v, int begin,
                         const int (&limit)[2], float scale_log2) {
    float score[kScoreTiles][4];
    multiply_keys(score, q, first_row, k);
    if constexpr (kMasked) mask(score, begin, limit);
    float larger[2];
    if (softmax.is_exceeded(score, larger, scale_log2)) follow(larger);
    softmax.soften(score, scale_log2);
    softmax.add(score);
    multiply_values(score, v);
  }

  // The same for whole tiles, in steps, by a warpgroup for its 64 rows (wgmma.cuh): the products
  // are asynchronous, so that P V of one tile runs beside the softmax of the next.
  static constexpr int kScoreTiles = Traits::kKvTile / 8;
  static constexpr int kPanelBytes = Traits::kKvTile * 128;

  static __device__ uint32_t describe(uint32_t tile) {
    return wgmma::descriptor(tile, kPanelBytes);
  }

  __device__ void start_keys(float (&score)[kScoreTiles][4], uint32_t tile) {
#pragma unroll
    for (int step = 0; step < kDepthSteps; ++step) {
      wgmma::multiply_keys<typename Traits::T>(
          score, query[step], tile + (step / 4 * kPanelBytes + step % 4 * 32) / 16, step > 0);
    }
    wgmma::commit();
  }

  __device__ void start_values(const uint32_t (&probability)[kScoreTiles / 2][4], uint32_t tile) {
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

  // Of the tile's tokens a row sees [begin, limit) (limit 0: of row lane / 4, 1: of that + 8).
  static __device__ void mask(float (&score)[kScoreTiles][4], int begin, const int (&limit)[2]) {
#pragma unroll
    for (int j = 0; j < kScoreTiles; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int token = 8 * j + 2 * (threadIdx.x % 4) + i % 2;
        const bool is_seen = (token >= begin) & (token < limit[i / 2]);
        score[j][i] = is_seen ? score[j][i] : negative_infinity();
      }
    }
  }

  __device__ void follow(float (&larger)[2]) {
    float keep[2];
    softmax.follow(larger, keep);
#pragma unroll
    for (int j = 0; j < kColumnTiles; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) out[j][i] *= keep[i / 2];
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

  __device__ void multiply_keys(float (&score)[kScoreTiles][4], uint32_t q, int first_row,
                                uint32_t k) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < kScoreTiles; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) score[j][i] = 0.f;
    }
#pragma unroll
    for (int step = 0; step < kDepthSteps; ++step) {
      uint32_t loaded[4];
      if constexpr (!Traits::kQueriesInRegisters) {
        ptx::load_matrices(loaded, query_address(q, first_row, step));
      }
      const uint32_t (&a)[4] = Traits::kQueriesInRegisters ? query[step] : loaded;
#pragma unroll
      for (int t = 0; t < kScoreTiles / 2; ++t) {
        uint32_t b[4];  // tokens 0..7 then 8..15, for each the two halves of the 16 columns
        const int token = 16 * t + lane % 8 + lane / 16 * 8;
        ptx::load_matrices(b, swizzled<Traits::kKvTile>(k, token, 2 * step + lane / 8 % 2));
        ptx::multiply_add<typename Traits::T>(score[2 * t], a, b[0], b[1]);
        ptx::multiply_add<typename Traits::T>(score[2 * t + 1], a, b[2], b[3]);
      }
    }
  }

  __device__ void multiply_values(const float (&score)[kScoreTiles][4], uint32_t v) {
    using T = typename Traits::T;
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int t = 0; t < kScoreTiles / 2; ++t) {
      uint32_t a[4];
      pack_operand(a, score[2 * t], score[2 * t + 1]);
#pragma unroll
      for (int j = 0; j < kColumnTiles / 2; ++j) {
        uint32_t b[4];  // columns 0..7 then 8..15, for each the two halves of the 16 tokens
        const int token = 16 * t + lane % 16;
        ptx::load_matrices_transposed(b, swizzled<Traits::kKvTile>(v, token, 2 * j + lane / 16));
        ptx::multiply_add<T>(out[2 * j], a, b[0], b[1]);
        ptx::multiply_add<T>(out[2 * j + 1], a, b[2], b[3]);
      }
    }
  }
};

}  // namespace hf_cascade
