// torch operations: packing, linear maps with their epilogues, RMS norm.

#include "norm.h"
#include "packed.h"

namespace offramp {
inline namespace OFFRAMP_ISA {
namespace {

void check_matrix(const at::Tensor& weight, bool gated) {
  TORCH_CHECK(weight.dim() == 2 && weight.is_contiguous() && weight.numel() > 0, "weight has shape ", weight.sizes(),
              " and strides ", weight.strides(), "; it must be a contiguous matrix that is not empty");
  TORCH_CHECK(!gated || weight.size(0) % 2 == 0, "a gated weight has gates and as many ups, not ", weight.size(0),
              " rows in all");
}

// A weight of W for rows of T.
template <class T, class W>
at::Tensor packed_weight(const at::Tensor& weight, bool gated) {
  constexpr int kNeighbours = kWeightGroup<T, W>;
  const int64_t columns = weight.size(0), depth = weight.size(1);
  const at::Tensor packed = at::empty(
      {num_panels(columns, gated), padded_depth<T>(depth) / kNeighbours, kPanel, kNeighbours}, weight.options());
  pack_weight<T>(data<const W>(weight), columns, depth, gated, data<W>(packed));
  return packed;
}

at::Tensor pack_linear(const at::Tensor& weight, bool gated) {
  check_type(weight, "weight");
  check_matrix(weight, gated);
  return weight.scalar_type() == at::kBFloat16 ? packed_weight<bf16, bf16>(weight, gated)
                                               : packed_weight<float, float>(weight, gated);
}

std::tuple<at::Tensor, at::Tensor> pack_int8(const at::Tensor& weight, const at::Tensor& scales, at::ScalarType rows,
                                             bool gated) {
  TORCH_CHECK(weight.is_cpu() && weight.scalar_type() == at::kChar, "weight is of ", weight.scalar_type(), " on ",
              weight.device(), "; it must be int8 on the CPU");
  TORCH_CHECK(rows == at::kFloat || rows == at::kBFloat16, "rows are of ", rows, "; float32 and bfloat16 are supported");
  check_matrix(weight, gated);
  const int64_t columns = weight.size(0), depth = weight.size(1);
  TORCH_CHECK(scales.is_cpu() && scales.is_contiguous() && scales.scalar_type() == at::kFloat && scales.dim() == 2 &&
                  scales.size(0) == columns && scales.size(1) == num_scales(depth),
              "scales are of ", scales.scalar_type(), " and shape ", scales.sizes(), "; this weight needs float32 of ",
              columns, " by ", num_scales(depth));
  return {rows == at::kBFloat16 ? packed_weight<bf16, int8_t>(weight, gated) : packed_weight<float, int8_t>(weight, gated),
          packed_weight<float, float>(scales, gated)};
}

at::Tensor pack_bias_tensor(const at::Tensor& bias, bool gated) {
  check_type(bias, "bias");
  TORCH_CHECK(bias.dim() == 1 && bias.is_contiguous(), "bias has shape ", bias.sizes(), "; it must be a vector");
  TORCH_CHECK(!gated || bias.size(0) % 2 == 0, "a gated bias has gates and as many ups, not ", bias.size(0), " in all");
  at::Tensor packed = at::empty({num_panels(bias.size(0), gated), kPanel}, bias.options());
  with_type(bias, [&](auto type) {
    using T = decltype(type);
    pack_bias(data<const T>(bias), bias.size(0), gated, data<T>(packed));
  });
  return packed;
}

template <Epilogue kEpilogue, class T, class Y>
void run(const at::Tensor& x, const Linear<T>& map, const at::Tensor& y) {
  const PaddedRows<T> rows(x, map.depth);
#pragma omp parallel num_threads(threads_for(x.size(0) * map.depth * map.columns))
  gemm<kEpilogue>(rows.data(), x.size(0), rows.stride(), map, data<Y>(y), y.stride(0), Team::here());
}

// Whether the operating system lets this process use what the library is made of. To be asked before anything else.
bool may_run() {
#if defined(OFFRAMP_AMX)
  return may_use_tiles();
#else
  return true;
#endif
}

at::Tensor linear(const at::Tensor& x, const at::Tensor& packed, const OptionalTensor& bias, int64_t out_features,
                  bool keep_fp32, const OptionalTensor& scales) {
  check_rows(x, "x");
  at::Tensor y = at::empty({x.size(0), out_features}, keep_fp32 ? x.options().dtype(at::kFloat) : x.options());
  with_type(x, [&](auto type) {
    using T = decltype(type);
    const Linear<T> map = linear_of<T>(packed, bias, scales, out_features, false);
    if (keep_fp32)
      run<Epilogue::Store, T, float>(x, map, y);
    else
      run<Epilogue::Store, T, T>(x, map, y);
  });
  return y;
}

at::Tensor gated_linear(const at::Tensor& x, const at::Tensor& packed, const OptionalTensor& bias, int64_t out_features,
                        const OptionalTensor& scales) {
  check_rows(x, "x");
  at::Tensor y = at::empty({x.size(0), out_features}, x.options());
  with_type(x, [&](auto type) {
    using T = decltype(type);
    run<Epilogue::GatedSilu, T, T>(x, linear_of<T>(packed, bias, scales, out_features, true), y);
  });
  return y;
}

at::Tensor rms_norm_rows(const at::Tensor& x, const std::optional<at::Tensor>& weight, double eps) {
  check_rows(x, "x");
  const int64_t rows = x.size(0), size = x.size(1);
  if (weight) {
    check_same_type(*weight, "weight", x, "x");
    TORCH_CHECK(weight->dim() == 1 && weight->is_contiguous() && weight->size(0) == size, "weight has shape ",
                weight->sizes(), "; rows of x have ", size, " features");
  }
  at::Tensor y = at::empty({rows, size}, x.options());
  with_type(x, [&](auto type) {
    using T = decltype(type);
    const T* const factors = weight ? data<const T>(*weight) : nullptr;
#pragma omp parallel for num_threads(threads_for(rows * size))
    for (int64_t r = 0; r < rows; ++r)
      rms_norm(data<const T>(x) + r * x.stride(0), factors, data<T>(y) + r * size, size, float(eps));
  });
  return y;
}

}  // namespace
}  // namespace OFFRAMP_ISA
}  // namespace offramp

