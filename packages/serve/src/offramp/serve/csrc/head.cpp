// torch operation: unembedding and choice in one. The logits of a batch are megabytes that are written, read again three
// times and thrown away; here a block of them stays in the cache between being made and being summed up.

#include "head.h"

#include <algorithm>
#include <tuple>
#include <vector>

#include "packed.h"

namespace offramp {
inline namespace OFFRAMP_ISA {
namespace {

// Rows taken at once: their logits of one block, fp32, should stay in the second-level cache.
constexpr int64_t kHeadRows = 96;

// From one row's logits to the next's. A power of two would put all rows into a few sets of the first-level cache.
constexpr int64_t kLogitsStride = kHeadBlock + 16;

// Logits of one block, whole cache lines.
class LogitsBuffer {
 public:
  explicit LogitsBuffer(int64_t rows) : memory_(rows * kLogitsStride + 16) {
    const auto address = reinterpret_cast<uintptr_t>(memory_.data());
    start_ = reinterpret_cast<float*>((address + 63) / 64 * 64);
  }
  void fill(float value) { std::fill(memory_.begin(), memory_.end(), value); }
  float* row(int64_t r) { return start_ + r * kLogitsStride; }

 private:
  std::vector<float> memory_;
  float* start_;
};

template <class T>
void summarize_block(const PaddedRows<T>& x, Range rows, const Linear<T>& map, int64_t block, int64_t num_blocks,
                     LogitsBuffer& logits, Summary* summaries) {
  constexpr int64_t kPanels = kHeadBlock / kPanel;
  const Linear<T> part = map.part(block * kPanels, std::min(kHeadBlock, map.columns - block * kHeadBlock));
  if (part.columns < kHeadBlock) logits.fill(-std::numeric_limits<float>::infinity());
  gemm<Epilogue::Store>(x.data() + rows.begin * x.stride(), rows.end - rows.begin, x.stride(), part, logits.row(0),
                        kLogitsStride, Range{0, part.panels()});
  for (int64_t r = rows.begin; r < rows.end; ++r)
    summaries[r * num_blocks + block] = summarize(logits.row(r - rows.begin), part.columns);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> head(const at::Tensor& x, const at::Tensor& packed,
                                                                int64_t vocab, const OptionalTensor& scales) {
  check_rows(x, "x");
  const int64_t rows = x.size(0), num_blocks = (vocab + kHeadBlock - 1) / kHeadBlock;
  const auto floats = x.options().dtype(at::kFloat);
  const at::Tensor ids = at::empty({rows}, x.options().dtype(at::kLong)), best = at::empty({rows}, floats),
                   second = at::empty({rows}, floats), logsumexp = at::empty({rows}, floats);
  with_type(x, [&](auto type) {
    using T = decltype(type);
    const Linear<T> map = linear_of<T>(packed, std::nullopt, scales, vocab, false);
    const PaddedRows<T> padded(x, map.depth);
    std::vector<Summary> summaries(rows * num_blocks);
#pragma omp parallel num_threads(threads_for(rows * map.depth * vocab))
    {
      LogitsBuffer logits(std::min(rows, kHeadRows));
      const Range blocks = share(num_blocks, Team::here());
      for (int64_t first = 0; first < rows; first += kHeadRows)
        for (int64_t block = blocks.begin; block < blocks.end; ++block)
          summarize_block(padded, {first, std::min(first + kHeadRows, rows)}, map, block, num_blocks, logits,
                          summaries.data());
    }
    for (int64_t r = 0; r < rows; ++r) {
      const Row row = merge(summaries.data() + r * num_blocks, num_blocks);
      data<int64_t>(ids)[r] = row.all.index;
      data<float>(best)[r] = row.all.best;
      data<float>(second)[r] = row.all.second;
      data<float>(logsumexp)[r] = row.logsumexp;
    }
  });
  return {ids, best, second, logsumexp};
}

}  // namespace
}  // namespace OFFRAMP_ISA
}  // namespace offramp

TORCH_LIBRARY_FRAGMENT(OFFRAMP_OPS, m) {
  // x [N, I], packed of [vocab, I] -> token_ids [N] (lowest of equals), best, second, logsumexp [N] fp32; NaN where a
  // logit is.
  m.def(
      "head(Tensor x, Tensor packed, int vocab, Tensor? scales=None) -> (Tensor token_ids, Tensor best, Tensor second, "
      "Tensor logsumexp)");
}

TORCH_LIBRARY_IMPL(OFFRAMP_OPS, CPU, m) { m.impl("head", &offramp::head); }
