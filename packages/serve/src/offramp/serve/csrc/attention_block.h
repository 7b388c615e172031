// What attention works on at a time: the queries of a tile, and a block of the keys that they see.
#pragma once

#include <algorithm>
#include <cstdint>

#include "attention_plan.h"
#include "parallel.h"
#include "prefetch.h"
#include "vec.h"

namespace offramp {
inline namespace OFFRAMP_ISA {

// Elements of a head with the padding that whole vectors need.
static inline int padded(int head_dim) { return (head_dim + kLanes - 1) / kLanes * kLanes; }

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
