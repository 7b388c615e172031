// Root-mean-square norm of rows.
#pragma once

#include <cmath>
#include <cstdint>

#include "vec.h"

namespace offramp {
inline namespace OFFRAMP_ISA {

// mean(x^2), in fp32.
template <class T>
float mean_square(const T* x, int64_t size) {
  const int64_t whole = size / kLanes * kLanes;
  const int rest = int(size - whole);
  F32 sums[2] = {zero(), zero()};  // two chains, so that additions do not wait for each other
  for (int64_t i = 0; i < whole; i += kLanes) {
    const F32 v = load(x + i);
    F32& sum = sums[i / kLanes % 2];
    sum = fma(v, v, sum);
  }
  if (rest > 0) {
    const F32 v = load_part(x + whole, rest);
    sums[0] = fma(v, v, sums[0]);
  }
  return reduce_add(sums[0] + sums[1]) / float(size);
}

// y = x / sqrt(mean(x^2) + eps) * weight, in fp32 and rounded once, as torch's rms_norm is; a null weight is ones.
// x and y [size] may be the same.
template <class T>
void rms_norm(const T* x, const T* weight, T* y, int64_t size, float eps) {
  const int64_t whole = size / kLanes * kLanes;
  const int rest = int(size - whole);
  const F32 scale = splat(1.f / std::sqrt(mean_square(x, size) + eps));
  for (int64_t i = 0; i < whole; i += kLanes) {
    const F32 normed = load(x + i) * scale;
    store(y + i, weight == nullptr ? normed : normed * load(weight + i));
  }
  if (rest > 0) {
    const F32 normed = load_part(x + whole, rest) * scale;
    store_part(y + whole, weight == nullptr ? normed : normed * load_part(weight + whole, rest), rest);
  }
}

}  // namespace OFFRAMP_ISA
}  // namespace offramp
