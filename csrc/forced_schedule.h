// Schedules that tests force on the append and the attention kernel: their answers must not depend
// on how many CTAs share the items, nor on who is late.
//   HF_CASCADE_CTAS    CTAs to launch, instead of one a multiprocessor
//   HF_CASCADE_DELAYS  a seed: who takes an item waits for up to 16 microseconds first, and the
//                      append kernel for 20 before it writes
#pragma once

#include <cstdint>
#include <cstdlib>

namespace hf_cascade {

struct ForcedSchedule {
  int num_ctas;         // 0: as grid_rule.cuh has it
  uint32_t delay_seed;  // 0: no delays
};

inline ForcedSchedule forced_schedule() {
  const auto number = [](const char* name) {
    const char* text = std::getenv(name);
    return text ? std::atoi(text) : 0;
  };
  const int ctas = number("HF_CASCADE_CTAS");
  return {ctas > 0 ? ctas : 0, static_cast<uint32_t>(number("HF_CASCADE_DELAYS"))};
}

}  // namespace hf_cascade
