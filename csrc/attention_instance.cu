// Compiled once for each head_dim, with -DHF_CASCADE_HEAD_DIM=...
#include "cascade_attention.cuh"
#include "checks.h"
#include "forced_schedule.h"
#include "grid_rule.cuh"
#include "launch_attention.h"
#include "merge_paths.cuh"

namespace hf_cascade {
namespace {

// L2 takes 128 bytes at a time: with 256 long leaves took 4% longer (benchmarks/NOTES.md, 9).
CUresult try_encode_map(CUtensorMap& map, const void* memory, CUtensorMapDataType type, int rank,
                        const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* box) {
  static const auto encode = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
    check_launch(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000,
                                                  cudaEnableDefault, &result),
                 "cuTensorMapEncodeTiled");
    STD_TORCH_CHECK(found != nullptr && result == cudaDriverEntryPointSuccess,
                    "the driver has no cuTensorMapEncodeTiled: it is older than CUDA 12");
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(found);
  }();
  const cuuint32_t steps[5] = {1, 1, 1, 1, 1};
  return encode(&map, type, rank, const_cast<void*>(memory), sizes, strides, box, steps,
                CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

CUtensorMap encode_map(const void* pool, CUtensorMapDataType type, int rank,
                       const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* box) {
  CUtensorMap map;
  const CUresult status = try_encode_map(map, pool, type, rank, sizes, strides, box);
  STD_TORCH_CHECK(status == CUDA_SUCCESS, "cuTensorMapEncodeTiled failed with ", int{status});
  return map;
}

// The pool as the copy engine sees it: boxes of 16 slots and 64 values of one page and head. Values
// past head_dim (80 and 96 are no multiples of 64) arrive as zeros.
CUtensorMap stage_map(const void* pool, const AttentionParams& params, CUtensorMapDataType type,
                      uint64_t head_dim) {
  const uint64_t page_size = uint64_t{1} << params.page_size_log2;
  const uint64_t num_heads = params.num_kv_heads, row_bytes = head_dim * 2;
  const cuuint64_t sizes[4] = {head_dim, page_size, num_heads, params.num_pages};
  const cuuint64_t strides[3] = {row_bytes, page_size * row_bytes,
                                 num_heads * page_size * row_bytes};
  const cuuint32_t box[4] = {kBoxValues, kBoxTokens, 1, 1};
  return encode_map(pool, type, 4, sizes, strides, box);
}

// For leaf warps: boxes of 16 slots and all of their values, panel after panel, if panels are
// whole.
CUtensorMap leaf_map(const void* pool, const AttentionParams& params, CUtensorMapDataType type,
                     uint64_t head_dim) {
  const uint64_t page_size = uint64_t{1} << params.page_size_log2;
  const uint64_t num_heads = params.num_kv_heads, row_bytes = head_dim * 2;
  const bool is_whole = head_dim % kBoxValues == 0;
  const uint64_t panels = is_whole ? head_dim / kBoxValues : 1;
  const cuuint64_t sizes[5] = {is_whole ? kBoxValues : head_dim, page_size, panels, num_heads,
                               params.num_pages};
  const cuuint64_t strides[4] = {row_bytes, 2 * kBoxValues, page_size * row_bytes,
                                 num_heads * page_size * row_bytes};
  const cuuint32_t box[5] = {kBoxValues, kBoxTokens, static_cast<cuuint32_t>(panels), 1, 1};
  return encode_map(pool, type, 5, sizes, strides, box);
}

// q: a box is the rows of an item, token after token. Strides are the caller's: false if the copy
// engine can't have them.
bool set_q_map(AttentionParams& params, CUtensorMapDataType type, uint64_t head_dim) {
  const uint64_t num_heads = uint64_t{1} * params.num_kv_heads * params.group_size;
  const uint64_t num_tokens = params.tree.num_tokens;
  // Where there is but one head, or token, its stride may be anything.
  const uint64_t head_stride = num_heads > 1 ? params.q_head_stride * 16 : head_dim * 2;
  const uint64_t token_stride = num_tokens > 1 ? params.q_token_stride * 16 : head_stride;
  if (head_stride == 0 || token_stride == 0) return false;  // an expanded tensor
  const cuuint64_t sizes[3] = {head_dim, num_heads, num_tokens};
  const cuuint64_t strides[2] = {head_stride, token_stride};
  const cuuint32_t box[3] = {kBoxValues, static_cast<cuuint32_t>(params.group_size),
                             static_cast<cuuint32_t>(tokens_per_tile(params.group_size))};
  return try_encode_map(params.q_map, params.q, type, 3, sizes, strides, box) == CUDA_SUCCESS;
}

template <typename T, int kHeadDim>
void launch_typed(AttentionParams params, cudaStream_t stream) {
  using Traits = AttentionTraits<T, kHeadDim>;
  static_assert(num_stages(kHeadDim, 227 * 1024) == (kHeadDim <= 128 ? kMostStages : 5),
                "a stage is lost");
  // A warpgroup waits for a tile's K while it holds the V of the one before.
  static_assert(shared_stages(num_stages(kHeadDim, 227 * 1024), 1, 1, 0.f, 1.f) >= 2, "deadlock");
  params.num_stages =
      num_stages(kHeadDim, device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin));
  if (device_attribute(cudaDevAttrComputeCapabilityMajor) == 9) {
    const auto type = std::is_same_v<T, __half> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                                : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    params.k_map = stage_map(params.k_pool, params, type, kHeadDim);
    params.v_map = stage_map(params.v_pool, params, type, kHeadDim);
    params.leaf_k_map = leaf_map(params.k_pool, params, type, kHeadDim);
    params.leaf_v_map = leaf_map(params.v_pool, params, type, kHeadDim);
    params.has_q_map = set_q_map(params, type, kHeadDim);
  }
  const int bytes = SharedMemory<Traits>::bytes(params.num_stages);
  check_launch(cudaFuncSetAttribute(cascade_attention_kernel<Traits>,
                                    cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
               "cascade_attention: shared memory");
  const ForcedSchedule forced = forced_schedule();
  params.delay_seed = forced.delay_seed;
  const int64_t rows = int64_t{params.tree.num_seqs} * params.num_kv_heads * params.group_size;
  const int num_ctas = num_attention_ctas(device_attribute(cudaDevAttrMultiProcessorCount), rows,
                                          has_early_launch());
  launch("cascade_attention", cascade_attention_kernel<Traits>,
         forced.num_ctas ? forced.num_ctas : num_ctas, kAttentionThreads, bytes, stream, params);
  if (rows == 0) return;
  if (rows <= kFewRows) {
    launch("merge_paths", merge_paths_kernel<T, kHeadDim, kMergeWarps>, static_cast<int>(rows),
           kMergeThreads, 0, stream, params);
  } else {
    launch("merge_paths", merge_paths_kernel<T, kHeadDim, 1>,
           static_cast<int>((rows + kMergeWarps - 1) / kMergeWarps), kMergeThreads, 0, stream,
           params);
  }
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
