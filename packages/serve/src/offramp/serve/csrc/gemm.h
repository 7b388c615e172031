// Matrix products of a few to many rows with a packed weight: y = x W^T + b, with what follows it fused in.
//
// Legend: N output features ("columns"), K input features ("depth"), rows = tokens.
//
// A weight is packed in panels of kPanel columns, each panel holding its columns side by side for every k, in the order in
// which they are read. So a product over few rows, which takes as long as reading the weight takes, reads it once from
// front to end; over many rows one panel stays in the first-level cache while the rows pass over it.
//
// The sum over K is never split: every element of y is one chain of fused multiply-adds in the order of k, begun at zero.
// It depends on its own row and column alone, bit for bit: not on how many rows there are, on the tile it falls into, or
// on the number of threads. An engine whose rows come and go owes its requests exactly that.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <utility>
#include <vector>

#include "amx.h"
#include "int8.h"
#include "parallel.h"
#include "prefetch.h"
#include "vec.h"

namespace offramp {
inline namespace OFFRAMP_ISA {

// ---- packing --------------------------------------------------------------------------------------------------------

// Two vectors of columns, which is also two matrix tiles.
constexpr int kPanel = 2 * kLanes;

// Neighbouring k that are kept together for each column: bf16 go in pairs, as the dot product takes them.
template <class T>
constexpr int kGroup = sizeof(T) == 2 ? 2 : 1;

// K is padded with zeros to a multiple of this. Rows of x must be readable, and zero, up to there.
#if defined(OFFRAMP_AMX)
template <class T>
constexpr int kDepthStep = sizeof(T) == 2 ? 32 : kGroup<T>;  // a matrix tile is 16 pairs deep
#else
template <class T>
constexpr int kDepthStep = kGroup<T>;
#endif

static_assert(kScaleDepth % kDepthStep<bf16> == 0, "padding must not begin a group of its own");

template <class T>
constexpr int64_t padded_depth(int64_t depth) {
  return (depth + kDepthStep<T> - 1) / kDepthStep<T> * kDepthStep<T>;
}

// Panels of N columns. Of a gated map N = 2F: F gate columns, then F up columns.
constexpr int64_t num_panels(int64_t columns, bool gated) {
  return gated ? (columns / 2 + kLanes - 1) / kLanes : (columns + kPanel - 1) / kPanel;
}

// The column of the unpacked weight that stands at `lane` of `panel`, or -1 where there is padding. A panel of a gated map
// has the gates of kLanes features in its first vector and their ups in the second, so that one tile holds both.
constexpr int64_t column_at(int64_t panel, int lane, int64_t columns, bool gated) {
  if (!gated) {
    const int64_t column = panel * kPanel + lane;
    return column < columns ? column : -1;
  }
  const int64_t feature = panel * kLanes + lane % kLanes, features = columns / 2;
  if (feature >= features) return -1;
  return lane < kLanes ? feature : features + feature;
}

// What rows of x are read as: where bf16 has no dot product they have been widened.
template <class T>
using Operand = std::conditional_t<kHasDot, T, float>;

// Neighbouring k in a packed weight of W, for rows of T. Int8 are widened to what the rows are read as.
template <class T, class W>
constexpr int kWeightGroup = std::is_same_v<W, T> ? kGroup<T> : kGroup<Operand<T>>;

// w [columns, depth] of T or int8 -> packed [num_panels, padded_depth / group, kPanel, group], for rows of T.
template <class T, class W>
void pack_weight(const W* w, int64_t columns, int64_t depth, bool gated, W* packed) {
  constexpr int kNeighbours = kWeightGroup<T, W>;
  const int64_t padded = padded_depth<T>(depth), panels = num_panels(columns, gated);
#pragma omp parallel
  {
    const Range range = share(panels, Team::here());
    for (int64_t panel = range.begin; panel < range.end; ++panel) {
      W* const to = packed + panel * padded * kPanel;
      for (int lane = 0; lane < kPanel; ++lane) {
        const int64_t column = column_at(panel, lane, columns, gated);
        for (int64_t k = 0; k < padded; ++k) {
          const bool inside = column >= 0 && k < depth;
          to[(k / kNeighbours * kPanel + lane) * kNeighbours + k % kNeighbours] = inside ? w[column * depth + k] : W{};
        }
      }
    }
  }
}

// bias [columns] -> packed [num_panels, kPanel].
template <class T>
void pack_bias(const T* bias, int64_t columns, bool gated, T* packed) {
  for (int64_t panel = 0; panel < num_panels(columns, gated); ++panel)
    for (int lane = 0; lane < kPanel; ++lane) {
      const int64_t column = column_at(panel, lane, columns, gated);
      packed[panel * kPanel + lane] = column < 0 ? T{} : bias[column];
    }
}

// A packed map. `columns` are the columns of y: N, or F of a gated map. Its weight is of T, or of int8 with scales.
template <class T>
struct Linear {
  const T* weight;  // of pack_weight; null if it is of int8
  const T* bias;    // of pack_bias, or null
  int64_t depth;    // padded
  int64_t columns;
  bool gated = false;
  const int8_t* quantized = nullptr;  // of pack_weight
  const float* scales = nullptr;      // of pack_weight, as if they were a weight [N, num_scales(depth)]

  int64_t panels() const { return num_panels(gated ? 2 * columns : columns, gated); }

  const T* panel(int64_t index) const { return weight + index * depth * kPanel; }
  ScaledPanel scaled_panel(int64_t index) const {
    return {quantized + index * depth * kPanel, scales + index * num_scales(depth) * kPanel};
  }

  // The map of `count` columns from the first one of `panel` on.
  Linear part(int64_t panel, int64_t count) const {
    Linear map = *this;
    map.columns = count;
    if (weight != nullptr) map.weight += panel * depth * kPanel;
    if (bias != nullptr) map.bias += panel * kPanel;
    if (quantized != nullptr) map.quantized += panel * depth * kPanel;
    if (scales != nullptr) map.scales += panel * num_scales(depth) * kPanel;
    return map;
  }
};

// ---- sums of one tile -----------------------------------------------------------------------------------------------

// sums[row][panel][lane] = sum over k of x[row][k] * w[panel][k][lane], by vectors.
template <class T, int kRows, int kPanels>
void vector_sums(const Operand<T>* x, int64_t x_stride, const T* w, int64_t depth, float* sums) {
  constexpr int kVectors = 2 * kPanels;
  // Multiply-adds for each pair of bf16: one with a dot product, else two, that of the second element first.
  constexpr int kSteps = kHasDot ? 1 : kGroup<T>;
  F32 sum[kRows][kVectors];
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kVectors; ++v) sum[r][v] = zero();

  for (int64_t k = 0; k < depth; k += kGroup<T>)
#pragma GCC unroll 2
    for (int step = kSteps - 1; step >= 0; --step) {
      std::conditional_t<kHasDot && std::is_same_v<T, bf16>, U32, F32> weights[kVectors];
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        const T* const at = w + v / 2 * depth * kPanel + k * kPanel + v % 2 * kLanes * kGroup<T>;
        if constexpr (std::is_same_v<T, float>)
          weights[v] = load(at);
        else if constexpr (kHasDot)
          weights[v] = load_pairs(at);
        else
          weights[v] = step == 0 ? first_of(load_pairs(at)) : second_of(load_pairs(at));
      }
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        const Operand<T>* const at = x + r * x_stride + k + step;
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) {
          if constexpr (kHasDot && std::is_same_v<T, bf16>)
            sum[r][v] = dot2(weights[v], splat_pair(at), sum[r][v]);
          else
            sum[r][v] = fma(splat(*at), weights[v], sum[r][v]);
        }
      }
    }
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kVectors; ++v) store(sums + (r * kVectors + v) * kLanes, sum[r][v]);
}

