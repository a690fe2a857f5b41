// The PTX the kernels use, one thin function an instruction. Knows CUDA only.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace hf_cascade::ptx {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// 16 bytes from global to shared memory past L1; zeros instead where `keep` is false, in which
// case nothing is read.
__device__ __forceinline__ void copy_async_16(uint32_t target, const void* source, bool keep) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(target), "l"(source),
               "r"(keep ? 16 : 0)
               : "memory");
}

// mbarriers, by pointer or by address in shared memory. A phase ends when `count` arrivals have
// come; `parity` names the phase waited for.
__device__ __forceinline__ void barrier_init(uint64_t* barrier, uint32_t count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count)
               : "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }" ::"r"(barrier)
               : "memory");
}

__device__ __forceinline__ void barrier_arrive(uint64_t* barrier) {
  barrier_arrive(shared_address(barrier));
}

// Arrives when all cp.async of this thread so far have landed.
__device__ __forceinline__ void barrier_arrive_after_copies(uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(barrier))
               : "memory");
}

// Whether the phase has ended, asked at once and only where `asks`; else false. A predicate does
// that, for at a branch ptxas would wait for all products under way.
__device__ __forceinline__ bool barrier_has_passed_if(bool asks, uint32_t barrier,
                                                      uint32_t parity) {
  uint32_t passed;
  asm volatile(
      "{ .reg .pred asks, p;"
      "  setp.ne.u32 asks, %3, 0;"
      "  setp.ne.u32 p, %3, %3;"
      "  @asks mbarrier.test_wait.parity.shared.b64 p, [%1], %2;"
      "  selp.u32 %0, 1, 0, p; }"
      : "=r"(passed)
      : "r"(barrier), "r"(parity), "r"(uint32_t{asks})
      : "memory");
  return passed != 0;
}

// Whether the phase has ended. It may take its time, in which it does not compete with other warps.
__device__ __forceinline__ bool barrier_passes(uint32_t barrier, uint32_t parity) {
#if __CUDA_ARCH__ >= 900
#define HF_CASCADE_WAIT "try_wait"
#else
#define HF_CASCADE_WAIT "test_wait"
#endif
  uint32_t passed;
  asm volatile(
      "{ .reg .pred p;"
      "  mbarrier." HF_CASCADE_WAIT
      ".parity.shared.b64 p, [%1], %2;"
      "  selp.u32 %0, 1, 0, p; }"
      : "=r"(passed)
      : "r"(barrier), "r"(parity)
      : "memory");
#undef HF_CASCADE_WAIT
  return passed != 0;
}

__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
  while (!barrier_passes(barrier, parity)) {
  }
}

__device__ __forceinline__ void barrier_wait(uint64_t* barrier, uint32_t parity) {
  barrier_wait(shared_address(barrier), parity);
}

// Announces bytes that the copy engine will deliver before the phase may end.
__device__ __forceinline__ void barrier_expect_bytes(uint64_t* barrier, uint32_t bytes) {
  asm volatile(
      "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(bytes)
      : "memory");
}

// True in one lane of the warp, and the compiler knows it.
__device__ __forceinline__ bool elect_lane() {
#if __CUDA_ARCH__ >= 900
  uint32_t elected;
  asm volatile(
      "{ .reg .pred p;"
      "  elect.sync _|p, 0xffffffff;"
      "  selp.u32 %0, 1, 0, p; }"
      : "=r"(elected));
  return elected != 0;
#else
  return threadIdx.x % 32 == 0;
#endif
}

// What `createpolicy.fractional.L2::evict_first` makes.
constexpr uint64_t kEvictFirst = 0x12f0000000000000;

// The copy engine moves a box of a 3-d tensor to shared memory and tells the barrier its bytes.
__device__ __forceinline__ void copy_box(uint32_t target, const void* map, uint64_t* barrier, int x,
                                         int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5}], [%2];" ::"r"(target),
      "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y), "r"(z)
      : "memory");
}

// The same of a 4-d tensor.
__device__ __forceinline__ void copy_box(uint32_t target, const void* map, uint64_t* barrier, int x,
                                         int y, int z, int w) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(target),
      "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y), "r"(z), "r"(w)
      : "memory");
}

// The same of a 5-d tensor, of which nothing will be read again: it is the first to leave L2.
__device__ __forceinline__ void copy_box(uint32_t target, const void* map, uint64_t* barrier, int x,
                                         int y, int z, int w, int u) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(target),
      "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y), "r"(z), "r"(w), "r"(u),
      "l"(kEvictFirst)
      : "memory");
}

// Fetches a map of the copy engine's before it is needed.
__device__ __forceinline__ void prefetch_map(const void* map) {
#if __CUDA_ARCH__ >= 900
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
#endif
}

// Orders this thread's ordinary accesses to shared memory before those of the copy engine and of
// wgmma that follow.
__device__ __forceinline__ void fence_async_proxy() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

__device__ __forceinline__ void store_zeros_16(uint32_t target) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(target), "r"(0) : "memory");
}

// Adds 1 and returns what was there, to be looked at later. Of an addition by one lane ptxas makes
// one for the warp, and waits for it at once to tell all lanes; not so of this instruction.
__device__ __forceinline__ int32_t count_up(int32_t* counter) {
  int32_t before;
  asm volatile("atom.relaxed.gpu.global.inc.u32 %0, [%1], 0x7fffffff;"
               : "=r"(before)
               : "l"(__cvta_generic_to_global(counter))
               : "memory");
  return before;
}

// A barrier among `num_threads` threads of the CTA, by number; 0 is __syncthreads'.
__device__ __forceinline__ void named_barrier_sync(int number, int num_threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(num_threads) : "memory");
}

// For those who wait for nobody there.
__device__ __forceinline__ void named_barrier_arrive(int number, int num_threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(num_threads) : "memory");
}

// Four 8 x 8 matrices of 16-bit values; lane i gives the address of row i % 8 of matrix i / 8.
__device__ __forceinline__ void load_matrices(uint32_t (&m)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ void load_matrices_transposed(uint32_t (&m)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(address)
               : "memory");
}

// Of an 8 x 8 matrix of 16-bit values, two of row lane / 4 a lane: the transposed one.
__device__ __forceinline__ uint32_t transpose(uint32_t pair) {
  uint32_t transposed;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(pair));
  return transposed;
}

// d += a b for a 16 x 16 and b 16 x 8, float32 accumulation.
template <typename T>
__device__ __forceinline__ void multiply_add(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                             uint32_t b1) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Programmatic dependent launch: wait for the kernel before us; let the one after us start.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Registers of a warpgroup, for the rest of its life.
template <int kCount>
__device__ __forceinline__ void give_registers() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
#endif
}

template <int kCount>
__device__ __forceinline__ void take_registers() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
#endif
}

}  // namespace hf_cascade::ptx
