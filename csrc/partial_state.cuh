// A row's partial state as it is kept between the attention kernel and the merge: in 16 bits, for
// where many rows share long prefixes states are most of what is written.
//
// It is fp16 whatever the dtype of q is: its 11 bits round a bfloat16 row eight times finer than
// that will be rounded in the end. What range it lacks is made up by a power of two a row, the
// scale, and only where it lacks it: else that is 1. Knows CUDA only.
#pragma once

namespace hf_cascade {

// Beside a row's values.
struct alignas(8) LseAndScale {
  float lse_log2;
  float scale;  // stored values times this are the row's
};

// Largest values of a row that is stored as it is. Below 2^-14 fp16 has steps of 2^-24: 2^-12 of
// the smallest of them.
constexpr float kLeastLargest = 1.f / 4096, kMostLargest = 65504.f;

// Exponents that serve any finite row: of the largest float, and of what is left of 2^-126.
constexpr int kMostExponent = 112, kLeastExponent = -120;

// By how many powers of two more a row is to be divided, whose stored values are at most `largest`
// (infinite: too large for fp16) when they are divided by 2^exponent; 0: it fits, or nothing helps.
__host__ __device__ constexpr int rescaling(float largest, int exponent) {
  if (largest > kMostLargest) return exponent < kMostExponent ? 16 : 0;
  if (largest >= kLeastLargest) return 0;
  const int step = largest > 0.f ? -12 : -36;  // 0 may be any value below 2^-25
  return step > kLeastExponent - exponent ? step : kLeastExponent - exponent;
}

// A row's 16 values from `column` on, a multiple of 16, lie in an order of their own,
// state_column(i) at place i: what a thread holds of them then lies side by side.
__host__ __device__ constexpr int state_column(int place) {
  return place / 4 * 2 + place / 2 % 2 + place % 2 * 8;
}

}  // namespace hf_cascade
