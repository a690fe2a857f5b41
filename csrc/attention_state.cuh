// The merge of attention states, on the device. Knows CUDA only.
//
// Attention over a set of KV pairs is a state (out, lse). Folding states one by one needs the
// running maximum of lse and the sum of exp(lse - maximum): `Fold` keeps both and tells the
// weights with which `out` is to be combined.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace hf_cascade {

constexpr float kLn2 = 0.6931471805599453f;

__device__ __forceinline__ float negative_infinity() { return __int_as_float(0xff800000); }

// Folds states from left to right: acc = acc * keep + out * add, and at the end acc / sum.
//
// Exact where exactness can be had: the empty state (lse = -inf) changes nothing whatever its out
// holds, a lone state comes back bit for bit (`is_first` tells the caller to copy, for 0 + -0
// is 0), and two states fold to the same bits in either order (products rounded before the sum,
// no fused multiply-add).
struct Fold {
  float maximum = negative_infinity();  // of the lse seen, natural log
  float sum = 0.f;                      // of exp(lse - maximum)

  struct Weights {
    float keep, add;
    bool is_empty, is_first;
  };

  __device__ Weights push(float lse) {
    Weights w{0.f, 1.f, lse == negative_infinity(), sum == 0.f};
    if (w.is_empty) return w;
    const float larger = fmaxf(maximum, lse);
    // Equals are not subtracted: both may be infinite.
    if (!w.is_first) w.keep = maximum == larger ? 1.f : expf(maximum - larger);
    if (lse != larger) w.add = expf(lse - larger);
    sum = __fadd_rn(__fmul_rn(sum, w.keep), w.add);
    maximum = larger;
    return w;
  }

  __device__ float lse() const { return sum == 1.f ? maximum : maximum + logf(sum); }
  __device__ float normalizer() const { return sum == 0.f ? 0.f : 1.f / sum; }
};

__device__ __forceinline__ float combine(float acc, float out, const Fold::Weights& w) {
  if (w.is_empty) return acc;
  if (w.is_first) return out;
  return __fadd_rn(__fmul_rn(acc, w.keep), __fmul_rn(out, w.add));
}

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <typename T>
__device__ __forceinline__ T from_float(float x) {
  if constexpr (std::is_same_v<T, __half>) return __float2half_rn(x);
  if constexpr (std::is_same_v<T, __nv_bfloat16>) return __float2bfloat16_rn(x);
  if constexpr (std::is_same_v<T, float>) return x;
}

// Two values packed as the matrix units take them, the first in the low half.
template <typename T>
__device__ __forceinline__ uint32_t pack(float low, float high) {
  if constexpr (std::is_same_v<T, __half>) {
    const __half2 pair = __floats2half2_rn(low, high);
    return reinterpret_cast<const uint32_t&>(pair);
  } else {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<const uint32_t&>(pair);
  }
}

}  // namespace hf_cascade
