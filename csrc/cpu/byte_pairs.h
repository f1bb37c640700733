// Pairs of int8 as the operands of a bf16 dot (isa.h), exactly: what `widen` and `load_pairs` would give, without a
// detour through memory.
#pragma once

#include <cstdint>

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

}  // namespace quire::cpu::QUIRE_ISA
