// The integer half of isa.h: dot products of bytes, one 32-bit lane per column, exact at every level.
//
//   Codes, Nibbles    kLanes columns of four unsigned bytes; Nibbles are at most 15, or below 64 of weights in units
//   Quad              four signed bytes of a row, for every lane
//   load_ints, store_ints   kLanes integers of 32 bits
//   kCodesZero        what `Codes` hold for an int8 weight of 0: 128, or 0 where loading them makes them signed
//   dot(acc, w, x)    acc[i] += w[4i] * x[0] + ... + w[4i+3] * x[3]
//   bits_as_float     the bits of integers as fp32
//   fused(a, b, c)    a * b + c with one rounding (isa.h's fma has two at the scalar level)
//   store_rounded     kLanes floats within +-127 as int8, ties to even; or four vectors of them in a row
//   add_quads(acc, p) acc[i] += p[4i] + ... + p[4i+3]
//   load_multipliers  the multipliers of a group of two levels, for a panel's columns (quantized.h), as words 0 ... 15
//   start_group(m, p)       the sum of a group before its products: p[1] in lanes of odd m, else p[0]
//   dot_group(d, w, x)      as dot, of at most 16 inputs; `d` may have two parts, which add_scaled joins
//   add_scaled(acc, d, m)   acc + d * m, d within 16 bits
//   add_odd(n, m)           n + 1 where m is odd (word_groups.h)
//   Scaler(m, zero)   store: nibbles n as bytes m * (n - 8 + m mod 2) + zero
//   load_half         kLanes fp16 numbers; half_to_float: one
//
// Tiles: kChannelRows x kVectors<R> accumulators over all of K; kGroupRows x kVectors<R> of integers and as many
// floats. For two levels up to kFewRows x kFewVectors<R>, twice, and at most kFewTiles of them: with more rows unpacking
// to int8 pays.
#pragma once

#include <cmath>

#include "cpu/isa.h"

