// Where a finished query row goes: a place for its partial state (for merge_paths.cuh) or, if it is
// all the row has, its row of `out` and `lse`.
#pragma once

#include "attention_state.cuh"
#include "attention_traits.cuh"

namespace hf_cascade {

// Not for kNowhere.
template <typename Traits>
class TargetRow {
  using T = typename Traits::T;

 public:
  __device__ TargetRow(const AttentionParams& p, Target target, int q_head)
      : p_(p),
        row_(int64_t{target >= 0 ? target : ~target} * (p.num_kv_heads * p.group_size) + q_head) {}

  // Of rows of `out`, this one and those of the heads after it.
  __device__ T* out(int head) const {
    return static_cast<T*>(p_.out) + (row_ + head) * Traits::kHeadDim;
  }
  __device__ void write_lse(int head, float lse_log2) const {
    p_.lse[row_ + head] = lse_log2 * kLn2;
  }

  // Of partial states, likewise.
  __device__ __half* state(int head) const {
    return p_.state_out + (row_ + head) * Traits::kHeadDim;
  }
  __device__ void write_state_lse(int head, const LseAndScale& own) const {
    __stcg(reinterpret_cast<float2*>(p_.state_lse + row_ + head),
           make_float2(own.lse_log2, own.scale));
  }

 private:
  const AttentionParams& p_;
  const int64_t row_;
};

}  // namespace hf_cascade
