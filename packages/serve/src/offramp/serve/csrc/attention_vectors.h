// Attention's sums of products by vectors of fp32, whatever keys and values are stored as.
//
// Legend: E head dim.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "attention_block.h"
#include "vec.h"

namespace offramp {
inline namespace OFFRAMP_ISA {

constexpr int kQueryBlock = 6;  // queries that share one load of a value; with the next line, what registers hold
#if defined(OFFRAMP_AVX512)
constexpr int kValueVectors = 4;
#else
constexpr int kValueVectors = 2;
#endif

// Scores of one query [E] against kLanes keys.
template <class T>
static inline F32 score_group(const T* query, const T* const* keys, int head_dim) {
  F32 sums[kLanes];
  for (int i = 0; i < kLanes; ++i) sums[i] = zero();
  int e = 0;
  if constexpr (std::is_same_v<T, bf16> && kHasDot) {
    for (; e + 2 * kLanes <= head_dim; e += 2 * kLanes) {
      const U32 q = load_pairs(query + e);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) sums[i] = dot2(load_pairs(keys[i] + e), q, sums[i]);
    }
  }
  for (; e + kLanes <= head_dim; e += kLanes) {
    const F32 q = load(query + e);
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) sums[i] = fma(load(keys[i] + e), q, sums[i]);
  }
  if (e < head_dim) {
    const F32 q = load_part(query + e, head_dim - e);
    for (int i = 0; i < kLanes; ++i) sums[i] = fma(load_part(keys[i] + e, head_dim - e), q, sums[i]);
  }
  return reduce_rows(sums);
}

// Add weighted values to the sums of M queries, for C vectors of channels; `n` channels of the last one exist.
//   weights: [M, kKeyBlock];   values: pointers to their first channel;   sums: [M, stride]
template <class T, int M, int C>
static inline void add_values(const float* weights, const T* const* values, int first, int stop, int channel, float* sums,
                              int stride, int n) {
  F32 s[M][C];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) s[m][c] = load(sums + m * stride + channel + c * kLanes);
  for (int key = first; key < stop; ++key) {
    F32 v[C];
    const T* value = values[key] + channel;
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) v[c] = n == kLanes ? load(value + c * kLanes) : load_part(value + c * kLanes, n);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const F32 w = splat(weights[m * kKeyBlock + key]);
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) s[m][c] = fma(w, v[c], s[m][c]);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) store(sums + m * stride + channel + c * kLanes, s[m][c]);
}

// The same for all channels.
template <class T, int M>
static inline void add_all_values(const float* weights, const T* const* values, int first, int stop, int head_dim,
                                  float* sums, int stride) {
  if (first >= stop) return;
  int e = 0;
  for (; e + kValueVectors * kLanes <= head_dim; e += kValueVectors * kLanes)
    add_values<T, M, kValueVectors>(weights, values, first, stop, e, sums, stride, kLanes);
  for (; e + kLanes <= head_dim; e += kLanes)
    add_values<T, M, 1>(weights, values, first, stop, e, sums, stride, kLanes);
  if (e < head_dim) add_values<T, M, 1>(weights, values, first, stop, e, sums, stride, head_dim - e);
}

// M neighbouring queries: together where all of them see the keys, one by one at the ends of their ranges.
template <class T, int M>
static inline void add_values_of_block(const Query<T>* queries, const KeyBlock<T>& block, const float* weights,
                                       int head_dim, float* sums, int stride) {
  Range seen[M], common{0, kKeyBlock};
  for (int m = 0; m < M; ++m) {
    seen[m] = block.seen(queries[m]);
    common = {std::max(common.begin, seen[m].begin), std::min(common.end, seen[m].end)};
  }
  const auto alone = [&](int m, int64_t from, int64_t to) {
    add_all_values<T, 1>(weights + m * kKeyBlock, block.values, int(from), int(to), head_dim, sums + m * stride, stride);
  };
  if (common.begin >= common.end) {
    for (int m = 0; m < M; ++m) alone(m, seen[m].begin, seen[m].end);
    return;
  }
  for (int m = 0; m < M; ++m) alone(m, seen[m].begin, common.begin);
  add_all_values<T, M>(weights, block.values, int(common.begin), int(common.end), head_dim, sums, stride);
  for (int m = 0; m < M; ++m) alone(m, common.end, seen[m].end);
}

template <class T>
class VectorAttention {
 public:
  void begin(const std::vector<Query<T>>& queries, int head_dim) {
    queries_ = queries.data();
    count_ = int(queries.size());
    head_dim_ = head_dim;
    scores_.resize(size_t(count_) * kKeyBlock);
    sums_.assign(size_t(count_) * sums_size(), 0.f);
  }

  float* scores(int q) { return scores_.data() + q * kKeyBlock; }
  int sums_size() const { return padded(head_dim_); }
  float* sums(int q) { return sums_.data() + q * sums_size(); }

  // Sums of channels e .. e + kLanes - 1.
  F32 sum(int q, int e) { return load(sums(q) + e); }

  // Products of keys and queries; `ahead` is called with the first key of each group before it is its turn.
  template <class Ahead>
  void score(const KeyBlock<T>& block, Ahead ahead) {
    for (int group = block.first / kLanes * kLanes; group < block.stop; group += kLanes) {
      ahead(block.start + group);
      for (int q = 0; q < count_; ++q) {
        const Range seen = block.seen(queries_[q]);
        if (seen.begin >= group + kLanes || seen.end <= group) continue;
        store(scores(q) + group, score_group(queries_[q].vector, block.keys + group, head_dim_));
      }
    }
  }

  // Weights take the place of scores. Returns what is kept.
  F32 keep_weight(int q, int key, F32 weight) {
    store(scores(q) + key, weight);
    return weight;
  }

  void add_values(const KeyBlock<T>& block) {
    for (int q = 0, count; q < count_; q += count) {
      // Blocks of queries as equal as possible: 8 are 4 and 4, not 6 and 2.
      const int left = count_ - q, blocks = (left + kQueryBlock - 1) / kQueryBlock;
      count = (left + blocks - 1) / blocks;
      switch (count) {
#define OFFRAMP_QUERIES(M)                                                                                          \
  case M:                                                                                                           \
    add_values_of_block<T, M>(queries_ + q, block, scores(q), head_dim_, sums(q), sums_size()); \
    break;
        OFFRAMP_QUERIES(1)
        OFFRAMP_QUERIES(2)
        OFFRAMP_QUERIES(3)
        OFFRAMP_QUERIES(4)
        OFFRAMP_QUERIES(5)
        OFFRAMP_QUERIES(6)
#undef OFFRAMP_QUERIES
      }
    }
  }

  // Whether no query had a part in what another one alone sees.
  bool kept_apart() const { return true; }

 private:
  const Query<T>* queries_;
  int count_, head_dim_;
  std::vector<float> scores_;  // [queries, kKeyBlock], then the weights
  std::vector<float> sums_;    // [queries, stride] weighted sums of values
};

}  // namespace OFFRAMP_ISA
}  // namespace offramp
