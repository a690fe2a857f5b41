// The merge along the paths: combines the partial states of each query row.
//
// A warp owns one row (sequence, q head). If there are few rows, four warps own one, each a quarter
// of its states. A lane owns the weight of one state, and four values of the row.
//   Memory   Reads the row's states, which the attention kernel has just written, from L2. Their
//            lse and scales and kAtOnce of their rows are in flight together, so a row with few
//            states waits once.
//   Compute  Weights 2^(lse - maximum), one per lane, then the weighted sum from root to leaf. The
//            order in which states were written does not matter.
//   Writes   The row of `out` and its lse. Rows with a single state were written by the attention
//            kernel itself.
//
// It is a kernel of its own, chained by programmatic launch. When instead the CTA that finished
// last merged a row, the merges of a step's last item (128 rows) fell to one CTA while 131 were
// idle (benchmarks/NOTES.md, section 8).
#pragma once

#include "attention_state.cuh"
#include "attention_traits.cuh"
#include "partial_state.cuh"
#include "ptx.cuh"

namespace hf_cascade {

constexpr int kMergeWarps = 4;
constexpr int kMergeThreads = 32 * kMergeWarps;
// Rows of states that are loaded together: enough for a prefix in 8 splits and the leaf, a frequent
// case. More would take registers, and fewer rows would fit a multiprocessor.
constexpr int kAtOnce = 9;
// States whose weights a warp holds at a time, one per lane: a multiple of kAtOnce.
constexpr int kGroup = 3 * kAtOnce;

// `push` takes up to 32 more states, one per lane. It returns this lane's weight; `keep` is the
// factor by which earlier weights shrink.
struct MergeWeights {
  float maximum = negative_infinity(), sum = 0.f;

  __device__ float push(float lse_log2, float& keep) {
    float larger = lse_log2;
#pragma unroll
    for (int lane = 16; lane > 0; lane /= 2) {
      larger = fmaxf(larger, __shfl_xor_sync(~0u, larger, lane));
    }
    larger = fmaxf(larger, maximum);
    // If all states so far are empty, -inf - -inf would be NaN.
    const float offset = larger == negative_infinity() ? 0.f : larger;
    keep = ptx::exp2_approx(maximum - offset);
    const float weight = ptx::exp2_approx(lse_log2 - offset);
    float total = weight;
#pragma unroll
    for (int lane = 16; lane > 0; lane /= 2) total += __shfl_xor_sync(~0u, total, lane);
    sum = sum * keep + total;
    maximum = larger;
    return weight;
  }
};

// Some of a row's states, combined: per lane four values of each 128 of the row.
template <int kHeadDim>
struct MergedStates {
  static constexpr int kParts = (kHeadDim + 127) / 128;
  float4 out[kParts] = {};
  MergeWeights weights;

  __device__ void shrink(float factor) {
#pragma unroll
    for (float4& v : out) v.x *= factor, v.y *= factor, v.z *= factor, v.w *= factor;
  }

  __device__ void add(float weight, int part, const float4& other) {
    out[part].x = fmaf(weight, other.x, out[part].x);
    out[part].y = fmaf(weight, other.y, out[part].y);
    out[part].z = fmaf(weight, other.z, out[part].z);
    out[part].w = fmaf(weight, other.w, out[part].w);
  }

  static __device__ float4 unpacked(const uint2& packed) {
    const float2 a = __half22float2(reinterpret_cast<const __half2&>(packed.x));
    const float2 b = __half22float2(reinterpret_cast<const __half2&>(packed.y));
    return make_float4(a.x, a.y, b.x, b.y);
  }

  // Adds num_states states of q_head, from `begin` on.
  __device__ void take(const AttentionParams& p, int begin, int num_states, int q_head) {
    const int num_q_heads = p.num_kv_heads * p.group_size, lane = threadIdx.x % 32;
    const int64_t first_row = int64_t{begin} * num_q_heads + q_head;
    const LseAndScale* own = p.state_lse + first_row + int64_t{lane} * num_q_heads;
    const __half* next = p.state_out + first_row * kHeadDim + 4 * lane;
    const int64_t step = int64_t{num_q_heads} * kHeadDim;
    for (int group = 0; group < num_states; group += kGroup, own += kGroup * num_q_heads) {
      float2 lse_and_scale = make_float2(negative_infinity(), 1.f);
      if (lane < kGroup && group + lane < num_states) {
        lse_and_scale = __ldcg(reinterpret_cast<const float2*>(own));
      }
      float weight = 0.f;
      for (int first = 0; first < kGroup && group + first < num_states; first += kAtOnce) {
        uint2 loaded[kAtOnce][kParts] = {};
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i, next += step) {
#pragma unroll
          for (int part = 0; part < kParts; ++part) {
            if (group + first + i < num_states && 128 * part + 4 * lane < kHeadDim) {
              loaded[i][part] = __ldcg(reinterpret_cast<const uint2*>(next + 128 * part));
            }
          }
        }
        if (first == 0) {
          float keep;
          weight = weights.push(lse_and_scale.x, keep) * lse_and_scale.y;
          shrink(keep);
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const float factor = __shfl_sync(~0u, weight, first + i);
#pragma unroll
          for (int part = 0; part < kParts; ++part) add(factor, part, unpacked(loaded[i][part]));
        }
      }
    }
  }

