// Attention of up to 8 query rows to 32 tokens at a time, by one warp with mma.sync, transposed:
// the instruction is 16 x 8, and here the 16 are tokens (of K) and values (of V) and the 8 are
// query rows. The other way round 8 rows would fill half of it, and `out` twice the registers.
//
//   Owns      up to 8 rows: a thread holds rows 2 * (lane % 4) + {0, 1}, and of each the values
//             lane / 4 + 8 j (the accumulator layout of m16n8k16).
//   Computes  S^T = K q^T, online softmax in base 2, O^T += V^T P^T. P^T stays in registers: the
//             accumulators of S^T, 8 x 8 of them transposed, are the right operand of the second
//             product.
#pragma once

#include "attention_traits.cuh"
#include "ptx.cuh"
#include "softmax.cuh"

namespace hf_cascade {

template <typename Traits>
struct LeafRows {
  using T = typename Traits::T;
  static constexpr int kDepthSteps = Traits::kHeadDim / 16;
  static constexpr int kBlocks = kLeafTokens / kBoxTokens;
  // More registers than a leaf warp has: such q is read anew for each block, from L1.
  static constexpr bool kKeepsQuery = Traits::kHeadDim <= 128;

  float out[kDepthSteps][4];  // not normalized
  Softmax<ScoreLayout::kScoresByToken> softmax;
  uint32_t query[kKeepsQuery ? kDepthSteps : 1][2];
  const uint32_t* query_row;  // of row lane / 4, from this thread's values on; null: no such row

  __device__ void clear() {
#pragma unroll
    for (int j = 0; j < kDepthSteps; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) out[j][i] = 0.f;
    }
    softmax.clear();
  }

  // Rows that do not exist are zeros.
  __device__ void load_queries(const void* row) {
    query_row = row ? static_cast<const uint32_t*>(row) + threadIdx.x % 4 : nullptr;
    if constexpr (kKeepsQuery) {
#pragma unroll
      for (int step = 0; step < kDepthSteps; ++step) load_query(query[step], step);
    }
  }

  // 32 tokens, of which [begin, end) count: two blocks of 16 rows of K, and of V.
  __device__ void attend(uint32_t k, uint32_t v, int begin, int end, float scale_log2) {
    const int lane = threadIdx.x % 32;
    // Four chains of products, and four operands on their way at a time: they hide each other's
    // latency.
    float chain[2][kBlocks][4] = {};
#pragma unroll
    for (int step = 0; step < kDepthSteps; ++step) {
      if constexpr (!kKeepsQuery) load_query(query[0], step);
      const uint32_t (&b)[2] = query[kKeepsQuery ? step : 0];
      uint32_t a[kBlocks][4];  // tokens 0..7 then 8..15, of the first then of the last 8 values
#pragma unroll
      for (int c = 0; c < kBlocks; ++c) {
        ptx::load_matrices(a[c], swizzled<kBoxTokens>(k + c * Traits::kBlockBytes, lane % 16,
                                                      2 * step + lane / 16));
      }
#pragma unroll
      for (int c = 0; c < kBlocks; ++c) {
        ptx::multiply_add<T>(chain[step % 2][c], a[c], b[0], b[1]);
      }
    }
    float score[kBlocks][4], keep[2];
#pragma unroll
    for (int c = 0; c < kBlocks; ++c) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int token = kBoxTokens * c + lane / 4 + i / 2 * 8;
        const bool counts = (token >= begin) & (token < end);
        score[c][i] = counts ? chain[0][c][i] + chain[1][c][i] : negative_infinity();
      }
    }
    if (softmax.soften(score, keep, scale_log2)) rescale(keep);
    uint32_t b[kBlocks][2];
#pragma unroll
    for (int c = 0; c < kBlocks; ++c) {
      b[c][0] = ptx::transpose(pack<T>(score[c][0], score[c][1]));
      b[c][1] = ptx::transpose(pack<T>(score[c][2], score[c][3]));
    }
    constexpr int kAtOnce = kDepthSteps % 4 == 0 ? 4 : kDepthSteps % 3 == 0 ? 3 : 5;
#pragma unroll
    for (int first = 0; first < kDepthSteps; first += kAtOnce) {
#pragma unroll
      for (int c = 0; c < kBlocks; ++c) {
        uint32_t a[kAtOnce][4];  // values 0..7 then 8..15, of the first then of the last 8 tokens
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
          const int token = lane % 8 + lane / 16 * 8, chunk = 2 * (first + j) + lane / 8 % 2;
          ptx::load_matrices_transposed(
              a[j], swizzled<kBoxTokens>(v + c * Traits::kBlockBytes, token, chunk));
        }
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
          ptx::multiply_add<T>(out[first + j], a[j], b[c][0], b[c][1]);
        }
      }
    }
  }

 private:
  __device__ void load_query(uint32_t (&b)[2], int step) const {
    b[0] = query_row ? query_row[8 * step] : 0;
    b[1] = query_row ? query_row[8 * step + 4] : 0;
  }

  __device__ void rescale(const float (&keep)[2]) {
#pragma unroll
    for (int j = 0; j < kDepthSteps; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) out[j][i] *= keep[i % 2];
    }
  }
};

}  // namespace hf_cascade
