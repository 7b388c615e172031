// Which keys the rows of a call see, where those lie, and who computes what.
//
// Legend: N rows, S sequences, H query heads, K key/value heads, G = H / K query heads that share one, E head dim.
#pragma once

#include <algorithm>
#include <cstdint>
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
    const bool split = num_threads > 1 && int64_t(tiles.size()) * shape.num_kv_heads < 4 * int64_t(num_threads);
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

}  // namespace OFFRAMP_ISA
}  // namespace offramp
