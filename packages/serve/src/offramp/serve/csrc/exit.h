// Early exits: from the state after an exit layer to the one that its unembedding reads.
//
// Legend: N rows, D model, F features between the maps of a head.
#pragma once

#include <cmath>
#include <cstdint>
#include <optional>

#include "gemm.h"
#include "layers.h"
#include "line_buffer.h"
#include "norm.h"
#include "parallel.h"

namespace offramp {
inline namespace OFFRAMP_ISA {

// norm(x + map(inner(inner_norm(x))) * scale), and what of it a head has.
template <class T>
struct ExitHead {
  int64_t hidden;  // D
  float eps;
  const T* inner_norm;             // [D]; null: there is no map
  std::optional<Linear<T>> inner;  // D -> F, gated or followed by SiLU
  std::optional<Linear<T>> map;    // D or F -> D
  bool scaled;                     // by the root mean square of x
  const T* norm;                   // [D]; null: none

  int64_t multiplications() const {
    return (inner ? (inner->gated ? 2 : 1) * inner->columns * inner->depth : 0) + (map ? map->columns * map->depth : 0) + hidden;
  }
};

// Memory for what lies between: rows as gemm wants its input, padding zero.
template <class T>
struct ExitBuffers {
  T* normed;      // [N, padded D]
  T* inner;       // [N, padded F]
  T* correction;  // [N, D]
};

// One row of x + correction * scale; no correction is none. Rounded where torch would store a result.
template <class T>
void correct_row(const ExitHead<T>& head, const T* x, const T* correction, T* y) {
  if (correction == nullptr) {
    std::copy_n(x, head.hidden, y);
    return;
  }
  const float root = head.scaled ? std::sqrt(mean_square(x, head.hidden) + head.eps) : 1.f;
  const F32 scale = round_to<T>(splat(root));
  const int64_t whole = head.hidden / kLanes * kLanes;
  const int rest = int(head.hidden - whole);
  for (int64_t i = 0; i < whole; i += kLanes) store(y + i, load(x + i) + round_to<T>(load(correction + i) * scale));
  if (rest > 0)
    store_part(y + whole, load_part(x + whole, rest) + round_to<T>(load_part(correction + whole, rest) * scale), rest);
}

// Called by all of a team. x [N, D] -> state, N rows of `stride` elements, padding zero.
template <class T>
void transform(const ExitHead<T>& head, const T* x, int64_t rows, const ExitBuffers<T>& buffers, T* state, int64_t stride,
               Team team, Barrier& barrier) {
  if (head.map) {
    const int64_t padded = padded_depth<T>(head.hidden);
    LineBuffer<T> own;
    const SharedNorm<T> norm{buffers.normed, head.hidden, padded, head.eps};
    const T* inner = norm(x, rows, head.inner_norm, own, team, barrier);
    int64_t inner_stride = padded;
    if (head.inner) {
      inner_stride = padded_depth<T>(head.inner->columns);
      if (head.inner->gated)
        gemm<Epilogue::GatedSilu>(inner, rows, padded, *head.inner, buffers.inner, inner_stride, team);
      else
        gemm<Epilogue::Silu>(inner, rows, padded, *head.inner, buffers.inner, inner_stride, team);
      barrier.wait(team.count);
      inner = buffers.inner;
    }
    gemm<Epilogue::Store>(inner, rows, inner_stride, *head.map, buffers.correction, head.hidden, team);
    barrier.wait(team.count);
  }
  const Range mine = share(rows, team);
  for (int64_t r = mine.begin; r < mine.end; ++r) {
    T* const y = state + r * stride;
    correct_row(head, x + r * head.hidden, head.map ? buffers.correction + r * head.hidden : nullptr, y);
    if (head.norm != nullptr) rms_norm(y, head.norm, y, head.hidden, head.eps);
    for (int64_t i = head.hidden; i < stride; ++i) y[i] = T{};
  }
  barrier.wait(team.count);
}

// a . b / (|a| |b|), at most 1; NaN comes through.
template <class T>
float cosine(const T* a, const T* b, int64_t size) {
  const int64_t whole = size / kLanes * kLanes;
  const int rest = int(size - whole);
  F32 product = zero(), first = zero(), second = zero();
  for (int64_t i = 0; i < whole; i += kLanes) {
    const F32 x = load(a + i), y = load(b + i);
    product = fma(x, y, product);
    first = fma(x, x, first);
    second = fma(y, y, second);
  }
  if (rest > 0) {
    const F32 x = load_part(a + whole, rest), y = load_part(b + whole, rest);
    product = fma(x, y, product);
    first = fma(x, x, first);
    second = fma(y, y, second);
  }
  constexpr double kLeast = 1e-8;  // as torch has it
  const double length = std::sqrt(double(reduce_add(first))), other = std::sqrt(double(reduce_add(second)));
  const float result = float(reduce_add(product) / ((length < kLeast ? kLeast : length) * (other < kLeast ? kLeast : other)));
  return result > 1.f ? 1.f : result;
}

}  // namespace OFFRAMP_ISA
}  // namespace offramp
