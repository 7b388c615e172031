// The torch operation run_t5_layers. Here arguments are checked and given types; what is computed stands in t5_layers.h.
//
// Legend: N rows, S sequences, L layers of a stack, D model, F feed-forward, H heads, E head dim, C cache layers.
#include "t5_layers.h"

#include <ATen/ops/empty_like.h>

#include <climits>
#include <tuple>
#include <vector>

#include "stack.h"

namespace offramp {
inline namespace OFFRAMP_ISA {
namespace {

std::tuple<at::Tensor, at::Tensor> run_t5_layers_op(
    const at::Tensor& x, at::Tensor cache, const at::Tensor& positions, const at::Tensor& slots,
    const at::Tensor& sequences, const at::Tensor& block_tables, const at::Tensor& source_lengths,
    const at::Tensor& source_tables, const at::Tensor& distance_bias, const at::Tensor& input_norm, const at::Tensor& qkv,
    const OptionalTensor& qkv_scales, const at::Tensor& output, const OptionalTensor& output_scales,
    const at::Tensor& cross_norm, const at::Tensor& cross_query, const OptionalTensor& cross_query_scales,
    const at::Tensor& cross_output, const OptionalTensor& cross_output_scales, const at::Tensor& mlp_norm,
    const at::Tensor& inner, const OptionalTensor& inner_scales, const at::Tensor& down, const OptionalTensor& down_scales,
    at::IntArrayRef cache_layers, int64_t start, int64_t stop, int64_t num_heads, int64_t intermediate, bool gated,
    int64_t block_size, double eps) {
  const auto dtype = x.scalar_type();
  check_type(x, "states");
  check_tensor(x, "states", dtype, {-1, -1});
  check_tensor(cache, "cache", dtype, {-1, -1, -1});
  TORCH_CHECK(num_heads > 0 && cache.size(2) > 0 && cache.size(2) % (2 * num_heads) == 0, "cache rows of ", cache.size(2),
              " elements do not hold keys and values of ", num_heads, " heads");
  TORCH_CHECK(cache.size(1) <= INT32_MAX, "a cache of ", cache.size(1), " slots is more than kernels can count");
  TORCH_CHECK(block_size > 0, "block_size ", block_size, " is no size");
  const int head_dim = int(cache.size(2) / (2 * num_heads));
  const LayerShape shape{{int(num_heads), int(num_heads), head_dim, 0}, x.size(1), intermediate, float(eps)};
  const int64_t n = x.size(0), hidden = shape.hidden, layers = input_norm.size(0), query_size = shape.query_size();
  const OptionalTensor none;
  const Stack qkv_stack{qkv, none, qkv_scales, hidden, shape.qkv_size(), false};
  const Stack output_stack{output, none, output_scales, query_size, hidden, false};
  const Stack query_stack{cross_query, none, cross_query_scales, hidden, query_size, false};
  const Stack cross_stack{cross_output, none, cross_output_scales, query_size, hidden, false};
  const Stack inner_stack{inner, none, inner_scales, hidden, intermediate, gated};
  const Stack down_stack{down, none, down_scales, intermediate, hidden, false};
  qkv_stack.check("qkv", dtype, layers);
  output_stack.check("output", dtype, layers);
  query_stack.check("cross_query", dtype, layers);
  cross_stack.check("cross_output", dtype, layers);
  inner_stack.check("inner", dtype, layers);
  down_stack.check("down", dtype, layers);
  check_tensor(input_norm, "input_norm", dtype, {layers, hidden});
  check_tensor(cross_norm, "cross_norm", dtype, {layers, hidden});
  check_tensor(mlp_norm, "mlp_norm", dtype, {layers, hidden});
  TORCH_CHECK(0 <= start && start <= stop && stop <= layers, "layers ", start, " to ", stop, " are not among the ", layers);
  TORCH_CHECK(int64_t(cache_layers.size()) == layers, "cache_layers names ", cache_layers.size(), " of ", layers);
  for (const int64_t layer : cache_layers) check_cache_layer(cache, layer);

  check_tensor(distance_bias, "distance_bias", at::kFloat, {num_heads, -1});
  const int64_t max_length = distance_bias.size(1) - DistanceBias::kPadding;
  check_tensor(positions, "positions", at::kLong, {n});
  check_tensor(slots, "slots", at::kLong, {n});
  for (int64_t i = 0; i < n; ++i) {
    const int64_t position = positions.const_data_ptr<int64_t>()[i], slot = slots.const_data_ptr<int64_t>()[i];
    TORCH_CHECK(position >= 0 && position < max_length, "position ", position, " of row ", i, " is outside of the ",
                max_length, " distances that have a bias");
    TORCH_CHECK(slot >= 0 && slot < cache.size(1), "slot ", slot, " of row ", i, " is outside of the cache of ",
                cache.size(1), " slots");
  }
  check_tables(positions, sequences, block_tables, block_size, cache);
  check_tensor(source_lengths, "source_lengths", at::kLong, {block_tables.size(0)});
  const at::Tensor last = at::empty({n}, positions.options());
  for (int64_t i = 0; i < n; ++i) {
    const int64_t length = source_lengths.const_data_ptr<int64_t>()[sequences.const_data_ptr<int32_t>()[i]];
    TORCH_CHECK(length > 0, "the source of row ", i, " has ", length, " tokens");
    data<int64_t>(last)[i] = length - 1;
  }
  check_tables(last, sequences, source_tables, block_size, cache);

  at::Tensor states = x.clone();
  if (start == stop || n == 0) return {states, x};
  at::Tensor previous = at::empty_like(x);
  const int num_threads = threads_for(n * hidden * (shape.qkv_size() + 3 * intermediate) * (stop - start));
  const auto plan_of = [&](const at::Tensor& stops, const at::Tensor& tables) {
    return AttentionPlan(shape.attention, int(n), stops.const_data_ptr<int64_t>(), sequences.const_data_ptr<int32_t>(),
                         tables.const_data_ptr<int32_t>(), tables.size(1), int(block_size), num_threads);
  };
  const AttentionPlan text_plan = plan_of(positions, block_tables), source_plan = plan_of(last, source_tables);
  const Seen text{text_plan, data<int64_t>(positions), {distance_bias.const_data_ptr<float>(), max_length}};
  const Seen source{source_plan, data<int64_t>(last), {}};
  with_type(x, [&](auto type) {
    using T = decltype(type);
    const at::Tensor normed = at::empty({n, padded_depth<T>(hidden)}, x.options());
    const at::Tensor projected = at::empty({n, shape.qkv_size()}, x.options());
    const at::Tensor attended = padded_rows<T>(x, query_size), mlp = padded_rows<T>(x, intermediate);
    std::vector<T5Layer<T>> run;
    for (int64_t i = start; i < stop; ++i)
      run.push_back({at_index<const T>(input_norm, i), qkv_stack.map<T>(i), output_stack.map<T>(i),
                     at_index<const T>(cross_norm, i), query_stack.map<T>(i), cross_stack.map<T>(i),
                     at_index<const T>(mlp_norm, i), inner_stack.map<T>(i), down_stack.map<T>(i),
                     at_index<T>(cache, cache_layers[i])});
    run_t5_layers<T>(shape, run, {n, data<int64_t>(positions), data<int64_t>(slots)}, text, source,
                     {data<T>(normed), data<T>(projected), data<T>(attended), data<T>(mlp)}, data<T>(states),
                     data<T>(previous), num_threads);
  });
  return {states, previous};
}

}  // namespace
}  // namespace OFFRAMP_ISA
}  // namespace offramp

