// Asking for memory that will be read soon.
#pragma once

#include "vec.h"

namespace offramp {
inline namespace OFFRAMP_ISA {

// Into the first-level cache. GCC takes a function of nothing but __builtin_prefetch for one that does nothing,
// and leaves out its calls.
static inline void prefetch(const void* p) {
#if defined(__x86_64__)
  __asm__ volatile("prefetcht0 %0" ::"m"(*static_cast<const char*>(p)));
#else
  __builtin_prefetch(p);
#endif
}

// Into the second-level cache.
static inline void prefetch_far(const void* p) {
#if defined(__x86_64__)
  __asm__ volatile("prefetcht1 %0" ::"m"(*static_cast<const char*>(p)));
#else
  __builtin_prefetch(p);
#endif
}

}  // namespace OFFRAMP_ISA
}  // namespace offramp
