// csrc/softmax.cuh on the CPU: rows of scores, as the warps of a CTA share them out.
// host_sources.py compiles it, with an empty ptx.cuh.
#include "host_cuda.h"

#include <cmath>

inline float __log2f(float x) { return std::log2(x); }

namespace hf_cascade::ptx {
inline float exp2_approx(float x) { return std::exp2(x); }
}  // namespace hf_cascade::ptx

#include "softmax.cuh"

using namespace hf_cascade;

namespace {

// Where a thread's scores lie in a tile of 8 kTiles (by row) or 16 kTiles (by token) tokens.
template <ScoreLayout kLayout>
struct Place {
  static constexpr bool kByRow = kLayout == ScoreLayout::kScoresByRow;
  static constexpr int kRows = kByRow ? 16 : 8;  // of a warp
  static constexpr int kTiles = kByRow ? 8 : 2;  // matrix warps' 64 tokens, leaf warps' 32
  static constexpr int kTokens = kByRow ? 64 : 32;

  static int row(int r) { return kByRow ? host::lane() / 4 + 8 * r : 2 * (host::lane() % 4) + r; }
  static int token(int j, int i) {
    return kByRow ? 8 * j + 2 * (host::lane() % 4) + i % 2 : 16 * j + host::lane() / 4 + i / 2 * 8;
  }
};

// A warp's rows, tile after tile; `out` is the sum of values, weighted by the probabilities.
template <ScoreLayout kLayout>
void attend(const float* scores, const float* values, int num_tokens, float scale_log2, float* out,
            float* lse_log2, int32_t* num_follows) {
  using P = Place<kLayout>;
  const int first_row = host::current / 32 * P::kRows;
  Softmax<kLayout> softmax;
  softmax.clear();
  float weighted[2] = {0.f, 0.f};
  for (int begin = 0; begin < num_tokens; begin += P::kTokens) {
    float score[P::kTiles][4], larger[2], keep[2];
    for (int j = 0; j < P::kTiles; ++j) {
      for (int i = 0; i < 4; ++i) {
        const int row = first_row + P::row(softmax.row_of(i)), token = begin + P::token(j, i);
        score[j][i] = token < num_tokens ? scores[int64_t{row} * num_tokens + token] : -INFINITY;
      }
    }
    if (softmax.is_exceeded(score, larger, scale_log2)) {
      softmax.follow(larger, keep);
      for (int r = 0; r < 2; ++r) weighted[r] *= keep[r];
      if (host::lane() == 0) ++num_follows[host::current / 32];
    }
    softmax.soften(score, scale_log2);
    softmax.add(score);
    for (int j = 0; j < P::kTiles; ++j) {
      for (int i = 0; i < 4; ++i) {
        const int token = begin + P::token(j, i);
        if (token < num_tokens) weighted[softmax.row_of(i)] += score[j][i] * values[token];
      }
    }
  }
  softmax.finish_sums();
  for (int r = 0; r < 2; ++r) {
    for (int lane = softmax.kFirstLane; lane < softmax.kEndLane; lane *= 2) {
      weighted[r] += __shfl_xor_sync(~0u, weighted[r], lane);
    }
    const int row = first_row + P::row(r);
    out[row] = weighted[r] * softmax.normalizer(r);
    lse_log2[row] = softmax.lse_log2(r);
  }
}

}  // namespace

extern "C" {

int rows_at_once(bool by_row) { return host::kMostThreads / 32 * (by_row ? 16 : 8); }

// Of rows_at_once rows; num_follows is of every warp. Null, or what went wrong.
const char* attend_rows(bool by_row, const float* scores, const float* values, int num_tokens,
                        float scale_log2, unsigned seed, float* out, float* lse_log2,
                        int32_t* num_follows) {
  host::kernel = [&] {
    (by_row ? attend<ScoreLayout::kScoresByRow>
            : attend<ScoreLayout::kScoresByToken>)(scores, values, num_tokens, scale_log2, out,
                                                   lse_log2, num_follows);
  };
  std::mt19937 random(seed);
  host::cta.x = 0;
  host::num_ctas.x = 1;
  host::num_threads.x = host::kMostThreads;
  return host::run_cta(random) ? nullptr : "threads wait for ever";
}

}  // extern "C"
