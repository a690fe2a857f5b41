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

void launch_append(const Tensor& k, const Tensor& v, const Tensor& k_pool, const Tensor& v_pool,
                   const Tensor& slots, const Tensor* ticket) {
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
  const int64_t num_chunks =
      int64_t{params.num_tokens} * params.num_kv_heads * params.chunks_per_row;
  const int64_t num_ctas = (num_chunks + kThreads - 1) / kThreads;
  if (num_ctas == 0 && !ticket) return;
  STD_TORCH_CHECK(num_ctas < (int64_t{1} << 31), "append_kv: too many tokens, got ",
                  params.num_tokens);
  launch("append_kv", append_kv_kernel, num_ctas ? static_cast<int>(num_ctas) : 1, kThreads, 0,
         current_stream(k_pool), params);
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
