// The vector vocabulary of one ISA level. A kernel source includes this once and is compiled once per level, with
// QUIRE_ISA naming the namespace and the compiler flags choosing the branch below.
//
//   kLanes            fp32 lanes of a vector
//   kRows             rows of the register tile (x kPanel columns, or kTileVectors vectors of them)
//   dot(acc,w,x)      acc[i] += w[2i] * x[0] + w[2i+1] * x[1], in the level's fixed order
//   max, min          of (a, b): b where either is NaN, so pass what may be NaN second
//   where_less        a < b ? x : y, lane by lane
//   times_power(p,n)  p * 2^n for an integral n in [-126, 127]
//   power(y)          2^n of y = n + 1.5 * 2^23, n in [-126, 127]: the sum that rounds an exponent by adding that number
//   reciprocal(d)     1 / d to 2^-23, d in [2^-126, 2^126]
//   fraction(x)       x - floor(x); for x below -127 any number in [0, 1]
//   times_floor_power(p,x)  p * 2^floor(x) for p in [1, 2] and x < 127; below 2^-126 it may be rough, for x <= -150 it is 0
//                     if p is 1
//   store(to,a,b)     two vectors beside each other, as bf16
//   widen(to, from)   kWidened int8 -> bf16, exactly
//   sum, largest      over the lanes, in a fixed order
//   transpose8        8 x 8 elements of 32 bits; target rows `stride` elements apart
#pragma once

#include <cstdint>
#include <cstring>

#include "cpu/bf16.h"

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(QUIRE_NEON)
#include <arm_neon.h>
#endif

// Unrolls loops over a tile's accumulators: if one stays a loop, the accumulators live in memory in every loop.
#define UNROLL _Pragma("GCC unroll 16")

namespace quire::cpu::QUIRE_ISA {

#if defined(__AVX512F__)

using Vec = __m512;
constexpr int kLanes = 16;
constexpr int kRows = 12;        // 12 x 2 accumulators, 2 weights (widened: 4), 1 broadcast (2): at most 30 of 32 registers
constexpr int kTileVectors = 2;  // the whole panel at once
inline Vec zero() { return _mm512_setzero_ps(); }
inline Vec load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, Vec v) { _mm512_storeu_ps(p, v); }
inline Vec broadcast(float f) { return _mm512_set1_ps(f); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
// gcc 12 reloads a weight for every row instead of holding it, and the load ports become the bound: this hides where it
// came from.
inline void keep(Vec& v) { __asm__("" : "+v"(v)); }
inline Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
inline Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
inline Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
inline Vec min(Vec a, Vec b) { return _mm512_min_ps(a, b); }
inline Vec where_less(Vec a, Vec b, Vec x, Vec y) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), y, x);
}
inline Vec times_power(Vec p, Vec n) {
  const __m512i bits = _mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23);
  return _mm512_mul_ps(p, _mm512_castsi512_ps(bits));
}
inline Vec power(Vec y) {
  return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_slli_epi32(_mm512_castps_si512(y), 23), _mm512_set1_epi32(127 << 23)));
}
// 14 bits and one Newton step: a division occupies the multiplier for 16 cycles.
inline Vec reciprocal(Vec d) {
  const Vec r = _mm512_rcp14_ps(d);
  return _mm512_fmadd_ps(r, _mm512_fnmadd_ps(d, r, _mm512_set1_ps(1.0f)), r);
}
inline Vec fraction(Vec x) { return _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); }
inline Vec times_floor_power(Vec p, Vec x) { return _mm512_scalef_ps(p, x); }
inline float sum(Vec v) { return _mm512_reduce_add_ps(v); }
inline float largest(Vec v) { return _mm512_reduce_max_ps(v); }
inline Vec load(const uint16_t* p) {
  const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(v), 16));
}
// Pairs of bytes as floats of 2^23 + 128 + x and 2^15 + 128 + x (x is the low or the high byte): a subtraction leaves
// x, whose upper half is its bf16.
constexpr int kWidened = 32;
inline void widen(uint16_t* to, const int8_t* from) {
  const __m512i v = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  const auto take = [v](int byte, int bits) {  // (v & byte) ^ bits
    return _mm512_castsi512_ps(_mm512_ternarylogic_epi32(v, _mm512_set1_epi32(byte), _mm512_set1_epi32(bits), 0x6a));
  };
  const __m512 low = _mm512_sub_ps(take(0xff, 0x4b000080), _mm512_set1_ps(8388736.0f));
  const __m512 high = _mm512_sub_ps(take(0xff00, 0x47008000), _mm512_set1_ps(32896.0f));
  _mm512_storeu_si512(to, _mm512_or_si512(_mm512_castps_si512(high),
                                          _mm512_srli_epi32(_mm512_castps_si512(low), 16)));
}
#if defined(__AVX512BF16__)
struct Weights {
  __m512bh v;
};
inline Weights load_pairs(const uint16_t* p) { return {(__m512bh)_mm512_loadu_si512(p)}; }
using Pair = __m512bh;
inline Pair broadcast_pair(const uint16_t* x) {
  int32_t two;
  std::memcpy(&two, x, 4);
  return (__m512bh)_mm512_set1_epi32(two);
}
inline Vec dot(Vec acc, const Weights& w, const Pair& x) { return _mm512_dpbf16_ps(acc, w.v, x); }
inline void keep(Weights& w) { __asm__("" : "+v"(w.v)); }
inline void store(uint16_t* p, Vec v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh(v));
}
inline void store(uint16_t* p, Vec a, Vec b) { _mm512_storeu_si512(p, (__m512i)_mm512_cvtne2ps_pbh(b, a)); }
#else
struct Weights {
  __m512 even, odd;  // bf16 is the upper half of a float: widening is a shift or a mask
};
using Pair = Weights;
inline Weights widened(__m512i v) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(v, 16)),
          _mm512_castsi512_ps(_mm512_and_si512(v, _mm512_set1_epi32(int(0xffff0000))))};
}
inline Weights load_pairs(const uint16_t* p) { return widened(_mm512_loadu_si512(p)); }
inline Pair broadcast_pair(const uint16_t* x) {
  int32_t two;
  std::memcpy(&two, x, 4);
  return widened(_mm512_set1_epi32(two));
}
// Not the intrinsic, with which gcc 12 copies accumulators and spills.
inline Vec dot(Vec acc, const Weights& w, const Pair& x) {
  __asm__("vfmadd231ps %2, %1, %0" : "+v"(acc) : "v"(w.even), "v"(x.even));
  __asm__("vfmadd231ps %2, %1, %0" : "+v"(acc) : "v"(w.odd), "v"(x.odd));
  return acc;
}
inline void keep(Weights& w) { __asm__("" : "+v"(w.even), "+v"(w.odd)); }
inline void store(uint16_t* p, Vec v) {
  const __m512i u = _mm512_castps_si512(v), half = _mm512_srli_epi32(u, 16);
  const __m512i odd = _mm512_and_si512(half, _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7fff)), odd), 16);
  const __m512i quiet = _mm512_or_si512(half, _mm512_set1_epi32(0x40));
  const __m512i h = _mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), quiet);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(h));
}
inline void store(uint16_t* p, Vec a, Vec b) {
  store(p, a);
  store(p + kLanes, b);
}
#endif

