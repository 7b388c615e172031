// A run of T5's decoder layers on packed rows, inside one team of threads: see layers.h. What differs: scores have no
// scale and get a bias for each distance, nothing is rotated, and rows attend to their sequence's source as well, whose
// keys and values of a layer lie in the same cache layer.
//
// Legend: N rows, D model, F feed-forward, H heads, E head dim.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>
#include <vector>

#include "attention.h"
#include "gemm.h"
#include "layers.h"
#include "line_buffer.h"
#include "parallel.h"

namespace offramp {
inline namespace OFFRAMP_ISA {

template <class T>
struct T5Layer {
  const T* input_norm;  // [D]
  Linear<T> qkv;        // D -> 3 * H * E
  Linear<T> output;     // H * E -> D
  const T* cross_norm;
  Linear<T> cross_query;   // D -> H * E
  Linear<T> cross_output;  // H * E -> D
  const T* mlp_norm;
  Linear<T> inner;  // D -> F, gated or followed by ReLU
  Linear<T> down;   // F -> D
  T* cache;         // [slots, 2, H, E]
};

// What rows see of one text: their own, or the source.
struct Seen {
  const AttentionPlan& plan;
  const int64_t* positions;  // [N] of the last key that a row sees
  DistanceBias bias;
};

// Called by all of a team, each with a scratch of its own. Queries [N, query_stride], heads first.
template <class T>
static inline void attend_all(const AttentionShape& shape, const Seen& seen, const T* queries, int64_t query_stride,
                              const T* cache, T* out, int64_t out_stride, std::atomic<size_t>& next_task,
                              AttentionScratch<T>& scratch) {
  const AttentionLayer<T> attention{shape, seen.plan, seen.positions, queries, query_stride, cache, out, out_stride, 1.f,
                                    seen.bias};
  for (size_t i; (i = next_task++) < seen.plan.tasks.size();) attend(attention, seen.plan.tasks[i], scratch);
}

// Layers on states x [N, D], in place. `previous` [N, D] gets the states before the last of them.
template <class T>
void run_t5_layers(const LayerShape& shape, const std::vector<T5Layer<T>>& layers, const RowPlaces& rows, const Seen& text,
                   const Seen& source, const LayerBuffers<T>& buffers, T* x, T* previous, int num_threads) {
  const int64_t n = rows.count, hidden = shape.hidden, query_size = shape.query_size();
  const int64_t padded_hidden = padded_depth<T>(hidden), padded_mlp = padded_depth<T>(shape.intermediate);
  const int64_t padded_heads = padded_depth<T>(query_size);
  const SharedNorm<T> norm{buffers.normed, hidden, padded_hidden, shape.eps};
  std::vector<std::atomic<size_t>> next_task(2 * layers.size());
  for (auto& next : next_task) next = 0;

  Barrier barrier;
#pragma omp parallel num_threads(num_threads)
  {
    const Team team = Team::here();
    LineBuffer<T> own;
    AttentionScratch<T> scratch(shape.attention);
    for (size_t l = 0; l < layers.size(); ++l) {
      const T5Layer<T>& layer = layers[l];
      if (l + 1 == layers.size()) {
        const Range mine = share(n, team);
        std::memcpy(previous + mine.begin * hidden, x + mine.begin * hidden, (mine.end - mine.begin) * hidden * sizeof(T));
      }
      const T* normed = norm(x, n, layer.input_norm, own, team, barrier);
      gemm<Epilogue::Store>(normed, n, padded_hidden, layer.qkv, buffers.qkv, shape.qkv_size(), team);
      barrier.wait(team.count);
      const Range mine = share(n, team);
      for (int64_t row = mine.begin; row < mine.end; ++row)
        std::memcpy(layer.cache + rows.slots[row] * shape.attention.token_size(),
                    buffers.qkv + row * shape.qkv_size() + query_size, 2 * query_size * sizeof(T));
      barrier.wait(team.count);
      attend_all(shape.attention, text, buffers.qkv, shape.qkv_size(), layer.cache, buffers.attended, padded_heads,
                 next_task[2 * l], scratch);
      barrier.wait(team.count);
      gemm<Epilogue::Residual>(buffers.attended, n, padded_heads, layer.output, x, hidden, team);
      barrier.wait(team.count);

      normed = norm(x, n, layer.cross_norm, own, team, barrier);
      gemm<Epilogue::Store>(normed, n, padded_hidden, layer.cross_query, buffers.qkv, query_size, team);
      barrier.wait(team.count);
      attend_all(shape.attention, source, buffers.qkv, query_size, layer.cache, buffers.attended, padded_heads,
                 next_task[2 * l + 1], scratch);
      barrier.wait(team.count);
      gemm<Epilogue::Residual>(buffers.attended, n, padded_heads, layer.cross_output, x, hidden, team);
      barrier.wait(team.count);

      normed = norm(x, n, layer.mlp_norm, own, team, barrier);
      if (layer.inner.gated)
        gemm<Epilogue::GatedGelu>(normed, n, padded_hidden, layer.inner, buffers.mlp, padded_mlp, team);
      else
        gemm<Epilogue::Relu>(normed, n, padded_hidden, layer.inner, buffers.mlp, padded_mlp, team);
      barrier.wait(team.count);
      gemm<Epilogue::Residual>(buffers.mlp, n, padded_mlp, layer.down, x, hidden, team);
      barrier.wait(team.count);
    }
  }
}

}  // namespace OFFRAMP_ISA
}  // namespace offramp