namespace quire::cpu::QUIRE_ISA {

inline uint32_t float_bits(float f) {
  uint32_t u;
  std::memcpy(&u, &f, 4);
  return u;
}

inline float half_to_float(const uint8_t* p) {
  uint16_t h;
  std::memcpy(&h, p, 2);
  const int exponent = (h >> 10) & 31, mantissa = h & 1023;
  const float magnitude = exponent == 0    ? std::ldexp(float(mantissa), -24)
                          : exponent == 31 ? (mantissa != 0 ? NAN : INFINITY)
                                           : std::ldexp(float(mantissa + 1024), exponent - 25);
  return (h & 0x8000) != 0 ? -magnitude : magnitude;
}

#if !defined(QUIRE_NEON)
constexpr int kCodesZero = 128;
#endif

#if defined(__AVX2__)
// zero - m * (8 - m mod 2) for the multipliers m = 0 ... 15 of int4 in two levels.
inline __m128i offsets_of_multipliers(int zero) {
  const __m128i taken = _mm_setr_epi8(0, 7, 16, 21, 32, 35, 48, 49, 64, 63, 80, 77, 96, 91, 112, 105);
  return _mm_sub_epi8(_mm_set1_epi8(static_cast<char>(zero)), taken);
}

// Two integers as the bits of one number, which one instruction broadcasts.
inline double pair_of(const int32_t* p) {
  double pair;
  std::memcpy(&pair, p, 8);
  return pair;
}
#endif

#if defined(__AVX512F__)

using IVec = __m512i;
inline IVec broadcast(int32_t i) { return _mm512_set1_epi32(i); }
inline IVec load_ints(const int32_t* p) { return _mm512_loadu_si512(p); }
inline void store_ints(int32_t* p, IVec v) { _mm512_storeu_si512(p, v); }
template <int R>
constexpr int kVectors = 2;
template <int R>
constexpr int kFewVectors = 2;
struct Nibbles {
  __m512i v;
};
#if defined(__AVX512VNNI__)
constexpr int kChannelRows = 12, kGroupRows = 6, kFewRows = 6, kFewTiles = 2;
struct Codes {
  __m512i v;
};
struct Quad {
  __m512i v;
};
inline Codes load_codes(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
inline __m512i raw(const Codes& c) { return c.v; }
inline Quad quad_of(__m512i v) { return {v}; }
// Not the intrinsic, with which gcc 12 copies every accumulator and spills.
inline IVec dot_bytes(IVec acc, __m512i w, __m512i x) {
  __asm__("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(w), "v"(x));
  return acc;
}
inline IVec dot(IVec acc, const Codes& w, const Quad& x) { return dot_bytes(acc, w.v, x.v); }
inline IVec dot(IVec acc, const Nibbles& w, const Quad& x) { return dot_bytes(acc, w.v, x.v); }
inline IVec add_quads(IVec acc, const int8_t* p) {
  return dot_bytes(acc, _mm512_set1_epi8(1), _mm512_loadu_si512(p));
}
inline void load_multipliers(const uint8_t* p, IVec (&m)[2]) {
  const __m512i both = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  m[0] = _mm512_and_si512(both, _mm512_set1_epi32(15));
  m[1] = _mm512_srli_epi32(both, 4);
}
inline IVec start_group(IVec m, const int32_t* p) {
  const __m512d pairs = _mm512_set1_pd(pair_of(p));
  return _mm512_castps_si512(_mm512_permutevar_ps(_mm512_castpd_ps(pairs), m));  // the lowest two bits of a lane choose
}
inline IVec add_scaled(IVec acc, IVec d, IVec m) {
  __asm__("vpdpwssd %2, %1, %0" : "+v"(acc) : "v"(d), "v"(m));
  return acc;
}
#else
// As AVX2 without VNNI does it, below.
constexpr int kChannelRows = 12, kGroupRows = 4, kFewRows = 2, kFewTiles = 1;
#define QUIRE_WORD_GROUPS
struct Codes {
  __m512i even, odd;
};
struct Quad {
  __m512i v, even, odd;
};
inline Codes load_codes(const uint8_t* p) {
  const __m512i v = _mm512_loadu_si512(p);
  return {_mm512_and_si512(v, _mm512_set1_epi16(255)), _mm512_srli_epi16(v, 8)};
}
inline __m512i raw(const Codes& c) { return _mm512_or_si512(c.even, _mm512_slli_epi16(c.odd, 8)); }
inline Quad quad_of(__m512i v) {
  return {v, _mm512_srai_epi16(_mm512_slli_epi16(v, 8), 8), _mm512_srai_epi16(v, 8)};
}
inline IVec dot(IVec acc, const Codes& w, const Quad& x) {
  return _mm512_add_epi32(acc, _mm512_add_epi32(_mm512_madd_epi16(w.even, x.even), _mm512_madd_epi16(w.odd, x.odd)));
}
inline IVec dot(IVec acc, const Nibbles& w, const Quad& x) {
  return _mm512_add_epi32(acc, _mm512_madd_epi16(_mm512_maddubs_epi16(w.v, x.v), _mm512_set1_epi16(1)));
}
inline IVec add_quads(IVec acc, const int8_t* p) {
  const __m512i pairs = _mm512_maddubs_epi16(_mm512_set1_epi8(1), _mm512_loadu_si512(p));
  return _mm512_add_epi32(acc, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
}
inline void load_multipliers(const uint8_t* p, IVec (&m)[2]) {
  __m512i both = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  both = _mm512_or_si512(both, _mm512_slli_epi32(both, 16));
  m[0] = _mm512_and_si512(both, _mm512_set1_epi16(15));
  m[1] = _mm512_srli_epi16(both, 4);
}
inline IVec start_group(IVec m, const int32_t* p) {
  const __m512d pairs = _mm512_set1_pd(pair_of(p));
  const IVec start = _mm512_castps_si512(_mm512_permutevar_ps(_mm512_castpd_ps(pairs), m));
  return _mm512_and_si512(start, broadcast(0xffff));
}
inline IVec dot_group(IVec d, const Nibbles& w, const Quad& x) {
  return _mm512_add_epi16(d, _mm512_maddubs_epi16(w.v, x.v));
}
inline IVec add_scaled(IVec acc, IVec d, IVec m) { return _mm512_add_epi32(acc, _mm512_madd_epi16(d, m)); }
// Codes of odd multipliers count from 7, the others from 8.
inline Nibbles add_odd(const Nibbles& n, IVec m) {
  const __m512i odd = _mm512_and_si512(m, _mm512_set1_epi16(1));
  return {_mm512_add_epi8(n.v, _mm512_or_si512(odd, _mm512_slli_epi16(odd, 8)))};
}
#endif
inline Nibbles low_nibbles(const Codes& c) { return {_mm512_and_si512(raw(c), _mm512_set1_epi8(15))}; }
inline Nibbles high_nibbles(const Codes& c) {
  return {_mm512_and_si512(_mm512_srli_epi16(raw(c), 4), _mm512_set1_epi8(15))};
}
inline Quad broadcast_quad(const int8_t* x) {
  int32_t four;
  std::memcpy(&four, x, 4);
  return quad_of(_mm512_set1_epi32(four));
}
inline Vec to_float(IVec v) { return _mm512_cvtepi32_ps(v); }
inline Vec bits_as_float(IVec v) { return _mm512_castsi512_ps(v); }
inline Vec fused(Vec a, Vec b, Vec c) { return fma(a, b, c); }
inline void store_rounded(int8_t* p, Vec v) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(v)));
}
inline void store_rounded(int8_t* p, Vec a, Vec b, Vec c, Vec d) {
  const __m512i left = _mm512_packs_epi32(_mm512_cvtps_epi32(a), _mm512_cvtps_epi32(b));
  const __m512i right = _mm512_packs_epi32(_mm512_cvtps_epi32(c), _mm512_cvtps_epi32(d));
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);  // packs keep to 128 bits
  _mm512_storeu_si512(p, _mm512_permutexvar_epi32(order, _mm512_packs_epi16(left, right)));
}
inline int32_t sum(IVec v) { return _mm512_reduce_add_epi32(v); }
inline Vec load_half(const uint8_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
class Scaler {
 public:
  Scaler(IVec m, int zero) {
    const __m128i table = offsets_of_multipliers(zero);
    const __m128i lowest = _mm_set_epi64x(0x0c0c0c0c08080808, 0x0404040400000000);
    const __m512i four = _mm512_shuffle_epi8(m, _mm512_broadcast_i32x4(lowest));
    words_ = _mm512_and_si512(four, broadcast(0x00ff00ff));
    offset_ = _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), four);
  }
  void store(const Nibbles& n, uint8_t* p) const {
    _mm512_storeu_si512(p, _mm512_add_epi8(_mm512_mullo_epi16(n.v, words_), offset_));
  }

 private:
  __m512i words_, offset_;
};

