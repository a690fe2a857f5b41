// Which warps of a CTA take leaves' items, and where: three of their own, always. Three matrix
// warps join them: from the start where there is nothing shared, else, in the stages of their ring,
// once nothing shared is left.
#pragma once

#include "leaf_warp.cuh"

namespace hf_cascade {

template <typename Traits>
class LeafWarps {
 public:
  __device__ LeafWarps(const AttentionParams& params, const SharedMemory<Traits>& shared)
      : p_(params), shared_(shared) {
    if (!params.may_start_early) ptx::wait_for_previous_kernel();  // the work list
    num_ring_stages_ = shared.num_ring_stages(*params.work.header);
    num_warps_ = num_within(are_alone() ? kMostLeafWarps : kLeafWarps, num_leaf_stages());
  }

  __device__ bool are_alone() const { return p_.work.header->num_shared_items == 0; }

  // One of those who are there from the start.
  __device__ void run(int place) const {
    if (place >= num_warps_) return;
    leaf_warp(place, place, num_warps_, num_ring_stages_, num_leaf_stages()).run(place, num_warps_);
  }

  // One of those who join.
  __device__ void help(int place) const {
    const int num_helpers = num_within(kMostLeafWarps - kLeafWarps, num_ring_stages_);
    if (place >= num_helpers || p_.work.header->num_leaf_items == 0) return;
    leaf_warp(kLeafWarps + place, place, num_helpers, 0, num_ring_stages_).help(num_warps_);
  }

 private:
  __device__ int num_leaf_stages() const { return shared_.num_stages - num_ring_stages_; }

  // Warps that can have a slot each.
  static __device__ int num_within(int num_warps, int num_stages) {
    return min(num_warps, num_stages * Traits::kStageBytes / Traits::kSlotBytes);
  }

  // The index-th of num_warps that share these stages.
  __device__ LeafWarp<Traits> leaf_warp(int ring, int index, int num_warps, int first_stage,
                                        int num_stages) const {
    const int slots = num_stages * Traits::kStageBytes / (num_warps * Traits::kSlotBytes);
    const int num_slots = min(kMaxLeafSlots, slots);
    return LeafWarp<Traits>(p_, shared_.control().leaf_rings[ring],
                            shared_.k(first_stage) + index * num_slots * Traits::kSlotBytes,
                            num_slots);
  }

  const AttentionParams& p_;
  const SharedMemory<Traits>& shared_;
  int num_ring_stages_, num_warps_;
};

}  // namespace hf_cascade
