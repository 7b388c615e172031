// What the kernels' torch operations share: how they are registered, what they check, how they reach a tensor's memory.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "vec.h"

// Operations are registered as torch.ops.offramp_<ISA level>, so that libraries of several levels can be loaded at once.
#define OFFRAMP_JOIN_(a, b) a##b
#define OFFRAMP_JOIN(a, b) OFFRAMP_JOIN_(a, b)
#define OFFRAMP_OPS OFFRAMP_JOIN(offramp_, OFFRAMP_ISA)

namespace offramp {
inline namespace OFFRAMP_ISA {

// Call f with a value of the element type: with_type(x, [&](auto type) { using T = decltype(type); ... }).
template <class Function>
void with_type(const at::Tensor& x, Function f) {
  if (x.scalar_type() == at::kBFloat16)
    f(bf16{});
  else
    f(float{});
}

static inline void check_type(const at::Tensor& x, const char* name) {
  TORCH_CHECK(x.device().is_cpu(), name, " is on ", x.device(), "; these kernels run on the CPU");
  TORCH_CHECK(x.scalar_type() == at::kFloat || x.scalar_type() == at::kBFloat16, name, " is of ", x.scalar_type(),
              "; float32 and bfloat16 are supported");
}

static inline void check_same_type(const at::Tensor& x, const char* name, const at::Tensor& other, const char* other_name) {
  TORCH_CHECK(x.scalar_type() == other.scalar_type(), name, " is of ", x.scalar_type(), " and ", other_name, " of ",
              other.scalar_type(), "; they must be of one type");
}

// A matrix whose rows are contiguous; the rows themselves may lie apart.
static inline void check_rows(const at::Tensor& x, const char* name) {
  check_type(x, name);
  TORCH_CHECK(x.dim() == 2, name, " has shape ", x.sizes(), "; it must have two axes");
  TORCH_CHECK(x.size(1) <= 1 || x.stride(1) == 1, name, " has strides ", x.strides(), "; its rows must be contiguous");
}

template <class T>
T* data(const at::Tensor& x) {
  return static_cast<T*>(x.data_ptr());
}

// Threads for so many multiplications: waking a team takes microseconds, in which one thread does about this much.
static inline int threads_for(int64_t multiplications) {
  constexpr int64_t kWorthwhile = 1 << 17;
  return multiplications < kWorthwhile ? 1 : at::get_num_threads();
}

}  // namespace OFFRAMP_ISA
}  // namespace offramp