#elif defined(__AVX2__)

using IVec = __m256i;
inline IVec broadcast(int32_t i) { return _mm256_set1_epi32(i); }
inline IVec load_ints(const int32_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
inline void store_ints(int32_t* p, IVec v) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), v); }
struct Nibbles {
  __m256i v;
};
#if defined(QUIRE_AVX_VNNI)
constexpr int kChannelRows = 6, kGroupRows = 3;
constexpr bool kWordGroups = false;
struct Codes {
  __m256i v;
};
struct Quad {
  __m256i v;
};
inline Codes load_codes(const uint8_t* p) { return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))}; }
inline __m256i raw(const Codes& c) { return c.v; }
inline Quad quad_of(__m256i v) { return {v}; }
inline IVec dot_bytes(IVec acc, __m256i w, __m256i x) {
  __asm__("%{vex%} vpdpbusd %2, %1, %0" : "+x"(acc) : "x"(w), "x"(x));
  return acc;
}
inline IVec dot(IVec acc, const Codes& w, const Quad& x) { return dot_bytes(acc, w.v, x.v); }
inline IVec dot(IVec acc, const Nibbles& w, const Quad& x) { return dot_bytes(acc, w.v, x.v); }
#else
// vpmaddubsw saturates, so bytes are widened: the even ones and the odd ones of a quad as 16-bit pairs for vpmaddwd.
// Nibbles cannot saturate it: 2 * 15 * 127, nor can numbers below 64.
constexpr int kChannelRows = 4, kGroupRows = 2;
// A group of two levels is summed in words, even and odd pairs of inputs apart: 4 * 2 * 15 * 127, less 8 times the row's
// sum, stays within 16 bits.
#define QUIRE_WORD_GROUPS
constexpr bool kWordGroups = true;
struct Codes {
  __m256i even, odd;
};
struct Quad {
  __m256i v, even, odd;
};
inline Codes load_codes(const uint8_t* p) {
  const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return {_mm256_and_si256(v, _mm256_set1_epi16(255)), _mm256_srli_epi16(v, 8)};
}
inline __m256i raw(const Codes& c) { return _mm256_or_si256(c.even, _mm256_slli_epi16(c.odd, 8)); }
inline Quad quad_of(__m256i v) {
  return {v, _mm256_srai_epi16(_mm256_slli_epi16(v, 8), 8), _mm256_srai_epi16(v, 8)};
}
inline IVec dot(IVec acc, const Codes& w, const Quad& x) {
  return _mm256_add_epi32(acc, _mm256_add_epi32(_mm256_madd_epi16(w.even, x.even), _mm256_madd_epi16(w.odd, x.odd)));
}
inline IVec dot(IVec acc, const Nibbles& w, const Quad& x) {
  return _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_maddubs_epi16(w.v, x.v), _mm256_set1_epi16(1)));
}
inline Nibbles add_odd(const Nibbles& n, IVec m) {
  const __m256i odd = _mm256_and_si256(m, _mm256_set1_epi16(1));
  return {_mm256_add_epi8(n.v, _mm256_or_si256(odd, _mm256_slli_epi16(odd, 8)))};
}
#endif
template <int R>
constexpr int kVectors = R == 1 ? 4 : 2;  // one row: a whole panel at once, so that it streams
constexpr int kFewRows = 2, kFewTiles = 1;
template <int R>
constexpr int kFewVectors = kVectors<R>;
inline Nibbles low_nibbles(const Codes& c) { return {_mm256_and_si256(raw(c), _mm256_set1_epi8(15))}; }
inline Nibbles high_nibbles(const Codes& c) {
  return {_mm256_and_si256(_mm256_srli_epi16(raw(c), 4), _mm256_set1_epi8(15))};
}
inline Quad broadcast_quad(const int8_t* x) {
  int32_t four;
  std::memcpy(&four, x, 4);
  return quad_of(_mm256_set1_epi32(four));
}
inline Vec to_float(IVec v) { return _mm256_cvtepi32_ps(v); }
inline Vec bits_as_float(IVec v) { return _mm256_castsi256_ps(v); }
inline Vec fused(Vec a, Vec b, Vec c) { return fma(a, b, c); }
inline void store_rounded(int8_t* p, Vec v) {
  const __m256i i = _mm256_cvtps_epi32(v);
  const __m128i half = _mm_packs_epi32(_mm256_castsi256_si128(i), _mm256_extracti128_si256(i, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(half, half));
}
inline void store_rounded(int8_t* p, Vec a, Vec b, Vec c, Vec d) {
  const __m256i left = _mm256_packs_epi32(_mm256_cvtps_epi32(a), _mm256_cvtps_epi32(b));
  const __m256i right = _mm256_packs_epi32(_mm256_cvtps_epi32(c), _mm256_cvtps_epi32(d));
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);  // packs keep to 128 bits
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm256_permutevar8x32_epi32(_mm256_packs_epi16(left, right), order));
}
inline IVec add_quads(IVec acc, const int8_t* p) {
  const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  const __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), v);
  return _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
