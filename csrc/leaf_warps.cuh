// Which warps of a CTA take leaves' items, and which buffers each has. There are three leaf warps,
// or two with more buffers each if that is faster (stage_rule.cuh). Three matrix warps can join
// them: from the start if there are no shared items, else, with the stages of their ring as
// buffers, once no shared item is left.
#pragma once

#include "leaf_warp.cuh"

namespace hf_cascade {

template <typename Traits>
class LeafWarps {
 public:
  __device__ LeafWarps(const AttentionParams& params, const SharedMemory<Traits>& shared,
                       const WorkHeader& header)
      : p_(params), shared_(shared), header_(header) {
    num_ring_stages_ = shared.num_ring_stages(header);
    is_alone_ = header.num_shared_items == 0;
    num_warps_ = num_within(is_alone_ && header.all_leaf_warps ? kMostLeafWarps : kLeafWarps,
                            num_leaf_stages());
  }

  // A warp's number among those that can take leaves' items: the leaf warps come first.
  static __device__ int place_of(int warp) {
    return warp < kMatrixWarps ? kLeafWarps + warp : warp - kMatrixWarps;
  }

  // For any warp but the producer, once it has no other work. first_words: see LeafWarp::start.
  // (One body for all warps keeps the code short, see cascade_attention.cuh.)
  __device__ void run(int warp, int32_t first_words) const {
    const bool is_own = warp >= kMatrixWarps, is_first = is_own || is_alone_;
    const int place = place_of(warp), index = is_first ? place : warp;
    const int num_stages = is_first ? num_leaf_stages() : num_ring_stages_;
    const int num_warps =
        is_first ? num_warps_ : num_within(kMostLeafWarps - kLeafWarps, num_ring_stages_);
    if (index >= num_warps) return;
    LeafWarp<Traits> leaf_warp =
        make_warp(place, index, num_warps, is_own ? num_ring_stages_ : 0, num_stages);
    if (is_first ? leaf_warp.start(place, num_warps_, first_words) : leaf_warp.join(num_warps_)) {
      leaf_warp.run();
    }
  }

 private:
  __device__ int num_leaf_stages() const { return shared_.num_stages - num_ring_stages_; }

  // How many of num_warps these stages can give a buffer each or, if not all warps take items, two.
  __device__ int num_within(int num_warps, int num_stages) const {
    const int buffers = num_stages * Traits::kStageBytes / Traits::kBufferBytes;
    return min(num_warps, header_.all_leaf_warps || buffers < 4 ? buffers : buffers / 2);
  }

  // The index-th of num_warps warps that share these stages.
  __device__ LeafWarp<Traits> make_warp(int ring, int index, int num_warps, int first_stage,
                                        int num_stages) const {
    const int fitting = num_stages * Traits::kStageBytes / (num_warps * Traits::kBufferBytes);
    const int num_buffers = min(kMaxLeafBuffers, fitting);
    return LeafWarp<Traits>(p_, header_, shared_.control().leaf_rings[ring],
                            shared_.base + first_stage * Traits::kStageBytes +
                                index * num_buffers * Traits::kBufferBytes,
                            num_buffers);
  }

  const AttentionParams& p_;
  const SharedMemory<Traits>& shared_;
  const WorkHeader& header_;
  bool is_alone_;
  int num_ring_stages_, num_warps_;
};

}  // namespace hf_cascade
