// torch operation: unembedding and choice in one. The logits of a batch are megabytes that are written, read again three
// times and thrown away; here a block of them stays in the cache between being made and being summed up.

#include "head_product.h"

#include <tuple>

#include "packed.h"

namespace offramp {
inline namespace OFFRAMP_ISA {
namespace {

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> head(const at::Tensor& x, const at::Tensor& packed,
                                                                int64_t vocab, const OptionalTensor& scales) {
  check_rows(x, "x");
  const int64_t rows = x.size(0);
  const auto floats = x.options().dtype(at::kFloat);
  const at::Tensor ids = at::empty({rows}, x.options().dtype(at::kLong)), best = at::empty({rows}, floats),
                   second = at::empty({rows}, floats), logsumexp = at::empty({rows}, floats);
  with_type(x, [&](auto type) {
    using T = decltype(type);
    const Linear<T> map = linear_of<T>(packed, std::nullopt, scales, vocab, false);
    const PaddedRows<T> padded(x, map.depth);
    const int num_threads = threads_for(rows * map.depth * vocab);
    HeadProduct<T> product(map, rows, num_threads);
    Barrier barrier;
#pragma omp parallel num_threads(num_threads)
    product.run(padded.data(), padded.stride(), Team::here(), barrier);
    for (int64_t r = 0; r < rows; ++r) {
      const Row row = product.row(r);
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