inline int32_t sum(IVec v) {
  __m128i s = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1)));
}
inline void load_multipliers(const uint8_t* p, IVec (&m)[4]) {
  for (int v = 0; v < 2; ++v) {
    __m256i both = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + 8 * v)));
    if (kWordGroups) both = _mm256_or_si256(both, _mm256_slli_epi32(both, 16));
    m[v] = _mm256_and_si256(both, _mm256_set1_epi16(15));
    m[v + 2] = _mm256_srli_epi16(both, 4);
  }
}
inline IVec start_group(IVec m, const int32_t* p) {
  const __m256d pairs = _mm256_set1_pd(pair_of(p));
  const IVec start = _mm256_castps_si256(_mm256_permutevar_ps(_mm256_castpd_ps(pairs), m));  // by a lane's two lowest bits
  return kWordGroups ? _mm256_blend_epi16(start, _mm256_setzero_si256(), 0xaa) : start;
}
inline IVec dot_group(IVec d, const Nibbles& w, const Quad& x) {
  return kWordGroups ? _mm256_add_epi16(d, _mm256_maddubs_epi16(w.v, x.v)) : dot(d, w, x);
}
inline IVec add_scaled(IVec acc, IVec d, IVec m) { return _mm256_add_epi32(acc, _mm256_madd_epi16(d, m)); }
class Scaler {
 public:
  Scaler(IVec m, int zero) {
    const __m128i table = offsets_of_multipliers(zero);
    const __m256i lowest = _mm256_set_epi64x(0x0c0c0c0c08080808, 0x0404040400000000, 0x0c0c0c0c08080808, 0x0404040400000000);
    const __m256i four = _mm256_shuffle_epi8(m, lowest);
    words_ = _mm256_and_si256(four, broadcast(0x00ff00ff));
    offset_ = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), four);
  }
  void store(const Nibbles& n, uint8_t* p) const {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_add_epi8(_mm256_mullo_epi16(n.v, words_), offset_));
  }

 private:
  __m256i words_, offset_;
};
inline Vec load_half(const uint8_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }

