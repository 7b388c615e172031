// Attention's sums of products of bf16 by AMX matrix tiles: many queries for the price of a few.
//
// Keys and values are read as they lie in the cache. Sixteen keys are a tile of the first operand of their products with
// queries, which are turned around once for all keys. Sixteen values are a tile of the second operand, which is meant to
// have two neighbours of a column's chain of additions in each 32 bits and has two neighbouring channels there: so each
// weight goes with a zero in the place of the neighbour that it is not for, and even and odd channels are two products.
// That wastes half of the multiplications and saves turning all values around, which takes longer.
//
// Weights are rounded to bf16, as torch's and everybody's attention in bf16 does. An element of a product is a chain of
// additions over its own row and column, so queries do not see each other, with one exception: a key that one query does
// not see has a weight of zero there, and zero times NaN or infinity is NaN. A tile in which that comes up is given back,
// to be computed row by row, over the keys of the row alone.
//
// Legend: E head dim.
#pragma once

#include "amx.h"

#if defined(OFFRAMP_AMX)

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "attention_block.h"
#include "line_buffer.h"
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
    chunks_ = (head_dim + kDepth - 1) / kDepth;
    // Rows beyond the last query hold anything: nothing that is made of them is read.
    scores_.hold(groups_ * kSide * kKeyBlock);
    even_weights_.hold(groups_ * kSide * kKeyBlock);
    sums_.hold(groups_ * kSide * sums_size());
    std::fill_n(sums_.data(), count_ * sums_size(), 0.f);
    pack_queries();
    configure();
  }

  float* scores(int q) { return scores_.data() + q * kKeyBlock; }
  int sums_size() const { return chunks_ * kDepth; }
  float* sums(int q) { return sums_.data() + q * sums_size(); }

  // Sums of channels e .. e + kLanes - 1.
  F32 sum(int q, int e) {
    static constexpr int32_t kOrder[2][kSide] = {{0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23},
                                                 {8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31}};
    const float* const chunk = sums(q) + e / kDepth * kDepth;
    const __m512i order = _mm512_loadu_si512(kOrder[e / kSide % 2]);
    return (F32)_mm512_permutex2var_ps((__m512)load(chunk), order, (__m512)load(chunk + kSide));
  }

  template <class Ahead>
  void score(const KeyBlock<bf16>& block, Ahead ahead) {
    first_ = block.first / kSide;
    stop_ = (block.stop + kSide - 1) / kSide;
    for (int group = first_; group < stop_; ++group) find_step(block, group);
    for (int g = 0; g < groups_; ++g) {
      for (int group = first_; group < stop_; group += kSumTiles) {
        if (g == 0)
          for (int i = group; i < std::min(group + kSumTiles, stop_); ++i) ahead(block.start + i * kSide);
        multiply_keys(block, g, group);
      }
      const int count = std::min(kSide, count_ - g * kSide);
      for (int group = first_; group < stop_; ++group) {
        __m512 rows[kSide];
        for (int i = 0; i < kSide; ++i) rows[i] = _mm512_load_ps(products_[group] + i * kSide);
        transpose(rows);
        for (int q = 0; q < count; ++q) _mm512_storeu_ps(scores(g * kSide + q) + group * kSide, rows[q]);
      }
    }
  }

  // Weights take the place of scores. Returns the weight as it is kept.
  F32 keep_weight(int q, int key, F32 weight) {
    const F32 rounded = round_to<bf16>(weight);
    store(scores(q) + key, rounded);
    const U32 even = (U32)rounded >> 16;
    std::memcpy(even_weights_.data() + q * kKeyBlock + key, &even, sizeof even);
    return rounded;
  }

  void add_values(const KeyBlock<bf16>& block) {
    finish_stores();
    for (int g = 0; g < groups_; ++g)
      for (int chunk = 0; chunk < chunks_; chunk += 2) {
        if (chunk + 1 < chunks_)
          add_chunks<2>(block, g, chunk);
        else
          add_chunks<1>(block, g, chunk);
      }
  }

  // Whether no query had a part in what another one alone sees.
  bool kept_apart() const {
    if (queries_[0].row == queries_[count_ - 1].row) return true;
    const __m512i exponent = _mm512_set1_epi32(0x7f800000);
    __mmask16 not_finite = 0;
    for (int i = 0; i < count_ * sums_size(); i += kLanes)
      not_finite |= _mm512_cmpeq_epi32_mask(_mm512_and_si512(_mm512_loadu_si512(sums_.data() + i), exponent), exponent);
    return not_finite == 0;
  }

 private:
  static constexpr int kSide = 16;              // rows of a tile, and columns of fp32
  static constexpr int kDepth = 32;             // bf16 in a row of a tile: a chunk of channels
  static constexpr int kTile = kSide * kDepth;  // bf16 in a tile
  static constexpr int kRowBytes = 64;
  static constexpr int kSumTiles = 4;
  static_assert(kSide == kLanes && kKeyBlock % (kSumTiles * kSide) == 0);

  // Tiles 0 to 3 are sums, of four groups of keys or of the even and odd channels of two chunks: as many as it takes for
  // each to be ready when its turn comes again.
  void configure() {
    TileConfig config;
    for (int tile = 0; tile < 8; ++tile) {
      config.rows[tile] = kSide;
      config.row_bytes[tile] = kRowBytes;
    }
    load_tile_config(config);
  }

  // [groups, chunks, 16 pairs of channels, 16 queries, 2]; channels and queries that there are not are zero.
  void pack_queries() {
    packed_queries_.hold(groups_ * chunks_ * kTile);
    for (int g = 0; g < groups_; ++g)
      for (int chunk = 0; chunk < chunks_; ++chunk) {
        __m512 rows[kSide];
        for (int i = 0; i < kSide; ++i) {
          const int q = g * kSide + i;
          rows[i] = q < count_ ? _mm512_castsi512_ps(load_chunk(queries_[q].vector, chunk)) : _mm512_setzero_ps();
        }
        transpose(rows);
        bf16* const to = packed_queries_.data() + (g * chunks_ + chunk) * kTile;
        for (int i = 0; i < kSide; ++i) _mm512_storeu_ps(to + i * kDepth, rows[i]);
      }
  }

  // A chunk of the channels of a head; those that there are not are zero.
  __m512i load_chunk(const bf16* head, int chunk) const {
    const int channels = std::min(kDepth, head_dim_ - chunk * kDepth);
    const __mmask32 mask = channels == kDepth ? ~0u : (1u << channels) - 1;
    return _mm512_maskz_loadu_epi16(mask, head + chunk * kDepth);
  }

  // From one key of a group to the next, if that is always the same.
  void find_step(const KeyBlock<bf16>& block, int group) {
    const bf16* const* const keys = block.keys + group * kSide;
    const int64_t step = keys[1] - keys[0];
    bool even = step > 0;
    for (int i = 2; i < kSide; ++i) even &= keys[i] - keys[i - 1] == step;
    steps_[group] = even ? step : 0;
  }

  struct Rows {
    const bf16* start;
    int64_t bytes;  // from one to the next
  };

  // A chunk of a group's keys or values: where they lie, or copied into `gathered` with zeros for channels there are not.
  Rows rows_of(const bf16* const* vectors, int group, int chunk, bf16* gathered) const {
    vectors += group * kSide;
    if (steps_[group] > 0 && (chunk + 1) * kDepth <= head_dim_)
      return {vectors[0] + chunk * kDepth, steps_[group] * int64_t(sizeof(bf16))};
    for (int i = 0; i < kSide; ++i) _mm512_store_si512(gathered + i * kDepth, load_chunk(vectors[i], chunk));
    finish_stores();
    return {gathered, kRowBytes};
  }

  // Products of 16 queries and the keys of four groups from `group` on. Tiles have fixed names, hence the repetition.
  void multiply_keys(const KeyBlock<bf16>& block, int g, int group) {
    alignas(64) bf16 gathered[kTile];
    const int last = stop_ - 1;  // stands in for groups beyond it
    const int second = std::min(group + 1, last), third = std::min(group + 2, last), fourth = std::min(group + 3, last);
    finish_stores();
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int chunk = 0; chunk < chunks_; ++chunk) {
      _tile_loadd(6, packed_queries_.data() + (g * chunks_ + chunk) * kTile, kRowBytes);
      Rows keys = rows_of(block.keys, group, chunk, gathered);
      _tile_loadd(4, keys.start, keys.bytes);
      _tile_dpbf16ps(0, 4, 6);
      keys = rows_of(block.keys, second, chunk, gathered);
      _tile_loadd(5, keys.start, keys.bytes);
      _tile_dpbf16ps(1, 5, 6);
      keys = rows_of(block.keys, third, chunk, gathered);
      _tile_loadd(4, keys.start, keys.bytes);
      _tile_dpbf16ps(2, 4, 6);
      keys = rows_of(block.keys, fourth, chunk, gathered);
      _tile_loadd(5, keys.start, keys.bytes);
      _tile_dpbf16ps(3, 5, 6);
    }
    _tile_stored(3, products_[fourth], kRowBytes);
    _tile_stored(2, products_[third], kRowBytes);
    _tile_stored(1, products_[second], kRowBytes);
    _tile_stored(0, products_[group], kRowBytes);
    finish_stores();
  }

  // Sums of 16 queries and one or two chunks of channels.
  template <int kChunks>
  void add_chunks(const KeyBlock<bf16>& block, int g, int chunk) {
    alignas(64) bf16 gathered[kTile];
    float* const sum = sums(g * kSide) + chunk * kDepth;
    const int64_t sum_bytes = sums_size() * int64_t(sizeof(float));
    _tile_loadd(0, sum, sum_bytes);
    _tile_loadd(1, sum + kSide, sum_bytes);
    if constexpr (kChunks > 1) {
      _tile_loadd(2, sum + 2 * kSide, sum_bytes);
      _tile_loadd(3, sum + 3 * kSide, sum_bytes);
    }
    for (int group = first_; group < stop_; ++group) {
      const int64_t weights = int64_t(g) * kSide * kKeyBlock + group * kSide;
      _tile_loadd(4, even_weights_.data() + weights, kKeyBlock * sizeof(float));
      _tile_loadd(5, scores_.data() + weights, kKeyBlock * sizeof(float));
      Rows values = rows_of(block.values, group, chunk, gathered);
      _tile_loadd(6, values.start, values.bytes);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 5, 6);
      if constexpr (kChunks > 1) {
        values = rows_of(block.values, group, chunk + 1, gathered);
        _tile_loadd(7, values.start, values.bytes);
        _tile_dpbf16ps(2, 4, 7);
        _tile_dpbf16ps(3, 5, 7);
      }
    }
    _tile_stored(0, sum, sum_bytes);
    _tile_stored(1, sum + kSide, sum_bytes);
    if constexpr (kChunks > 1) {
      _tile_stored(2, sum + 2 * kSide, sum_bytes);
      _tile_stored(3, sum + 3 * kSide, sum_bytes);
    }
    finish_stores();
  }

  const Query<bf16>* queries_;
  int count_, groups_, head_dim_, chunks_;
  int first_, stop_;                   // groups of keys of the block at hand
  int64_t steps_[kKeyBlock / kSide];   // of find_step, or 0
  alignas(64) float products_[kKeyBlock / kSide][kSide * kSide];  // [groups of keys, keys, queries]
  LineBuffer<float> scores_;  // [queries, kKeyBlock], then the weights: bf16 in the odd place of each pair
  LineBuffer<uint32_t> even_weights_;  // the same in the even place
  LineBuffer<float> sums_;  // [queries, chunks, even channels and then odd ones]
  LineBuffer<bf16> packed_queries_;
};

}  // namespace OFFRAMP_ISA
}  // namespace offramp

#endif
