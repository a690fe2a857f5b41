#include "merge_states.cuh"

#include "ops.h"

namespace hf_cascade {
namespace {

constexpr int kThreads = 256;

// Rows of head_dim values, dense and in 16-byte accesses, float32 lse beside them.
bool is_state(const Tensor& out, const Tensor& lse) {
  const bool typed = (is_half(out) || out.scalar_type() == ScalarType::Float) &&
                     lse.scalar_type() == ScalarType::Float;
  if (!typed || out.dim() < 1 || lse.dim() != out.dim() - 1) return false;
  for (int64_t i = 0; i < lse.dim(); ++i) {
    if (lse.size(i) != out.size(i)) return false;
  }
  const int64_t row_bytes = out.size(-1) * static_cast<int64_t>(out.element_size());
  return row_bytes > 0 && row_bytes % kAccessBytes == 0 && out.is_contiguous() &&
         lse.is_contiguous() && is_aligned(out) && is_on_device_of(lse, out);
}

bool is_pair(const Tensor& out_a, const Tensor& lse_a, const Tensor& out_b, const Tensor& lse_b) {
  bool alike = is_state(out_a, lse_a) && is_state(out_b, lse_b) && out_a.dim() == out_b.dim() &&
               out_a.scalar_type() == out_b.scalar_type() && is_on_device_of(out_b, out_a);
  for (int64_t i = 0; alike && i < out_a.dim(); ++i) alike = out_a.size(i) == out_b.size(i);
  return alike;
}

void launch_merge(const MergeParams& params, ScalarType dtype, cudaStream_t stream) {
  const int64_t element_size = dtype == ScalarType::Float ? 4 : 2;
  const int64_t num_chunks = params.num_rows * params.head_dim * element_size / kAccessBytes;
  if (num_chunks == 0) return;
  void (*kernel)(MergeParams) = merge_states_kernel<float>;
  if (dtype == ScalarType::Half) kernel = merge_states_kernel<__half>;
  if (dtype == ScalarType::BFloat16) kernel = merge_states_kernel<__nv_bfloat16>;
  const int64_t num_ctas = (num_chunks + kThreads - 1) / kThreads;
  STD_TORCH_CHECK(num_ctas < (int64_t{1} << 31), "merge_states: too many rows, got ",
                  params.num_rows);
  launch("merge_states", kernel, static_cast<int>(num_ctas), kThreads, 0, stream, params);
}

}  // namespace

State merge_state(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b) {
  if (!is_pair(out_a, lse_a, out_b, lse_b)) {
    return composed_state("hf_cascade::composed_merge_state", out_a, lse_a, out_b, lse_b);
  }
  const torch::stable::accelerator::DeviceGuard guard(out_a.get_device_index());
  Tensor out = torch::stable::empty_like(out_a), lse = torch::stable::empty_like(lse_a);
  const auto distance = [](const Tensor& a, const Tensor& b) {
    return static_cast<const char*>(b.data_ptr()) - static_cast<const char*>(a.data_ptr());
  };
  MergeParams params = {};
  params.out = out_a.data_ptr();
  params.lse = static_cast<const float*>(lse_a.data_ptr());
  params.out_stride = distance(out_a, out_b);
  params.lse_stride = distance(lse_a, lse_b);
  params.merged_out = out.data_ptr();
  params.merged_lse = static_cast<float*>(lse.data_ptr());
  params.num_rows = lse.numel();
  params.num_states = 2;
  params.head_dim = static_cast<int>(out.size(-1));
  launch_merge(params, out.scalar_type(), current_stream(out));
  return {out, lse};
}

State merge_states(Tensor out, Tensor lse) {
  if (out.dim() < 2 || !is_state(out, lse)) {
    return composed_state("hf_cascade::composed_merge_states", out, lse);
  }
  const torch::stable::accelerator::DeviceGuard guard(out.get_device_index());
  const auto sizes = out.sizes();
  Tensor merged_out = torch::stable::new_empty(out, sizes.slice(1));
  Tensor merged_lse = torch::stable::new_empty(lse, lse.sizes().slice(1));
  MergeParams params = {};
  params.out = out.data_ptr();
  params.lse = static_cast<const float*>(lse.data_ptr());
  params.num_rows = merged_lse.numel();
  params.num_states = static_cast<int>(out.size(0));
  params.head_dim = static_cast<int>(out.size(-1));
  params.out_stride = merged_out.numel() * static_cast<int64_t>(out.element_size());
  params.lse_stride = params.num_rows * static_cast<int64_t>(sizeof(float));
  params.merged_out = merged_out.data_ptr();
  params.merged_lse = static_cast<float*>(merged_lse.data_ptr());
  launch_merge(params, out.scalar_type(), current_stream(out));
  return {merged_out, merged_lse};
}

}  // namespace hf_cascade