// The kernel of vectors for each tile.
template <class T>
class VectorTiles {
 public:
  // Rows of the largest tile: with its sums, the weights of one k and one element of x it just fits the registers.
  static constexpr int kRegisters = kLanes == 16 ? 32 : 16;
  static constexpr int kRows = kRegisters == 32 ? 12 : 6;

  // Few rows leave registers empty, and their chains of additions leave the units idle: then several panels go together.
  static constexpr int panels_for(int rows) {
    int panels = 4;
    while (panels > 1 && 2 * panels * (rows + 1) + 1 > kRegisters) panels /= 2;
    return panels;
  }
  static constexpr int kSums = kRows * kPanel;  // rows * panels_for(rows) * kPanel is at most this

  static constexpr bool kLeavesVectorsIdle = false;

  // Weights are `const T*` or a ScaledPanel.
  template <class Weights>
  void operator()(int rows, int panels, const Operand<T>* x, int64_t x_stride, Weights w, int64_t depth, float* sums) {
    static constexpr auto kOne = table<Weights, false>(std::make_integer_sequence<int, kRows>());
    static constexpr auto kSeveral = table<Weights, true>(std::make_integer_sequence<int, kRows>());
    (panels > 1 ? kSeveral : kOne)[rows - 1](x, x_stride, w, depth, sums);
  }

