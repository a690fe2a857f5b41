// Compiled once for each head_dim, with -DHF_CASCADE_HEAD_DIM=...
#include "cascade_attention.cuh"
#include "checks.h"
#include "launch_attention.h"

namespace hf_cascade {
namespace {

int device_attribute(cudaDeviceAttr attribute) {
  int device = 0, value = 0;
  check_launch(cudaGetDevice(&device), "cudaGetDevice");
  check_launch(cudaDeviceGetAttribute(&value, attribute, device), "cudaDeviceGetAttribute");
  return value;
}

template <typename T, int kHeadDim>
void launch_typed(AttentionParams params, cudaStream_t stream) {
  using Traits = AttentionTraits<T, kHeadDim>;
  using Shared = SharedMemory<Traits>;
  const int available = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  int num_stages = kMaxStages;
  while (num_stages > 1 && Shared::bytes(num_stages) > available) --num_stages;
  params.num_stages = num_stages;
  const int bytes = Shared::bytes(num_stages);
  check_launch(cudaFuncSetAttribute(cascade_attention_kernel<Traits>,
                                    cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
               "cascade_attention: shared memory");
  launch("cascade_attention", cascade_attention_kernel<Traits>,
         device_attribute(cudaDevAttrMultiProcessorCount), kAttentionThreads, bytes, stream,
         params);
}

}  // namespace

template <>
void launch_attention<HF_CASCADE_HEAD_DIM>(AttentionParams params, ElementType dtype,
                                           cudaStream_t stream) {
  if (dtype == ElementType::kHalf) {
    launch_typed<__half, HF_CASCADE_HEAD_DIM>(params, stream);
  } else {
    launch_typed<__nv_bfloat16, HF_CASCADE_HEAD_DIM>(params, stream);
  }
}

}  // namespace hf_cascade
