// Threads: torch's own OpenMP team, so that there is one pool, of the size that torch.set_num_threads gives.
#pragma once

#include <cstdint>

#if defined(_OPENMP)
#include <omp.h>
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

// The thread's share of `size` pieces of equal cost.
static inline Range share(int64_t size, Team team) {
  return {size * team.index / team.count, size * (team.index + 1) / team.count};
}

}  // namespace OFFRAMP_ISA
}  // namespace offramp
