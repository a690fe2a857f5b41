// Where a finished query row goes: a slot for its partial state (float32, for merge_paths.cuh) or,
// if it is all the row has, its row of `out` and `lse`.
#pragma once

#include "attention_state.cuh"
#include "attention_traits.cuh"

namespace hf_cascade {

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

  __device__ void write(int column, float value) const {
    const int64_t place = row_ * Traits::kHeadDim + column;
    if (is_state_) {
      __stcg(p_.state_out + place, value);
    } else {
      static_cast<T*>(p_.out)[place] = from_float<T>(value);
    }
  }

  // Two columns, from an even one on.
  __device__ void write_pair(int column, float first, float second) const {
    const int64_t place = row_ * Traits::kHeadDim + column;
    if (is_state_) {
      __stcg(reinterpret_cast<float2*>(p_.state_out + place), make_float2(first, second));
    } else {
      *reinterpret_cast<uint32_t*>(static_cast<T*>(p_.out) + place) = pack<T>(first, second);
    }
  }

 private:
  const AttentionParams& p_;
  const bool is_state_;
  int64_t row_;
};

}  // namespace hf_cascade
