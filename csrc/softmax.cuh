// Online softmax in base 2 over the accumulators of matrix products. Knows CUDA only.
#pragma once

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

  // By which scores may exceed the maximum: below 16, as probabilities may become fp16.
  static constexpr float kSlack = 8.f;
  static constexpr float kBelowAll = -1e38f;  // finite: -inf - -inf would be NaN

  float maximum[2];  // what the exponents are relative to
  float sum[2];      // of this thread's probabilities

  __device__ void clear() {
    maximum[0] = maximum[1] = kBelowAll;
    sum[0] = sum[1] = 0.f;
  }

  // A step: `is_exceeded`; if so, `follow`; `soften`; `add`.

  // Whether a score of any of the warp's rows exceeds its maximum by more than the slack. That is
  // seldom so: there is room for 2^8, and the quotient of output and `sum` is the same. So lanes
  // vote, and exchange maxima only then: a shuffle goes through shared memory, where wgmma's
  // operands come from. `larger` becomes the largest scores of this thread, in base 2.
  template <int kTiles>
  __device__ bool is_exceeded(const float (&score)[kTiles][4], float (&larger)[2],
                              float scale_log2) const {
    // Four chains of maxima, two a row: each waits for its last instruction.
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

  // The maxima of rows that `larger`, which becomes the row's, exceeds follow it; the output so far
  // is worth `keep`, 1 for the others.
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

  // Scores to probabilities, 2^(score * scale_log2 - maximum).
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

  // To `sum`. With a branch between `soften` and this ptxas computes all powers first; else each
  // addition waits for its power, and the next power for the addition.
  template <int kTiles>
  __device__ void add(const float (&probability)[kTiles][4]) {
    float chain[2][2];  // two a row: each waits for its last instruction
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
