// Torch operations on layers: run_layers, write_kv, fill. Here arguments are checked and given types; what is computed
// stands in layers.h.
//
// Legend: N rows, L layers of a stack, D model, F feed-forward, H query heads, K key/value heads, E head dim, C cache
// layers, P panels of a packed weight.
#include "layers.h"

#include <ATen/ops/empty_like.h>

#include <climits>
#include <tuple>
#include <vector>

#include "stack.h"

namespace offramp {
inline namespace OFFRAMP_ISA {
namespace {

using at::Tensor;

// The rows' tensors, checked against the cache: a wrong slot or position must not write anywhere.
void check_places(const Tensor& x, const Tensor& cache, const Tensor& positions, const Tensor& slots, const Tensor& cos,
                const Tensor& sin) {
  const int64_t n = x.size(0), max_length = cos.size(0), num_slots = cache.size(1);
  check_tensor(positions, "positions", at::kLong, {n});
  check_tensor(slots, "slots", at::kLong, {n});
  check_tensor(sin, "sin", at::kFloat, {max_length, cos.size(1)});
  const int64_t *position = positions.const_data_ptr<int64_t>(), *slot = slots.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < n; ++i) {
    TORCH_CHECK(position[i] >= 0 && position[i] < max_length, "position ", position[i], " of row ", i,
                " is outside of the ", max_length, " positions that have rotary tables");
    TORCH_CHECK(slot[i] >= 0 && slot[i] < num_slots, "slot ", slot[i], " of row ", i, " is outside of the cache of ",
                num_slots, " slots");
  }
}

// Shape of the model as far as x, cache and rotary tables tell it.
LayerShape read_shape(const Tensor& x, const Tensor& cache, const Tensor& cos, int64_t num_heads, int64_t intermediate,
                      int64_t window, double eps) {
  check_type(x, "states");
  check_tensor(x, "states", x.scalar_type(), {-1, -1});
  check_tensor(cos, "cos", at::kFloat, {-1, -1});
  check_tensor(cache, "cache", x.scalar_type(), {-1, -1, -1});
  const int64_t head_dim = 2 * cos.size(1);
  TORCH_CHECK(head_dim > 0 && cache.size(2) > 0 && cache.size(2) % (2 * head_dim) == 0, "cache rows of ", cache.size(2),
              " elements do not hold keys and values of ", head_dim, " channels");
  TORCH_CHECK(cache.size(1) <= INT32_MAX, "a cache of ", cache.size(1), " slots is more than kernels can count");
  const int64_t num_kv_heads = cache.size(2) / (2 * head_dim);
  TORCH_CHECK(num_heads > 0 && num_heads % num_kv_heads == 0, num_heads, " query heads are not a multiple of ",
              num_kv_heads, " key/value heads");
  return {{int(num_heads), int(num_kv_heads), int(head_dim), int(window)}, x.size(1), intermediate, float(eps)};
}

Rotary rotary_of(const LayerShape& shape, const Tensor& cos, const Tensor& sin) {
  return {cos.const_data_ptr<float>(), sin.const_data_ptr<float>(), shape.attention.head_dim, shape.eps};
}

RowPlaces places_of(const Tensor& positions, const Tensor& slots) {
  return {positions.size(0), positions.const_data_ptr<int64_t>(), slots.const_data_ptr<int64_t>()};
}

std::tuple<Tensor, Tensor> run_layers_op(
    const Tensor& x, Tensor cache, const Tensor& positions, const Tensor& slots, const Tensor& sequences,
    const Tensor& block_tables, const Tensor& cos, const Tensor& sin, const Tensor& input_norm, const Tensor& qkv,
    const OptionalTensor& qkv_bias, const OptionalTensor& qkv_scales, const OptionalTensor& query_norm,
    const OptionalTensor& key_norm, const Tensor& output, const OptionalTensor& output_bias,
    const OptionalTensor& output_scales, const Tensor& mlp_norm, const Tensor& gate_up, const OptionalTensor& gate_up_bias,
    const OptionalTensor& gate_up_scales, const Tensor& down, const OptionalTensor& down_bias,
    const OptionalTensor& down_scales, at::IntArrayRef cache_layers, int64_t start, int64_t stop,
    int64_t num_heads, int64_t intermediate, int64_t block_size, int64_t window, double eps) {
  const LayerShape shape = read_shape(x, cache, cos, num_heads, intermediate, window, eps);
  const auto dtype = x.scalar_type();
  const int64_t n = x.size(0), hidden = shape.hidden, layers = input_norm.size(0), head_dim = shape.attention.head_dim;
  check_places(x, cache, positions, slots, cos, sin);
  const Stack qkv_stack{qkv, qkv_bias, qkv_scales, hidden, shape.qkv_size(), false};
  const Stack output_stack{output, output_bias, output_scales, shape.query_size(), hidden, false};
  const Stack gate_up_stack{gate_up, gate_up_bias, gate_up_scales, hidden, intermediate, true};
  const Stack down_stack{down, down_bias, down_scales, intermediate, hidden, false};
  qkv_stack.check("qkv", dtype, layers);
  output_stack.check("output", dtype, layers);
  gate_up_stack.check("gate_up", dtype, layers);
  down_stack.check("down", dtype, layers);
  check_tensor(input_norm, "input_norm", dtype, {layers, hidden});
  check_tensor(mlp_norm, "mlp_norm", dtype, {layers, hidden});
  check_optional(query_norm, "query_norm", dtype, {layers, head_dim});
  check_optional(key_norm, "key_norm", dtype, {layers, head_dim});
  TORCH_CHECK(0 <= start && start <= stop && stop <= layers, "layers ", start, " to ", stop, " are not among the ", layers);
  TORCH_CHECK(int64_t(cache_layers.size()) == layers, "cache_layers names ", cache_layers.size(), " of ", layers);
  for (const int64_t layer : cache_layers) check_cache_layer(cache, layer);
  TORCH_CHECK(block_size > 0 && window >= 0, "block_size ", block_size, " or window ", window, " is no size");

  check_tables(positions, sequences, block_tables, block_size, cache);
  const int64_t num_blocks = block_tables.size(1);
  Tensor states = x.clone();
  if (start == stop || n == 0) return {states, x};
  Tensor previous = at::empty_like(x);
  const int num_threads = threads_for(n * hidden * (shape.qkv_size() + 3 * intermediate) * (stop - start));
  const AttentionPlan plan(shape.attention, int(n), positions.const_data_ptr<int64_t>(),
                           sequences.const_data_ptr<int32_t>(), block_tables.const_data_ptr<int32_t>(), num_blocks,
                           int(block_size), num_threads);
  with_type(x, [&](auto type) {
    using T = decltype(type);
    const Tensor normed = at::empty({n, padded_depth<T>(hidden)}, x.options());
    const Tensor projected = at::empty({n, shape.qkv_size()}, x.options());
    const Tensor attended = padded_rows<T>(x, shape.query_size()), mlp = padded_rows<T>(x, intermediate);
    std::vector<Layer<T>> run;
    for (int64_t i = start; i < stop; ++i)
      run.push_back({at_index<const T>(input_norm, i), qkv_stack.map<T>(i), at_index<T>(query_norm, i),
                     at_index<T>(key_norm, i), output_stack.map<T>(i), at_index<const T>(mlp_norm, i),
                     gate_up_stack.map<T>(i), down_stack.map<T>(i), at_index<T>(cache, cache_layers[i])});
    const LayerBuffers<T> buffers{data<T>(normed), data<T>(projected), data<T>(attended), data<T>(mlp)};
    run_layers<T>(shape, run, rotary_of(shape, cos, sin), places_of(positions, slots), plan, buffers, data<T>(states),
                  data<T>(previous), num_threads);
  });
  return {states, previous};
}

void write_kv_op(const Tensor& x, Tensor cache, const Tensor& positions, const Tensor& slots, const Tensor& cos,
                 const Tensor& sin, const Tensor& input_norm, const Tensor& qkv, const OptionalTensor& qkv_bias,
                 const OptionalTensor& qkv_scales, const OptionalTensor& key_norm, int64_t cache_layer, int64_t layer,
                 int64_t num_heads, double eps) {
  const LayerShape shape = read_shape(x, cache, cos, num_heads, 0, 0, eps);
  const int64_t n = x.size(0), layers = input_norm.size(0);
  check_places(x, cache, positions, slots, cos, sin);
  check_cache_layer(cache, cache_layer);
  TORCH_CHECK(0 <= layer && layer < layers, "layer ", layer, " is not among the ", layers);
  const Stack stack{qkv, qkv_bias, qkv_scales, shape.hidden, shape.qkv_size(), false};
  stack.check("qkv", x.scalar_type(), layers);
  check_tensor(input_norm, "input_norm", x.scalar_type(), {layers, shape.hidden});
  check_optional(key_norm, "key_norm", x.scalar_type(), {layers, shape.attention.head_dim});
  if (n == 0) return;
  with_type(x, [&](auto type) {
    using T = decltype(type);
    const Tensor normed = at::empty({n, padded_depth<T>(shape.hidden)}, x.options());
    const Tensor projected = at::empty({n, shape.qkv_size()}, x.options());
    Layer<T> written{};
    written.input_norm = at_index<const T>(input_norm, layer);
    written.qkv = stack.map<T>(layer);
    written.key_norm = at_index<T>(key_norm, layer);
    written.cache = at_index<T>(cache, cache_layer);
    write_kv<T>(shape, written, rotary_of(shape, cos, sin), places_of(positions, slots),
                {data<T>(normed), data<T>(projected), nullptr, nullptr}, data<T>(x),
                threads_for(n * shape.hidden * 2 * shape.kv_size()));
  });
}

void fill_op(const Tensor& x, Tensor cache, const Tensor& positions, const Tensor& slots, const Tensor& cos, const Tensor& sin,
          const Tensor& weight, const OptionalTensor& bias, const OptionalTensor& scales, const OptionalTensor& key_norm,
          int64_t first_cache_layer, int64_t start, double eps) {
  const LayerShape shape = read_shape(x, cache, cos, cache.size(2) / std::max<int64_t>(1, 2 * cos.size(1)), 0, 0, eps);
  const int64_t n = x.size(0), layers = weight.size(0);
  check_places(x, cache, positions, slots, cos, sin);
  const Stack stack{weight, bias, scales, shape.hidden, 2 * shape.kv_size(), false};
  stack.check("weight", x.scalar_type(), layers);
  check_optional(key_norm, "key_norm", x.scalar_type(), {layers, shape.attention.head_dim});
  TORCH_CHECK(0 <= start && start <= layers, "fill starts at ", start, " of ", layers, " layers");
  if (start == layers || n == 0) return;
  check_cache_layer(cache, first_cache_layer + start);
  check_cache_layer(cache, first_cache_layer + layers - 1);
  with_type(x, [&](auto type) {
    using T = decltype(type);
    const int64_t stride = weight.size(1) * kPanel;
    Fill<T> run{stack.map<T>(start), stride, at_index<T>(key_norm, start), {}};
    run.kv.columns = (layers - start) * stride;  // the panels of all layers lie one after the other
    for (int64_t i = start; i < layers; ++i) run.caches.push_back(at_index<T>(cache, first_cache_layer + i));
    const Tensor normed = at::empty({n, padded_depth<T>(shape.hidden)}, x.options());
    const Tensor projected = at::empty({n, run.kv.columns}, x.options());
    fill<T>(shape, run, rotary_of(shape, cos, sin), places_of(positions, slots), data<T>(normed), data<T>(projected),
            data<T>(x), threads_for(n * shape.hidden * run.kv.columns));
  });
}

}  // namespace
}  // namespace OFFRAMP_ISA
}  // namespace offramp

