// Rotary position embedding (RoPE) of a 16-byte chunk: x cos + rotate_half(x) sin.
//
//   Computes  the bits that torch's operators give: products and sum rounded to T or, where the
//             angles are float32, in float32 and only then rounded. A step's q and K then are those
//             of the model as it is, and its log-probabilities as near to it.
//   Source    RoFormer (arXiv 2104.09864, section 3.2.2), value i of a row's first half being
//             paired with value i of the second, as transformers has it.
#pragma once

#include "attention_state.cuh"

namespace hf_cascade {

constexpr int kChunkValues = 8;  // of fp16 or bf16, in 16 bytes

// The cosines or sines of a chunk's values.
template <typename Angle>
struct AngleChunk {
  static constexpr int kAccesses = kChunkValues * sizeof(Angle) / sizeof(int4);
  union {
    int4 access[kAccesses];
    Angle value[kChunkValues];
  };

  __device__ AngleChunk(const int4* row, int chunk) {
#pragma unroll
    for (int i = 0; i < kAccesses; ++i) access[i] = row[chunk * kAccesses + i];
  }
};

// What torch makes of a product of T and Angle, as float32.
template <typename T, typename Angle>
__device__ __forceinline__ float product(T value, Angle angle) {
  const float exact = __fmul_rn(to_float(value), to_float(angle));
  if constexpr (std::is_same_v<T, Angle>) return to_float(from_float<T>(exact));
  return exact;
}

// x: a chunk of the first or of the second half of the row's rotated values; partner: the one at
// the same place of the other half.
template <typename T, typename Angle>
__device__ __forceinline__ int4 rotate(int4 x, int4 partner, bool is_first,
                                       const AngleChunk<Angle>& cos, const AngleChunk<Angle>& sin) {
  const T* own = reinterpret_cast<const T*>(&x);
  const T* other = reinterpret_cast<const T*>(&partner);
  int4 rotated;
  T* result = reinterpret_cast<T*>(&rotated);
#pragma unroll
  for (int i = 0; i < kChunkValues; ++i) {
    const float turned = product(other[i], sin.value[i]);
    result[i] =
        from_float<T>(__fadd_rn(product(own[i], cos.value[i]), is_first ? -turned : turned));
  }
  return rotated;
}

}  // namespace hf_cascade