TORCH_LIBRARY_FRAGMENT(OFFRAMP_OPS, m) {
  m.def("may_run() -> bool", &offramp::may_run);
  // weight [O, I]; gated: O = 2F, F gates then F ups.
  m.def("pack_linear(Tensor weight, bool gated=False) -> Tensor");
  m.def("pack_bias(Tensor bias, bool gated=False) -> Tensor");
  // A weight of int8 for rows of the type `rows`, and its scales [O, I / 64 rounded up] fp32.
  m.def("pack_int8(Tensor weight, Tensor scales, ScalarType rows, bool gated=False) -> (Tensor packed, Tensor scales)");
  // x W^T + b, [N, I] -> [N, O]; keep_fp32 leaves the sums of bf16 products as they are. Scales go with a weight of int8.
  m.def(
      "linear(Tensor x, Tensor packed, Tensor? bias, int out_features, bool keep_fp32=False, Tensor? scales=None) -> "
      "Tensor");
  // silu(gate) * up, [N, I] -> [N, F]
  m.def("gated_linear(Tensor x, Tensor packed, Tensor? bias, int out_features, Tensor? scales=None) -> Tensor");
  m.def("rms_norm(Tensor x, Tensor? weight, float eps) -> Tensor");
}

TORCH_LIBRARY_IMPL(OFFRAMP_OPS, CPU, m) {
  m.impl("pack_linear", &offramp::pack_linear);
  m.impl("pack_bias", &offramp::pack_bias_tensor);
  m.impl("pack_int8", &offramp::pack_int8);
  m.impl("linear", &offramp::linear);
  m.impl("gated_linear", &offramp::gated_linear);
  m.impl("rms_norm", &offramp::rms_norm_rows);
}
