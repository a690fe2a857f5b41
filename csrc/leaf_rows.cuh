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

#include "attention_state.cuh"
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

  // 32 tokens, of which [begin, end) count: two blocks of 16 rows of K, and of V. Nothing else
  // hides latencies here, so operands are on their way some steps ahead of their products: those of
  // V too, while the softmax is computed.
  __device__ void attend(uint32_t k, uint32_t v, int begin, int end, float scale_log2) {
    const int lane = threadIdx.x % 32;
    uint32_t a[kAhead][kBlocks][4];
    k += lane % 16 * 128 + ((lane / 16) ^ (lane % 8)) * 16;
    const auto load_keys = [&](int step, int c) {
      // Tokens 0..7 then 8..15, of the first then of the last 8 values.
      ptx::load_matrices(a[step % kAhead][c], operand(k, step, c));
    };
    // Four chains of products hide each other's latency.
    float chain[2][kBlocks][4] = {};
    first_loads(load_keys);
    products(load_keys, [&](int step, int c) {
      if constexpr (!kKeepsQuery) load_query(query[0], step);
      const uint32_t (&b)[2] = query[kKeepsQuery ? step : 0];
      ptx::multiply_add<T>(chain[step % 2][c], a[step % kAhead][c], b[0], b[1]);
    });
    float score[kBlocks][4], larger[2];
#pragma unroll
    for (int c = 0; c < kBlocks; ++c) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int token = kBoxTokens * c + lane / 4 + i / 2 * 8;
        const bool counts = (token >= begin) & (token < end);
        score[c][i] = counts ? chain[0][c][i] + chain[1][c][i] : negative_infinity();
      }
    }
    v += (lane % 8 + lane / 16 * 8) * 128 + ((lane / 8 % 2) ^ (lane % 8)) * 16;
    const auto load_values = [&](int step, int c) {
      // Values 0..7 then 8..15, of the first then of the last 8 tokens.
      ptx::load_matrices_transposed(a[step % kAhead][c], operand(v, step, c));
    };
    first_loads(load_values);
    if (softmax.is_exceeded(score, larger, scale_log2)) follow(larger);
    softmax.soften(score, scale_log2);
    softmax.add(score);
    uint32_t b[kBlocks][2];
#pragma unroll
    for (int c = 0; c < kBlocks; ++c) {
      b[c][0] = ptx::transpose(pack<T>(score[c][0], score[c][1]));
      b[c][1] = ptx::transpose(pack<T>(score[c][2], score[c][3]));
    }
    products(load_values, [&](int step, int c) {
      ptx::multiply_add<T>(out[step], a[step % kAhead][c], b[c][0], b[c][1]);
    });
  }

 private:
  static constexpr int kAhead = kKeepsQuery ? 4 : 2;
  static_assert(kDepthSteps >= kAhead, "steps to be ahead of");

  // Address of a step's 16 values of a block, for this lane: `lane_row` is its row's chunk 0 or 1,
  // swizzled; the chunks of a later step differ in bits that no row has.
  static __device__ uint32_t operand(uint32_t lane_row, int step, int c) {
    return (lane_row ^ (step % 4 * 32)) + step / 4 * (kBoxTokens * 128) + c * Traits::kBlockBytes;
  }

  template <typename Load>
  static __device__ void first_loads(Load load) {
#pragma unroll
    for (int step = 0; step < kAhead; ++step) {
#pragma unroll
      for (int c = 0; c < kBlocks; ++c) load(step, c);
    }
  }

  // The products of all steps, whose first kAhead are loaded.
  template <typename Load, typename Multiply>
  static __device__ void products(Load load, Multiply multiply) {
#pragma unroll
    for (int step = 0; step < kDepthSteps; ++step) {
#pragma unroll
      for (int c = 0; c < kBlocks; ++c) multiply(step, c);
#pragma unroll
      for (int c = 0; c < kBlocks; ++c) {
        if (step + kAhead < kDepthSteps) load(step + kAhead, c);
      }
    }
  }

  __device__ void load_query(uint32_t (&b)[2], int step) const {
    b[0] = query_row ? query_row[8 * step] : 0;
    b[1] = query_row ? query_row[8 * step + 4] : 0;
  }

  __device__ void follow(float (&larger)[2]) {
    float keep[2];
    softmax.follow(larger, keep);
#pragma unroll
    for (int j = 0; j < kDepthSteps; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) out[j][i] *= keep[i % 2];
    }
  }
};

}  // namespace hf_cascade