 private:
  template <class Weights>
  using Kernel = void (*)(const Operand<T>*, int64_t, Weights, int64_t, float*);

  template <class Weights, bool kSeveral, int... kIndex>
  static constexpr std::array<Kernel<Weights>, sizeof...(kIndex)> table(std::integer_sequence<int, kIndex...>) {
    if constexpr (std::is_same_v<Weights, ScaledPanel>)
      return {&scaled_sums<Operand<T>, kIndex + 1, kSeveral ? panels_for(kIndex + 1) : 1>...};
    else
      return {&vector_sums<T, kIndex + 1, kSeveral ? panels_for(kIndex + 1) : 1>...};
  }
};

#if defined(OFFRAMP_AMX)
template <class T>
using Tiles = std::conditional_t<std::is_same_v<T, bf16>, WideningTiles, VectorTiles<T>>;
#else
template <class T>
using Tiles = VectorTiles<T>;
#endif

// ---- what follows the sums ------------------------------------------------------------------------------------------

enum class Epilogue {
  Store,      // y = s
  Residual,   // y = y + s
  Silu,       // y = silu(s)
  GatedSilu,  // y = silu(gate) * up
  Relu,       // y = relu(s)
  GatedGelu,  // y = gelu(gate) * up
};

constexpr bool is_gated(Epilogue epilogue) {
  return epilogue == Epilogue::GatedSilu || epilogue == Epilogue::GatedGelu;
}

// Finish one row of one panel: at most `columns` elements of y. Intermediate results are rounded where torch, with a
// kernel for each operation, would have stored them as T.
template <Epilogue kEpilogue, class T, class Y>
static inline void finish_row(const float* sums, const T* bias, Y* y, int64_t columns) {
  F32 s[2] = {load(sums), load(sums + kLanes)};
  if (bias != nullptr)
    for (int v = 0; v < 2; ++v) s[v] = s[v] + load(bias + v * kLanes);
  if constexpr (is_gated(kEpilogue)) {
    const F32 gate = round_to<T>(s[0]);
    const F32 gated = round_to<T>(kEpilogue == Epilogue::GatedSilu ? silu(gate) : gelu(gate)) * round_to<T>(s[1]);
    if (columns >= kLanes)
      store(y, gated);
    else
      store_part(y, gated, int(columns));
  } else {
    if constexpr (kEpilogue == Epilogue::Silu)
      for (int v = 0; v < 2; ++v) s[v] = silu(round_to<T>(s[v]));
    if constexpr (kEpilogue == Epilogue::Relu)
      for (int v = 0; v < 2; ++v) s[v] = relu(s[v]);
    for (int v = 0; v < 2; ++v, y += kLanes, columns -= kLanes) {
      if (columns >= kLanes)
        store(y, kEpilogue == Epilogue::Residual ? load(y) + round_to<T>(s[v]) : s[v]);
      else if (columns > 0)
        store_part(y, kEpilogue == Epilogue::Residual ? load_part(y, int(columns)) + round_to<T>(s[v]) : s[v],
                   int(columns));
    }
  }
}

