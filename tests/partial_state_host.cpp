// csrc/partial_state.cuh on the CPU. host_sources.py compiles it.
#include "host_cuda.h"
#include "partial_state.cuh"

using namespace hf_cascade;

extern "C" {

int rescaling_of(float largest, int exponent) { return rescaling(largest, exponent); }
int column_of(int place) { return state_column(place); }
}
