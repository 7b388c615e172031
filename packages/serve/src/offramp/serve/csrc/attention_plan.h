// Which keys the rows of a call see, where those lie, and who computes what.
//
// Legend: N rows, S sequences, H query heads, K key/value heads, G = H / K query heads that share one, E head dim.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "vec.h"

namespace offramp {
inline namespace OFFRAMP_ISA {

constexpr int kKeyBlock = 128;    // keys per correction of the softmax
constexpr int kTileQueries = 32;  // at most, counting every head of every row: their sums stay in L1

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
  int64_t slots;                // plan.slots[slots + key] is where a key lies; negative where a window leaves out the first
};

// A piece of work for one thread: some query heads of some key/value heads of a tile.
struct AttentionTask {
  int tile, first_kv_head, stop_kv_head, first_head, stop_head;  // query heads count within the group
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
    split(shape, num_threads);
  }

 private:
  // Who has a tile's heads together reads its keys and values front to end, and once. But where tiles are few or uneven,
  // as when one sequence decodes, threads that would wait for each other do better to share them.
  void split(const AttentionShape& shape, int num_threads) {
    const int kv_heads = shape.num_kv_heads, group = shape.group();
    int64_t least = std::numeric_limits<int64_t>::max();
    for (const auto& [kv_step, step] : {std::pair(kv_heads, group), std::pair(1, group), std::pair(1, 1)}) {
      std::vector<AttentionTask> shared;
      int64_t total = 0;
      for (int tile = 0; tile < int(tiles.size()); ++tile)
        for (int kv_head = 0; kv_head < kv_heads; kv_head += kv_step)
          for (int head = 0; head < group; head += step) {
            // To read a key takes about as long as to multiply it by a query.
            const int64_t queries = int64_t(tiles[tile].num_rows) * step;
            const int64_t cost = (tiles[tile].stop_key - tiles[tile].first_key) * kv_step * (queries + 1);
            shared.push_back({tile, kv_head, kv_head + kv_step, head, head + step, cost});
            total += cost;
          }
      std::stable_sort(shared.begin(), shared.end(), [](const auto& a, const auto& b) { return a.cost > b.cost; });
      std::vector<int64_t> busy(num_threads);
      for (const AttentionTask& task : shared) *std::min_element(busy.begin(), busy.end()) += task.cost;
      const int64_t busiest = *std::max_element(busy.begin(), busy.end());
      if (busiest >= least) break;
      tasks = std::move(shared);
      least = busiest;
      if (busiest * num_threads <= total + total / 8) break;
    }
  }
};

}  // namespace OFFRAMP_ISA
}  // namespace offramp
