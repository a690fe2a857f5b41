// Which warps of a CTA take leaves' items, and where: three of their own, always. Three matrix
// warps join them: from the start where there is nothing shared, else, in the stages of their ring,
// once nothing shared is left.
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
    const int wanted = header.num_shared_items == 0 ? kMostLeafWarps : kLeafWarps;
    num_warps_ = num_within(wanted, num_leaf_stages());
  }

  // One of the three.
  __device__ void run(int place) const {
    if (place >= num_warps_) return;
    LeafWarp<Traits> warp =
        leaf_warp(place, place, num_warps_, num_ring_stages_, num_leaf_stages());
    if (warp.start(place, num_warps_)) warp.run();
  }

  // One of those who join. (One body for both cases: code that runs once costs by the line.)
  __device__ void join(int helper) const {
    const bool is_alone = header_.num_shared_items == 0;
    const int num_helpers = num_within(kMostLeafWarps - kLeafWarps, num_ring_stages_);
    const int place = kLeafWarps + helper;
    if (is_alone ? place >= num_warps_ : helper >= num_helpers) return;
    LeafWarp<Traits> warp = is_alone ? leaf_warp(place, place, num_warps_, 0, num_leaf_stages())
                                     : leaf_warp(place, helper, num_helpers, 0, num_ring_stages_);
    const bool has_items = is_alone ? warp.start(place, num_warps_) : warp.join(num_warps_);
    if (has_items) warp.run();
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
    return LeafWarp<Traits>(
        p_, header_, shared_.control().leaf_rings[ring],
        shared_.base + first_stage * Traits::kStageBytes + index * num_slots * Traits::kSlotBytes,
        num_slots);
  }

  const AttentionParams& p_;
  const SharedMemory<Traits>& shared_;
  const WorkHeader& header_;
  int num_ring_stages_, num_warps_;
};

}  // namespace hf_cascade
