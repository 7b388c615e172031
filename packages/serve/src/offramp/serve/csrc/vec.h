// A small SIMD layer: fp32 vectors, bf16 storage, and the few operations that Offramp's kernels are made of.
//
// The kernels are written once against this file and compiled once for each ISA level:
//   avx512_bf16   AVX-512 F/BW/VL/DQ and its bf16 dot products   (`amx` adds matrix tiles, see gemm.h)
//   avx512        AVX-512 F/BW/VL/DQ
//   avx2          AVX2 and FMA
//   portable      whatever vector unit the compiler's default target has
//
// Vectors are GCC's (clang has them too): + - * / and comparisons work on them at every level, and only what has no such
// notation is written in intrinsics. Everything is compiled with -ffp-contract=off: a product is fused with a sum exactly
// where `fma` says so. So a result is a function of the operands and the ISA level alone, which is what makes a row
// independent of the rows beside it.
#pragma once

#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <type_traits>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#ifndef OFFRAMP_ISA
#error "OFFRAMP_ISA must name the ISA level that is compiled, such as avx2; see model/native.py"
#endif

// The namespace carries the level, so that libraries of several levels can live in one process (the tests do that).
namespace offramp {
inline namespace OFFRAMP_ISA {

// ---- types ----------------------------------------------------------------------------------------------------------

struct bf16 {
  uint16_t bits;
};

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define OFFRAMP_AVX512 1
constexpr int kLanes = 16;
#elif defined(__AVX2__) && defined(__FMA__)
#define OFFRAMP_AVX2 1
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

// Whether `dot2` is one instruction. Where it is not, kernels do better to widen bf16 once and work in fp32.
#if defined(OFFRAMP_AVX512) && defined(__AVX512BF16__)
#define OFFRAMP_BF16_DOT 1
constexpr bool kHasDot = true;
#else
constexpr bool kHasDot = false;
#endif

typedef float F32 __attribute__((vector_size(4 * kLanes)));     // kLanes floats
typedef int32_t I32 __attribute__((vector_size(4 * kLanes)));   // comparisons of F32 give this: -1 true, 0 false
typedef uint32_t U32 __attribute__((vector_size(4 * kLanes)));  // also kLanes pairs of bf16, the first in the low half

// ---- fp32 -----------------------------------------------------------------------------------------------------------

static inline F32 splat(float x) { return x - F32{}; }
static inline F32 zero() { return F32{}; }

static inline F32 load(const float* p) {
  F32 v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

static inline void store(float* p, F32 v) { std::memcpy(p, &v, sizeof v); }

// a * b + c, rounded once where the hardware can; the portable level of x86-64 rounds twice rather than call a library.
static inline F32 fma(F32 a, F32 b, F32 c) {
#if defined(OFFRAMP_AVX512)
  return (F32)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(OFFRAMP_AVX2)
  return (F32)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__FP_FAST_FMAF)
  F32 r;
  for (int i = 0; i < kLanes; ++i) r[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return r;
#else
  return a * b + c;
#endif
}

// mask ? a : b, lane by lane.
static inline F32 select(I32 mask, F32 a, F32 b) { return (F32)(((I32)a & mask) | ((I32)b & ~mask)); }

// If either operand is NaN, both of these give the second one: put what may be NaN there for it to come through.
static inline F32 max(F32 a, F32 b) {
#if defined(OFFRAMP_AVX512)
  return (F32)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(OFFRAMP_AVX2)
  return (F32)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return select(a > b, a, b);
#endif
}

static inline F32 min(F32 a, F32 b) {
#if defined(OFFRAMP_AVX512)
  return (F32)_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(OFFRAMP_AVX2)
  return (F32)_mm256_min_ps((__m256)a, (__m256)b);
#else
  return select(a < b, a, b);
#endif
}

// ---- bf16 -----------------------------------------------------------------------------------------------------------

static inline float to_float(float x) { return x; }

static inline float to_float(bf16 x) {
  uint32_t bits = uint32_t(x.bits) << 16;
  float y;
  std::memcpy(&y, &bits, sizeof y);
  return y;
}

// Widen kLanes bf16.
static inline F32 load(const bf16* p) {
#if defined(OFFRAMP_AVX512)
  return (F32)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
#elif defined(OFFRAMP_AVX2)
  return (F32)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16);
#else
  F32 v;
  for (int i = 0; i < kLanes; ++i) v[i] = to_float(p[i]);
  return v;
#endif
}

#if !defined(OFFRAMP_BF16_DOT)
// fp32 whose upper halves are the bf16 nearest to v, ties to even; the lower halves are rubbish.
static inline U32 rounded_bits(F32 v) {
  U32 bits = (U32)v;
  bits += 0x7fffu + ((bits >> 16) & 1u);
  const U32 nan = (U32)(I32)(v != v);  // adding could carry a NaN into an infinity
  return (nan & 0x7fc00000u) | (~nan & bits);
}
#endif

// Round to the nearest bf16 (ties to even) and store kLanes of them.
static inline void store(bf16* p, F32 v) {
#if defined(OFFRAMP_BF16_DOT)
  __m256bh h = _mm512_cvtneps_pbh((__m512)v);
  std::memcpy(p, &h, sizeof h);
#elif defined(OFFRAMP_AVX512)
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16((__m512i)(rounded_bits(v) >> 16)));
#else
  const U32 bits = rounded_bits(v);
  for (int i = 0; i < kLanes; ++i) p[i].bits = uint16_t(bits[i] >> 16);
#endif
}

// v after a round trip through storage type T: where torch would have stored an intermediate result.
template <class T>
static inline F32 round_to(F32 v) {
  if constexpr (std::is_same_v<T, float>) {
    return v;
  } else {
#if defined(OFFRAMP_BF16_DOT)
    __m256bh h = _mm512_cvtneps_pbh((__m512)v);
    __m256i bits;
    std::memcpy(&bits, &h, sizeof bits);
    return (F32)_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16);
#else
    return (F32)(rounded_bits(v) & 0xffff0000u);
#endif
  }
}