#elif defined(QUIRE_NEON)

#include "cpu/int_vec_neon.h"

#else

struct IVec {
  int32_t i[4];
};
constexpr int kChannelRows = 2, kGroupRows = 2, kFewRows = 1, kFewTiles = 1;
template <int R>
constexpr int kVectors = 2;  // more are unrolled into megabytes of code
template <int R>
constexpr int kFewVectors = 8;
struct Codes {
  uint8_t b[16];
};
struct Nibbles {
  uint8_t b[16];
};
struct Quad {
  const int8_t* p;
};
inline IVec broadcast(int32_t i) { return {{i, i, i, i}}; }
inline IVec load_ints(const int32_t* p) { return {{p[0], p[1], p[2], p[3]}}; }
inline void store_ints(int32_t* p, IVec v) { std::memcpy(p, v.i, sizeof(v.i)); }
inline Codes load_codes(const uint8_t* p) {
  Codes c;
  std::memcpy(c.b, p, 16);
  return c;
}
inline Nibbles low_nibbles(const Codes& c) {
  Nibbles n;
  for (int i = 0; i < 16; ++i) n.b[i] = c.b[i] & 15;
  return n;
}
inline Nibbles high_nibbles(const Codes& c) {
  Nibbles n;
  for (int i = 0; i < 16; ++i) n.b[i] = c.b[i] >> 4;
  return n;
}
inline Quad broadcast_quad(const int8_t* x) { return {x}; }
template <typename W>
inline IVec dot(IVec acc, const W& w, const Quad& x) {
  for (int i = 0; i < 4; ++i) {
    for (int j = 0; j < 4; ++j) acc.i[i] += int32_t(w.b[4 * i + j]) * x.p[j];
  }
  return acc;
}
inline Vec to_float(IVec v) { return each([&](int i) { return float(v.i[i]); }); }
inline Vec bits_as_float(IVec v) {
  Vec f;
  std::memcpy(&f, &v, sizeof(f));
  return f;
}
inline Vec fused(Vec a, Vec b, Vec c) {
  return each([&](int i) { return float(double(a.f[i]) * double(b.f[i]) + double(c.f[i])); });
}
inline void store_rounded(int8_t* p, Vec v) {
  const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  for (int i = 0; i < 4; ++i) p[i] = int8_t((v.f[i] + magic) - magic);
}
inline void store_rounded(int8_t* p, Vec a, Vec b, Vec c, Vec d) {
  store_rounded(p, a), store_rounded(p + 4, b), store_rounded(p + 8, c), store_rounded(p + 12, d);
}
inline IVec add_quads(IVec acc, const int8_t* p) {
  for (int i = 0; i < 16; ++i) acc.i[i / 4] += p[i];
  return acc;
}
inline int32_t sum(IVec v) { return v.i[0] + v.i[1] + v.i[2] + v.i[3]; }
inline Vec load_half(const uint8_t* p) {
  return each([&](int i) { return half_to_float(p + 2 * i); });
}
inline void load_multipliers(const uint8_t* p, IVec (&m)[8]) {
  for (int v = 0; v < 8; ++v) {
    for (int i = 0; i < 4; ++i) m[v].i[i] = p[v % 4 * 4 + i] >> (v / 4 * 4) & 15;
  }
}
inline IVec start_group(IVec m, const int32_t* p) {
  for (int i = 0; i < 4; ++i) m.i[i] = p[m.i[i] % 2];
  return m;
}
inline IVec add_scaled(IVec acc, IVec d, IVec m) {
  for (int i = 0; i < 4; ++i) acc.i[i] += d.i[i] * m.i[i];
  return acc;
}
struct Scaler {
  IVec m;
  int zero;
  Scaler(IVec m, int zero) : m(m), zero(zero) {}
  void store(const Nibbles& n, uint8_t* p) const {
    for (int i = 0; i < 16; ++i) {
      const int each = m.i[i / 4], level = n.b[i] - 8 + each % 2;
      p[i] = static_cast<uint8_t>(each * level + zero);
    }
  }
};

#endif

#if !defined(__AVX2__) || defined(__AVX512VNNI__)
inline IVec dot_group(IVec d, const Nibbles& w, const Quad& x) { return dot(d, w, x); }
#endif

}  // namespace quire::cpu::QUIRE_ISA
