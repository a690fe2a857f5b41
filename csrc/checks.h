// What the kernels rely on, as questions about tensors. A call for which an answer is no goes to
// the composed torch path (ops/composed.py), which serves it or says what is wrong with it: so
// messages are written once, in Python, and no call fails for want of a kernel.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <cuda_runtime.h>

#include <array>
#include <optional>
#include <tuple>

namespace hf_cascade {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t kAccessBytes = 16;  // every kernel moves rows in accesses of this size

inline bool is_half(const Tensor& t) {
  return t.scalar_type() == ScalarType::Half || t.scalar_type() == ScalarType::BFloat16;
}

inline bool is_on_device_of(const Tensor& t, const Tensor& like) {
  return t.is_cuda() && t.get_device_index() == like.get_device_index();
}

inline bool is_index(const Tensor& t, const Tensor& like) {
  return t.scalar_type() == ScalarType::Int && t.dim() == 1 && t.is_contiguous() &&
         is_on_device_of(t, like);
}

inline bool is_aligned(const Tensor& t) {
  return reinterpret_cast<uintptr_t>(t.data_ptr()) % kAccessBytes == 0;
}

// Rows [num_tokens, num_heads, head_dim] that 16-byte accesses can walk: dense rows, any strides.
inline bool has_whole_rows(const Tensor& t) {
  const int64_t width = kAccessBytes / static_cast<int64_t>(t.element_size());
  return t.dim() == 3 && t.size(2) % width == 0 && (t.size(2) == 0 || t.stride(2) == 1) &&
         t.stride(0) % width == 0 && t.stride(1) % width == 0 && is_aligned(t);
}

inline bool is_pool(const Tensor& k_pool, const Tensor& v_pool) {
  bool alike = k_pool.dim() == 4 && v_pool.dim() == 4 &&
               k_pool.scalar_type() == v_pool.scalar_type() && is_on_device_of(v_pool, k_pool);
  for (int i = 0; alike && i < 4; ++i) alike = k_pool.size(i) == v_pool.size(i);
  return alike && k_pool.is_contiguous() && v_pool.is_contiguous() && is_aligned(k_pool) &&
         is_aligned(v_pool);
}

inline int64_t stride_in_chunks(const Tensor& t, int64_t dim) {
  return t.stride(dim) * static_cast<int64_t>(t.element_size()) / kAccessBytes;
}

inline cudaStream_t current_stream(const Tensor& t) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(t.get_device_index(), &stream));
  return static_cast<cudaStream_t>(stream);
}

inline void check_launch(cudaError_t error, const char* what) {
  if (error != cudaSuccess) cudaGetLastError();  // ours, not to be found by the next check of torch
  STD_TORCH_CHECK(error == cudaSuccess, what, ": ", cudaGetErrorString(error));
}

inline int device_attribute(cudaDeviceAttr attribute) {
  int device = 0, value = 0;
  check_launch(cudaGetDevice(&device), "cudaGetDevice");
  check_launch(cudaDeviceGetAttribute(&value, attribute, device), "cudaDeviceGetAttribute");
  return value;
}

// Whether `launch` makes programmatic dependent launches.
inline bool has_early_launch() { return device_attribute(cudaDevAttrComputeCapabilityMajor) == 9; }

// Programmatic dependent launch, on sm_90: a kernel's prologue overlaps the end of the kernel
// before it. Every kernel launched this way waits (ptx::wait_for_previous_kernel) before it touches
// what that one writes. Code for other GPUs has no such wait, so there a launch is an ordinary one.
template <typename... Params>
void launch(const char* what, void (*kernel)(Params...), dim3 num_ctas, int num_threads,
            int shared_bytes, cudaStream_t stream, const Params&... params) {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = num_ctas;
  config.blockDim = dim3(num_threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = has_early_launch() ? 1 : 0;
  check_launch(cudaLaunchKernelEx(&config, kernel, params...), what);
}

// Calls an op by name, as Python would: `name` is one of ours, `composed_...`.
template <typename... Args>
std::array<StableIValue, (sizeof...(Args) > 2 ? sizeof...(Args) : 2)> call_composed(
    const char* name, const Args&... args) {
  std::array<StableIValue, (sizeof...(Args) > 2 ? sizeof...(Args) : 2)> stack{
      torch::stable::detail::from(args)...};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(name, "", stack.data(), TORCH_ABI_VERSION));
  return stack;
}

template <typename... Args>
std::tuple<Tensor, Tensor> composed_state(const char* name, const Args&... args) {
  const auto stack = call_composed(name, args...);
  return {torch::stable::detail::to<Tensor>(stack[0]), torch::stable::detail::to<Tensor>(stack[1])};
}

}  // namespace hf_cascade
