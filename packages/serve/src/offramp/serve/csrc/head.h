// What one row's logits amount to, without the logits being stored: best, second best, logsumexp.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "vec.h"

namespace offramp {
inline namespace OFFRAMP_ISA {

// Columns whose logits are made, summed up and forgotten together. Sums are taken block by block, so the block is part of
// the result: it depends neither on the number of rows nor on that of threads.
constexpr int64_t kHeadBlock = 512;

struct Summary {
  float best = -std::numeric_limits<float>::infinity();  // NaN if any logit is
  float second = -std::numeric_limits<float>::infinity();
  int64_t index = 0;  // of the best, the lowest of equals
  float sum = 0;      // of e^(logit - best)
};

// logits [kHeadBlock]: those from `columns` on must be -infinity.
static inline Summary summarize(const float* logits, int64_t columns) {
  const F32 none = splat(-std::numeric_limits<float>::infinity());
  F32 bests = none, seconds = none;  // of each lane
  I32 nans = I32{};
  const int64_t width = (columns + kLanes - 1) / kLanes * kLanes;
  for (int64_t i = 0; i < width; i += kLanes) {
    const F32 v = load(logits + i);
    nans |= (I32)(v != v);
    seconds = max(seconds, min(bests, v));
    bests = max(bests, v);
  }
  Summary all;
  bool any_nan = false;
  for (int lane = 0; lane < kLanes; ++lane) {
    any_nan |= nans[lane] != 0;
    if (bests[lane] > all.best) {
      all.second = all.best > seconds[lane] ? all.best : seconds[lane];
      all.best = bests[lane];
    } else if (bests[lane] > all.second) {
      all.second = bests[lane];
    }
  }
  if (any_nan) {
    all.best = all.second = all.sum = std::numeric_limits<float>::quiet_NaN();
    return all;
  }
  while (all.index < columns - 1 && logits[all.index] != all.best) ++all.index;
  if (!std::isfinite(all.best)) return all;
  F32 sum = zero();
  for (int64_t i = 0; i < width; i += kLanes) sum = sum + exp(load(logits + i) - splat(all.best));
  all.sum = reduce_add(sum);
  return all;
}

struct Row {
  Summary all;
  float logsumexp;
};

// The whole row from its blocks, in their order.
static inline Row merge(const Summary* blocks, int64_t num_blocks) {
  Summary all;
  for (int64_t b = 0; b < num_blocks; ++b) {
    const Summary& block = blocks[b];
    if (std::isnan(block.best)) return {block, block.best};
    if (block.best > all.best) {
      all.second = all.best > block.second ? all.best : block.second;
      all.best = block.best;
      all.index = b * kHeadBlock + block.index;
    } else if (block.best > all.second) {
      all.second = block.best;
    }
  }
  if (!std::isfinite(all.best)) return {all, all.best};
  double sum = 0;
  for (int64_t b = 0; b < num_blocks; ++b) sum += double(blocks[b].sum) * std::exp(double(blocks[b].best) - all.best);
  return {all, float(all.best + std::log(sum))};
}

}  // namespace OFFRAMP_ISA
}  // namespace offramp
