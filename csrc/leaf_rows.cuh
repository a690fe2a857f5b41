// Attention of up to 8 query rows to blocks of 16 tokens, by one warp with mma.sync, transposed:
// the instruction is 16 x 8, and here the 16 are tokens (of K) and values (of V) and the 8 are
// query rows. The other way round 8 rows would fill half of it, and `out` twice the registers.
//
//   Owns      up to 8 rows: a thread holds rows 2 * (lane % 4) + {0, 1}, and of each the values
//             lane / 4 + 8 j (the accumulator layout of m16n8k16).
//   Computes  S^T = K q^T, online softmax in base 2, O^T += V^T P^T. P^T stays in registers: an 8 x
//   8
//             transposition makes the accumulators of S^T the right operand of the second product.
#pragma once

#include "attention_traits.cuh"
#include "ptx.cuh"
#include "softmax.cuh"

namespace hf_cascade {

template <typename Traits>
struct LeafRows {
  using T = typename Traits::T;
  static constexpr int kDepthSteps = Traits::kHeadDim / 16;
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

  // Blocks k and v of 16 tokens, of which [begin, end) count; kCount of them at once hide each
  // other's latency.
  template <int kCount>
  __device__ void attend(const uint32_t (&k)[kCount], const uint32_t (&v)[kCount],
                         const int (&begin)[kCount], const int (&end)[kCount], float scale_log2) {
    const int lane = threadIdx.x % 32;
    // Two chains of products at a time: one waits for the other's result.
    constexpr int kChains = 3 - kCount;
    float score[kCount][4], chain[kCount][kChains][4] = {};
#pragma unroll
    for (int step = 0; step < kDepthSteps; ++step) {
      uint32_t loaded[2];
      if constexpr (!kKeepsQuery) load_query(loaded, step);
      const uint32_t (&b)[2] = kKeepsQuery ? query[step] : loaded;
#pragma unroll
      for (int c = 0; c < kCount; ++c) {
        uint32_t a[4];  // tokens 0..7 then 8..15, of the first then of the last 8 values
        ptx::load_matrices(a, swizzled<kBoxTokens>(k[c], lane % 16, 2 * step + lane / 16));
        ptx::multiply_add<T>(chain[c][step % kChains], a, b[0], b[1]);
      }
    }
#pragma unroll
    for (int c = 0; c < kCount; ++c) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int token = lane / 4 + i / 2 * 8;
        const bool counts = token >= begin[c] && token < end[c];
        const float sum = chain[c][0][i] + (kChains > 1 ? chain[c][kChains - 1][i] : 0.f);
        score[c][i] = counts ? sum : negative_infinity();
      }
    }
    float keep[2];
    if (softmax.soften(score, keep, scale_log2)) rescale(keep);
    uint32_t b[kCount][2];
#pragma unroll
    for (int c = 0; c < kCount; ++c) {
      b[c][0] = ptx::transpose(pack<T>(score[c][0], score[c][1]));
      b[c][1] = ptx::transpose(pack<T>(score[c][2], score[c][3]));
    }
#pragma unroll
    for (int j = 0; j < kDepthSteps; ++j) {
#pragma unroll
      for (int c = 0; c < kCount; ++c) {
        uint32_t a[4];  // values 0..7 then 8..15, of the first then of the last 8 tokens
        const int token = lane % 8 + lane / 16 * 8;
        ptx::load_matrices_transposed(a, swizzled<kBoxTokens>(v[c], token, 2 * j + lane / 8 % 2));
        ptx::multiply_add<T>(out[j], a, b[c][0], b[c][1]);
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