// The first n < kLanes elements; the other lanes are zero, and memory beyond p[n - 1] is not touched.
template <class T>
static inline F32 load_part(const T* p, int n) {
  T buffer[kLanes] = {};
  for (int i = 0; i < n; ++i) buffer[i] = p[i];
  return load(buffer);
}

template <class T>
static inline void store_part(T* p, F32 v, int n) {
  T buffer[kLanes];
  store(buffer, v);
  for (int i = 0; i < n; ++i) p[i] = buffer[i];
}

// kLanes pairs of neighbouring bf16.
static inline U32 load_pairs(const bf16* p) {
  U32 v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

// One pair in all lanes.
static inline U32 splat_pair(const bf16* p) {
  uint32_t bits;
  std::memcpy(&bits, p, sizeof bits);
  return bits - U32{};
}

static inline F32 first_of(U32 pairs) { return (F32)(pairs << 16); }
static inline F32 second_of(U32 pairs) { return (F32)(pairs & 0xffff0000u); }

// sum + the two products of each pair. The instruction adds the second product first; so do the other levels.
static inline F32 dot2(U32 a, U32 b, F32 sum) {
#if defined(OFFRAMP_BF16_DOT)
  return (F32)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#else
  return fma(first_of(a), first_of(b), fma(second_of(a), second_of(b), sum));
#endif
}

// ---- int8 -----------------------------------------------------------------------------------------------------------

// Widen kLanes int8 to floats.
static inline F32 load(const int8_t* p) {
#if defined(OFFRAMP_AVX512)
  return (F32)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#elif defined(OFFRAMP_AVX2)
  return (F32)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#else
  F32 v;
  for (int i = 0; i < kLanes; ++i) v[i] = float(p[i]);
  return v;
#endif
}

// ---- reductions and functions ---------------------------------------------------------------------------------------

// Halves are folded onto each other until one lane is left: the order is the same whatever the compiler does.
template <class Fold>
static inline float fold(F32 v, Fold op) {
  float x[kLanes];
  store(x, v);
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) x[i] = op(x[i], x[i + half]);
  return x[0];
}

#if defined(OFFRAMP_AVX512) || defined(OFFRAMP_AVX2)
// The same folding, in registers: the upper 256 bits onto the lower, then 128, 64, 32.
template <class Fold>
static inline float fold_registers(F32 v, Fold op) {
#if defined(OFFRAMP_AVX512)
  const __m256 y = op(_mm512_castps512_ps256((__m512)v), _mm512_extractf32x8_ps((__m512)v, 1));
#else
  const __m256 y = (__m256)v;
#endif
  const auto op4 = [&](__m128 a, __m128 b) { return _mm256_castps256_ps128(op(_mm256_castps128_ps256(a), _mm256_castps128_ps256(b))); };
  __m128 x = op4(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1));
  x = op4(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(op4(x, _mm_movehdup_ps(x)));
}
#endif