#elif defined(__AVX2__)

using Vec = __m256;
constexpr int kLanes = 8;
constexpr int kRows = 6;         // 6 x 2 accumulators, 2 weights, 1 broadcast, 1 mask: all of 16 registers
constexpr int kTileVectors = 2;  // half a panel at a time
struct Weights {
  __m256 even, odd;  // bf16 is the upper half of a float: widening is a shift or a mask
};
inline Vec zero() { return _mm256_setzero_ps(); }
inline Vec load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, Vec v) { _mm256_storeu_ps(p, v); }
inline Vec broadcast(float f) { return _mm256_set1_ps(f); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
inline Weights load_pairs(const uint16_t* p) {
  const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(v, 16)),
          _mm256_castsi256_ps(_mm256_and_si256(v, _mm256_set1_epi32(int(0xffff0000))))};
}
using Pair = Weights;
inline Pair broadcast_pair(const uint16_t* x) {
  int32_t two;
  std::memcpy(&two, x, 4);
  const __m256i v = _mm256_set1_epi32(two);
  return {_mm256_castsi256_ps(_mm256_slli_epi32(v, 16)),
          _mm256_castsi256_ps(_mm256_and_si256(v, _mm256_set1_epi32(int(0xffff0000))))};
}
inline Vec dot(Vec acc, const Weights& w, const Pair& x) {
  return _mm256_fmadd_ps(w.odd, x.odd, _mm256_fmadd_ps(w.even, x.even, acc));
}
inline void keep(Weights& w) { __asm__("" : "+x"(w.even), "+x"(w.odd)); }
inline void keep(Vec& v) { __asm__("" : "+x"(v)); }
inline Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
inline Vec div(Vec a, Vec b) { return _mm256_div_ps(a, b); }
inline Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }
inline Vec min(Vec a, Vec b) { return _mm256_min_ps(a, b); }
inline Vec where_less(Vec a, Vec b, Vec x, Vec y) {
  return _mm256_blendv_ps(y, x, _mm256_cmp_ps(a, b, _CMP_LT_OQ));
}
inline Vec times_power(Vec p, Vec n) {
  const __m256i bits = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  return _mm256_mul_ps(p, _mm256_castsi256_ps(bits));
}
inline Vec power(Vec y) {
  return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_slli_epi32(_mm256_castps_si256(y), 23), _mm256_set1_epi32(127 << 23)));
}
inline Vec reciprocal(Vec d) { return _mm256_div_ps(_mm256_set1_ps(1.0f), d); }
inline Vec power_floor(Vec x) { return _mm256_floor_ps(_mm256_max_ps(_mm256_set1_ps(-127.0f), x)); }
inline Vec fraction(Vec x) { return _mm256_sub_ps(_mm256_max_ps(_mm256_set1_ps(-127.0f), x), power_floor(x)); }
inline Vec times_floor_power(Vec p, Vec x) {
  const __m256i power = _mm256_slli_epi32(_mm256_cvttps_epi32(power_floor(x)), 23);
  return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p), power));
}
inline float sum(Vec v) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
inline float largest(Vec v) {
  __m128 s = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  s = _mm_max_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}
