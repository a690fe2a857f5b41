// Where a finished query row goes: a slot for its partial state (float32, for merge_paths.cuh) or,
// if it is all the row has, its row of `out` and `lse`.
#pragma once

#include "attention_state.cuh"
#include "attention_traits.cuh"

namespace hf_cascade {

__device__ __forceinline__ void write_pair(float* place, float first, float second) {
  __stcg(reinterpret_cast<float2*>(place), make_float2(first, second));
}

template <typename T>
__device__ __forceinline__ void write_pair(T* place, float first, float second) {
  *reinterpret_cast<uint32_t*>(place) = pack<T>(first, second);
}

__device__ __forceinline__ void write_four(float* place, const float4& values) {
  __stcg(reinterpret_cast<float4*>(place), values);
}

template <typename T>
__device__ __forceinline__ void write_four(T* place, const float4& values) {
  *reinterpret_cast<uint2*>(place) = {pack<T>(values.x, values.y), pack<T>(values.z, values.w)};
}

template <typename Traits>
class TargetRow {
  using T = typename Traits::T;

 public:
  // Not for kNowhere.
  __device__ TargetRow(const AttentionParams& p, Target target, int q_head)
      : p_(p), is_state_(target >= 0) {
    const int num_q_heads = p.num_kv_heads * p.group_size;
    row_ = int64_t{is_state_ ? target : ~target} * num_q_heads + q_head;
  }

  __device__ void write_lse(float lse_log2) const {
    if (is_state_) {
      __stcg(p_.state_lse_log2 + row_, lse_log2);
    } else {
      p_.lse[row_] = lse_log2 * kLn2;
    }
  }

  // Calls write(places) with the row's beginning, as float* or as T*: one branch a row, since code
  // that runs once an item is paid for by the line.
  template <typename Write>
  __device__ void with_places(Write write) const {
    if (is_state_) {
      write(p_.state_out + row_ * Traits::kHeadDim);
    } else {
      write(static_cast<T*>(p_.out) + row_ * Traits::kHeadDim);
    }
  }

 private:
  const AttentionParams& p_;
  const bool is_state_;
  int64_t row_;
};

}  // namespace hf_cascade
