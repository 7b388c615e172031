// What operations on stacks of layers share: stacks of packed maps, and checks of what they are given.
//
// Legend: N rows, S sequences, L layers of a stack, P panels of a packed weight.
#pragma once

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <cstdint>

#include "packed.h"

namespace offramp {
inline namespace OFFRAMP_ISA {

static inline void check_tensor(const at::Tensor& t, const char* name, at::ScalarType dtype, at::IntArrayRef sizes) {
  TORCH_CHECK(t.is_cpu() && t.is_contiguous(), name, " must be a contiguous tensor on the CPU");
  TORCH_CHECK(t.scalar_type() == dtype, name, " is ", t.scalar_type(), "; expected ", dtype);
  bool same = t.dim() == int64_t(sizes.size());
  for (int64_t i = 0; same && i < t.dim(); ++i) same = sizes[i] < 0 || t.size(i) == sizes[i];  // negative: any
  TORCH_CHECK(same, name, " has shape ", t.sizes(), "; expected ", sizes);
}

static inline void check_optional(const OptionalTensor& t, const char* name, at::ScalarType dtype, at::IntArrayRef sizes) {
  if (t) check_tensor(*t, name, dtype, sizes);
}

// Element `index` of a stack's first axis; null without a stack.
template <class T>
T* at_index(const at::Tensor& stack, int64_t index) {
  return reinterpret_cast<T*>(stack.data_ptr()) + index * stack.stride(0);
}

template <class T>
const T* at_index(const OptionalTensor& stack, int64_t index) {
  return stack ? at_index<const T>(*stack, index) : nullptr;
}

// A stack of packed maps, with rows of padding only at the end of each.
struct Stack {
  const at::Tensor& weight;  // [L, P, padded depth / group, panel, group], of int8 where there are scales
  const OptionalTensor& bias;    // [L, P, panel]
  const OptionalTensor& scales;  // [L, P, num_scales(padded depth), panel, 1] fp32
  int64_t inputs, outputs;
  bool gated;

  void check(const char* name, at::ScalarType dtype, int64_t layers) const {
    if (dtype == at::kBFloat16)
      check_as<bf16>(name, dtype, layers);
    else
      check_as<float>(name, dtype, layers);
  }

  template <class T>
  Linear<T> map(int64_t layer) const {
    return {scales ? nullptr : at_index<const T>(weight, layer),
            at_index<T>(bias, layer),
            padded_depth<T>(inputs),
            outputs,
            gated,
            scales ? at_index<const int8_t>(weight, layer) : nullptr,
            at_index<float>(scales, layer)};
  }

 private:
  template <class T>
  void check_as(const char* name, at::ScalarType dtype, int64_t layers) const {
    const int64_t group = scales ? kWeightGroup<T, int8_t> : kGroup<T>;
    const int64_t panels = num_panels(gated ? 2 * outputs : outputs, gated);
    check_tensor(weight, name, scales ? at::kChar : dtype, {layers, panels, padded_depth<T>(inputs) / group, kPanel, group});
    check_optional(bias, name, dtype, {layers, panels, kPanel});
    check_optional(scales, name, at::kFloat, {layers, panels, num_scales(padded_depth<T>(inputs)), kPanel, 1});
  }
};

static inline void check_cache_layer(const at::Tensor& cache, int64_t layer) {
  TORCH_CHECK(layer >= 0 && layer < cache.size(0), "cache layer ", layer, " is outside of the cache of ", cache.size(0));
}

// A buffer for rows of `size` elements that a product will read: what lies beyond them is zero.
template <class T>
at::Tensor padded_rows(const at::Tensor& x, int64_t size) {
  const int64_t padded = padded_depth<T>(size);
  return padded == size ? at::empty({x.size(0), padded}, x.options()) : at::zeros({x.size(0), padded}, x.options());
}

// Tables of the blocks in which sequences lie, one after the other, so that no row reads beyond the cache. Each row reads
// up to its position.
static inline void check_tables(const at::Tensor& positions, const at::Tensor& sequences, const at::Tensor& block_tables,
                                int64_t block_size, const at::Tensor& cache) {
  const int64_t n = positions.size(0);
  check_tensor(sequences, "sequences", at::kInt, {n});
  check_tensor(block_tables, "block_tables", at::kInt, {-1, -1});
  const int64_t num_sequences = block_tables.size(0), num_blocks = block_tables.size(1);
  const int32_t* const sequence = sequences.const_data_ptr<int32_t>();
  const int32_t* const tables = block_tables.const_data_ptr<int32_t>();
  for (int64_t i = 0; i < n; ++i) {
    const int64_t position = positions.const_data_ptr<int64_t>()[i];
    TORCH_CHECK(sequence[i] >= 0 && sequence[i] < num_sequences, "sequence ", sequence[i], " of row ", i, " has no table");
    TORCH_CHECK(position < num_blocks * block_size, "position ", position, " of row ", i, " is outside of a table of ",
                num_blocks, " blocks");
  }
  for (int64_t i = 0; i < num_sequences * num_blocks; ++i)
    TORCH_CHECK(tables[i] >= 0 && (int64_t(tables[i]) + 1) * block_size <= cache.size(1), "block ", tables[i],
                " is outside of the cache");
}

}  // namespace OFFRAMP_ISA
}  // namespace offramp
