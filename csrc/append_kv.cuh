// Writes new K and V into pages. A second kernel here also rotates q and K by RoPE on the way.
//
// For one token and head, a thread moves 16 bytes of K and the same 16 bytes of V, or 16 bytes of
// q. Consecutive threads have consecutive chunks, so reads and writes are whole rows of head_dim.
//   Memory   Reads k and v once and writes them once. A thread with K and V looks up one slot; the
//            threads of a row share that lookup through L1. A rotating thread also reads its
//            partner chunk, which is another thread's, from L1.
//   Also     Sets the ticket counters of the following attention launch to 0, so that nothing of an
//            earlier launch, finished or not, affects it.
#pragma once

#include "params.h"
#include "ptx.cuh"
#include "rotary.cuh"

namespace hf_cascade {

constexpr int kMostAppendThreads = 1024;  // per CTA of rotate_and_append_kernel

struct AppendParams {
  const void* k;  // [num_tokens, num_kv_heads, head_dim], strides below, in 16-byte chunks
  const void* v;
  void* k_pool;  // [num_pages, num_kv_heads, page_size, head_dim]
  void* v_pool;
  const int32_t* slots;  // [num_tokens], page * page_size + offset; negative drops the token
  int64_t k_token_stride, k_head_stride, v_token_stride, v_head_stride;
  int num_tokens, num_kv_heads, page_size;
  int chunks_per_row;  // head_dim in 16-byte chunks
  int32_t* ticket;     // [2], set to 0; null: no attention follows
  bool is_late;        // waits before it writes; see forced_schedule.h
};

// Runs before the first read, in every thread. `index` numbers the threads of the whole grid.
__device__ __forceinline__ void begin_append(const AppendParams& params, int64_t index) {
  // Attention waits for this kernel itself. Before that it reads only the work list and tokens of
  // earlier steps, whose kernels have ended by then. But a kernel's end starts its dependents
  // without making its writes visible; only a wait does that. So the kernels that write those data
  // and can run right before this one (work_list_kernel, append_kv_kernel alone) do not start it
  // early, and they fence their writes.
  if (params.ticket) ptx::let_next_kernel_start();
  ptx::wait_for_previous_kernel();
  if (index < 2 && params.ticket) params.ticket[index] = 0;
  for (int i = 0; params.is_late && i < 20; ++i) __nanosleep(1000);
}

// Stores a chunk of a head's K and V in its slot of the pools; a negative slot drops it.
__device__ __forceinline__ void store_in_slot(const AppendParams& params, int32_t slot, int head,
                                              int chunk, const int4& k, const int4& v) {
  if (slot < 0) return;
  const int64_t page = slot / params.page_size;
  const int offset = slot % params.page_size;
  const int64_t target =
      ((page * params.num_kv_heads + head) * params.page_size + offset) * params.chunks_per_row +
      chunk;
  static_cast<int4*>(params.k_pool)[target] = k;
  static_cast<int4*>(params.v_pool)[target] = v;
}

static __global__ void append_kv_kernel(const AppendParams params) {
  const int64_t thread = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  begin_append(params, thread);
  const int64_t chunks_per_token = int64_t{params.num_kv_heads} * params.chunks_per_row;
  const int64_t token = thread / chunks_per_token;
  if (token >= params.num_tokens) return;
  const int head = static_cast<int>(thread % chunks_per_token) / params.chunks_per_row;
  const int chunk = static_cast<int>(thread % params.chunks_per_row);
  // Three independent loads, in flight together.
  const int32_t slot = params.slots[token];
  const int4 k = static_cast<const int4*>(
      params.k)[token * params.k_token_stride + head * params.k_head_stride + chunk];
  const int4 v = static_cast<const int4*>(
      params.v)[token * params.v_token_stride + head * params.v_head_stride + chunk];
  store_in_slot(params, slot, head, chunk, k, v);
  if (!params.ticket) __threadfence();  // see begin_append
}

struct RotateParams {
  const void* q;    // [num_tokens, num_q_heads, head_dim], strides below, in 16-byte chunks
  void* rotated;    // like q, but contiguous: the attention kernel's q
  const void* cos;  // [num_tokens, rotary_dim] of Angle, stride below, in 16-byte chunks
  const void* sin;
  int64_t q_token_stride, q_head_stride, cos_token_stride, sin_token_stride;
  int num_q_heads;
  int half_chunks;  // rotary_dim / 2 in 16-byte chunks of q
};

// blockIdx.x is the token, blockIdx.y the part of it if one CTA has too few threads. CTAs are large
// so that they occupy few multiprocessors; the attention kernel can begin on the others. The first
// threads have a chunk of q each, the others one of K and V.
template <typename T, typename Angle>
__global__ void __launch_bounds__(kMostAppendThreads)
    rotate_and_append_kernel(const AppendParams params, const RotateParams rope) {
  const int part = static_cast<int>(blockIdx.y * blockDim.x + threadIdx.x);
  begin_append(params, int64_t{blockIdx.x} * gridDim.y * blockDim.x + part);

  const int64_t token = blockIdx.x;
  const int row = part / params.chunks_per_row, chunk = part % params.chunks_per_row;
  const int head = row - rope.num_q_heads;  // kv head; below 0: this thread has q
  if (head >= params.num_kv_heads) return;
  const int4* source = head < 0 ? static_cast<const int4*>(rope.q) + token * rope.q_token_stride +
                                      row * rope.q_head_stride
                                : static_cast<const int4*>(params.k) +
                                      token * params.k_token_stride + head * params.k_head_stride;
  // Independent loads, in flight together.
  const int32_t slot = head < 0 ? -1 : params.slots[token];
  int4 v = {};
  if (head >= 0) {
    v = static_cast<const int4*>(
        params.v)[token * params.v_token_stride + head * params.v_head_stride + chunk];
  }
  int4 x = source[chunk];
  if (chunk < 2 * rope.half_chunks) {
    const bool is_first = chunk < rope.half_chunks;
    const int4 partner = source[is_first ? chunk + rope.half_chunks : chunk - rope.half_chunks];
    const AngleChunk<Angle> cos(static_cast<const int4*>(rope.cos) + token * rope.cos_token_stride,
                                chunk);
    const AngleChunk<Angle> sin(static_cast<const int4*>(rope.sin) + token * rope.sin_token_stride,
                                chunk);
    x = rotate<T>(x, partner, is_first, cos, sin);
  }
  if (head < 0) {
    const int64_t target = (token * rope.num_q_heads + row) * params.chunks_per_row + chunk;
    static_cast<int4*>(rope.rotated)[target] = x;
  } else {
    store_in_slot(params, slot, head, chunk, x, v);
  }
}

}  // namespace hf_cascade
