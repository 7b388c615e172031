// Attention's sums of products of bf16 by AMX matrix tiles: many queries for the price of a few.
//
// Weights are rounded to bf16, as torch's and everybody's attention in bf16 does. An element of a product is a chain of
// additions over its own row and column, so queries do not see each other, with one exception: a key that one query does
// not see has a weight of zero there, and zero times NaN or infinity is NaN. A tile in which such values come up is given
// back, to be computed row by row, where all keys that no query sees are left out.
//
// Legend: E head dim.
#pragma once

#include "amx.h"

#if defined(OFFRAMP_AMX)

#include <algorithm>
#include <cstdint>
#include <array>
#include <cstring>
#include <vector>

#include "attention_block.h"
#include "vec.h"

namespace offramp {
inline namespace OFFRAMP_ISA {

// rows[i][j] <-> rows[j][i]
static inline void transpose(__m512 (&rows)[16]) {
  __m512 pairs[16], quads[16];
  for (int i = 0; i < 16; i += 2) {
    pairs[i] = _mm512_unpacklo_ps(rows[i], rows[i + 1]);
    pairs[i + 1] = _mm512_unpackhi_ps(rows[i], rows[i + 1]);
  }
  for (int i = 0; i < 16; i += 4)
    for (int half = 0; half < 2; ++half) {
      const __m512d x = _mm512_castps_pd(pairs[i + half]), y = _mm512_castps_pd(pairs[i + half + 2]);
      quads[i + 2 * half] = _mm512_castpd_ps(_mm512_unpacklo_pd(x, y));
      quads[i + 2 * half + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(x, y));
    }
  // quads[4 * a + b] has, in its 128-bit lane c, the elements 4 * c + b of rows 4 * a .. 4 * a + 3.
  for (int b = 0; b < 4; ++b) {
    const __m512 low = _mm512_shuffle_f32x4(quads[b], quads[4 + b], 0x88);         // lanes 0 2 | 0 2
    const __m512 high = _mm512_shuffle_f32x4(quads[b], quads[4 + b], 0xdd);        // lanes 1 3 | 1 3
    const __m512 low2 = _mm512_shuffle_f32x4(quads[8 + b], quads[12 + b], 0x88);
    const __m512 high2 = _mm512_shuffle_f32x4(quads[8 + b], quads[12 + b], 0xdd);
    rows[b] = _mm512_shuffle_f32x4(low, low2, 0x88);
    rows[4 + b] = _mm512_shuffle_f32x4(high, high2, 0x88);
    rows[8 + b] = _mm512_shuffle_f32x4(low, low2, 0xdd);
    rows[12 + b] = _mm512_shuffle_f32x4(high, high2, 0xdd);
  }
}

class TileAttention {
 public:
  ~TileAttention() { _tile_release(); }

  void begin(const std::vector<Query<bf16>>& queries, int head_dim) {
    queries_ = queries.data();
    count_ = int(queries.size());
    groups_ = (count_ + kSide - 1) / kSide;
    head_dim_ = head_dim;
    depth_ = (head_dim + kDepth - 1) / kDepth;
    columns_ = (head_dim + kSide - 1) / kSide;
    stride_ = padded(head_dim);
    // Rows beyond the last query hold anything: nothing that is made of them is read.
    scores_.resize(size_t(groups_) * kSide * kKeyBlock);
    weights_.resize(scores_.size());
    sums_.resize(size_t(groups_) * kSide * stride_);
    std::fill_n(sums_.begin(), count_ * stride_, 0.f);
    packed_values_.resize(size_t(kKeyBlock / kDepth) * columns_ * kTile);
    pack_queries();
    configure();
  }

  float* scores(int q) { return scores_.data() + q * kKeyBlock; }
  float* sums(int q) { return sums_.data() + q * stride_; }

  // Keys times queries: keys can be read as they lie in the cache, and queries are turned around once for all keys.
  template <class Ahead>
  void score(const KeyBlock<bf16>& block, Ahead ahead) {
    alignas(64) bf16 gathered[kSide * kDepth];
    alignas(64) float products[kSide * kSide];
    finish_stores();
    for (int group = block.first / kSide * kSide; group < block.stop; group += kSide) {
      ahead(block.start + group);
      const int64_t step = block.keys[group + 1] - block.keys[group];
      bool even = step > 0;
      for (int i = 2; i < kSide; ++i) even &= block.keys[group + i] - block.keys[group + i - 1] == step;
      for (int g = 0; g < groups_; ++g) {
        _tile_zero(7);
        for (int d = 0; d < depth_; ++d) {
          const int elements = std::min(kDepth, head_dim_ - d * kDepth);
          if (even && elements == kDepth) {
            _tile_loadd(5, block.keys[group] + d * kDepth, step * sizeof(bf16));
          } else {
            std::memset(gathered, 0, sizeof gathered);
            for (int i = 0; i < kSide; ++i)
              std::memcpy(gathered + i * kDepth, block.keys[group + i] + d * kDepth, elements * sizeof(bf16));
            finish_stores();
            _tile_loadd(5, gathered, kDepth * sizeof(bf16));
          }
          _tile_loadd(6, packed_queries_.data() + (g * depth_ + d) * kTile, kRowBytes);
          _tile_dpbf16ps(7, 5, 6);
        }
        _tile_stored(7, products, kRowBytes);
        __m512 rows[kSide];
        for (int i = 0; i < kSide; ++i) rows[i] = _mm512_load_ps(products + i * kSide);
        transpose(rows);
        const int count = std::min(kSide, count_ - g * kSide);
        for (int q = 0; q < count; ++q) _mm512_storeu_ps(scores(g * kSide + q) + group, rows[q]);
      }
    }
  }

  void forget_weights(int q) { std::memset(static_cast<void*>(weights_.data() + q * kKeyBlock), 0, kKeyBlock * sizeof(bf16)); }

  // Returns the weight as it is kept.
  F32 keep_weight(int q, int key, F32 weight) {
    store(weights_.data() + q * kKeyBlock + key, weight);
    return round_to<bf16>(weight);
  }

  bool add_values(const KeyBlock<bf16>& block) {
    const int first = block.first / kDepth, stop = (block.stop + kDepth - 1) / kDepth;
    if (!pack_values(block, first, stop) && queries_[0].row != queries_[count_ - 1].row) return false;
    finish_stores();
    for (int g = 0; g < groups_; ++g)
      for (int column = 0; column < columns_; column += kSumTiles)
        switch (std::min(kSumTiles, columns_ - column)) {
          case 1: add_columns<1>(g, column, first, stop); break;
          case 2: add_columns<2>(g, column, first, stop); break;
          case 3: add_columns<3>(g, column, first, stop); break;
          default: add_columns<4>(g, column, first, stop);
        }
    return true;
  }

 private:
  static constexpr int kSide = 16;                 // rows of a tile, and columns of fp32
  static constexpr int kDepth = 32;                // bf16 in a row of a tile
  static constexpr int kTile = kSide * kDepth;     // bf16 in a tile
  static constexpr int kRowBytes = 64;
  static constexpr int kSumTiles = 4;              // see configure
  static_assert(kSide == kLanes && kKeyBlock % kDepth == 0);

  // Tiles 0 to 3 are sums of values, 4 weights, 5 keys (or values), 6 queries or values, 7 scores.
  void configure() {
    TileConfig config;
    for (int tile = 0; tile < 8; ++tile) {
      // Few queries are few rows of weights and sums; products take as long as they have rows.
      config.rows[tile] = uint8_t(tile <= 4 ? std::min(kSide, count_) : kSide);
      config.row_bytes[tile] = kRowBytes;
    }
    load_tile_config(config);
  }

  // [groups, depth, 16 pairs of channels, 16 queries, 2]; channels that there are not are zero.
  void pack_queries() {
    packed_queries_.resize(size_t(groups_) * depth_ * kTile);
    if (head_dim_ % kDepth != 0) std::fill(packed_queries_.begin(), packed_queries_.end(), bf16{});
    for (int q = 0; q < count_; ++q) {
      bf16* const to = packed_queries_.data() + (int64_t(q) / kSide * depth_ * kSide * kSide + q % kSide) * 2;
      for (int e = 0; e < head_dim_; e += 2) std::memcpy(to + e * kSide, queries_[q].vector + e, 2 * sizeof(bf16));
    }
  }

  // Values of keys kDepth * first .. kDepth * stop - 1 as [kDepth keys, columns, 16 pairs of keys, 16 channels, 2]. Keys
  // that no query sees are zero. False if there is a value that is not finite.
  bool pack_values(const KeyBlock<bf16>& block, int first, int stop) {
    // (x[i], y[i]) for the lower and the upper half of i.
    alignas(64) static constexpr auto kOrder = [] {
      std::array<std::array<uint16_t, 32>, 2> order{};
      for (int half = 0; half < 2; ++half)
        for (int i = 0; i < 32; ++i) order[half][i] = uint16_t(16 * half + i / 2 + 32 * (i % 2));
      return order;
    }();
    const __m512i lower = _mm512_loadu_si512(kOrder[0].data()), upper = _mm512_loadu_si512(kOrder[1].data());
    const __m512i exponent = _mm512_set1_epi16(0x7f80);
    __mmask32 not_finite = 0;
    for (int key = first * kDepth; key < stop * kDepth; key += 2) {
      bf16* const to = packed_values_.data() + (int64_t(key) / kDepth * columns_ * kSide + key % kDepth / 2) * kDepth;
      for (int e = 0; e < head_dim_; e += kDepth) {
        const __mmask32 mask = head_dim_ - e >= kDepth ? ~0u : (1u << (head_dim_ - e)) - 1;
        __m512i x[2];
        for (int i = 0; i < 2; ++i) {
          const bool seen = key + i >= block.first && key + i < block.stop;
          x[i] = seen ? _mm512_maskz_loadu_epi16(mask, block.values[key + i] + e) : _mm512_setzero_si512();
          not_finite |= _mm512_cmpeq_epi16_mask(_mm512_and_si512(x[i], exponent), exponent);
        }
        bf16* const column = to + e / kSide * kTile;
        _mm512_storeu_si512(column, _mm512_permutex2var_epi16(x[0], lower, x[1]));
        if (head_dim_ - e > kSide) _mm512_storeu_si512(column + kTile, _mm512_permutex2var_epi16(x[0], upper, x[1]));
      }
    }
    return not_finite == 0;
  }

  // Sums of 16 queries and C times 16 channels. Tiles have fixed names, hence the repetition.
  template <int C>
  void add_columns(int group, int column, int first, int stop) {
    float* const sum = sums(group * kSide) + column * kSide;
    const int64_t sum_bytes = stride_ * int64_t(sizeof(float));
    _tile_loadd(0, sum, sum_bytes);
    if constexpr (C > 1) _tile_loadd(1, sum + kSide, sum_bytes);
    if constexpr (C > 2) _tile_loadd(2, sum + 2 * kSide, sum_bytes);
    if constexpr (C > 3) _tile_loadd(3, sum + 3 * kSide, sum_bytes);
    for (int d = first; d < stop; ++d) {
      const bf16* const value = packed_values_.data() + (d * columns_ + column) * int64_t(kTile);
      _tile_loadd(4, weights_.data() + group * kSide * kKeyBlock + d * kDepth, kKeyBlock * sizeof(bf16));
      _tile_loadd(6, value, kRowBytes);
      _tile_dpbf16ps(0, 4, 6);
      if constexpr (C > 1) {
        _tile_loadd(5, value + kTile, kRowBytes);
        _tile_dpbf16ps(1, 4, 5);
      }
      if constexpr (C > 2) {
        _tile_loadd(6, value + 2 * kTile, kRowBytes);
        _tile_dpbf16ps(2, 4, 6);
      }
      if constexpr (C > 3) {
        _tile_loadd(5, value + 3 * kTile, kRowBytes);
        _tile_dpbf16ps(3, 4, 5);
      }
    }
    _tile_stored(0, sum, sum_bytes);
    if constexpr (C > 1) _tile_stored(1, sum + kSide, sum_bytes);
    if constexpr (C > 2) _tile_stored(2, sum + 2 * kSide, sum_bytes);
    if constexpr (C > 3) _tile_stored(3, sum + 3 * kSide, sum_bytes);
  }

  const Query<bf16>* queries_;
  int count_, groups_, head_dim_, depth_, columns_, stride_;
  std::vector<float> scores_, sums_;  // as of VectorAttention, for whole groups of 16 queries
  std::vector<bf16> weights_;         // [queries, kKeyBlock]
  std::vector<bf16> packed_queries_, packed_values_;
};

}  // namespace OFFRAMP_ISA
}  // namespace offramp

#endif