inline Vec load(const uint16_t* p) {
  const __m128i v = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(v), 16));
}
constexpr int kWidened = 16;  // as above
inline void widen(uint16_t* to, const int8_t* from) {
  const __m256i v = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  const auto take = [v](int byte, int bits) {
    return _mm256_castsi256_ps(_mm256_xor_si256(_mm256_and_si256(v, _mm256_set1_epi32(byte)), _mm256_set1_epi32(bits)));
  };
  const __m256 low = _mm256_sub_ps(take(0xff, 0x4b000080), _mm256_set1_ps(8388736.0f));
  const __m256 high = _mm256_sub_ps(take(0xff00, 0x47008000), _mm256_set1_ps(32896.0f));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to),
                      _mm256_or_si256(_mm256_castps_si256(high), _mm256_srli_epi32(_mm256_castps_si256(low), 16)));
}
inline void store(uint16_t* p, Vec v) {
  const __m256i u = _mm256_castps_si256(v);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  __m256i h = _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(u, _mm256_set1_epi32(0x7fff)), odd), 16);
  const __m256i quiet = _mm256_or_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(0x40));
  h = _mm256_blendv_epi8(h, quiet, _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q)));
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(h, h), 0x08);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
}
inline void store(uint16_t* p, Vec a, Vec b) {
  store(p, a);
  store(p + kLanes, b);
}

#elif defined(QUIRE_NEON)

#include "cpu/isa_neon.h"

#else

