// The pages of consecutive slots, for a warp that sends for their KV block after block.
//
//   Owns  the pages of 32 blocks of 16 slots, a lane a block, and those of the next 32, which are
//         on their way: looked up tile by tile, each would be a trip to memory before its KV's.
#pragma once

#include "attention_traits.cuh"

namespace hf_cascade {

class PageWindow {
 public:
  // What it is opened on: kv_indices from the pages of a run of slots on.
  struct Run {
    const int32_t* pages;
    int start, end_slot;  // of the run; block 0 begins at `start`, a multiple of 16
    int page_size_log2;

    // The page of block first + lane, if there is one.
    __device__ int32_t load(int first) const {
      const int slot = start + (first + static_cast<int>(threadIdx.x % 32)) * kBoxTokens;
      return slot < end_slot ? __ldcg(pages + (slot >> page_size_log2)) : 0;
    }
  };

  // Sends for the pages of blocks 0 to 31. What it was opened on before needs no more by then.
  __device__ void send_for(const Run& run) { ahead_ = run.load(0); }

  // What was sent for begins. The first blocks need not wait for it if their pages are known: here
  // a lane's.
  __device__ void open(int32_t known) { at_hand_ = known; }

  // To the blocks of the tile that begins with `block`; at first to 0. Not before they are needed,
  // for then others are waited for. num_known: blocks that `open` knew; find_run(): the run.
  template <typename FindRun>
  __device__ void move_to(int block, int num_known, FindRun find_run) {
    if (block != num_known && (block == 0 || block % 32 > 0)) return;
    at_hand_ = ahead_;
    ahead_ = find_run().load(block / 32 * 32 + 32);
  }

  // By all lanes.
  __device__ int page_of(int block) const { return __shfl_sync(~0u, at_hand_, block % 32); }

 private:
  int32_t at_hand_ = 0, ahead_ = 0;
};

}  // namespace hf_cascade
