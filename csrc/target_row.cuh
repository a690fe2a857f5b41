// Where a finished query row goes: a place for its partial state (float32, for merge_paths.cuh) or,
// if it is all the row has, its row of `out` and `lse`.
#pragma once

#include "attention_state.cuh"
#include "attention_traits.cuh"

namespace hf_cascade {

// A row's 16 values from `column` on, a multiple of 16, by those who hold them. A partial state has
// them in an order of its own, state_column(i) at place i: what a thread holds of them then lies
// side by side, and a row is written in pieces of 64 bytes.
__host__ __device__ constexpr int state_column(int place) {
  return place / 4 * 2 + place / 2 % 2 + place % 2 * 8;
}

// By 4 lanes: lane q has the values 2 q + {0, 1} and 8 + 2 q + {0, 1}.
__device__ __forceinline__ void write_by_four(float* row, int column, const float2& first,
                                              const float2& last) {
  const int place = column + threadIdx.x % 4 * 4;
  __stcg(reinterpret_cast<float4*>(row + place), make_float4(first.x, last.x, first.y, last.y));
}

template <typename T>
__device__ __forceinline__ void write_by_four(T* row, int column, const float2& first,
                                              const float2& last) {
  T* place = row + column + threadIdx.x % 4 * 2;
  *reinterpret_cast<uint32_t*>(place) = pack<T>(first.x, first.y);
  *reinterpret_cast<uint32_t*>(place + 8) = pack<T>(last.x, last.y);
}

// By 8 lanes that differ in lane / 4: lane / 4 = i has the values i and 8 + i.
__device__ __forceinline__ void write_by_eight(float* row, int column, float first, float last) {
  const int place = column + threadIdx.x % 32 / 4 * 2;
  __stcg(reinterpret_cast<float2*>(row + place), make_float2(first, last));
}

template <typename T>
__device__ __forceinline__ void write_by_eight(T* row, int column, float first, float last) {
  T* place = row + column + threadIdx.x % 32 / 4;
  place[0] = from_float<T>(first);
  place[8] = from_float<T>(last);
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