// Plain C++ with vectors of four, so that the compiler may use what the base architecture has.
struct Vec {
  float f[4];
};
constexpr int kLanes = 4;
constexpr int kRows = 2;
constexpr int kTileVectors = 4;
struct Weights {
  Vec even, odd;
};
inline Vec zero() { return {{0, 0, 0, 0}}; }
inline Vec load(const float* p) { return {{p[0], p[1], p[2], p[3]}}; }
inline void store(float* p, Vec v) { std::memcpy(p, v.f, sizeof(v.f)); }
inline Vec broadcast(float f) { return {{f, f, f, f}}; }
inline Vec fma(Vec a, Vec b, Vec c) {
  for (int i = 0; i < 4; ++i) c.f[i] += a.f[i] * b.f[i];
  return c;
}
inline Weights load_pairs(const uint16_t* p) {
  Weights w;
  for (int i = 0; i < 4; ++i) {
    w.even.f[i] = bf16_to_float(p[2 * i]);
    w.odd.f[i] = bf16_to_float(p[2 * i + 1]);
  }
  return w;
}
using Pair = Weights;
inline Pair broadcast_pair(const uint16_t* x) {
  return {broadcast(bf16_to_float(x[0])), broadcast(bf16_to_float(x[1]))};
}
inline Vec dot(Vec acc, const Weights& w, const Pair& x) { return fma(w.odd, x.odd, fma(w.even, x.even, acc)); }
inline void keep(const Weights&) {}
inline void keep(const Vec&) {}
template <typename F>
inline Vec each(const F& f) {
  return {{f(0), f(1), f(2), f(3)}};
}
inline Vec add(Vec a, Vec b) { return each([&](int i) { return a.f[i] + b.f[i]; }); }
inline Vec sub(Vec a, Vec b) { return each([&](int i) { return a.f[i] - b.f[i]; }); }
inline Vec mul(Vec a, Vec b) { return each([&](int i) { return a.f[i] * b.f[i]; }); }
inline Vec div(Vec a, Vec b) { return each([&](int i) { return a.f[i] / b.f[i]; }); }
inline Vec max(Vec a, Vec b) { return each([&](int i) { return a.f[i] > b.f[i] ? a.f[i] : b.f[i]; }); }
inline Vec min(Vec a, Vec b) { return each([&](int i) { return a.f[i] < b.f[i] ? a.f[i] : b.f[i]; }); }
inline Vec where_less(Vec a, Vec b, Vec x, Vec y) {
  return each([&](int i) { return a.f[i] < b.f[i] ? x.f[i] : y.f[i]; });
}
inline Vec times_power(Vec p, Vec n) {
  return each([&](int i) {
    // A NaN has no integer; any power will do, since p is NaN then.
    const uint32_t bits = uint32_t((n.f[i] == n.f[i] ? int32_t(n.f[i]) : 0) + 127) << 23;
    float power;
    std::memcpy(&power, &bits, 4);
    return p.f[i] * power;
  });
}
inline Vec power(Vec y) {
  return each([&](int i) {
    uint32_t bits;
    std::memcpy(&bits, &y.f[i], 4);
    bits = (bits << 23) + (127u << 23);
    float two;
    std::memcpy(&two, &bits, 4);
    return two;
  });
}
inline Vec reciprocal(Vec d) { return div(broadcast(1.0f), d); }
inline int32_t power_floor(float x) {  // any value for a NaN
  const float y = x > -127.0f ? x : -127.0f;
  const int32_t n = static_cast<int32_t>(y);
  return n - (static_cast<float>(n) > y);
}
inline Vec fraction(Vec x) {
  return each([&](int i) { return (x.f[i] < -127.0f ? -127.0f : x.f[i]) - static_cast<float>(power_floor(x.f[i])); });
}
inline Vec times_floor_power(Vec p, Vec x) {
  return each([&](int i) {
    uint32_t bits;
    std::memcpy(&bits, &p.f[i], 4);
    bits += static_cast<uint32_t>(power_floor(x.f[i])) << 23;
    float product;
    std::memcpy(&product, &bits, 4);
    return p.f[i] == p.f[i] ? product : p.f[i];
  });
}
inline float sum(Vec v) { return (v.f[0] + v.f[2]) + (v.f[1] + v.f[3]); }
inline float largest(Vec v) {
  float m = v.f[0];
  for (int i = 1; i < 4; ++i) m = m > v.f[i] ? m : v.f[i];
  return m;
}
inline Vec load(const uint16_t* p) { return each([&](int i) { return bf16_to_float(p[i]); }); }
constexpr int kWidened = 4;
inline void widen(uint16_t* to, const int8_t* from) {
  for (int i = 0; i < kWidened; ++i) to[i] = float_to_bf16(from[i]);
}
inline void store(uint16_t* p, Vec v) {
  for (int i = 0; i < 4; ++i) p[i] = float_to_bf16(v.f[i]);
}
inline void store(uint16_t* p, Vec a, Vec b) {
  store(p, a);
  store(p + kLanes, b);
}

#endif

// rows[i] points to 8 elements; element j of row i goes to target[j * stride + i].
#if defined(__AVX2__)
inline void transpose8(const uint32_t* const* rows, uint32_t* target, int64_t stride) {
  __m256 r[8], t[8];
  for (int i = 0; i < 8; ++i) r[i] = _mm256_loadu_ps(reinterpret_cast<const float*>(rows[i]));
  for (int i = 0; i < 4; ++i) {
    t[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
  }
  for (int i = 0; i < 2; ++i) {
    r[4 * i + 0] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0x44);
    r[4 * i + 1] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0xee);
    r[4 * i + 2] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0x44);
    r[4 * i + 3] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0xee);
  }
  for (int i = 0; i < 4; ++i) {
    _mm256_storeu_ps(reinterpret_cast<float*>(target + i * stride), _mm256_permute2f128_ps(r[i], r[i + 4], 0x20));
    _mm256_storeu_ps(reinterpret_cast<float*>(target + (i + 4) * stride),
                     _mm256_permute2f128_ps(r[i], r[i + 4], 0x31));
  }
}
#else
inline void transpose8(const uint32_t* const* rows, uint32_t* target, int64_t stride) {
  for (int i = 0; i < 8; ++i) {
    for (int j = 0; j < 8; ++j) target[j * stride + i] = rows[i][j];
  }
}
#endif

}  // namespace quire::cpu::QUIRE_ISA
