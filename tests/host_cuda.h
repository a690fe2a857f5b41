// Threads of a CTA on the CPU, and as much of CUDA as the kernels' sources that run on them need.
//
// A CTA's threads are fibers of one host thread. Each runs until it has to wait for others, and
// who goes first is drawn from a seed: what is read before a barrier has made sure of it shows.
//   Shared memory  is the host thread's.
//   Meetings       are what barriers, shuffles and votes have in common: threads wait for each
//                  other, and each brings a value.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

// ---------------------------------------------------------------------- threads

namespace host {

constexpr int kMostThreads = 1024;  // of a CTA
constexpr int kStackBytes = 64 * 1024;

struct Meeting;

struct Fiber {
  ucontext_t beginning;
  std::vector<char> stack = std::vector<char>(kStackBytes);
  bool has_begun = false;
  jmp_buf place;  // where it waits; jumps take a tenth of the time that contexts take
  const Meeting* waits_at = nullptr;
  unsigned waits_for;  // the round of that meeting to be over
  bool is_done;        // with the CTA

  bool can_run() const;
  void run();
  void pause();
};

struct Index {
  unsigned x;
};

std::vector<Fiber> fibers(kMostThreads);
jmp_buf scheduler;
std::function<void()> kernel;
int current;                       // thread
Index cta, num_ctas, num_threads;  // of the latter, those of a CTA

// Where `expected` threads meet, over and over.
struct Meeting {
  int expected, arrived;
  unsigned round;
  uint32_t brought[2][kMostThreads];  // of even rounds and of odd ones

  void start(int num_threads) {
    expected = num_threads;
    arrived = 0;
    round = 0;
  }

  // What all have brought, in the order of their places; stays until this thread comes again.
  const uint32_t* meet(int place, uint32_t value) {
    uint32_t* values = brought[round % 2];
    values[place] = value;
    if (++arrived == expected) {
      arrived = 0;
      ++round;
      return values;
    }
    Fiber& fiber = fibers[current];
    fiber.waits_at = this;
    fiber.waits_for = round;
    fiber.pause();
    return values;
  }
};

Meeting cta_meeting, warp_meetings[kMostThreads / 32];

bool Fiber::can_run() const {
  return !is_done && (waits_at == nullptr || waits_at->round != waits_for);
}

void run_thread() {
  for (;;) {  // a CTA after the other
    kernel();
    fibers[current].is_done = true;
    fibers[current].pause();
  }
}

// Until it pauses.
void Fiber::run() {
  if (_setjmp(scheduler) != 0) return;
  if (has_begun) _longjmp(place, 1);
  has_begun = true;
  getcontext(&beginning);
  beginning.uc_stack.ss_sp = stack.data();
  beginning.uc_stack.ss_size = stack.size();
  beginning.uc_link = nullptr;
  makecontext(&beginning, run_thread, 0);
  setcontext(&beginning);
}

void Fiber::pause() {
  if (_setjmp(place) == 0) _longjmp(scheduler, 1);
}

// False if threads still wait when nobody can run.
bool run_cta(std::mt19937& random) {
  const int threads = static_cast<int>(num_threads.x);
  cta_meeting.start(threads);
  for (Meeting& warp : warp_meetings) warp.start(32);
  for (Fiber& fiber : fibers) {
    fiber.waits_at = nullptr;
    fiber.is_done = false;
  }
  std::vector<int> order(threads);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), random);
  for (bool has_run = true; has_run;) {
    has_run = false;
    for (int thread : order) {
      if (!fibers[thread].can_run()) continue;
      has_run = true;
      current = thread;
      fibers[thread].run();
    }
  }
  bool are_done = true;
  for (int thread : order) {
    are_done &= fibers[thread].is_done;
    fibers[thread].has_begun &= fibers[thread].is_done;
  }
  return are_done;
}

template <typename To, typename From>
To bits_as(From value) {
  static_assert(sizeof(To) == sizeof(From), "32 bits each");
  To result;
  std::memcpy(&result, &value, sizeof(To));
  return result;
}

inline int lane() { return current % 32; }

template <typename T>
const uint32_t* meet_warp(T value) {
  return warp_meetings[current / 32].meet(lane(), bits_as<uint32_t>(value));
}

}  // namespace host

// ---------------------------------------------------------------------- CUDA, as far as it is used

#define __host__
#define __device__
#define __global__
#define __grid_constant__
#define __noinline__
#define __launch_bounds__(threads)
#define __shared__ thread_local  // all fibers'; goes with `extern` too, which `static` does not
#define threadIdx (host::Index{static_cast<unsigned>(host::current)})
#define blockIdx host::cta
#define gridDim host::num_ctas
#define blockDim host::num_threads

using std::max;
using std::min;

inline float __fdividef(float a, float b) { return a / b; }

inline void __syncthreads() { host::cta_meeting.meet(host::current, 0); }

inline bool __syncthreads_and(bool vote) {
  const uint32_t* votes = host::cta_meeting.meet(host::current, vote);
  return std::all_of(votes, votes + host::num_threads.x, [](uint32_t v) { return v != 0; });
}

template <typename T>
T __shfl_sync(unsigned, T value, int source) {
  return host::bits_as<T>(host::meet_warp(value)[source % 32]);
}

template <typename T>
T __shfl_up_sync(unsigned, T value, int step) {
  const uint32_t* values = host::meet_warp(value);
  return host::bits_as<T>(values[host::lane() >= step ? host::lane() - step : host::lane()]);
}

template <typename T>
T __shfl_xor_sync(unsigned, T value, int bits) {
  return host::bits_as<T>(host::meet_warp(value)[host::lane() ^ bits]);
}

inline bool __any_sync(unsigned, bool vote) {
  const uint32_t* votes = host::meet_warp(uint32_t{vote});
  return std::any_of(votes, votes + 32, [](uint32_t v) { return v != 0; });
}

inline unsigned __ballot_sync(unsigned, bool vote) {
  const uint32_t* votes = host::meet_warp(uint32_t{vote});
  unsigned result = 0;
  for (int i = 0; i < 32; ++i) result |= votes[i] << i;
  return result;
}

inline unsigned __reduce_min_sync(unsigned, unsigned value) {
  const uint32_t* values = host::meet_warp(value);
  return *std::min_element(values, values + 32);
}

inline void __threadfence() {}
inline uint32_t __float_as_uint(float value) { return host::bits_as<uint32_t>(value); }
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __ffs(unsigned bits) { return __builtin_ffs(static_cast<int>(bits)); }

template <typename T>
T atomicAdd(T* place, T value) {
  return std::exchange(*place, *place + value);
}

template <typename T>
T atomicMax(T* place, T value) {
  return std::exchange(*place, std::max(*place, value));
}

template <typename T>
T atomicOr(T* place, T bits) {
  return std::exchange(*place, *place | bits);
}
