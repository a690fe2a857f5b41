// The attention kernel's launch, one function a head_dim: each is compiled from
// attention_instance.cu by itself, so that a build uses all cores.
#pragma once

#include "attention_traits.cuh"

namespace hf_cascade {

enum class ElementType { kHalf, kBFloat16 };

template <int kHeadDim>
void launch_attention(AttentionParams params, ElementType dtype, cudaStream_t stream);

}  // namespace hf_cascade
