// Online softmax in base 2 over the accumulators of matrix products. Knows CUDA only.
#pragma once

#include "ptx.cuh"

namespace hf_cascade {

// A thread holds some scores of two query rows; other lanes hold the rest of these rows.
//   kScoresByRow    Scores are rows x tokens. Of four accumulators the first two are row 0's. Lanes
//                   that differ only in bits 0 and 1 share a row.
//   kScoresByToken  Scores are tokens x rows. Of four accumulators the first and third are row 0's.
//                   Lanes that differ only in bits 2, 3 and 4 share a row.
enum class ScoreLayout { kScoresByRow, kScoresByToken };

template <ScoreLayout kLayout>
struct Softmax {
  static constexpr bool kByRow = kLayout == ScoreLayout::kScoresByRow;
  static constexpr int kFirstLane = kByRow ? 1 : 4, kEndLane = kByRow ? 4 : 32;
  static __device__ constexpr int row_of(int i) { return kByRow ? i / 2 : i % 2; }

  // How far, in base 2, a score may exceed `maximum` before that is raised. Probabilities stay at
  // most 2^8; fp16 ends at 2^16.
  static constexpr float kSlack = 8.f;
  static constexpr float kBelowAll = -1e38f;  // finite: -inf - -inf would be NaN

  float maximum[2];  // what the exponents are relative to
  float sum[2];      // of this thread's probabilities

  __device__ void clear() {
    maximum[0] = maximum[1] = kBelowAll;
    sum[0] = sum[1] = 0.f;
  }

  // The steps for each tile: `is_exceeded`; if true, `follow`; `soften`; `add`.

  // Whether a score of any of the warp's rows exceeds its row's maximum by more than kSlack.
  // `larger` becomes this thread's largest scores, in base 2.
  //
  // A stale maximum does not change the result, the quotient of output and `sum`, and scores seldom
  // exceed it by kSlack. So lanes only vote here, and `follow` exchanges maxima: a shuffle goes
  // through shared memory, which also feeds wgmma its operands.
  template <int kTiles>
  __device__ bool is_exceeded(const float (&score)[kTiles][4], float (&larger)[2],
                              float scale_log2) const {
    // Four chains of maxima, two per row: in a chain each instruction waits for the one before.
    float chain[2][2];
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float pair =
            fmaxf(score[j][kByRow ? 2 * r : r], score[j][kByRow ? 2 * r + 1 : r + 2]);
        chain[r][j % 2] = j < 2 ? pair : fmaxf(chain[r][j % 2], pair);
      }
    }
    bool exceeds = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      larger[r] = fmaxf(chain[r][0], chain[r][1]) * scale_log2;
      exceeds |= larger[r] > maximum[r] + kSlack;
    }
    return __any_sync(~0u, exceeds);
  }

  // Reduces `larger` over the lanes of each row and raises the maxima that it exceeds by more than
  // kSlack. The caller multiplies the row's output by `keep`, which is 1 if the maximum stays.
  __device__ void follow(float (&larger)[2], float (&keep)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int lane = kFirstLane; lane < kEndLane; lane *= 2) {
        larger[r] = fmaxf(larger[r], __shfl_xor_sync(~0u, larger[r], lane));
      }
      const bool follows = larger[r] > maximum[r] + kSlack;
      const float smaller = ptx::exp2_approx(maximum[r] - larger[r]);
      keep[r] = follows ? smaller : 1.f;
      maximum[r] = follows ? larger[r] : maximum[r];
      sum[r] *= keep[r];
    }
  }

  // Turns scores into probabilities, 2^(score * scale_log2 - maximum).
  template <int kTiles>
  __device__ void soften(float (&score)[kTiles][4], float scale_log2) const {
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        score[j][i] = ptx::exp2_approx(fmaf(score[j][i], scale_log2, -maximum[row_of(i)]));
      }
    }
  }

  // Adds the probabilities to `sum`. If there is a branch between `soften` and this, ptxas computes
  // all powers first; else each addition waits for its power, and the next power for that addition.
  template <int kTiles>
  __device__ void add(const float (&probability)[kTiles][4]) {
    float chain[2][2];  // two per row, as in is_exceeded
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float pair =
            probability[j][kByRow ? 2 * r : r] + probability[j][kByRow ? 2 * r + 1 : r + 2];
        chain[r][j % 2] = j < 2 ? pair : chain[r][j % 2] + pair;
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) sum[r] += chain[r][0] + chain[r][1];
  }

  // Reduces `sum` over the lanes that share a row.
  __device__ void finish_sums() {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int lane = kFirstLane; lane < kEndLane; lane *= 2) {
        sum[r] += __shfl_xor_sync(~0u, sum[r], lane);
      }
    }
  }

  // The approximations are exact to 2^-22, which is enough, and short (see cascade_attention.cuh).
  __device__ float normalizer(int r) const { return sum[r] == 0.f ? 0.f : __fdividef(1.f, sum[r]); }
  __device__ float lse_log2(int r) const { return maximum[r] + __log2f(sum[r]); }
};

}  // namespace hf_cascade
