// Memory that begins at a cache line: a vector or a row of a matrix tile that straddles two lines is read twice.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "vec.h"

namespace offramp {
inline namespace OFFRAMP_ISA {

// Grows and never shrinks; what it holds is undefined at first and after it has grown.
template <class T>
class LineBuffer {
 public:
  LineBuffer() = default;
  explicit LineBuffer(int64_t count) { hold(count); }

  void hold(int64_t count) {
    const size_t lines = (size_t(count) * sizeof(T) + sizeof(Line) - 1) / sizeof(Line);
    if (num_lines_ >= lines) return;
    lines_.reset(new Line[lines]);
    num_lines_ = lines;
  }

  T* data() { return reinterpret_cast<T*>(lines_.get()); }
  const T* data() const { return reinterpret_cast<const T*>(lines_.get()); }

 private:
  struct alignas(64) Line {
    unsigned char bytes[64];
  };
  std::unique_ptr<Line[]> lines_;
  size_t num_lines_ = 0;
};

}  // namespace OFFRAMP_ISA
}  // namespace offramp