TORCH_LIBRARY_FRAGMENT(OFFRAMP_OPS, m) {
  // As run_layers, for T5's decoder: maps have no bias. The sources' keys and values are in the cache already.
  // distance_bias is [H, L + 16], the longest distance first, see attention.h; inner is gated (GELU) or is
  // followed by ReLU.
  m.def(
      "run_t5_layers(Tensor x, Tensor(a!) cache, Tensor positions, Tensor slots, Tensor sequences, Tensor block_tables, "
      "Tensor source_lengths, Tensor source_tables, Tensor distance_bias, Tensor input_norm, Tensor qkv, "
      "Tensor? qkv_scales, Tensor output, Tensor? output_scales, Tensor cross_norm, Tensor cross_query, "
      "Tensor? cross_query_scales, Tensor cross_output, Tensor? cross_output_scales, Tensor mlp_norm, Tensor inner, "
      "Tensor? inner_scales, Tensor down, Tensor? down_scales, int[] cache_layers, int start, int stop, int num_heads, "
      "int intermediate, bool gated, int block_size, float eps) -> (Tensor states, Tensor previous)");
}

TORCH_LIBRARY_IMPL(OFFRAMP_OPS, CPU, m) { m.impl("run_t5_layers", &offramp::run_t5_layers_op); }
