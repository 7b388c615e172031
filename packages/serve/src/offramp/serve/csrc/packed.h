// A packed weight as a tensor, checked, and as the kernels take it.
#pragma once

#include <optional>
#include <vector>

#include "gemm.h"
#include "ops.h"

namespace offramp {
inline namespace OFFRAMP_ISA {

// A packed tensor is [panels, depth / group, kPanel, group]; `out_features` are the columns of the map's result.
template <class T>
Linear<T> linear_of(const at::Tensor& packed, const std::optional<at::Tensor>& bias, int64_t out_features, bool gated) {
  TORCH_CHECK(packed.dim() == 4 && packed.is_contiguous() && packed.size(2) == kPanel && packed.size(3) == kGroup<T>,
              "packed has shape ", packed.sizes(), "; it must come from pack_linear of this library");
  const Linear<T> map{data<const T>(packed), bias ? data<const T>(*bias) : nullptr, packed.size(1) * kGroup<T>,
                      out_features, gated};
  TORCH_CHECK(out_features >= 1 && map.panels() == packed.size(0), "out_features ", out_features, " does not fit ",
              packed.size(0), " panels of ", gated ? kLanes : kPanel);
  if (bias) {
    check_same_type(*bias, "bias", packed, "packed");
    TORCH_CHECK(bias->is_contiguous() && bias->numel() == map.panels() * kPanel, "bias has shape ", bias->sizes(),
                "; it must come from pack_bias of this library");
  }
  return map;
}

// Rows of x with the zeros that a padded depth asks for: x itself where there is nothing to pad.
template <class T>
class PaddedRows {
 public:
  PaddedRows(const at::Tensor& x, int64_t depth) : data_(offramp::data<const T>(x)), stride_(x.stride(0)) {
    const int64_t size = x.size(1);
    TORCH_CHECK(padded_depth<T>(size) == depth, "x has ", size, " features and the packed weight ", depth,
                depth - kDepthStep<T> + 1 < depth ? " (padded)" : "", "; they must agree");
    if (size == depth) return;
    copy_.resize(x.size(0) * depth);
    for (int64_t r = 0; r < x.size(0); ++r) std::copy_n(data_ + r * stride_, size, copy_.data() + r * depth);
    data_ = copy_.data();
    stride_ = depth;
  }

  const T* data() const { return data_; }
  int64_t stride() const { return stride_; }

 private:
  std::vector<T> copy_;
  const T* data_;
  int64_t stride_;
};

}  // namespace OFFRAMP_ISA
}  // namespace offramp
