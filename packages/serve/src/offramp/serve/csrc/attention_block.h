// What attention works on at a time: the queries of a tile, and a block of the keys that they see.
#pragma once

#include <algorithm>
#include <cstdint>

#include "attention_plan.h"
#include "parallel.h"
#include "vec.h"

namespace offramp {
inline namespace OFFRAMP_ISA {

// Elements of a head with the padding that whole vectors need.
static inline int padded(int head_dim) { return (head_dim + kLanes - 1) / kLanes * kLanes; }

// Ask for memory that will be read soon. GCC takes a function of nothing but __builtin_prefetch for one that does nothing,
// and leaves out its calls.
static inline void prefetch(const void* p) {
#if defined(__x86_64__)
  __asm__ volatile("prefetcht0 %0" ::"m"(*static_cast<const char*>(p)));
#else
  __builtin_prefetch(p);
#endif
}

// One head of one row, and its softmax so far.
template <class T>
struct Query {
  const T* vector;      // [E]
  int64_t first, stop;  // the keys it sees
  int row, head;
  float top;              // greatest score
  float weights[kLanes];  // sums of weights: lane i has those of the keys that are i more than a multiple of kLanes
};

// kKeyBlock keys from position `start`, or those of them that the tile sees.
template <class T>
struct KeyBlock {
  int64_t start;
  int first, stop;  // what the tile sees, counted from `start`
  // From `first` down to `stop` up to whole groups of kLanes, whose ends point to some key that the tile sees.
  const T *keys[kKeyBlock], *values[kKeyBlock];

  // What a query sees of it, counted from `start`; empty ranges may lie anywhere.
  Range seen(const Query<T>& query) const {
    return {std::clamp<int64_t>(query.first - start, 0, kKeyBlock), std::clamp<int64_t>(query.stop - start, 0, kKeyBlock)};
  }
};

}  // namespace OFFRAMP_ISA
}  // namespace offramp
