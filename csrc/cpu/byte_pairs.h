// int8 as operands of the dots of attention.
//
// Bf16Product<Element>   bf16 by bf16 or by int8, which bf16 holds exactly: what `widen` and `load_pairs` would give,
//                        without a detour through memory
// WordProduct            int16 by int8, exactly, times a scale per row. Where a level has dots of words, this widens a
//                        vector of int8 by one instruction beside the products, and Bf16Product by seven.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "cpu/isa.h"

namespace quire::cpu::QUIRE_ISA {

// kPairsFromBytes: whether Bf16Product takes int8 at this level, by `load_pairs` of kLanes pairs of int8.
#if defined(__AVX2__) && !defined(__AVX512F__)
constexpr bool kPairsFromBytes = true;
inline Weights load_pairs(const int8_t* p) {
  const __m256i v = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  const auto take = [v](int byte, int bits) {  // (v & byte) ^ bits, as in `widen`
    return _mm256_castsi256_ps(_mm256_xor_si256(_mm256_and_si256(v, _mm256_set1_epi32(byte)), _mm256_set1_epi32(bits)));
  };
  return {_mm256_sub_ps(take(0xff, 0x4b000080), _mm256_set1_ps(8388736.0f)),
          _mm256_sub_ps(take(0xff00, 0x47008000), _mm256_set1_ps(32896.0f))};
}
#else
constexpr bool kPairsFromBytes = false;
#endif

// The dot of isa.h, but not by the intrinsic, with which gcc 12 copies accumulators and spills in these loops.
inline Vec dot_in_place(Vec acc, const Weights& w, const Pair& x) {
#if defined(__AVX512BF16__)
  __asm__("vdpbf16ps %2, %1, %0" : "+v"(acc) : "v"(w.v), "v"(x));
  return acc;
#else
  return dot(acc, w, x);
#endif
}

// Of rows of bf16 and tiles of `E`: sums grow in place.
template <typename E>
struct Bf16Product {
  using Element = E;
  static constexpr bool kScaled = false;
  static Vec start(const float* sums) { return load(sums); }
  static Vec number(const float* sum) { return load(sum); }
  static Weights take(const E* p) {
    Weights w = load_pairs(p);
    keep(w);
    return w;
  }
  static Pair broadcast_x(const uint16_t* x) { return broadcast_pair(x); }
  static Vec dot(Vec sum, const Weights& w, const Pair& x) { return dot_in_place(sum, w, x); }
};

constexpr float kWordMost = 32766.0f;      // 32767 is left to what an inverse is off by
constexpr float kWordSmallest = 0x1p-80f;  // less has no inverse to speak of, and counts as 0

// kWordProducts: whether this level has WordProduct. What it takes as `uint16_t` are the bits of int16.
#if defined(__AVX512F__)
constexpr bool kWordProducts = true;
struct WordProduct {
  using Element = int8_t;
  static constexpr bool kScaled = true;  // sums are the bits of integers
  static Vec start(const float*) { return zero(); }
  static __m512i take(const int8_t* p) {
    __m512i w = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    __asm__("" : "+v"(w));  // as `keep`
    return w;
  }
  static __m512i broadcast_x(const uint16_t* x) {
    int32_t two;
    std::memcpy(&two, x, 4);
    return _mm512_set1_epi32(two);
  }
  static Vec dot(Vec sum, __m512i w, __m512i x) {
#if defined(__AVX512VNNI__)
    __asm__("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(w), "v"(x));
    return sum;
#else
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(sum), _mm512_madd_epi16(w, x)));
#endif
  }
  static Vec number(const float* sum) { return _mm512_cvtepi32_ps(_mm512_loadu_si512(sum)); }
};

// Two vectors of numbers times `factor`, within +-32767, rounded and beside each other: the lower half of a sum with
// 1.5 * 2^23 is the rounded number.
inline void store_words(uint16_t* p, Vec low, Vec high, Vec factor) {
  alignas(64) static constexpr uint16_t kEven[] = {0,  2,  4,  6,  8,  10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30,
                                                   32, 34, 36, 38, 40, 42, 44, 46, 48, 50, 52, 54, 56, 58, 60, 62};
  const Vec magic = broadcast(12582912.0f);
  const __m512i a = _mm512_castps_si512(fma(low, factor, magic)), b = _mm512_castps_si512(fma(high, factor, magic));
  _mm512_storeu_si512(p, _mm512_permutex2var_epi16(a, _mm512_load_si512(kEven), b));
}

// Of four vectors of numbers that are not negative: factors[r] makes words of vector r, of which one stands for scales[r].
inline void scale_to_words(Vec a, Vec b, Vec c, Vec d, Vec* factors, float* scales) {
  const Vec ab = max(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
  const Vec cd = max(_mm512_shuffle_f32x4(c, d, 0x44), _mm512_shuffle_f32x4(c, d, 0xee));
  Vec most = max(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd));
  most = max(most, _mm512_permute_ps(most, 0xb1));
  most = max(most, _mm512_permute_ps(most, 0x4e));  // four lanes per vector
  const __mmask16 counts = _mm512_cmp_ps_mask(most, broadcast(kWordSmallest), _CMP_GE_OQ);
  const Vec factor = _mm512_maskz_mul_ps(counts, reciprocal(most), broadcast(kWordMost));
  const Vec scale = _mm512_maskz_mul_ps(counts, most, broadcast(1.0f / kWordMost));
  factors[0] = _mm512_shuffle_f32x4(factor, factor, 0x00), factors[1] = _mm512_shuffle_f32x4(factor, factor, 0x55);
  factors[2] = _mm512_shuffle_f32x4(factor, factor, 0xaa), factors[3] = _mm512_shuffle_f32x4(factor, factor, 0xff);
  // Compressed straight to memory, it takes Zen 4 over a hundred cycles.
  _mm_storeu_ps(scales, _mm512_castps512_ps128(_mm512_maskz_compress_ps(0x1111, scale)));
}
#else
constexpr bool kWordProducts = false;
using WordProduct = Bf16Product<uint16_t>;
inline void store_words(uint16_t*, Vec, Vec, Vec) {}
inline void scale_to_words(Vec, Vec, Vec, Vec, Vec*, float*) {}
#endif

// A query row as words within +-`most`; returns what a word stands for, NaN where the row is not finite.
inline float query_words(const float* x, int64_t size, float most, uint16_t* to) {
  uint32_t top = 0;  // the bits of a magnitude: those of NaN are the largest
  for (int64_t i = 0; i < size; ++i) {
    uint32_t bits;
    std::memcpy(&bits, x + i, 4);
    top = std::max(top, bits & 0x7fffffff);
  }
  float largest;
  std::memcpy(&largest, &top, 4);
  const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an even integer
  const bool finite = top < 0x7f800000, counts = finite && largest >= kWordSmallest;
  const float inverse = counts ? most / largest : 0.0f;
  for (int64_t i = 0; i < size; ++i) {
    const float scaled = finite ? x[i] * inverse : 0.0f;
    to[i] = static_cast<uint16_t>(static_cast<int16_t>((scaled + magic) - magic));
  }
  return !finite ? NAN : counts ? largest / most : 1.0f;
}

}  // namespace quire::cpu::QUIRE_ISA
