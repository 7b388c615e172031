// torch operations on early exits: their heads, and the exit test in one call. Around a test of a few rows everything has
// to come from memory, the code of ten small operations too, so it is the number of calls that costs.
//
// Legend: N rows, D model, F features between the maps of a head.
#include "exit.h"

#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>

#include <tuple>

#include "head_product.h"
#include "packed.h"

namespace offramp {
inline namespace OFFRAMP_ISA {
namespace {

using at::Tensor;

template <class T>
const T* norm_of(const OptionalTensor& norm, const char* name, const Tensor& x) {
  if (!norm) return nullptr;
  check_same_type(*norm, name, x, "x");
  TORCH_CHECK(norm->dim() == 1 && norm->is_contiguous() && norm->size(0) == x.size(1), name, " has shape ", norm->sizes(),
              "; rows of x have ", x.size(1), " features");
  return data<const T>(*norm);
}

template <class T>
Linear<T> map_of(const Tensor& packed, const OptionalTensor& bias, const OptionalTensor& scales, const char* name,
                 int64_t inputs, int64_t outputs, bool gated) {
  const Linear<T> map = linear_of<T>(packed, bias, scales, outputs, gated);
  TORCH_CHECK(map.depth == padded_depth<T>(inputs), name, " takes ", map.depth, " features (padded), not ", inputs);
  return map;
}

// The arguments that make up a head, checked.
template <class T>
ExitHead<T> head_of(const Tensor& x, const OptionalTensor& inner_norm, const OptionalTensor& inner,
                    const OptionalTensor& inner_bias, const OptionalTensor& inner_scales, int64_t features, bool gated,
                    const OptionalTensor& map, const OptionalTensor& map_bias, const OptionalTensor& map_scales, bool scaled,
                    const OptionalTensor& norm, double eps) {
  const int64_t hidden = x.size(1);
  TORCH_CHECK(map.has_value() == inner_norm.has_value(), "a head has a map and a norm before it, or neither");
  TORCH_CHECK(map || !inner, "a head with an inner map has one after it");
  ExitHead<T> head{hidden,       float(eps),   norm_of<T>(inner_norm, "inner_norm", x), std::nullopt,
                   std::nullopt, scaled,       norm_of<T>(norm, "norm", x)};
  if (inner) head.inner = map_of<T>(*inner, inner_bias, inner_scales, "inner", hidden, features, gated);
  if (map) head.map = map_of<T>(*map, map_bias, map_scales, "map", inner ? features : hidden, hidden, false);
  return head;
}

// What a transform writes to, as tensors.
template <class T>
struct ExitMemory {
  Tensor normed, inner, correction, state;

  ExitMemory(const ExitHead<T>& head, const Tensor& x) {
    const int64_t n = x.size(0);
    if (head.map) {
      normed = at::empty({n, padded_depth<T>(head.hidden)}, x.options());
      correction = at::empty({n, head.hidden}, x.options());
    }
    if (head.inner) inner = at::zeros({n, padded_depth<T>(head.inner->columns)}, x.options());
    state = at::empty({n, padded_depth<T>(head.hidden)}, x.options());
  }

  ExitBuffers<T> buffers() const {
    return {normed.defined() ? data<T>(normed) : nullptr, inner.defined() ? data<T>(inner) : nullptr,
            correction.defined() ? data<T>(correction) : nullptr};
  }
  Tensor result(int64_t hidden) const { return state.size(1) == hidden ? state : state.narrow(1, 0, hidden); }
};

void check_states(const Tensor& x) {
  check_rows(x, "x");
  TORCH_CHECK(x.is_contiguous(), "x has strides ", x.strides(), "; it must be contiguous");
}

Tensor exit_state(const Tensor& x, const OptionalTensor& inner_norm, const OptionalTensor& inner,
                  const OptionalTensor& inner_bias, const OptionalTensor& inner_scales, int64_t features, bool gated,
                  const OptionalTensor& map, const OptionalTensor& map_bias, const OptionalTensor& map_scales, bool scaled,
                  const OptionalTensor& norm, double eps) {
  check_states(x);
  Tensor state;
  with_type(x, [&](auto type) {
    using T = decltype(type);
    const auto head = head_of<T>(x, inner_norm, inner, inner_bias, inner_scales, features, gated, map, map_bias,
                                 map_scales, scaled, norm, eps);
    const ExitMemory<T> memory(head, x);
    const ExitBuffers<T> buffers = memory.buffers();
    const int64_t n = x.size(0);
    Barrier barrier;
#pragma omp parallel num_threads(threads_for(n * head.multiplications()))
    transform(head, data<const T>(x), n, buffers, data<T>(memory.state), memory.state.size(1), Team::here(), barrier);
    state = memory.result(head.hidden);
  });
  return state;
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> exit_test(
    const Tensor& x, const OptionalTensor& inner_norm, const OptionalTensor& inner, const OptionalTensor& inner_bias,
    const OptionalTensor& inner_scales, int64_t features, bool gated, const OptionalTensor& map,
    const OptionalTensor& map_bias, const OptionalTensor& map_scales, bool scaled, const OptionalTensor& norm, double eps,
    const Tensor& unembedding, const OptionalTensor& unembedding_scales, int64_t vocab, const OptionalTensor& tokens, bool margin) {
  check_states(x);
  TORCH_CHECK(!tokens || (tokens->is_cpu() && tokens->is_contiguous() && tokens->scalar_type() == at::kLong &&
                          tokens->dim() == 1 && tokens->size(0) == vocab),
              "tokens must name one for each of the ", vocab, " logits");
  const int64_t n = x.size(0);
  const Tensor numbers = at::empty({4, n}, x.options().dtype(at::kFloat));
  const Tensor ids = at::empty({n}, x.options().dtype(at::kLong));
  Tensor state;
  with_type(x, [&](auto type) {
    using T = decltype(type);
    const auto head = head_of<T>(x, inner_norm, inner, inner_bias, inner_scales, features, gated, map, map_bias,
                                 map_scales, scaled, norm, eps);
    const Linear<T> logits =
        map_of<T>(unembedding, std::nullopt, unembedding_scales, "unembedding", head.hidden, vocab, false);
    const ExitMemory<T> memory(head, x);
    const ExitBuffers<T> buffers = memory.buffers();
    const int num_threads = threads_for(n * (head.multiplications() + logits.depth * vocab));
    HeadProduct<T> product(logits, n, num_threads);
    Barrier barrier;
#pragma omp parallel num_threads(num_threads)
    {
      const Team team = Team::here();
      T* const states = data<T>(memory.state);
      transform(head, data<const T>(x), n, buffers, states, memory.state.size(1), team, barrier);
      product.run(states, memory.state.size(1), team, barrier);
    }
    float *best = data<float>(numbers), *second = best + n, *logsumexp = second + n, *confidence = logsumexp + n;
    for (int64_t r = 0; r < n; ++r) {
      const Row row = product.row(r);
      data<int64_t>(ids)[r] = tokens ? data<const int64_t>(*tokens)[row.all.index] : row.all.index;
      best[r] = row.all.best;
      second[r] = row.all.second;
      logsumexp[r] = row.logsumexp;
      confidence[r] = std::exp(row.all.best - row.logsumexp) - (margin ? std::exp(row.all.second - row.logsumexp) : 0.f);
    }
    state = memory.result(head.hidden);
  });
  return {state, ids, numbers[0], numbers[1], numbers[2], numbers[3]};
}

Tensor cosine_rows(const Tensor& x, const Tensor& previous) {
  check_rows(x, "x");
  check_rows(previous, "previous");
  check_same_type(x, "x", previous, "previous");
  TORCH_CHECK(x.sizes() == previous.sizes(), "x has shape ", x.sizes(), " and previous ", previous.sizes(),
              "; they must agree");
  const int64_t n = x.size(0), size = x.size(1);
  const Tensor result = at::empty({n}, x.options().dtype(at::kFloat));
  with_type(x, [&](auto type) {
    using T = decltype(type);
#pragma omp parallel for num_threads(threads_for(n * size))
    for (int64_t r = 0; r < n; ++r)
      data<float>(result)[r] =
          cosine(data<const T>(x) + r * x.stride(0), data<const T>(previous) + r * previous.stride(0), size);
  });
  return result;
}

}  // namespace
}  // namespace OFFRAMP_ISA
}  // namespace offramp

TORCH_LIBRARY_FRAGMENT(OFFRAMP_OPS, m) {
  // An exit head on states x [N, D]: norm(x + map(inner(inner_norm(x))) * scale), all of it optional. `features` is F of
  // the inner map, which is gated or followed by SiLU; `scaled` multiplies by the root mean square of x.
  m.def(
      "exit_state(Tensor x, Tensor? inner_norm, Tensor? inner, Tensor? inner_bias, Tensor? inner_scales, int features, "
      "bool gated, Tensor? map, Tensor? map_bias, Tensor? map_scales, bool scaled, Tensor? norm, float eps) -> Tensor");
  // The same, then what `head` gives for an unembedding (or a shortlist of it), and the confidence [N] fp32: the best
  // token's probability, or that less the second's. `tokens` [vocab] are what a shortlist's own numbers stand for.
  m.def(
      "exit_test(Tensor x, Tensor? inner_norm, Tensor? inner, Tensor? inner_bias, Tensor? inner_scales, int features, "
      "bool gated, Tensor? map, Tensor? map_bias, Tensor? map_scales, bool scaled, Tensor? norm, float eps, Tensor unembedding, "
      "Tensor? unembedding_scales, int vocab, Tensor? tokens, bool margin) -> "
      "(Tensor state, Tensor token_ids, Tensor best, Tensor second, Tensor logsumexp, Tensor confidence)");
  // Of rows [N, D] -> [N] fp32, at most 1.
  m.def("cosine(Tensor x, Tensor previous) -> Tensor");
}

TORCH_LIBRARY_IMPL(OFFRAMP_OPS, CPU, m) {
  m.impl("exit_state", &offramp::exit_state);
  m.impl("exit_test", &offramp::exit_test);
  m.impl("cosine", &offramp::cosine_rows);
}
