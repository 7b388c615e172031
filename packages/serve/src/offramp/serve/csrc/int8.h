// Weights of int8. Each group of kScaleDepth neighbouring k of a column has a scale, by which its int8 are multiplied on
// their way to the units that multiply: the weight is then what it would have been in the type of x. So a product is, bit
// for bit, that with the dequantized weight (but where bf16 have no dot product: there weights are not rounded to bf16).
// Memory gives half as many bytes as for bf16, and that is what products of few rows wait for.
//
// Few rows take their weights from the packed int8 as they pass over them; many rows share a panel that was widened once.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>

#include "amx.h"
#include "line_buffer.h"
#include "prefetch.h"
#include "vec.h"

namespace offramp {
inline namespace OFFRAMP_ISA {

// Neighbouring k that share a scale.
constexpr int kScaleDepth = 64;

constexpr int64_t num_scales(int64_t depth) { return (depth + kScaleDepth - 1) / kScaleDepth; }

// Begin to read what is to be widened soon: there is so much to do for each of these bytes that the CPU, by itself, does not
// look far enough ahead to keep memory busy. Twice as fast where memory is what is waited for.
static inline void read_ahead(const int8_t* w) {
  constexpr int kBytesAhead = 2048;
  prefetch(w + kBytesAhead);
}

// Scales of kLanes columns, as the weights of one group take them.
template <class X>
class Scales;

// Weights of one k.
template <>
class Scales<float> {
 public:
  Scales() = default;
  explicit Scales(const float* scales) : scales_(load(scales)) {}

  // kLanes int8, dequantized.
  F32 widen(const int8_t* w) const { return load(w) * scales_; }

 private:
  F32 scales_;
};

#if defined(OFFRAMP_BF16_DOT)
// Weights of two neighbouring k, side by side for each column.
template <>
class Scales<bf16> {
 public:
  Scales() = default;
  explicit Scales(const float* scales) {
    alignas(64) int32_t low[kLanes], high[kLanes];
    for (int i = 0; i < kLanes; ++i) {
      low[i] = i / 2;
      high[i] = kLanes / 2 + i / 2;
    }
    low_ = _mm512_permutexvar_ps(_mm512_load_si512(low), (__m512)load(scales));
    high_ = _mm512_permutexvar_ps(_mm512_load_si512(high), (__m512)load(scales));
  }

  // kLanes pairs of int8, dequantized.
  U32 widen(const int8_t* w) const {
    const __m512bh pairs =
        _mm512_cvtne2ps_pbh(_mm512_mul_ps((__m512)load(w + kLanes), high_), _mm512_mul_ps((__m512)load(w), low_));
    U32 v;
    std::memcpy(&v, &pairs, sizeof v);
    return v;
  }

 private:
  __m512 low_, high_;
};
#endif

// A panel of a weight of int8, and those behind it.
struct ScaledPanel {
  const int8_t* weight;  // [depth / group, panel, group]
  const float* scales;   // [num_scales(depth), panel]
};

// sums[row][panel][lane] = sum over k of x[row][k] * w[panel][k][lane], by vectors.
template <class X, int kRows, int kPanels>
void scaled_sums(const X* x, int64_t x_stride, ScaledPanel w, int64_t depth, float* sums) {
  constexpr int kPanel = 2 * kLanes, kVectors = 2 * kPanels, kNeighbours = sizeof(X) == 2 ? 2 : 1;
  const int64_t groups = num_scales(depth);
  F32 sum[kRows][kVectors];
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kVectors; ++v) sum[r][v] = zero();

  for (int64_t group = 0; group < groups; ++group) {
    Scales<X> scales[kVectors];
    for (int v = 0; v < kVectors; ++v)
      scales[v] = Scales<X>(w.scales + (v / 2 * groups + group) * kPanel + v % 2 * kLanes);
    const int64_t stop = std::min<int64_t>((group + 1) * kScaleDepth, depth);
    for (int64_t k = group * kScaleDepth; k < stop; k += kNeighbours) {
      decltype(scales[0].widen(w.weight)) weights[kVectors];
      for (int p = 0; p < kPanels; ++p) read_ahead(w.weight + (p * depth + k) * kPanel);
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v)
        weights[v] = scales[v].widen(w.weight + v / 2 * depth * kPanel + k * kPanel + v % 2 * kLanes * kNeighbours);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        const X* const at = x + r * x_stride + k;
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) {
          if constexpr (kNeighbours == 2)
            sum[r][v] = dot2(weights[v], splat_pair(at), sum[r][v]);
          else
            sum[r][v] = fma(splat(*at), weights[v], sum[r][v]);
        }
      }
    }
  }
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kVectors; ++v) store(sums + (r * kVectors + v) * kLanes, sum[r][v]);
}