  // Writes the row. A lane's four values are the columns c, c + 8, c + 1 and c + 9: see
  // state_column.
  template <typename T>
  __device__ void write(const AttentionParams& p, int64_t row) const {
    const int lane = threadIdx.x % 32;
    const float n = weights.sum == 0.f ? 0.f : __fdividef(1.f, weights.sum);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const int column = 128 * part + 4 * lane;
      if (column >= kHeadDim) continue;
      const float4& v = out[part];
      static_assert(state_column(0) == 0 && state_column(1) == 8 && state_column(2) == 1);
      T* place =
          static_cast<T*>(p.out) + row * kHeadDim + column / 16 * 16 + state_column(column % 16);
      *reinterpret_cast<uint32_t*>(place) = pack<T>(v.x * n, v.z * n);
      *reinterpret_cast<uint32_t*>(place + 8) = pack<T>(v.y * n, v.w * n);
    }
    if (lane == 0) p.lse[row] = (weights.maximum + __log2f(weights.sum)) * kLn2;
  }
};

constexpr int64_t kFewRows = 1024;

// kTogether: warps per row, 1 or kMergeWarps. 8 CTAs fit a multiprocessor, see grid_rule.cuh.
template <typename T, int kHeadDim, int kTogether>
__global__ void __launch_bounds__(kMergeThreads, 8)
    merge_paths_kernel(const __grid_constant__ AttentionParams params) {
  ptx::let_next_kernel_start();
  // The work list is older than the kernel before this one, so these loads need not wait for it.
  const int num_q_heads = params.num_kv_heads * params.group_size;
  const int warp = static_cast<int>(threadIdx.x / 32);
  const int row = static_cast<int>(blockIdx.x) * (kMergeWarps / kTogether) + warp / kTogether;
  const int seq = row / num_q_heads, q_head = row % num_q_heads;
  bool is_merged = false, is_divided = kTogether > 1;
  int begin = 0, end = 0, token = 0;
  if (seq < params.tree.num_seqs && params.work.header->is_decode) {
    begin = params.work.path_indptr[seq];
    end = params.work.path_indptr[seq + 1];
    token = params.tree.q_indptr[seq];
    is_merged = end - begin > 1 && params.tree.q_indptr[seq + 1] > token;
    // shared_split is above 0 only if bits may depend on the batch; else one warp has the row.
    is_divided &= params.work.header->shared_split > 0;
  }
  ptx::wait_for_previous_kernel();
  if (!is_merged) return;

  MergedStates<kHeadDim> states;
  const int64_t out_row = int64_t{token} * num_q_heads + q_head;
  const int num_states = end - begin;
  const int share = is_divided ? ceil_div(num_states, kMergeWarps) : num_states;
  const int before = kTogether > 1 ? min(num_states, warp * share) : 0;
  // The shuffle tells the compiler that a warp's threads loop alike, which halves the code.
  const int taken = __shfl_sync(~0u, min(share, num_states - before), 0);
  states.take(params, begin + before, taken, q_head);
  if (kTogether == 1 || !is_divided) {
    if (warp % kTogether == 0) states.template write<T>(params, out_row);
    return;
  }
  __shared__ MergedStates<kHeadDim> shared[kMergeWarps][32];
  if (warp > 0) shared[warp][threadIdx.x % 32] = states;
  __syncthreads();
  if (warp > 0) return;
  for (int w = 1; w < kMergeWarps; ++w) {
    const MergedStates<kHeadDim>& other = shared[w][threadIdx.x];
    const float maximum = fmaxf(states.weights.maximum, other.weights.maximum);
    const float offset = maximum == negative_infinity() ? 0.f : maximum;
    const float keep = ptx::exp2_approx(states.weights.maximum - offset);
    const float weight = ptx::exp2_approx(other.weights.maximum - offset);
    states.shrink(keep);
#pragma unroll
    for (int part = 0; part < states.kParts; ++part) states.add(weight, part, other.out[part]);
    states.weights.sum = states.weights.sum * keep + other.weights.sum * weight;
    states.weights.maximum = maximum;
  }
  states.template write<T>(params, out_row);
}

}  // namespace hf_cascade