TORCH_LIBRARY_FRAGMENT(OFFRAMP_OPS, m) {
  // Layers start + 1 .. stop of a stack on states x [N, D] -> the states after them, and those before the last of them.
  // Every weight is stacked over layers: maps as pack_linear (or pack_int8, with scales) and pack_bias give them, norms as
  // they are. cache_layers says where in the cache [C, slots, 2 * K * E] each layer of the stack has its keys and values;
  // window 0 is all.
  m.def(
      "run_layers(Tensor x, Tensor(a!) cache, Tensor positions, Tensor slots, Tensor sequences, Tensor block_tables, "
      "Tensor cos, Tensor sin, Tensor input_norm, Tensor qkv, Tensor? qkv_bias, Tensor? qkv_scales, Tensor? query_norm, "
      "Tensor? key_norm, Tensor output, Tensor? output_bias, Tensor? output_scales, Tensor mlp_norm, Tensor gate_up, "
      "Tensor? gate_up_bias, Tensor? gate_up_scales, Tensor down, Tensor? down_bias, Tensor? down_scales, "
      "int[] cache_layers, int start, int stop, int num_heads, int intermediate, int block_size, int window, float eps) "
      "-> (Tensor states, Tensor previous)");
  // Keys and values of one layer of a stack, and nothing else.
  m.def(
      "write_kv(Tensor x, Tensor(a!) cache, Tensor positions, Tensor slots, Tensor cos, Tensor sin, Tensor input_norm, "
      "Tensor qkv, Tensor? qkv_bias, Tensor? qkv_scales, Tensor? key_norm, int cache_layer, int layer, int num_heads, "
      "float eps) -> ()");
  // Keys and values of the layers from `start` to the end of a stack, from states that are normed without a weight.
  // Layer i of the stack has cache layer first_cache_layer + i; its weight is that of its keys, then its values.
  m.def(
      "fill(Tensor x, Tensor(a!) cache, Tensor positions, Tensor slots, Tensor cos, Tensor sin, Tensor weight, "
      "Tensor? bias, Tensor? scales, Tensor? key_norm, int first_cache_layer, int start, float eps) -> ()");
}

TORCH_LIBRARY_IMPL(OFFRAMP_OPS, CPU, m) {
  m.impl("run_layers", &offramp::run_layers_op);
  m.impl("write_kv", &offramp::write_kv_op);
  m.impl("fill", &offramp::fill_op);
}
