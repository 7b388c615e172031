// Memory that begins at a cache line: a vector or a row of a matrix tile that straddles two lines is read twice.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "vec.h"

namespace offramp {
inline namespace OFFRAMP_ISA {

// Grows and never shrinks; what it holds is undefined after it has grown.
template <class T>
class LineBuffer {
 public:
  void hold(int64_t count) {
    const size_t lines = (size_t(count) * sizeof(T) + sizeof(Line) - 1) / sizeof(Line);
    if (lines_.size() < lines) lines_ = std::vector<Line>(lines);
  }

  T* data() { return reinterpret_cast<T*>(lines_.data()); }
  const T* data() const { return reinterpret_cast<const T*>(lines_.data()); }

 private:
  struct alignas(64) Line {
    unsigned char bytes[64];
  };
  std::vector<Line> lines_;
};

}  // namespace OFFRAMP_ISA
}  // namespace offramp
