// The product of rows with an unembedding, and what each row's logits amount to.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "gemm.h"
#include "head.h"
#include "line_buffer.h"
#include "parallel.h"

namespace offramp {
inline namespace OFFRAMP_ISA {

// Rows taken at once: their logits of one block, fp32, should stay in the second-level cache.
constexpr int64_t kHeadRows = 96;

// From one row's logits of a block to the next's. A power of two would put all rows into a few sets of the first-level
// cache.
constexpr int64_t kLogitsStride = kHeadBlock + 16;

// Logits are made and summed up by a team in one of two ways, which give the same bits: a large vocabulary block by
// block, each thread those of its own, which are never in memory all together; and one of few blocks panel by panel, as
// the blocks alone could not be shared out evenly.
template <class T>
class HeadProduct {
 public:
  // For `rows` rows and up to `num_threads` threads.
  HeadProduct(const Linear<T>& map, int64_t rows, int num_threads)
      : map_(map),
        rows_(rows),
        num_blocks_((map.columns + kHeadBlock - 1) / kHeadBlock),
        by_blocks_(num_threads == 1 || num_blocks_ >= kManyBlocks * num_threads),
        row_stride_(by_blocks_ ? 0 : num_blocks_ * kHeadBlock + 16),
        logits_(std::min(rows, kHeadRows) * row_stride_),
        summaries_(rows * num_blocks_) {}

  // Called by all of a team, once. x: rows `stride` apart, padded as gemm wants them.
  void run(const T* x, int64_t stride, Team team, Barrier& barrier) {
    if (by_blocks_)
      run_blocks(x, stride, team);
    else
      run_panels(x, stride, team, barrier);
  }

  // After `run`, and after all of the team.
  Row row(int64_t r) const { return merge(summaries_.data() + r * num_blocks_, num_blocks_); }

 private:
  static constexpr int64_t kManyBlocks = 8;  // for each thread: then the last one waits for an eighth at most

  int64_t columns_of(int64_t block) const { return std::min(kHeadBlock, map_.columns - block * kHeadBlock); }

  // What lies behind the last logit up to the end of its vector must not count.
  static void end_row(float* logits, int64_t columns) {
    const int64_t width = (columns + kLanes - 1) / kLanes * kLanes;
    std::fill(logits + columns, logits + width, -std::numeric_limits<float>::infinity());
  }

  void run_blocks(const T* x, int64_t stride, Team team) {
    LineBuffer<float> logits(std::min(rows_, kHeadRows) * kLogitsStride);
    const Range blocks = share(num_blocks_, team);
    for (int64_t first = 0; first < rows_; first += kHeadRows) {
      const int64_t count = std::min(kHeadRows, rows_ - first);
      for (int64_t block = blocks.begin; block < blocks.end; ++block) {
        const Linear<T> part = map_.part(block * (kHeadBlock / kPanel), columns_of(block));
        gemm<Epilogue::Store>(x + first * stride, count, stride, part, logits.data(), kLogitsStride,
                              Range{0, part.panels()});
        for (int64_t r = 0; r < count; ++r) sum_up(first + r, block, logits.data() + r * kLogitsStride);
      }
    }
  }

  void run_panels(const T* x, int64_t stride, Team team, Barrier& barrier) {
    for (int64_t first = 0; first < rows_; first += kHeadRows) {
      const int64_t count = std::min(kHeadRows, rows_ - first);
      gemm<Epilogue::Store>(x + first * stride, count, stride, map_, logits_.data(), row_stride_, team);
      barrier.wait(team.count);
      const Range mine = share(count * num_blocks_, team);
      for (int64_t i = mine.begin; i < mine.end; ++i) {
        const int64_t r = i / num_blocks_, block = i % num_blocks_;
        sum_up(first + r, block, logits_.data() + r * row_stride_ + block * kHeadBlock);
      }
      barrier.wait(team.count);
    }
  }

  void sum_up(int64_t row, int64_t block, float* logits) {
    end_row(logits, columns_of(block));
    summaries_[row * num_blocks_ + block] = summarize(logits, columns_of(block));
  }

  const Linear<T> map_;
  const int64_t rows_, num_blocks_;
  const bool by_blocks_;
  const int64_t row_stride_;
  LineBuffer<float> logits_;
  std::vector<Summary> summaries_;  // [rows, blocks]
};

}  // namespace OFFRAMP_ISA
}  // namespace offramp
