// Rotary position embedding (RoPE) of a 16-byte chunk: x cos + rotate_half(x) sin.
//
//   Computes  in float32, every product rounded before the sum and the sum rounded once to T: the
//             bits are those that torch's operators give in float32.
//   Source    RoFormer (arXiv 2104.09864, section 3.2.2), value i of a row's first half being
//   paired
//             with value i of the second, as transformers has it.
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
    const float turned = is_first ? -to_float(other[i]) : to_float(other[i]);
    result[i] = from_float<T>(__fadd_rn(__fmul_rn(to_float(own[i]), to_float(cos.value[i])),
                                        __fmul_rn(turned, to_float(sin.value[i]))));
  }
  return rotated;
}

}  // namespace hf_cascade
