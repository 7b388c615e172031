// Paged causal attention, row by row.
//
// A row at position p of a sequence attends to the keys of positions 0 .. p, or to the last `window` of them. All rows
// of a call have their keys and values in the cache before any of them is read.
//
// What a row gets never depends on the rows beside it, bit for bit. Keys are taken in blocks that begin at multiples of
// kKeyBlock and in groups that begin at multiples of kLanes, counted from the sequence's first token. Lane i of a group is
// always the same key, sums over keys run in ascending order, and the softmax is corrected once per block (online softmax:
// Milakov and Gimelshein, 2018). Rows of one sequence share a tile only to find the keys and values in the L1 cache: each
// of them does the arithmetic it would do alone, over its own keys only. A tile's rows may read each other's keys; what
// comes of them is replaced, not multiplied by zero: it may be NaN.
//
// Legend: N rows, H query heads, K key/value heads, G = H / K query heads that share one, E head dim.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>
#include <vector>

#include "attention_block.h"
#include "attention_plan.h"
#include "attention_tiles.h"
#include "attention_vectors.h"
#include "rope.h"
#include "vec.h"

namespace offramp {
inline namespace OFFRAMP_ISA {

#if defined(OFFRAMP_AMX)
template <class T>
using AttentionProducts = std::conditional_t<std::is_same_v<T, bf16>, TileAttention, VectorAttention<T>>;
#else
template <class T>
using AttentionProducts = VectorAttention<T>;
#endif

// What one thread keeps from task to task: memory. Each key/value head of a task has queries and products of its own.
template <class T>
struct AttentionScratch {
  explicit AttentionScratch(const AttentionShape& shape) : queries(shape.num_kv_heads), products(shape.num_kv_heads) {}

  std::vector<std::vector<Query<T>>> queries;
  KeyBlock<T> block;
  std::vector<AttentionProducts<T>> products;
};

// What is added to scores by head and distance, of L distances: [H, L + kPadding], the longest distance first and 0 last;
// what follows is read and not used. So the biases of a query's keys lie as the keys do. Null: nothing is added.
struct DistanceBias {
  static constexpr int64_t kPadding = 16;
  static_assert(kPadding >= kLanes);

  const float* table = nullptr;
  int64_t count = 0;  // L

  // Of one head at a position: that of key k is k elements on.
  const float* of(int head, int64_t position) const {
    return table == nullptr ? nullptr : table + head * (count + kPadding) + (count - 1 - position);
  }
};

// One cache layer and the rows that attend to it.
template <class T>
struct AttentionLayer {
  const AttentionShape& shape;
  const AttentionPlan& plan;
  const int64_t* positions;  // [N]
  const T* queries;          // [N, query_stride] rotated, heads first in each row
  int64_t query_stride;
  const T* cache;  // [slots, 2, K, E]
  T* out;          // [N, out_stride], heads first in each row
  int64_t out_stride;
  float scale;           // of the scores
  DistanceBias bias{};   // what is added to them then
};

// The softmax of one query over one block of keys, whose products with the query `products` has.
//   bias: of the query's head and position, see DistanceBias
template <class T>
static inline void weigh(Query<T>& query, int q, const KeyBlock<T>& block, float scale, const float* bias,
                         AttentionProducts<T>& products) {
  const Range seen = block.seen(query);
  const F32 none = splat(-std::numeric_limits<float>::infinity());
  I32 lanes;
  for (int i = 0; i < kLanes; ++i) lanes[i] = i;
  const int first = int(seen.begin) / kLanes * kLanes, stop = int(std::max(seen.begin, seen.end));
  // Groups that others of the tile see.
  for (int i = block.first / kLanes * kLanes; i < std::min(first, block.stop); i += kLanes)
    products.keep_weight(q, i, zero());
  for (int i = std::max((stop + kLanes - 1) / kLanes * kLanes, block.first / kLanes * kLanes); i < block.stop; i += kLanes)
    products.keep_weight(q, i, zero());
  if (seen.begin >= seen.end) return;
  float* const scores = products.scores(q);
  F32 top = none;
  for (int i = first; i < stop; i += kLanes) {
    F32 score = load(scores + i) * scale;
    if (bias != nullptr) score = score + load(bias + block.start + i);
    if (i < seen.begin || i + kLanes > stop)
      score = select((lanes >= int32_t(seen.begin - i)) & (lanes < int32_t(stop - i)), score, none);
    store(scores + i, score);
    top = max(top, score);
  }
  F32 weights = load(query.weights);
  const float highest = std::max(query.top, reduce_max(top));
  if (highest > query.top) {
    if (std::isfinite(query.top)) {
      const F32 correction = exp(splat(query.top - highest));
      weights = weights * correction;
      float* const sums = products.sums(q);
      for (int i = 0; i < products.sums_size(); i += kLanes) store(sums + i, load(sums + i) * correction);
    }
    query.top = highest;
  }
  for (int i = first; i < stop; i += kLanes)
    weights = weights + products.keep_weight(q, i, exp(load(scores + i) - highest));
  store(query.weights, weights);
}

// Asks for keys and values of one head some way ahead, so that they come while others are computed.
template <class T>
struct Ahead {
  static constexpr int kKeys = 64;

  const T* keys;  // of slot 0
  int64_t token_size;
  int head_dim;
  const int32_t* slots;  // of all sequences
  int64_t offset;        // Tile::slots
  int64_t stop_key;

  // A group is about to be computed: ask for the one that comes kKeys later.
  void operator()(int64_t group) const { ask(group + kKeys, group + kKeys + kLanes); }

  void ask(int64_t key, int64_t stop) const {
    for (; key < std::min(stop, stop_key); ++key) {
      const T* const vector = keys + slots[offset + key] * token_size;
      for (int e = 0; e < head_dim; e += 64 / int(sizeof(T))) {
        prefetch(vector + e);
        prefetch(vector + token_size / 2 + e);
      }
    }
  }
};

// Some heads of the rows of a tile. False if `products` cannot keep these rows apart; then nothing has been written.
template <class T>
static bool attend_tile(const AttentionLayer<T>& layer, const Tile& tile, const AttentionTask& task,
                        AttentionScratch<T>& scratch) {
  const AttentionShape& shape = layer.shape;
  const int head_dim = shape.head_dim, kv_heads = task.stop_kv_head - task.first_kv_head;
  const int heads = task.stop_head - task.first_head, num_queries = heads * tile.num_rows;
  const int64_t token_size = shape.token_size();
  const T* const base = layer.cache + int64_t(task.first_kv_head) * head_dim;
  const int32_t* const slots = layer.plan.slots.data();
  KeyBlock<T>& block = scratch.block;
  const auto ahead_of = [&](int k) {
    return Ahead<T>{base + int64_t(k) * head_dim, token_size, head_dim, slots, tile.slots, tile.stop_key};
  };

  for (int k = 0; k < kv_heads; ++k) {
    auto& queries = scratch.queries[k];
    queries.resize(num_queries);
    for (int q = 0; q < num_queries; ++q) {
      const int row = tile.first_row + q / heads;
      const int head = (task.first_kv_head + k) * shape.group() + task.first_head + q % heads;
      const int64_t position = layer.positions[row];
      queries[q] = {layer.queries + row * layer.query_stride + int64_t(head) * head_dim,
                    shape.first_key(position), position + 1, row, head, -std::numeric_limits<float>::infinity(), {}};
    }
    scratch.products[k].begin(queries, head_dim);
    ahead_of(k).ask(tile.first_key, tile.first_key + Ahead<T>::kKeys);
  }
  for (block.start = tile.first_key / kKeyBlock * kKeyBlock; block.start < tile.stop_key; block.start += kKeyBlock) {
    block.first = int(std::max<int64_t>(tile.first_key - block.start, 0));
    block.stop = int(std::min<int64_t>(tile.stop_key - block.start, kKeyBlock));
    for (int k = 0; k < kv_heads; ++k) {
      const T* const keys = base + int64_t(k) * head_dim;
      for (int i = block.first / kLanes * kLanes; i < (block.stop + kLanes - 1) / kLanes * kLanes; ++i) {
        const int64_t key = std::clamp<int64_t>(block.start + i, tile.first_key, tile.stop_key - 1);
        block.keys[i] = keys + slots[tile.slots + key] * token_size;
        block.values[i] = block.keys[i] + token_size / 2;
      }
      AttentionProducts<T>& products = scratch.products[k];
      products.score(block, ahead_of(k));
      for (int q = 0; q < num_queries; ++q) {
        Query<T>& query = scratch.queries[k][q];
        weigh(query, q, block, layer.scale, layer.bias.of(query.head, query.stop - 1), products);
      }
      products.add_values(block);
    }
  }
  for (int k = 0; k < kv_heads; ++k)
    if (!scratch.products[k].kept_apart()) return false;
  for (int k = 0; k < kv_heads; ++k)
    for (int q = 0; q < num_queries; ++q) {
      const Query<T>& query = scratch.queries[k][q];
      const float inverse = 1.f / reduce_add(load(query.weights));
      T* const result = layer.out + query.row * layer.out_stride + int64_t(query.head) * head_dim;
      // Adding zero makes -0 of +0 and -0 alike: tiles may add zeros to a sum that came to -0.
      pieces(head_dim,
             [&](int e, int n) { store_upto(result + e, scratch.products[k].sum(q, e) * inverse + zero(), n); });
    }
  return true;
}

template <class T>
static void attend(const AttentionLayer<T>& layer, const AttentionTask& task, AttentionScratch<T>& scratch) {
  const Tile& tile = layer.plan.tiles[task.tile];
  if (attend_tile(layer, tile, task, scratch)) return;
  for (int row = tile.first_row; row < tile.first_row + tile.num_rows; ++row) {
    const int64_t position = layer.positions[row];
    attend_tile(layer, {row, 1, layer.shape.first_key(position), position + 1, tile.slots}, task, scratch);
  }
}

}  // namespace OFFRAMP_ISA
}  // namespace offramp