// Dequantize `depth` k of a panel, which begin with a group: in the same order, as floats or bf16.
template <class X>
static inline void widen(const int8_t* w, const float* scales, int64_t depth, X* wide) {
  constexpr int kPanel = 2 * kLanes, kNeighbours = sizeof(X) == 2 ? 2 : 1, kStep = kLanes * kNeighbours;
  for (int64_t start = 0; start < depth; start += kScaleDepth, scales += kPanel) {
    const Scales<X> first(scales), second(scales + kLanes);
    const int64_t stop = std::min<int64_t>(start + kScaleDepth, depth);
#pragma GCC unroll 4
    for (int64_t k = start; k < stop; k += kNeighbours) {
      read_ahead(w + k * kPanel);
      const auto a = first.widen(w + k * kPanel), b = second.widen(w + k * kPanel + kStep);
      std::memcpy(wide + k * kPanel, &a, sizeof a);
      std::memcpy(wide + k * kPanel + kStep, &b, sizeof b);
    }
  }
}

// A panel that was widened, for as many rows as there are.
template <class X>
class WidePanel {
 public:
  void take(const ScaledPanel& panel, int64_t depth) {
    memory_.hold(depth * 2 * kLanes);
    widen(panel.weight, panel.scales, depth, memory_.data());
  }

  const X* data() const { return memory_.data(); }

 private:
  LineBuffer<X> memory_;
};

#if defined(OFFRAMP_AMX)
// Matrix tiles that also take weights of int8, by way of a buffer in the first-level cache.
class WideningTiles : public MatrixTiles {
 public:
  using MatrixTiles::operator();

  template <class Meanwhile>
  void operator()(int rows, const bf16* x, int64_t x_stride, ScaledPanel w, int64_t depth, float* sums,
                  Meanwhile meanwhile) {
    finish_stores();
    configure(rows);
    const int64_t row_bytes = x_stride * int64_t(sizeof(bf16));
    if (rows > 16)
      sum_up<true>(x, row_bytes, w, depth, sums, meanwhile);
    else
      sum_up<false>(x, row_bytes, w, depth, sums, meanwhile);
    finish_stores();
  }

 private:
  // What one piece of widened weights holds. While tiles multiply it, the next one is on its way from memory.
  static constexpr int kPiece = kScaleDepth * kColumns;

  template <bool kTwo, class Meanwhile>
  void sum_up(const bf16* x, int64_t row_bytes, ScaledPanel w, int64_t depth, float* sums, Meanwhile meanwhile) {
    const bf16* const lower = x + 16 * (row_bytes / int64_t(sizeof(bf16)));
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (kTwo) {
      _tile_zero(2);
      _tile_zero(3);
    }
    bf16* wide = pieces_[0];
    bf16* next = pieces_[1];
    widen(w.weight, w.scales, std::min<int64_t>(kScaleDepth, depth), wide);
    for (int64_t start = 0; start < depth; start += kScaleDepth) {
      const int64_t after = start + kScaleDepth, stop = std::min(after, depth);
      if (after < depth)
        widen(w.weight + after * kColumns, w.scales + after / kScaleDepth * kColumns,
              std::min<int64_t>(kScaleDepth, depth - after), next);
      finish_stores();
      for (int64_t k = start; k < stop; k += kDepth) {
        const bf16* const weights = wide + (k - start) * kColumns;
        _tile_loadd(4, x + k, row_bytes);
        _tile_loadd(6, weights, kPairBytes);
        _tile_loadd(7, weights + kColumns, kPairBytes);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if constexpr (kTwo) {
          _tile_loadd(5, lower + k, row_bytes);
          _tile_dpbf16ps(2, 5, 6);
          _tile_dpbf16ps(3, 5, 7);
        }
        meanwhile(k);
      }
      std::swap(wide, next);
    }
    _tile_stored(0, sums, kSumBytes);
    _tile_stored(1, sums + 16, kSumBytes);
    if constexpr (kTwo) {
      _tile_stored(2, sums + 16 * kColumns, kSumBytes);
      _tile_stored(3, sums + 16 * kColumns + 16, kSumBytes);
    }
  }

  alignas(64) bf16 pieces_[2][kPiece];
};
#endif

}  // namespace OFFRAMP_ISA
}  // namespace offramp
