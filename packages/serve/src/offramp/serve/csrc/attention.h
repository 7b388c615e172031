// Paged causal attention, row by row.
//
// A row at position p of a sequence attends to the keys of positions 0 .. p, or to the last `window` of them. All rows
// of a call have their keys and values in the cache before any of them is read.
//
// What a row gets never depends on the rows beside it, bit for bit. Keys are taken in blocks that begin at multiples of
// kKeyBlock and in groups that begin at multiples of kLanes, counted from the sequence's first token. Lane i of a group is
// always the same key, sums over keys run in ascending order, and the softmax is corrected once per block (online softmax:
// Milakov and Gimelshein, 2018). Rows of one sequence share a tile only to find the keys and values in the L1 cache: each
// of them does the arithmetic it would do alone, over its own keys only. Keys outside of a row's range may be read where
// they are those of another row of its tile, and what comes of them is replaced, never multiplied by zero: it may be NaN.
//
// Legend: N rows, H query heads, K key/value heads, G = H / K query heads that share one, E head dim.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "rope.h"
#include "vec.h"

namespace offramp {
inline namespace OFFRAMP_ISA {

constexpr int kKeyBlock = 128;    // keys per correction of the softmax
constexpr int kTileQueries = 32;  // at most, counting every head of every row: their sums stay in L1
constexpr int kQueryBlock = 6;    // queries that share one load of a value; with the next line, what registers hold
#if defined(OFFRAMP_AVX512)
constexpr int kValueVectors = 4;
#else
constexpr int kValueVectors = 2;
#endif
static_assert(kKeyBlock % kLanes == 0);

struct AttentionShape {
  int num_heads, num_kv_heads, head_dim;
  int window;  // 0 is all

  int group() const { return num_heads / num_kv_heads; }
  int64_t token_size() const { return int64_t(2) * num_kv_heads * head_dim; }
  int64_t first_key(int64_t position) const { return window ? std::max<int64_t>(0, position + 1 - window) : 0; }
};

// Neighbouring rows of one sequence.
struct Tile {
  int first_row, num_rows;
  int64_t first_key, stop_key;  // the union of what they see
  int64_t slots;                // plan.slots[slots + key] is where a key lies
};

// A piece of work for one thread: some query heads of one key/value head of a tile.
struct AttentionTask {
  int tile, kv_head, first_head, stop_head;  // the heads count within the group
  int64_t cost;
};

// Who computes what: made once per call, the same for all layers.
struct AttentionPlan {
  std::vector<Tile> tiles;
  std::vector<int32_t> slots;
  std::vector<AttentionTask> tasks;  // costly ones first, so that threads that take the next one finish together

  //   positions: [N];   sequences: [N] rows of `tables`;   tables: [S, num_blocks] blocks of each sequence
  AttentionPlan(const AttentionShape& shape, int num_rows, const int64_t* positions, const int32_t* sequences,
                const int32_t* tables, int64_t num_blocks, int block_size, int num_threads) {
    const int group = shape.group(), rows_per_tile = std::max(1, kTileQueries / group);
    for (int begin = 0, end; begin < num_rows; begin = end) {
      int64_t first = shape.first_key(positions[begin]), stop = positions[begin] + 1;
      for (end = begin + 1; end < num_rows && sequences[end] == sequences[begin]; ++end) {
        first = std::min(first, shape.first_key(positions[end]));
        stop = std::max(stop, positions[end] + 1);
      }
      const int64_t offset = int64_t(slots.size()) - first;
      const int32_t* table = tables + sequences[begin] * num_blocks;
      for (int64_t key = first; key < stop; ++key)
        slots.push_back(table[key / block_size] * block_size + int32_t(key % block_size));
      for (int row = begin; row < end; row += rows_per_tile) {
        Tile tile{row, std::min(rows_per_tile, end - row), first, 0, offset};
        tile.first_key = shape.first_key(positions[row]);
        for (int i = row; i < row + tile.num_rows; ++i) {
          tile.first_key = std::min(tile.first_key, shape.first_key(positions[i]));
          tile.stop_key = std::max(tile.stop_key, positions[i] + 1);
        }
        tiles.push_back(tile);
      }
    }
    // Few tiles, as when one sequence decodes: threads share the heads of a group rather than wait for each other.
    const bool split = int64_t(tiles.size()) * shape.num_kv_heads < 4 * int64_t(num_threads) && num_threads > 1;
    const int step = split ? 1 : group;
    for (int tile = 0; tile < int(tiles.size()); ++tile)
      for (int kv_head = 0; kv_head < shape.num_kv_heads; ++kv_head)
        for (int head = 0; head < group; head += step) {
          const int64_t cost = (tiles[tile].stop_key - tiles[tile].first_key) * tiles[tile].num_rows * step;
          tasks.push_back({tile, kv_head, head, head + step, cost});
        }
    std::stable_sort(tasks.begin(), tasks.end(), [](const auto& a, const auto& b) { return a.cost > b.cost; });
  }
};

// What one thread needs to remember of a tile's queries.
struct AttentionScratch {
  std::vector<float> scores;  // [queries, kKeyBlock]
  std::vector<float> sums;    // [queries, E rounded up to lanes] weighted sums of values
  struct Query {
    int64_t first, stop;  // its keys
    int row, head;
    float top;      // greatest score so far
    float weights[kLanes];  // sum of weights so far, lane by lane
  };
  std::vector<Query> queries;
};

static inline int padded(int head_dim) { return (head_dim + kLanes - 1) / kLanes * kLanes; }

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
//   weights: [M, kKeyBlock];   values: kKeyBlock pointers to their first channel;   sums: [M, stride]
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
static inline void add_values_of_block(const AttentionScratch::Query* queries, int64_t block, const float* weights,
                                       const T* const* values, int head_dim, float* sums, int stride) {
  int first[M], stop[M], common_first = 0, common_stop = kKeyBlock;
  for (int m = 0; m < M; ++m) {
    first[m] = int(std::clamp<int64_t>(queries[m].first - block, 0, kKeyBlock));
    stop[m] = int(std::clamp<int64_t>(queries[m].stop - block, 0, kKeyBlock));
    common_first = std::max(common_first, first[m]);
    common_stop = std::min(common_stop, stop[m]);
  }
  const auto alone = [&](int m, int from, int to) {
    add_all_values<T, 1>(weights + m * kKeyBlock, values, from, to, head_dim, sums + m * stride, stride);
  };
  if (common_first >= common_stop) {
    for (int m = 0; m < M; ++m) alone(m, first[m], stop[m]);
    return;
  }
  if constexpr (M > 1)
    for (int m = 0; m < M; ++m) alone(m, first[m], common_first);
  add_all_values<T, M>(weights, values, common_first, common_stop, head_dim, sums, stride);
  if constexpr (M > 1)
    for (int m = 0; m < M; ++m) alone(m, common_stop, stop[m]);
}

// Run one task on one cache layer.
//   queries: [N, stride] rotated, heads first in each row;   cache: [slots, 2, K, E];   out: [N, out_stride], heads first
template <class T>
static void attend(const AttentionShape& shape, const AttentionPlan& plan, const AttentionTask& task,
                   const int64_t* positions, const T* queries, int64_t query_stride, const T* cache, T* out,
                   int64_t out_stride, AttentionScratch& scratch) {
  const Tile& tile = plan.tiles[task.tile];
  const int head_dim = shape.head_dim, stride = padded(head_dim);
  const int heads = task.stop_head - task.first_head, num_queries = heads * tile.num_rows;
  const int64_t token_size = shape.token_size(), values_offset = token_size / 2;
  const T* const base = cache + int64_t(task.kv_head) * head_dim;
  const int32_t* const slots = plan.slots.data() + tile.slots;
  const float scale = 1.f / std::sqrt(float(head_dim));
  constexpr float kNone = -std::numeric_limits<float>::infinity();

  scratch.scores.resize(size_t(num_queries) * kKeyBlock);
  scratch.sums.assign(size_t(num_queries) * stride, 0.f);
  scratch.queries.resize(num_queries);
  for (int q = 0; q < num_queries; ++q) {
    const int row = tile.first_row + q / heads, head = task.kv_head * shape.group() + task.first_head + q % heads;
    scratch.queries[q] = {shape.first_key(positions[row]), positions[row] + 1, row, head, kNone, {}};
  }

  const T *keys[kKeyBlock], *values[kKeyBlock];
  I32 lanes;
  for (int i = 0; i < kLanes; ++i) lanes[i] = i;
  for (int64_t block = tile.first_key / kKeyBlock * kKeyBlock; block < tile.stop_key; block += kKeyBlock) {
    const int block_first = int(std::max<int64_t>(tile.first_key - block, 0)) / kLanes * kLanes;
    const int block_stop = int(std::min<int64_t>(tile.stop_key - block, kKeyBlock));
    for (int i = block_first; i < (block_stop + kLanes - 1) / kLanes * kLanes; ++i) {
      // The ends of the first and last group point to a key that is there; no query sees that lane.
      const int64_t key = std::clamp<int64_t>(block + i, tile.first_key, tile.stop_key - 1);
      keys[i] = base + slots[key] * token_size;
      values[i] = keys[i] + values_offset;
    }
    for (int group = block_first; group < block_stop; group += kLanes) {
      // Values are needed soon, and keys two groups on: asked for now, they come while scores are computed.
      for (int i = group; i < std::min(group + kLanes, block_stop); ++i)
        for (int line = 0; line < head_dim; line += 64 / int(sizeof(T))) {
          __builtin_prefetch(values[i] + line);
          if (i + 2 * kLanes < block_stop) __builtin_prefetch(keys[i + 2 * kLanes] + line);
        }
      for (int q = 0; q < num_queries; ++q) {
        const auto& query = scratch.queries[q];
        const int64_t first = query.first - block - group, stop = query.stop - block - group;  // lanes it sees
        if (first >= kLanes || stop <= 0) continue;
        const T* const vector = queries + query.row * query_stride + int64_t(query.head) * head_dim;
        F32 s = score_group(vector, keys + group, head_dim) * scale;
        if (first > 0 || stop < kLanes)
          s = select((lanes >= int32_t(std::max<int64_t>(first, 0))) & (lanes < int32_t(std::min<int64_t>(stop, kLanes))), s,
                     splat(kNone));
        store(scratch.scores.data() + q * kKeyBlock + group, s);
      }
    }
    for (int q = 0; q < num_queries; ++q) {
      auto& query = scratch.queries[q];
      const int first = int(std::max<int64_t>(query.first - block, 0)) / kLanes * kLanes;
      const int stop = int(std::min<int64_t>(query.stop - block, kKeyBlock));
      if (first >= stop) continue;
      float* const scores = scratch.scores.data() + q * kKeyBlock;
      float* const sums = scratch.sums.data() + q * stride;
      F32 top = splat(kNone), weights = load(query.weights);
      for (int i = first; i < stop; i += kLanes) top = max(top, load(scores + i));
      const float highest = std::max(query.top, reduce_max(top));
      if (highest > query.top) {
        if (query.top != kNone) {
          const F32 correction = exp(splat(query.top - highest));
          weights = weights * correction;
          for (int e = 0; e < stride; e += kLanes) store(sums + e, load(sums + e) * correction);
        }
        query.top = highest;
      }
      for (int i = first; i < stop; i += kLanes) {
        const F32 weight = exp(load(scores + i) - highest);
        weights = weights + weight;
        store(scores + i, weight);
      }
      store(query.weights, weights);
    }
    for (int q = 0, count; q < num_queries; q += count) {
      // Blocks of queries as equal as possible: 8 are 4 and 4, not 6 and 2.
      const int left = num_queries - q, blocks = (left + kQueryBlock - 1) / kQueryBlock;
      count = (left + blocks - 1) / blocks;
      const float* const weights = scratch.scores.data() + q * kKeyBlock;
      float* const sums = scratch.sums.data() + q * stride;
      const auto* const block_queries = scratch.queries.data() + q;
      switch (count) {
#define OFFRAMP_QUERIES(M) \
  case M:                  \
    add_values_of_block<T, M>(block_queries, block, weights, values, head_dim, sums, stride); \
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
  for (int q = 0; q < num_queries; ++q) {
    const auto& query = scratch.queries[q];
    const float inverse = 1.f / reduce_add(load(query.weights));
    const float* const sums = scratch.sums.data() + q * stride;
    T* const result = out + query.row * out_stride + int64_t(query.head) * head_dim;
    pieces(head_dim, [&](int e, int n) { store_upto(result + e, load(sums + e) * inverse, n); });
  }
}

}  // namespace OFFRAMP_ISA
}  // namespace offramp