static inline float reduce_add(F32 v) {
#if defined(OFFRAMP_AVX512) || defined(OFFRAMP_AVX2)
  return fold_registers(v, [](__m256 a, __m256 b) { return _mm256_add_ps(a, b); });
#else
  return fold(v, [](float a, float b) { return a + b; });
#endif
}

// Not for NaN.
static inline float reduce_max(F32 v) {
#if defined(OFFRAMP_AVX512) || defined(OFFRAMP_AVX2)
  return fold_registers(v, [](__m256 a, __m256 b) { return _mm256_max_ps(a, b); });
#else
  return fold(v, [](float a, float b) { return a > b ? a : b; });
#endif
}

// Lane i of the result is the sum of the lanes of rows[i]: kLanes dot products finished together.
static inline F32 reduce_rows(const F32 (&rows)[kLanes]) {
#if defined(OFFRAMP_AVX512)
  __m512 pairs[8], quads[4], halves[2];
  for (int i = 0; i < 8; ++i) {
    const __m512 x = (__m512)rows[2 * i], y = (__m512)rows[2 * i + 1];
    pairs[i] = _mm512_add_ps(_mm512_unpacklo_ps(x, y), _mm512_unpackhi_ps(x, y));
  }
  for (int i = 0; i < 4; ++i) {
    const __m512d x = _mm512_castps_pd(pairs[2 * i]), y = _mm512_castps_pd(pairs[2 * i + 1]);
    quads[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)), _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
  }
  for (int i = 0; i < 2; ++i) {
    const __m512 x = quads[2 * i], y = quads[2 * i + 1];
    halves[i] = _mm512_add_ps(_mm512_shuffle_f32x4(x, y, 0x88), _mm512_shuffle_f32x4(x, y, 0xdd));
  }
  return (F32)_mm512_add_ps(_mm512_shuffle_f32x4(halves[0], halves[1], 0x88),
                            _mm512_shuffle_f32x4(halves[0], halves[1], 0xdd));
#else
  F32 sums;
  for (int i = 0; i < kLanes; ++i) sums[i] = reduce_add(rows[i]);
  return sums;
#endif
}

// e^x to about 2 units in the last place; exactly 0 below -87.3, for there results would be subnormal, which CPUs take a
// hundred cycles for. Infinity and NaN come through.
static inline F32 exp(F32 x) {
  const I32 vanishes = (I32)(x < splat(-87.3f));
  x = max(splat(-87.3f), min(splat(90.f), x));  // above 90 the result is infinity all the same
  // e^x = 2^n e^r with |r| <= ln(2) / 2. Adding 1.5 * 2^23 pushes the fraction out: what is left is n, as an integer too.
  const F32 magic = splat(12582912.f);
  const F32 shifted = fma(x, splat(1.44269504f), magic);
  const F32 n = shifted - magic;
  const I32 exponent = (I32)shifted - (I32)magic;
  F32 r = fma(n, splat(-0.693145752f), x);  // ln(2) in two parts, the first with few bits, so that n * ln(2) is exact
  r = fma(n, splat(-1.42860677e-6f), r);
  F32 p = splat(1.f / 5040);
  for (const float c : {1.f / 720, 1.f / 120, 1.f / 24, 1.f / 6, .5f, 1.f, 1.f}) p = fma(p, r, splat(c));
  const I32 half = exponent >> 1;  // 2^n in two factors: n alone may lie outside of what an exponent can say
  const F32 y = p * (F32)((half + 127) << 23) * (F32)((exponent - half + 127) << 23);
  return (F32)((I32)y & ~vanishes);
}

// x / (1 + e^-x)
static inline F32 silu(F32 x) { return x / (splat(1.f) + exp(-x)); }

// The approximation by tanh: x (1 + tanh(u)) / 2 is x / (1 + e^-2u), with u = sqrt(2 / pi) (x + 0.044715 x^3).
static inline F32 gelu(F32 x) {
  const F32 twice = splat(1.59576912f) * fma(splat(0.044715f) * x * x, x, x);
  return x / (splat(1.f) + exp(-twice));
}

// NaN stays NaN.
static inline F32 relu(F32 x) { return select(x < zero(), zero(), x); }

}  // namespace OFFRAMP_ISA
}  // namespace offramp
