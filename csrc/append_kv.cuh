// Writing new K and V into pages.
//
// A thread moves 16 bytes of K and the same of V, for one token and head; the threads of a head's
// row lie side by side, so reads and writes are whole rows of head_dim.
//   Memory   k and v once in, once out; one slot lookup a thread, shared by the row through L1.
//   Also     sets the ticket counters of the attention launch that follows to 0: nothing of an
//            earlier launch, finished or not, can leak into it.
#pragma once

#include "params.h"
#include "ptx.cuh"

namespace hf_cascade {

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

static __global__ void append_kv_kernel(const AppendParams params) {
  const int64_t thread = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  // The attention kernel that follows waits for us itself. What it reads before that, the work list
  // and tokens of earlier steps, was written by kernels that let nobody start before their end, and
  // those of ours that may come right before us (work_list_kernel, this one alone) fence what they
  // wrote: the end of a kernel lets the next one start, but only a wait is sure to see its writes.
  if (params.ticket) ptx::let_next_kernel_start();
  ptx::wait_for_previous_kernel();
  if (thread < 2 && params.ticket) params.ticket[thread] = 0;
  for (int i = 0; params.is_late && i < 20; ++i) __nanosleep(1000);

  const int64_t chunks_per_token = int64_t{params.num_kv_heads} * params.chunks_per_row;
  const int64_t token = thread / chunks_per_token;
  if (token >= params.num_tokens) return;
  const int head = static_cast<int>(thread % chunks_per_token) / params.chunks_per_row;
  const int chunk = static_cast<int>(thread % params.chunks_per_row);
  // Three loads under way together.
  const int32_t slot = params.slots[token];
  const int4 k = static_cast<const int4*>(
      params.k)[token * params.k_token_stride + head * params.k_head_stride + chunk];
  const int4 v = static_cast<const int4*>(
      params.v)[token * params.v_token_stride + head * params.v_head_stride + chunk];
  if (slot < 0) return;
  const int64_t page = slot / params.page_size;
  const int offset = slot % params.page_size;
  const int64_t target =
      ((page * params.num_kv_heads + head) * params.page_size + offset) * params.chunks_per_row +
      chunk;
  static_cast<int4*>(params.k_pool)[target] = k;
  static_cast<int4*>(params.v_pool)[target] = v;
  if (!params.ticket) __threadfence();  // see above
}

}  // namespace hf_cascade
