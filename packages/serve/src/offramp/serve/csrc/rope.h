// Query and key heads made ready for attention: optional per-head norm (Qwen3), rotary rotation, keys and values into
// the paged cache.
//
// Legend: E head dim, H query heads, K key/value heads.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "vec.h"

namespace offramp {
inline namespace OFFRAMP_ISA {

// Call with(offset, n) for pieces of 0 .. size, each of kLanes elements and the last one perhaps shorter.
template <class With>
static inline void pieces(int size, With with) {
  int i = 0;
  for (; i + kLanes <= size; i += kLanes) with(i, kLanes);
  if (i < size) with(i, size - i);
}

template <class T>
static inline F32 load_upto(const T* p, int n) {
  return n == kLanes ? load(p) : load_part(p, n);
}

template <class T>
static inline void store_upto(T* p, F32 v, int n) {
  n == kLanes ? store(p, v) : store_part(p, v, n);
}

// One head [E] through its norm, if it has one, and the rotation; `out` may be `head` itself. Channels pair up as
// (i, i + E/2). Everything between load and store is fp32: fewer roundings than torch makes in bf16.
//   norm: [E] weight, or null;   cos, sin: [E/2] of the head's position
template <class T>
static inline void rotate_head(const T* head, T* out, int head_dim, const T* norm, float eps, const float* cos,
                               const float* sin) {
  F32 scale = splat(1.f);
  if (norm) {
    F32 squares = zero();
    pieces(head_dim, [&](int i, int n) {
      const F32 v = load_upto(head + i, n);
      squares = fma(v, v, squares);
    });
    scale = splat(1.f / std::sqrt(reduce_add(squares) / float(head_dim) + eps));
  }
  const int half = head_dim / 2;
  pieces(half, [&](int i, int n) {
    F32 a = load_upto(head + i, n), b = load_upto(head + half + i, n);
    if (norm) {
      a = a * scale * load_upto(norm + i, n);
      b = b * scale * load_upto(norm + half + i, n);
    }
    const F32 c = load_upto(cos + i, n), s = load_upto(sin + i, n);
    store_upto(out + i, fma(a, c, -(b * s)), n);
    store_upto(out + half + i, fma(b, c, a * s), n);
  });
}

// What turns projections into rotated queries and cached keys and values; the same for all layers of a call.
struct Rotary {
  const float* cos;  // [max_model_len, E/2]
  const float* sin;
  int head_dim;
  float eps;

  template <class T>
  void rotate(const T* head, T* out, const T* norm, int64_t position) const {
    const int64_t offset = position * (head_dim / 2);
    rotate_head(head, out, head_dim, norm, eps, cos + offset, sin + offset);
  }

  // Keys [K, E] rotated, and values [K, E] as they are, into a token's place in the cache [2, K, E].
  template <class T>
  void write(const T* keys, const T* values, T* token, const T* key_norm, int num_kv_heads, int64_t position) const {
    const int64_t size = int64_t(num_kv_heads) * head_dim;
    for (int64_t i = 0; i < size; i += head_dim) rotate(keys + i, token + i, key_norm, position);
    std::memcpy(token + size, values, size * sizeof(T));
  }
};

}  // namespace OFFRAMP_ISA
}  // namespace offramp
