// Counting partial states in, and folding them when the last has arrived.
//
// One counter a (sequence, kv head). Who completes its count folds the group's states in slot
// order: the order of arrival does not show, and nobody waits.
#pragma once

#include "attention_state.cuh"
#include "attention_traits.cuh"
#include "ptx.cuh"

namespace hf_cascade {

// Four values of a row of `out`.
template <typename Traits>
__device__ __forceinline__ void write_out(const AttentionParams& params, int64_t row, int column,
                                          const float4& value) {
  using T = typename Traits::T;
  const uint2 packed = {pack<T>(value.x, value.y), pack<T>(value.z, value.w)};
  T* out = static_cast<T*>(params.out) + row * Traits::kHeadDim + column;
  *reinterpret_cast<uint2*>(out) = packed;
}

template <typename Traits>
class StateMerger {
 public:
  __device__ explicit StateMerger(const AttentionParams& params)
      : p_(params), lane_(threadIdx.x % 32) {}

  // Counts one item in; true if all states of (sequence, kv head) are now written. Called after a
  // barrier that follows the writes, by one thread: its fence covers them all.
  __device__ bool arrive(int seq, int head) {
    const int num_states = p_.work.path_indptr[seq + 1] - p_.work.path_indptr[seq];
    ptx::fence_device();
    const int before = atomicAdd(p_.counters + kTicketCounters + seq * p_.num_kv_heads + head, 1);
    if (before + 1 != num_states) return false;
    ptx::fence_device();  // the others' states, read past L1, come after their counts
    return true;
  }

  // A warp folds the states of all heads of the group, in slot order.
  __device__ void merge_group(int seq, int head) {
    for (int row = 0; row < p_.group_size; row += 2) {
      merge_rows<2, 4>(seq, head * p_.group_size + row, min(2, p_.group_size - row));
    }
  }

  // Those of one head.
  __device__ void merge_head(int seq, int q_head) { merge_rows<1, 8>(seq, q_head, 1); }

 private:
  using StateFold = Fold<LogBase::kTwo>;

  // kMergeRows rows and kMergeStates states at a time: eight independent loads a lane hide L2's
  // latency.
  template <int kMergeRows, int kMergeStates>
  __device__ void merge_rows(int seq, int q_head, int num_rows) {
    const int begin = p_.work.path_indptr[seq], end = p_.work.path_indptr[seq + 1];
    const int num_q_heads = p_.num_kv_heads * p_.group_size;
    const int token = p_.tree.q_indptr[seq];
    for (int c = 4 * lane_; c < Traits::kHeadDim; c += 128) {
      StateFold fold[kMergeRows];
      float4 acc[kMergeRows] = {};
      for (int s = begin; s < end; s += kMergeStates) {
        float4 out[kMergeStates][kMergeRows];
        float lse_log2[kMergeStates][kMergeRows];
#pragma unroll
        for (int i = 0; i < kMergeStates; ++i) {
#pragma unroll
          for (int r = 0; r < kMergeRows; ++r) {
            lse_log2[i][r] = negative_infinity();
            out[i][r] = {0.f, 0.f, 0.f, 0.f};
            if (s + i < end && r < num_rows) {
              const int64_t row = int64_t{s + i} * num_q_heads + q_head + r;
              lse_log2[i][r] = __ldcg(p_.state_lse_log2 + row);
              out[i][r] = __ldcg(
                  reinterpret_cast<const float4*>(p_.state_out + row * Traits::kHeadDim + c));
            }
          }
        }
#pragma unroll
        for (int i = 0; i < kMergeStates; ++i) {
#pragma unroll
          for (int r = 0; r < kMergeRows; ++r) {
            const StateFold::Weights w = fold[r].push(lse_log2[i][r]);
            acc[r].x = combine(acc[r].x, out[i][r].x, w);
            acc[r].y = combine(acc[r].y, out[i][r].y, w);
            acc[r].z = combine(acc[r].z, out[i][r].z, w);
            acc[r].w = combine(acc[r].w, out[i][r].w, w);
          }
        }
      }
#pragma unroll
      for (int r = 0; r < kMergeRows; ++r) {
        if (r >= num_rows) continue;
        const int64_t row = int64_t{token} * num_q_heads + q_head + r;
        const float n = fold[r].normalizer();
        write_out<Traits>(p_, row, c, {acc[r].x * n, acc[r].y * n, acc[r].z * n, acc[r].w * n});
        if (c == 0) p_.lse[row] = fold[r].lse() * kLn2;
      }
    }
  }

  const AttentionParams& p_;
  const int lane_;
};

// A merger warp: leaves' states come to it one by one, so that a leaf's item ends for the consumers
// when its state is written, microseconds before it is counted in.
template <typename Traits>
__device__ void merge_arrivals(const AttentionParams& params, Control& control, int merger) {
  StateMerger<Traits> states(params);
  for (uint32_t parity = 0;; parity ^= 1) {
    ptx::barrier_wait(&control.arrival_full[merger], parity);
    const Arrival arrival = control.arrivals[merger];
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::barrier_arrive(&control.arrival_empty[merger]);
    if (arrival.seq < 0) return;
    bool completes = false;
    if (threadIdx.x % 32 == 0) completes = states.arrive(arrival.seq, arrival.head);
    if (__shfl_sync(~0u, completes, 0)) states.merge_group(arrival.seq, arrival.head);
  }
}

}  // namespace hf_cascade
