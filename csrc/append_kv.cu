#include "append_kv.cuh"

#include "forced_schedule.h"
#include "ops.h"

namespace hf_cascade {

constexpr int kThreads = 256;

bool can_append(const Tensor& k, const Tensor& v, const Tensor& k_pool, const Tensor& v_pool,
                const Tensor& slots) {
  const auto fits = [&](const Tensor& rows) {
    return has_whole_rows(rows) && rows.scalar_type() == k_pool.scalar_type() &&
           is_on_device_of(rows, k_pool) && rows.size(0) == slots.size(0) &&
           rows.size(1) == k_pool.size(1) && rows.size(2) == k_pool.size(3);
  };
  return is_pool(k_pool, v_pool) && is_index(slots, k_pool) && fits(k) && fits(v);
}

namespace {

AppendParams append_params(const Tensor& k, const Tensor& v, const Tensor& k_pool,
                           const Tensor& v_pool, const Tensor& slots, const Tensor* ticket) {
  AppendParams params = {};
  params.k = k.data_ptr();
  params.v = v.data_ptr();
  params.k_pool = k_pool.data_ptr();
  params.v_pool = v_pool.data_ptr();
  params.slots = static_cast<const int32_t*>(slots.data_ptr());
  params.k_token_stride = stride_in_chunks(k, 0);
  params.k_head_stride = stride_in_chunks(k, 1);
  params.v_token_stride = stride_in_chunks(v, 0);
  params.v_head_stride = stride_in_chunks(v, 1);
  params.num_tokens = static_cast<int>(k.size(0));
  params.num_kv_heads = static_cast<int>(k.size(1));
  params.page_size = static_cast<int>(k_pool.size(2));
  params.chunks_per_row =
      static_cast<int>(k.size(2) * static_cast<int64_t>(k.element_size()) / kAccessBytes);
  if (ticket) params.ticket = static_cast<int32_t*>(ticket->data_ptr());
  params.is_late = forced_schedule().delay_seed > 0;
  return params;
}

int ceil_div(int a, int b) { return (a + b - 1) / b; }

template <typename T, typename Angle>
void launch_rotating(const AppendParams& params, const RotateParams& rope, cudaStream_t stream) {
  const int num_chunks = (rope.num_q_heads + params.num_kv_heads) * params.chunks_per_row;
  const int num_parts = ceil_div(num_chunks, kMostAppendThreads);
  const int num_threads = ceil_div(ceil_div(num_chunks, num_parts), 32) * 32;
  launch("append_kv", rotate_and_append_kernel<T, Angle>, dim3(params.num_tokens, num_parts),
         num_threads, 0, stream, params, rope);
}

template <typename T>
void launch_rotating(const AppendParams& params, const RotateParams& rope, bool has_float_angles,
                     cudaStream_t stream) {
  if (has_float_angles) {
    launch_rotating<T, float>(params, rope, stream);
  } else {
    launch_rotating<T, T>(params, rope, stream);
  }
}

}  // namespace

void launch_append(const Tensor& k, const Tensor& v, const Tensor& k_pool, const Tensor& v_pool,
                   const Tensor& slots, const Tensor* ticket) {
  const AppendParams params = append_params(k, v, k_pool, v_pool, slots, ticket);
  const int64_t num_chunks =
      int64_t{params.num_tokens} * params.num_kv_heads * params.chunks_per_row;
  const int64_t num_ctas = (num_chunks + kThreads - 1) / kThreads;
  if (num_ctas == 0 && !ticket) return;
  STD_TORCH_CHECK(num_ctas < (int64_t{1} << 31), "append_kv: too many tokens, got ",
                  params.num_tokens);
  launch("append_kv", append_kv_kernel, num_ctas ? static_cast<int>(num_ctas) : 1, kThreads, 0,
         current_stream(k_pool), params);
}

bool can_rotate(const Tensor& q, const Tensor& k, const Tensor& cos, const Tensor& sin) {
  const auto fits = [&](const Tensor& angles) {
    const int64_t width = kAccessBytes / static_cast<int64_t>(angles.element_size());
    return angles.dim() == 2 && is_on_device_of(angles, q) && angles.size(0) == q.size(0) &&
           (angles.scalar_type() == q.scalar_type() || angles.scalar_type() == ScalarType::Float) &&
           angles.stride(1) == 1 && angles.stride(0) % width == 0 && is_aligned(angles);
  };
  return is_half(q) && q.size(0) == k.size(0) && fits(cos) && fits(sin) &&
         cos.size(1) == sin.size(1) && cos.scalar_type() == sin.scalar_type() && cos.size(1) > 0 &&
         cos.size(1) <= q.size(2) && cos.size(1) % (2 * kChunkValues) == 0;
}

void launch_rotating_append(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& k_pool,
                            const Tensor& v_pool, const Tensor& slots, const Tensor& cos,
                            const Tensor& sin, const Tensor& rotated, const Tensor* ticket) {
  const AppendParams params = append_params(k, v, k_pool, v_pool, slots, ticket);
  if (params.num_tokens == 0) return;  // and nothing follows
  RotateParams rope = {};
  rope.q = q.data_ptr();
  rope.rotated = rotated.data_ptr();
  rope.cos = cos.data_ptr();
  rope.sin = sin.data_ptr();
  rope.q_token_stride = stride_in_chunks(q, 0);
  rope.q_head_stride = stride_in_chunks(q, 1);
  rope.cos_token_stride = stride_in_chunks(cos, 0);
  rope.sin_token_stride = stride_in_chunks(sin, 0);
  rope.num_q_heads = static_cast<int>(q.size(1));
  rope.half_chunks = static_cast<int>(cos.size(1) / (2 * kChunkValues));
  const bool has_float_angles = cos.scalar_type() == ScalarType::Float;
  if (q.scalar_type() == ScalarType::Half) {
    launch_rotating<__half>(params, rope, has_float_angles, current_stream(k_pool));
  } else {
    launch_rotating<__nv_bfloat16>(params, rope, has_float_angles, current_stream(k_pool));
  }
}

void append_kv(Tensor k, Tensor v, Tensor k_pool, Tensor v_pool, Tensor slots) {
  if (!can_append(k, v, k_pool, v_pool, slots)) {
    call_composed("hf_cascade::composed_append_kv", k, v, k_pool, v_pool, slots);
    return;
  }
  const torch::stable::accelerator::DeviceGuard guard(k_pool.get_device_index());
  launch_append(k, v, k_pool, v_pool, slots, nullptr);
}

}  // namespace hf_cascade
