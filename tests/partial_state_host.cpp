// csrc/packed_rows.cuh on the CPU: rows of values, as the warps of a CTA hold them. It takes CUDA's
// own fp16. host_sources.py compiles it, with an empty ptx.cuh.
#include <cuda_fp16.h>
#undef __host__
#undef __device__
#undef __global__
#undef __launch_bounds__
#undef __shared__
#undef __forceinline__

#include "host_cuda.h"

#define __forceinline__ inline
inline float __int_as_float(int bits) { return host::bits_as<float>(bits); }
inline bool __all_sync(unsigned, bool vote) { return !__any_sync(~0u, !vote); }

#include "packed_rows.cuh"

using namespace hf_cascade;

namespace {

constexpr int kColumns = 64;

// Where a lane's values lie: rows of a warp, and the columns of its i-th pair, the second 8 later.
template <bool kByRow>
struct Place {
  static constexpr int kRows = kByRow ? 16 : 8;  // matrix warps, leaf warps
  static constexpr int kPairs = kColumns / (kByRow ? 8 : 16);

  static int row(int r) { return kByRow ? host::lane() / 4 + 8 * r : 2 * (host::lane() % 4) + r; }
  static int column(int i) {
    return kByRow ? 16 * (i / 2) + 2 * (host::lane() % 4) + i % 2 : 16 * i + host::lane() / 4;
  }
};

template <bool kByRow>
void pack(const float* values, const float* normalizers, const uint8_t* exist, float* stored,
          float* scales) {
  using P = Place<kByRow>;
  const int first_row = host::current / 32 * P::kRows;
  bool exists[2];
  float normalizer[2];
  for (int r = 0; r < 2; ++r) {
    exists[r] = exist[first_row + P::row(r)];
    normalizer[r] = normalizers[first_row + P::row(r)];
  }
  const auto place = [&](int r, int i) {
    return (first_row + P::row(r)) * kColumns + P::column(i);
  };
  const auto packed = pack_rows<P::kPairs, kByRow ? 1 : 4, kByRow ? 4 : 32>(
      exists, normalizer,
      [&](int r, int i) { return make_float2(values[place(r, i)], values[place(r, i) + 8]); });
  for (int r = 0; r < 2; ++r) {
    for (int i = 0; i < P::kPairs; ++i) {
      const float2 pair = __half22float2(host::bits_as<__half2>(packed.pairs[r][i]));
      stored[place(r, i)] = pair.x;
      stored[place(r, i) + 8] = pair.y;
    }
    const bool writes_scale = (kByRow ? host::lane() % 4 : host::lane() / 4) == 0;
    if (writes_scale) scales[first_row + P::row(r)] = packed.scale[r];
  }
}

}  // namespace

extern "C" {

int rescaling_of(float largest, int exponent) { return rescaling(largest, exponent); }
int column_of(int place) { return state_column(place); }
int rows_at_once(bool by_row) { return host::kMostThreads / 32 * (by_row ? 16 : 8); }

// Of rows_at_once rows of 64 values, what is stored. Null, or what went wrong.
const char* pack_all(bool by_row, const float* values, const float* normalizers,
                     const uint8_t* exist, float* stored, float* scales) {
  host::kernel = [&] {
    (by_row ? pack<true> : pack<false>)(values, normalizers, exist, stored, scales);
  };
  std::mt19937 random(0);
  host::cta.x = 0;
  host::num_ctas.x = 1;
  host::num_threads.x = host::kMostThreads;
  return host::run_cta(random) ? nullptr : "threads wait for ever";
}

}  // extern "C"
