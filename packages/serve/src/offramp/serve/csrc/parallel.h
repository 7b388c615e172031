// Threads: torch's own OpenMP team, so that there is one pool, of the size that torch.set_num_threads gives.
#pragma once

#include <atomic>
#include <cstdint>

#if defined(_OPENMP)
#include <omp.h>
#endif

#if defined(__linux__) || defined(__APPLE__)
#include <sched.h>
#endif

#include "vec.h"

namespace offramp {
inline namespace OFFRAMP_ISA {

// Thread `index` of `count` within a parallel region.
struct Team {
  int index = 0;
  int count = 1;

  static Team here() {
#if defined(_OPENMP)
    return {omp_get_thread_num(), omp_get_num_threads()};
#else
    return {};
#endif
  }
};

struct Range {
  int64_t begin, end;
};

// Where all threads of a team wait for each other.
//
// OpenMP's own barrier spins for up to ten milliseconds before it lets go of the core. That is what a quiet machine
// needs; but where another process has the core that a thread of the team is to run on, each of the hundreds of barriers
// of a token then takes as long as the scheduler lets it. This one gives its core away after about a tenth of that.
class Barrier {
 public:
  void wait(int count) {
    if (count == 1) return;
    const uint32_t phase = phase_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == count) {
      arrived_.store(0, std::memory_order_relaxed);
      phase_.store(phase + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; phase_.load(std::memory_order_acquire) == phase; ++spins) {
      if (spins < kSpins) {
        pause();
      } else {
        give_way();
      }
    }
  }

 private:
  static constexpr int kSpins = 5000;

  static void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }

  static void give_way() {
#if defined(__linux__) || defined(__APPLE__)
    sched_yield();
#endif
  }

  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<uint32_t> phase_{0};
};

// The thread's share of `size` pieces of equal cost.
static inline Range share(int64_t size, Team team) {
  return {size * team.index / team.count, size * (team.index + 1) / team.count};
}

}  // namespace OFFRAMP_ISA
}  // namespace offramp
