// Pairs of int8 as operands of the dots of attention.
//
// Bf16Product<Element>   bf16 by bf16 or by int8, which bf16 holds exactly: what `widen` and `load_pairs` would give,
//                        without a detour through memory
// WordProduct<Element>   int16 by int16 or by int8, exactly, times a scale per row. Where a level has dots of words, this
//                        widens a vector of int8 by one instruction, and Bf16Product by seven.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "cpu/isa.h"

namespace quire::cpu::QUIRE_ISA {

// kPairsFromBytes: whether this level has `load_pairs` of kLanes pairs of int8.
#if defined(__AVX512F__)
constexpr bool kPairsFromBytes = true;
inline Weights load_pairs(const int8_t* p) {
  const __m512i v = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  const auto take = [v](int byte, int bits) {  // (v & byte) ^ bits, as in `widen`
    return _mm512_castsi512_ps(_mm512_ternarylogic_epi32(v, _mm512_set1_epi32(byte), _mm512_set1_epi32(bits), 0x6a));
  };
  const __m512 low = _mm512_sub_ps(take(0xff, 0x4b000080), _mm512_set1_ps(8388736.0f));
  const __m512 high = _mm512_sub_ps(take(0xff00, 0x47008000), _mm512_set1_ps(32896.0f));
#if defined(__AVX512BF16__)
  return {(__m512bh)_mm512_or_si512(_mm512_castps_si512(high), _mm512_srli_epi32(_mm512_castps_si512(low), 16))};
#else
  return {low, high};
#endif
}
#elif defined(__AVX2__)
constexpr bool kPairsFromBytes = true;
inline Weights load_pairs(const int8_t* p) {
  const __m256i v = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  const auto take = [v](int byte, int bits) {
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

// kWordProducts: whether this level has WordProduct. What it takes as `uint16_t` are the bits of int16.
#if defined(__AVX512F__)
constexpr bool kWordProducts = true;
template <typename E>
struct WordProduct {
  using Element = E;
  static constexpr bool kScaled = true;  // sums are the bits of integers
  static Vec start(const float*) { return zero(); }
  static __m512i take(const E* p) {
    __m512i w;
    if constexpr (sizeof(E) == 1) {
      w = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    } else {
      w = _mm512_loadu_si512(p);
    }
    __asm__("" : "+v"(w));  // as `keep`
    return w;
  }
  static __m512i broadcast_x(const uint16_t* x) {
    int32_t two;
    std::memcpy(&two, x, 4);
    return _mm512_set1_epi32(two);
  }
  static Vec dot(Vec sum, __m512i w, __m512i x) {
    __asm__("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(w), "v"(x));
    return sum;
  }
  static Vec number(const float* sum) { return _mm512_cvtepi32_ps(_mm512_loadu_si512(sum)); }
  static Vec result(const float* sum, float scale) { return mul(number(sum), broadcast(scale)); }
};
// kWidened int8 as words.
inline void widen_words(uint16_t* to, const int8_t* from) { _mm512_storeu_si512(to, WordProduct<int8_t>::take(from)); }
// Two vectors of numbers within +-32767, beside each other.
inline void store_words(uint16_t* p, Vec a, Vec b) {
  const __m512i both = _mm512_packs_epi32(_mm512_cvtps_epi32(a), _mm512_cvtps_epi32(b));  // by 128 bits of each
  _mm512_storeu_si512(p, _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), both));
}
#else
constexpr bool kWordProducts = false;
template <typename E>
using WordProduct = Bf16Product<E>;
inline void widen_words(uint16_t*, const int8_t*) {}
inline void store_words(uint16_t*, Vec, Vec) {}
#endif

constexpr float kWordMost = 32767.0f;
constexpr float kWordSmallest = 0x1p-100f;  // less has no inverse to speak of, and counts as 0

// A query row of bf16 as words within +-`most`; returns their scale, NaN where the row is not finite.
inline float query_words(const uint16_t* x, int64_t size, float most, uint16_t* to) {
  uint16_t top = 0;
  for (int64_t i = 0; i < size; ++i) top = std::max<uint16_t>(top, x[i] & 0x7fff);
  const float largest = bf16_to_float(top), magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an even integer
  const bool finite = top < 0x7f80, counts = finite && largest >= kWordSmallest;
  const float inverse = counts ? most / largest : 0.0f;
  for (int64_t i = 0; i < size; ++i) {
    const float scaled = finite ? bf16_to_float(x[i]) * inverse : 0.0f;
    to[i] = static_cast<uint16_t>(static_cast<int16_t>((scaled + magic) - magic));
  }
  return !finite ? NAN : counts ? largest / most : 0.0f;
}

}  // namespace quire::cpu::QUIRE_ISA
