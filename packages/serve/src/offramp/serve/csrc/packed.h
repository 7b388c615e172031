// A packed weight as a tensor, checked, and as the kernels take it.
#pragma once

#include <optional>
#include <vector>

#include "gemm.h"
#include "ops.h"

namespace offramp {
inline namespace OFFRAMP_ISA {

using OptionalTensor = std::optional<at::Tensor>;

// A packed tensor is [panels, depth / group, kPanel, group] of T, or of int8 where it has scales; `out_features` are the
// columns of the map's result.
template <class T>
Linear<T> linear_of(const at::Tensor& packed, const OptionalTensor& bias, const OptionalTensor& scales, int64_t out_features,
                    bool gated) {
  const int group = scales ? kWeightGroup<T, int8_t> : kGroup<T>;
  const at::ScalarType type = scales ? at::kChar : std::is_same_v<T, bf16> ? at::kBFloat16 : at::kFloat;
  TORCH_CHECK(packed.scalar_type() == type, "packed is of ", packed.scalar_type(), "; beside these rows it must be of ", type,
              scales ? ", as it has scales" : "; they must be of one type");
  TORCH_CHECK(packed.dim() == 4 && packed.is_contiguous() && packed.size(2) == kPanel && packed.size(3) == group,
              "packed has shape ", packed.sizes(), "; it must come from ", scales ? "pack_int8" : "pack_linear", " of this library");
  Linear<T> map{nullptr, bias ? data<const T>(*bias) : nullptr, packed.size(1) * group, out_features, gated};
  if (scales) {
    map.quantized = data<const int8_t>(packed);
    map.scales = data<const float>(*scales);
  } else {
    map.weight = data<const T>(packed);
  }
  TORCH_CHECK(out_features >= 1 && map.panels() == packed.size(0), "out_features ", out_features, " does not fit ",
              packed.size(0), " panels of ", gated ? kLanes : kPanel);
  if (bias) {
    TORCH_CHECK(bias->scalar_type() == (std::is_same_v<T, bf16> ? at::kBFloat16 : at::kFloat), "bias is of ",
                bias->scalar_type(), "; it and x must be of one type");
    TORCH_CHECK(bias->is_contiguous() && bias->numel() == map.panels() * kPanel, "bias has shape ", bias->sizes(),
                "; it must come from pack_bias of this library");
  }
  if (scales)
    TORCH_CHECK(scales->scalar_type() == at::kFloat && scales->is_contiguous() &&
                    scales->numel() == map.panels() * num_scales(map.depth) * kPanel,
                "scales are of ", scales->scalar_type(), " and shape ", scales->sizes(),
                "; they must be float32 and come from pack_int8 of this library");
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
