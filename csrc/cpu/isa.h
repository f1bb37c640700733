// The vector vocabulary of one ISA level. A kernel source includes this once and is compiled once a level, with
// QUIRE_ISA naming the namespace and the compiler flags choosing the branch below.
//
//   kLanes            fp32 lanes of a vector
//   kRows             rows of the register tile (x kPanel columns, or kTileVectors vectors of them)
//   dot_bf16(acc,w,x) acc[i] += w[2i] * x[0] + w[2i+1] * x[1], in the level's fixed order
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512BF16__) || defined(__AVX2__)
#include <immintrin.h>
#endif

namespace quire::cpu::QUIRE_ISA {

inline float bf16_to_float(uint16_t h) {
  const uint32_t u = uint32_t(h) << 16;
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}

// Round to nearest even, NaN kept quiet: the bits of torch and of vcvtneps2bf16 (for normal numbers).
inline uint16_t float_to_bf16(float f) {
  uint32_t u;
  std::memcpy(&u, &f, 4);
  if ((u & 0x7fffffffu) > 0x7f800000u) return uint16_t((u >> 16) | 0x40);
  return uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

#if defined(__AVX512BF16__)

using Vec = __m512;
constexpr int kLanes = 16;
constexpr int kRows = 12;        // 12 x 2 accumulators, 2 weights, 1 broadcast: 27 of 32 registers
constexpr int kTileVectors = 2;  // the whole panel at once
struct Weights {
  __m512bh v;
};
inline Vec zero() { return _mm512_setzero_ps(); }
inline Vec load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, Vec v) { _mm512_storeu_ps(p, v); }
inline Vec broadcast(float f) { return _mm512_set1_ps(f); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
inline Weights load_pairs(const uint16_t* p) { return {(__m512bh)_mm512_loadu_si512(p)}; }
using Pair = __m512bh;
inline Pair broadcast_pair(const uint16_t* x) {
  int32_t two;
  std::memcpy(&two, x, 4);
  return (__m512bh)_mm512_set1_epi32(two);
}
inline Vec dot(Vec acc, const Weights& w, const Pair& x) { return _mm512_dpbf16_ps(acc, w.v, x); }
// gcc 12 reloads a weight for every row instead of holding it, and the load ports become the bound: hide its origin.
inline void keep(Weights& w) { __asm__("" : "+v"(w.v)); }
inline void keep(Vec& v) { __asm__("" : "+v"(v)); }

#elif defined(__AVX2__)

using Vec = __m256;
constexpr int kLanes = 8;
constexpr int kRows = 4;         // 4 x 2 accumulators, 4 widened weights, 2 broadcasts: 14 of 16 registers
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
struct Pair {
  __m256 even, odd;
};
inline Pair broadcast_pair(const uint16_t* x) {
  return {_mm256_set1_ps(bf16_to_float(x[0])), _mm256_set1_ps(bf16_to_float(x[1]))};
}
inline Vec dot(Vec acc, const Weights& w, const Pair& x) {
  return _mm256_fmadd_ps(w.odd, x.odd, _mm256_fmadd_ps(w.even, x.even, acc));
}
inline void keep(Weights& w) { __asm__("" : "+x"(w.even), "+x"(w.odd)); }
inline void keep(Vec& v) { __asm__("" : "+x"(v)); }

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
struct Pair {
  Vec even, odd;
};
inline Pair broadcast_pair(const uint16_t* x) {
  return {broadcast(bf16_to_float(x[0])), broadcast(bf16_to_float(x[1]))};
}
inline Vec dot(Vec acc, const Weights& w, const Pair& x) { return fma(w.odd, x.odd, fma(w.even, x.even, acc)); }
inline void keep(const Weights&) {}
inline void keep(const Vec&) {}

#endif

}  // namespace quire::cpu::QUIRE_ISA
