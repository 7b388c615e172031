// A run of Transformer layers on packed rows, inside one team of threads.
//
// A layer is five products and passes with a barrier after each; between them every thread works on rows, columns or
// heads of its own. How they are shared out never shows in the results.
//
// Legend: N rows, D model, F feed-forward, H query heads, K key/value heads, E head dim.
#pragma once

#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "attention.h"
#include "gemm.h"
#include "line_buffer.h"
#include "norm.h"
#include "parallel.h"
#include "rope.h"
#include "vec.h"

namespace offramp {
inline namespace OFFRAMP_ISA {

// Rows [N, D] normed, for every thread of the team.
template <class T>
struct SharedNorm {
  // To norm a few rows takes less time than to wait for another thread that does it.
  static constexpr int64_t kRowsAlone = 16;

  T* shared;  // [N, padded D], padding zero
  int64_t size, stride;
  float eps;

  const T* operator()(const T* x, int64_t rows, const T* weight, LineBuffer<T>& own, Team team,
                      Barrier& barrier) const {
    const bool alone = rows <= kRowsAlone;
    if (alone) own.hold(rows * stride);
    T* const y = alone ? own.data() : shared;
    const Range mine = alone ? Range{0, rows} : share(rows, team);
    for (int64_t row = mine.begin; row < mine.end; ++row) {
      rms_norm(x + row * size, weight, y + row * stride, size, eps);
      for (int64_t i = size; i < stride; ++i) y[row * stride + i] = T{};
    }
    if (!alone) barrier.wait(team.count);
    return y;
  }
};

template <class T>
struct Layer {
  const T* input_norm;  // [D]
  Linear<T> qkv;        // D -> (H + 2K) * E
  const T* query_norm;  // [E], or null
  const T* key_norm;
  Linear<T> output;  // H * E -> D
  const T* mlp_norm;
  Linear<T> gate_up;  // D -> F, gated
  Linear<T> down;     // F -> D
  T* cache;           // [slots, 2, K, E]
};

// What all layers of a call have in common.
struct LayerShape {
  AttentionShape attention;
  int64_t hidden, intermediate;
  float eps;

  int64_t query_size() const { return int64_t(attention.num_heads) * attention.head_dim; }
  int64_t kv_size() const { return int64_t(attention.num_kv_heads) * attention.head_dim; }
  int64_t qkv_size() const { return query_size() + 2 * kv_size(); }
};

// Where the rows lie.
struct RowPlaces {
  int64_t count;
  const int64_t* positions;  // [N]
  const int64_t* slots;      // [N]
};

// Memory for what is between the products of a layer. Strides are padded as gemm wants its input.
template <class T>
struct LayerBuffers {
  T* normed;    // [N, padded D]
  T* qkv;       // [N, (H + 2K) * E]
  T* attended;  // [N, padded H * E], padding zero
  T* mlp;       // [N, padded F], padding zero
};

// One head of one row after the other: rotate what is to be rotated and write keys and values into the cache. Columns of
// `qkv` before the first key are left alone if `queries` is false.
template <class T>
static inline void rotate_and_write(const LayerShape& shape, const Layer<T>& layer, const Rotary& rotary,
                                    const RowPlaces& rows, T* qkv, bool queries, Team team) {
  const AttentionShape& heads = shape.attention;
  const Range mine = share(rows.count * heads.num_kv_heads, team);
  const int group = heads.group(), head_dim = heads.head_dim;
  for (int64_t i = mine.begin; i < mine.end; ++i) {
    const int64_t row = i / heads.num_kv_heads, kv_head = i % heads.num_kv_heads, position = rows.positions[row];
    T* const heads_of_row = qkv + row * shape.qkv_size();
    if (queries)
      for (int64_t h = kv_head * group; h < (kv_head + 1) * group; ++h) {
        T* const query = heads_of_row + h * head_dim;
        rotary.rotate(query, query, layer.query_norm, position);
      }
    const T* const key = heads_of_row + shape.query_size() + kv_head * head_dim;
    T* const token = layer.cache + rows.slots[row] * heads.token_size() + kv_head * head_dim;
    rotary.rotate(key, token, layer.key_norm, position);
    std::memcpy(token + shape.kv_size(), key + shape.kv_size(), head_dim * sizeof(T));
  }
}

// Layers on states x [N, D], in place. `previous` [N, D] gets the states before the last of them.
template <class T>
void run_layers(const LayerShape& shape, const std::vector<Layer<T>>& layers, const Rotary& rotary, const RowPlaces& rows,
                const AttentionPlan& plan, const LayerBuffers<T>& buffers, T* x, T* previous, int num_threads) {
  const int64_t n = rows.count, hidden = shape.hidden;
  const int64_t padded_hidden = padded_depth<T>(hidden), padded_mlp = padded_depth<T>(shape.intermediate);
  const int64_t padded_heads = padded_depth<T>(shape.query_size());
  const SharedNorm<T> norm{buffers.normed, hidden, padded_hidden, shape.eps};
  const float scale = 1.f / std::sqrt(float(shape.attention.head_dim));
  std::vector<std::atomic<size_t>> next_task(layers.size());
  for (auto& next : next_task) next = 0;

  Barrier barrier;
#pragma omp parallel num_threads(num_threads)
  {
    const Team team = Team::here();
    LineBuffer<T> own;
    AttentionScratch<T> scratch(shape.attention);
    for (size_t l = 0; l < layers.size(); ++l) {
      const Layer<T>& layer = layers[l];
      if (l + 1 == layers.size()) {
        const Range mine = share(n, team);
        std::memcpy(previous + mine.begin * hidden, x + mine.begin * hidden, (mine.end - mine.begin) * hidden * sizeof(T));
      }
      const T* normed = norm(x, n, layer.input_norm, own, team, barrier);
      gemm<Epilogue::Store>(normed, n, padded_hidden, layer.qkv, buffers.qkv, shape.qkv_size(), team);
      barrier.wait(team.count);
      rotate_and_write(shape, layer, rotary, rows, buffers.qkv, true, team);
      barrier.wait(team.count);
      const AttentionLayer<T> attention{shape.attention, plan,             rows.positions, buffers.qkv, shape.qkv_size(),
                                        layer.cache,     buffers.attended, padded_heads,   scale};
      for (size_t i; (i = next_task[l]++) < plan.tasks.size();) attend(attention, plan.tasks[i], scratch);
      barrier.wait(team.count);
      gemm<Epilogue::Residual>(buffers.attended, n, padded_heads, layer.output, x, hidden, team);
      barrier.wait(team.count);
      normed = norm(x, n, layer.mlp_norm, own, team, barrier);
      gemm<Epilogue::GatedSilu>(normed, n, padded_hidden, layer.gate_up, buffers.mlp, padded_mlp, team);
      barrier.wait(team.count);
      gemm<Epilogue::Residual>(buffers.mlp, n, padded_mlp, layer.down, x, hidden, team);
      barrier.wait(team.count);
    }
  }
}

// Only keys and values of one layer, from states x [N, D].
template <class T>
void write_kv(const LayerShape& shape, const Layer<T>& layer, const Rotary& rotary, const RowPlaces& rows,
              const LayerBuffers<T>& buffers, const T* x, int num_threads) {
  const int64_t padded_hidden = padded_depth<T>(shape.hidden);
  const SharedNorm<T> norm{buffers.normed, shape.hidden, padded_hidden, shape.eps};
  Barrier barrier;
#pragma omp parallel num_threads(num_threads)
  {
    const Team team = Team::here();
    LineBuffer<T> own;
    const T* const normed = norm(x, rows.count, layer.input_norm, own, team, barrier);
    const int64_t first = shape.query_size() / kPanel;  // the panel with the first key
    Range panels = share(layer.qkv.panels() - first, team);
    panels = {panels.begin + first, panels.end + first};
    gemm<Epilogue::Store>(normed, rows.count, padded_hidden, layer.qkv, buffers.qkv, shape.qkv_size(), panels);
    barrier.wait(team.count);
    rotate_and_write(shape, layer, rotary, rows, buffers.qkv, false, team);
  }
}

// Keys and values of several layers, all made from the same states. Each layer's norm weight is part of its weights.
template <class T>
struct Fill {
  Linear<T> kv;       // D -> layers * stride: keys [K, E] and values [K, E] of each layer, padded to whole panels
  int64_t stride;     // columns of a layer
  const T* key_norm;  // [layers, E], or null
  std::vector<T*> caches;
};

// projected: [N, layers * stride]
template <class T>
void fill(const LayerShape& shape, const Fill<T>& layers, const Rotary& rotary, const RowPlaces& rows, T* normed_rows,
          T* projected, const T* x, int num_threads) {
  const int64_t padded_hidden = padded_depth<T>(shape.hidden), count = int64_t(layers.caches.size());
  const int64_t row_size = count * layers.stride;
  const SharedNorm<T> norm{normed_rows, shape.hidden, padded_hidden, shape.eps};
  Barrier barrier;
#pragma omp parallel num_threads(num_threads)
  {
    const Team team = Team::here();
    LineBuffer<T> own;
    const T* const normed = norm(x, rows.count, static_cast<const T*>(nullptr), own, team, barrier);
    gemm<Epilogue::Store>(normed, rows.count, padded_hidden, layers.kv, projected, row_size, team);
    barrier.wait(team.count);
    const Range mine = share(rows.count * count, team);
    for (int64_t i = mine.begin; i < mine.end; ++i) {
      const int64_t layer = i / rows.count, row = i % rows.count;
      const T* const keys = projected + row * row_size + layer * layers.stride;
      const T* const key_norm = layers.key_norm ? layers.key_norm + layer * rotary.head_dim : nullptr;
      rotary.write(keys, keys + shape.kv_size(), layers.caches[layer] + rows.slots[row] * shape.attention.token_size(),
                   key_norm, shape.attention.num_kv_heads, rows.positions[row]);
    }
  }
}

}  // namespace OFFRAMP_ISA
}  // namespace offramp