// Rows of a tile whose sums are there and whose results are not.
template <Epilogue kEpilogue, class T, class Y>
class Unfinished {
 public:
  static constexpr int kWidth = is_gated(kEpilogue) ? kLanes : kPanel;  // columns of y in a panel

  Unfinished(const Linear<T>& map, int64_t y_stride) : map_(map), y_stride_(y_stride) {}

  // y: of the tile's first row
  void begin(const float* sums, int rows, int panels, int64_t panel, Y* y) {
    sums_ = sums;
    left_ = rows;
    panels_ = panels;
    panel_ = panel;
    y_ = y;
  }

  int rows_per_step(int64_t steps) const { return int((left_ + steps - 1) / steps); }

  void finish(int rows) {
    for (int stop = std::max(left_ - rows, 0); left_ > stop; --left_, y_ += y_stride_)
      for (int p = 0; p < panels_; ++p, sums_ += kPanel) {
        const int64_t column = (panel_ + p) * kWidth;
        finish_row<kEpilogue>(sums_, map_.bias == nullptr ? nullptr : map_.bias + (panel_ + p) * kPanel, y_ + column,
                              map_.columns - column);
      }
  }

  void finish_all() { finish(left_); }

 private:
  const Linear<T>& map_;
  const int64_t y_stride_;
  const float* sums_ = nullptr;
  int left_ = 0, panels_ = 0;
  int64_t panel_ = 0;
  Y* y_ = nullptr;
};

// ---- the product ----------------------------------------------------------------------------------------------------

// Bytes of x that are passed over for each panel; they should stay in the second-level cache beside the panels.
constexpr int64_t kRowBlockBytes = 256 << 10;

