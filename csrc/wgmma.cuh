// wgmma: four warps multiply 64 rows at once, B straight from shared memory. sm_90a only.
//
// The accumulators, and A where it is in registers, lie as those of mma.sync do (a warp owns 16
// rows), so the two are interchangeable tile by tile. What is in shared memory is one of our
// swizzled tiles, named by a descriptor.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace hf_cascade::wgmma {

// Where a tile begins, and the distances in bytes between its 64-value panels and between groups of
// 8 rows; 1 in the top bits is the 128-byte swizzle. The unit is 16 bytes: a descriptor plus n is
// n * 16 bytes further on. Of its 64 bits this is the lower half; the upper one is the same for all
// tiles. It comes from a shuffle for the compiler to keep it (as MatrixWarp::held_address says).
__device__ __forceinline__ uint32_t descriptor(uint32_t address, int panel_bytes) {
  address = __shfl_sync(~0u, address, 0);
  return (address & 0x3ffff) >> 4 | (static_cast<uint32_t>(panel_bytes) >> 4) << 16;
}

constexpr uint32_t kDescriptorUpperHalf = (8 * 128) >> 4 | 1u << 30;

// Before the first product after registers of it were written.
__device__ __forceinline__ void fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// Ends a group of products; waits until all but the last kPending groups are done.
__device__ __forceinline__ void commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int kPending>
__device__ __forceinline__ void wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// The compiler does not know that a product writes its registers later: keeps uses behind `wait`.
template <int kTiles>
__device__ __forceinline__ void settle(float (&d)[kTiles][4]) {
#pragma unroll
  for (int j = 0; j < kTiles; ++j) {
    asm volatile("" : "+f"(d[j][0]), "+f"(d[j][1]), "+f"(d[j][2]), "+f"(d[j][3])::"memory");
  }
}

// The instructions' operands: d is 64 x 64 or 64 x 128, four values a thread for every 8 columns.
#define HF_CASCADE_NAMES_64                                                \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define HF_CASCADE_NAMES_128                                                           \
  HF_CASCADE_NAMES_64                                                                  \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define HF_CASCADE_TILE(j) "+f"(d[j][0]), "+f"(d[j][1]), "+f"(d[j][2]), "+f"(d[j][3])
#define HF_CASCADE_VALUES_64                                                      \
  HF_CASCADE_TILE(0), HF_CASCADE_TILE(1), HF_CASCADE_TILE(2), HF_CASCADE_TILE(3), \
      HF_CASCADE_TILE(4), HF_CASCADE_TILE(5), HF_CASCADE_TILE(6), HF_CASCADE_TILE(7)
#define HF_CASCADE_VALUES_128                                                             \
  HF_CASCADE_VALUES_64, HF_CASCADE_TILE(8), HF_CASCADE_TILE(9), HF_CASCADE_TILE(10),      \
      HF_CASCADE_TILE(11), HF_CASCADE_TILE(12), HF_CASCADE_TILE(13), HF_CASCADE_TILE(14), \
      HF_CASCADE_TILE(15)

// d = a b, or d + a b where `keep`: 64 query rows, in registers, times 64 tokens, 16 values deep.
#define HF_CASCADE_MULTIPLY_KEYS(type)                                                     \
  asm volatile(                                                                            \
      "{ .reg .pred keep; .reg .b64 tile; setp.ne.s32 keep, %37, 0;"                       \
      "mov.b64 tile, {%36, %38};"                                                          \
      "wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type " {" HF_CASCADE_NAMES_64 \
      "}, {%32, %33, %34, %35}, tile, keep, 1, 1, 0; }"                                    \
      : HF_CASCADE_VALUES_64                                                               \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(keep), "n"(kDescriptorUpperHalf))

template <typename T>
__device__ __forceinline__ void multiply_keys(float (&d)[8][4], const uint32_t (&a)[4], uint32_t b,
                                              int keep) {
  if constexpr (std::is_same_v<T, __half>) {
    HF_CASCADE_MULTIPLY_KEYS("f16");
  } else {
    HF_CASCADE_MULTIPLY_KEYS("bf16");
  }
}

// d += a b: 64 rows of probabilities of 16 tokens, in registers, times their values, of which the
// long side is along the rows of b.
#define HF_CASCADE_MULTIPLY_VALUES(width, names, values, a0, a1, a2, a3, tile, upper, type)  \
  asm volatile("{ .reg .b64 tile; mov.b64 tile, {" tile ", " upper                           \
               "};"                                                                          \
               "wgmma.mma_async.sync.aligned.m64n" width "k16.f32." type "." type " {" names \
               "}, {" a0 ", " a1 ", " a2 ", " a3 "}, tile, 1, 1, 1, 1; }"                    \
               : values                                                                      \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "n"(kDescriptorUpperHalf))
#define HF_CASCADE_MULTIPLY_VALUES_64(type)                                                        \
  HF_CASCADE_MULTIPLY_VALUES("64", HF_CASCADE_NAMES_64, HF_CASCADE_VALUES_64, "%32", "%33", "%34", \
                             "%35", "%36", "%37", type)
#define HF_CASCADE_MULTIPLY_VALUES_128(type)                                                   \
  HF_CASCADE_MULTIPLY_VALUES("128", HF_CASCADE_NAMES_128, HF_CASCADE_VALUES_128, "%64", "%65", \
                             "%66", "%67", "%68", "%69", type)

template <typename T>
__device__ __forceinline__ void multiply_values(float (&d)[8][4], const uint32_t (&a)[4],
                                                uint32_t b) {
  if constexpr (std::is_same_v<T, __half>) {
    HF_CASCADE_MULTIPLY_VALUES_64("f16");
  } else {
    HF_CASCADE_MULTIPLY_VALUES_64("bf16");
  }
}

template <typename T>
__device__ __forceinline__ void multiply_values(float (&d)[16][4], const uint32_t (&a)[4],
                                                uint32_t b) {
  if constexpr (std::is_same_v<T, __half>) {
    HF_CASCADE_MULTIPLY_VALUES_128("f16");
  } else {
    HF_CASCADE_MULTIPLY_VALUES_128("bf16");
  }
}

#undef HF_CASCADE_NAMES_64
#undef HF_CASCADE_NAMES_128
#undef HF_CASCADE_TILE
#undef HF_CASCADE_VALUES_64
#undef HF_CASCADE_VALUES_128
#undef HF_CASCADE_MULTIPLY_KEYS
#undef HF_CASCADE_MULTIPLY_VALUES
#undef HF_CASCADE_MULTIPLY_VALUES_64
#undef HF_CASCADE_MULTIPLY_VALUES_128

}  // namespace hf_cascade::wgmma
