// Sums of products of bf16 by AMX matrix tiles: the kernel of ISA level `amx`, for one row as for many, so that a row's
// result is the same among few as among many.
#pragma once

#include "vec.h"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__)
#define OFFRAMP_AMX 1

#include <sys/syscall.h>
#include <unistd.h>

namespace offramp {
inline namespace OFFRAMP_ISA {

// Linux lets a process use tiles only if it asks; a tile instruction kills one that has not.
static inline bool may_use_tiles() {
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

// What each of the eight tiles is: rows of `row_bytes` bytes.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// GCC's _tile_loadconfig says that it reads eight bytes; the other stores into a configuration may then never be made.
static inline void load_tile_config(const TileConfig& config) { __asm__ volatile("ldtilecfg %0" ::"m"(config)); }

// And _tile_loadd does not say that it reads memory at all: this has everything written that was to be written before.
static inline void finish_stores() { __asm__ volatile("" ::: "memory"); }

// A tile is 16 rows of 64 bytes. Sums are in tiles 0 to 3, rows of x in 4 and 5, weights in 6 and 7; a panel of weights is
// two tiles wide. The thread's tiles are in use for as long as this object lives.
class MatrixTiles {
 public:
  static constexpr int kRows = 32;
  static constexpr int kDepth = 32;  // k in a tile, in 16 pairs
  static constexpr bool kLeavesVectorsIdle = true;
  static constexpr int panels_for(int) { return 1; }  // one panel is read as fast as memory gives it
  static constexpr int kSums = kRows * 32;

  MatrixTiles() = default;
  MatrixTiles(const MatrixTiles&) = delete;
  MatrixTiles& operator=(const MatrixTiles&) = delete;
  ~MatrixTiles() {
    if (rows_ > 0) _tile_release();  // a thread that has tiles in use costs more to switch away from
  }

  // sums[row][lane] = sum over k of x[row][k] * w[k][lane]. Multiplying keeps the vector units idle: `meanwhile(k)` may do
  // something else after each tile's depth.
  template <class Meanwhile>
  void operator()(int rows, const bf16* x, int64_t x_stride, const bf16* w, int64_t depth, float* sums,
                  Meanwhile meanwhile) {
    finish_stores();
    configure(rows);
    const int64_t row_bytes = x_stride * int64_t(sizeof(bf16));
    if (rows > 16)
      two_row_tiles(x, row_bytes, w, depth, sums, meanwhile);
    else
      one_row_tile(x, row_bytes, w, depth, sums, meanwhile);
    finish_stores();
  }

 protected:
  static constexpr int kColumns = 32;       // in a panel: two tiles of 16
  static constexpr int kPairBytes = 2 * kColumns * sizeof(bf16);  // of a panel, from one pair of k to the next
  static constexpr int kSumBytes = kColumns * sizeof(float);

  void configure(int rows) {
    if (rows == rows_) return;
    TileConfig config;
    const int upper = rows < 16 ? rows : 16, lower = rows - upper;
    const int heights[8] = {upper, upper, rows > 16 ? lower : upper, rows > 16 ? lower : upper, upper, lower, 16, 16};
    for (int tile = 0; tile < 8; ++tile) {
      config.rows[tile] = uint8_t(heights[tile]);
      config.row_bytes[tile] = heights[tile] > 0 ? 64 : 0;
    }
    load_tile_config(config);
    rows_ = rows;
  }

 private:
  // 17 to 32 rows.
  template <class Meanwhile>
  static void two_row_tiles(const bf16* x, int64_t row_bytes, const bf16* w, int64_t depth, float* sums,
                            Meanwhile meanwhile) {
    const bf16* const lower = x + 16 * (row_bytes / int64_t(sizeof(bf16)));
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t k = 0; k < depth; k += kDepth) {
      const bf16* const weights = w + k * kColumns;
      _tile_loadd(4, x + k, row_bytes);
      _tile_loadd(6, weights, kPairBytes);
      _tile_loadd(7, weights + kColumns, kPairBytes);
      _tile_loadd(5, lower + k, row_bytes);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
      meanwhile(k);
    }
    _tile_stored(0, sums, kSumBytes);
    _tile_stored(1, sums + 16, kSumBytes);
    _tile_stored(2, sums + 16 * kColumns, kSumBytes);
    _tile_stored(3, sums + 16 * kColumns + 16, kSumBytes);
  }

  // Up to 16 rows.
  template <class Meanwhile>
  static void one_row_tile(const bf16* x, int64_t row_bytes, const bf16* w, int64_t depth, float* sums,
                           Meanwhile meanwhile) {
    _tile_zero(0);
    _tile_zero(1);
    for (int64_t k = 0; k < depth; k += kDepth) {
      const bf16* const weights = w + k * kColumns;
      _tile_loadd(4, x + k, row_bytes);
      _tile_loadd(6, weights, kPairBytes);
      _tile_loadd(7, weights + kColumns, kPairBytes);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      meanwhile(k);
    }
    _tile_stored(0, sums, kSumBytes);
    _tile_stored(1, sums + 16, kSumBytes);
  }

  int rows_ = 0;  // that tiles are configured for
};

}  // namespace OFFRAMP_ISA
}  // namespace offramp
#endif