// Panels `panels` of y = x W^T + b. Threads share the panels of one product: no two write the same element.
//
// x [rows, depth] with rows x_stride apart, depth padded (see kDepthStep); y [rows, columns] with rows y_stride apart,
// of T or of float.
template <Epilogue kEpilogue, class T, class Y>
void gemm(const T* x, int64_t rows, int64_t x_stride, const Linear<T>& map, Y* y, int64_t y_stride, Range panels) {
  constexpr int kTileRows = Tiles<T>::kRows;
  const int64_t depth = map.depth;
  const int64_t fitting = kRowBlockBytes / (depth * int64_t(sizeof(Operand<T>)));
  const int64_t block_rows = std::max<int64_t>(fitting / kTileRows, 1) * kTileRows;
  // Sums of one tile are finished while the next one is multiplied.
  alignas(64) float sums[Tiles<T>::kLeavesVectorsIdle ? 2 : 1][Tiles<T>::kSums];
  Unfinished<kEpilogue, T, Y> unfinished{map, y_stride};
  Tiles<T> sum_up;
  const bool quantized = map.quantized != nullptr;
  WidePanel<Operand<T>> wide;
  int turn = 0;

  for (int64_t start = 0; start < rows; start += block_rows) {
    const int64_t block = std::min(block_rows, rows - start);
    const Operand<T>* operand;
    int64_t stride;
    if constexpr (std::is_same_v<Operand<T>, T>) {
      operand = x + start * x_stride;
      stride = x_stride;
    } else {
      thread_local std::vector<float> widened;
      if (int64_t(widened.size()) < block * depth) widened.resize(block * depth);
      for (int64_t r = 0; r < block; ++r)
        for (int64_t k = 0; k < depth; ++k) widened[r * depth + k] = to_float(x[(start + r) * x_stride + k]);
      operand = widened.data();
      stride = depth;
    }
    // Tiles of nearly equal height: 13 rows are 7 and 6, not 12 and 1.
    const int64_t tiles = (block + kTileRows - 1) / kTileRows;
    const int several = tiles == 1 ? Tiles<T>::panels_for(int(block)) : 1;
    for (int64_t panel = panels.begin; panel < panels.end;) {
      const int width = panel + several <= panels.end ? several : 1;
      const bool shared = quantized && tiles > 1;
      if (shared) wide.take(map.scaled_panel(panel), depth);
      for (int64_t tile = 0; tile < tiles; ++tile) {
        const int64_t first = block * tile / tiles;
        const int height = int(block * (tile + 1) / tiles - first);
        const Operand<T>* const rows_of_tile = operand + first * stride;
        Y* const result = y + (start + first) * y_stride;
        if constexpr (Tiles<T>::kLeavesVectorsIdle) {
          // One tile of rows takes less time than its panel takes to come from memory. More of them would wait for it less
          // than they would for so many requests.
          const T* const next = !quantized && tiles == 1 && panel + 1 < panels.end ? map.panel(panel + 1) : nullptr;
          const int some = unfinished.rows_per_step(depth / Tiles<T>::kDepth);
          const auto meanwhile = [&](int64_t k) {
            if (next != nullptr)
              for (int64_t i = k * kPanel; i < (k + Tiles<T>::kDepth) * kPanel; i += 64 / int64_t(sizeof(T)))
                prefetch_far(next + i);
            unfinished.finish(some);
          };
          if (!quantized)
            sum_up(height, rows_of_tile, stride, map.panel(panel), depth, sums[turn], meanwhile);
          else if (shared)
            sum_up(height, rows_of_tile, stride, wide.data(), depth, sums[turn], meanwhile);
          else
            sum_up(height, rows_of_tile, stride, map.scaled_panel(panel), depth, sums[turn], meanwhile);
          unfinished.finish_all();
          unfinished.begin(sums[turn], height, width, panel, result);
          turn ^= 1;
        } else {
          if (!quantized)
            sum_up(height, width, rows_of_tile, stride, map.panel(panel), depth, sums[0]);
          else if (!shared)
            sum_up(height, width, rows_of_tile, stride, map.scaled_panel(panel), depth, sums[0]);
          else if constexpr (std::is_same_v<Operand<T>, T>)
            sum_up(height, width, rows_of_tile, stride, wide.data(), depth, sums[0]);
          else
            VectorTiles<float>()(height, width, rows_of_tile, stride, wide.data(), depth, sums[0]);
          unfinished.begin(sums[0], height, width, panel, result);
          unfinished.finish_all();
        }
      }
      panel += width;
    }
    unfinished.finish_all();
  }
}

// The team's share of the whole product: as a grid of rows and panels that leaves its members equally busy. A small
// matrix has too few panels for many threads, and a prompt has rows enough for all of them.
template <Epilogue kEpilogue, class T, class Y>
void gemm(const T* x, int64_t rows, int64_t x_stride, const Linear<T>& map, Y* y, int64_t y_stride, Team team) {
  constexpr int kTileRows = Tiles<T>::kRows;
  const int64_t tiles = (rows + kTileRows - 1) / kTileRows, panels = map.panels();
  int row_parts = 1;
  int64_t least = INT64_MAX;
  for (int parts = 1; parts <= team.count && parts <= tiles; ++parts) {
    if (team.count % parts != 0) continue;
    const int64_t columns = team.count / parts;
    const int64_t busiest = ((tiles + parts - 1) / parts) * ((panels + columns - 1) / columns);
    if (busiest >= least) continue;  // of equals the fewest rows' parts: each of them reads the weight
    least = busiest;
    row_parts = parts;
  }
  const Range tile = share(tiles, {team.index % row_parts, row_parts});
  const Range panel = share(panels, {team.index / row_parts, team.count / row_parts});
  const int64_t first = tile.begin * kTileRows, last = std::min(tile.end * kTileRows, rows);
  gemm<kEpilogue>(x + first * x_stride, last - first, x_stride, map, y + first * y_stride, y_stride, panel);
}

}  // namespace OFFRAMP_ISA
}  // namespace offramp
