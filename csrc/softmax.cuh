// Online softmax in base 2 over the accumulators of matrix products. Knows CUDA only.
#pragma once

#include "attention_state.cuh"
#include "ptx.cuh"

namespace hf_cascade {

// Of two query rows, of which this thread holds some of the scores and other lanes the others:
//   kScoresByRow   scores are rows x tokens: of four accumulators the first two are row 0's, and
//                  the lanes that differ in bits 0 and 1 share a row;
//   kScoresByToken scores are tokens x rows: the first and the third are row 0's, and the lanes
//                  that differ in bits 2, 3 and 4 share a row.
enum class ScoreLayout { kScoresByRow, kScoresByToken };

template <ScoreLayout kLayout>
struct Softmax {
  static constexpr bool kByRow = kLayout == ScoreLayout::kScoresByRow;
  static constexpr int kFirstLane = kByRow ? 1 : 4, kEndLane = kByRow ? 4 : 32;
  static __device__ constexpr int row_of(int i) { return kByRow ? i / 2 : i % 2; }

  float maximum[2];  // what the exponents are relative to
  float sum[2];      // of this thread's probabilities

  __device__ void clear() {
    maximum[0] = maximum[1] = negative_infinity();
    sum[0] = sum[1] = 0.f;
  }

  // Scores to probabilities, 2^(score * scale_log2 - maximum). The maximum follows the scores only
  // when one exceeds it by 2^8: float32 has room for that, the quotient of output and `sum` is the
  // same, and the output seldom has to be rescaled. True if it has to be now, by `keep`.
  template <int kTiles>
  __device__ bool soften(float (&score)[kTiles][4], float (&keep)[2], float scale_log2) {
    constexpr float kSlack = 8.f;
    // Four chains of maxima, two a row: each waits for its last instruction.
    float larger[2], chain[2][2], offset[2];
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float pair =
            fmaxf(score[j][kByRow ? 2 * r : r], score[j][kByRow ? 2 * r + 1 : r + 2]);
        chain[r][j % 2] = j < 2 ? pair : fmaxf(chain[r][j % 2], pair);
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) larger[r] = fmaxf(chain[r][0], chain[r][1]);
    bool moves = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int lane = kFirstLane; lane < kEndLane; lane *= 2) {
        larger[r] = fmaxf(larger[r], __shfl_xor_sync(~0u, larger[r], lane));
      }
      larger[r] *= scale_log2;
      // Selects, not branches: see MatrixWarp::take_step.
      const bool follows = larger[r] > maximum[r] + kSlack;
      const float smaller = ptx::exp2_approx(maximum[r] - larger[r]);
      keep[r] = follows ? smaller : 1.f;
      maximum[r] = follows ? larger[r] : maximum[r];
      sum[r] *= keep[r];
      moves |= follows;
      // A row that has seen nothing yet: -inf - -inf would be NaN.
      offset[r] = maximum[r] == negative_infinity() ? 0.f : maximum[r];
    }
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        score[j][i] = ptx::exp2_approx(fmaf(score[j][i], scale_log2, -offset[row_of(i)]));
        sum[row_of(i)] += score[j][i];
      }
    }
    return __any_sync(~0u, moves);
  }

  // Sums over the lanes that share a row.
  __device__ void finish_sums() {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int lane = kFirstLane; lane < kEndLane; lane *= 2) {
        sum[r] += __shfl_xor_sync(~0u, sum[r], lane);
      }
    }
  }

  // Approximations are exact enough, to 2^-22, and short: code that runs once costs by the line.
  __device__ float normalizer(int r) const { return sum[r] == 0.f ? 0.f : __fdividef(1.f, sum[r]); }
  __device__ float lse_log2(int r) const { return maximum[r] + __log2f(sum[r]); }
};

}  // namespace hf_cascade
