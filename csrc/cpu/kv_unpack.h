// Codes of 4 bits (kv_codes.h) as the products of attention read them: low + step * q, tile by tile.
//
//   unpack_keys, unpack_values   -> numbers of 8 bits
//   widen_keys, widen_values     -> bf16, which holds them exactly, without a detour through 8 bits; where kWidensCodes
//
// A byte has the codes of two neighbours, an even and an odd one. Both results lie in a word, the even one in its low
// byte. step * q is at most 16 * 15, so that the products of both in one multiplication of words do not touch, and the
// lows are added byte by byte. As bf16 a code starts as the float 2^19 + q, which are bits of its byte below an exponent,
// and one fma makes it step * q + low, exactly.
//
// Bytes: a tile is read once from L2, and its numbers stay in L1. Bound: 5 or 6 instructions for a vector of numbers of 8
// bits, 8 or 9 for one of bf16.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "cpu/isa.h"
#include "cpu/kv_codes.h"

namespace quire::cpu::QUIRE_ISA {

// Two codes of a byte as numbers of 8 bits: the even one below the odd one.
struct StepPair {
  uint8_t even_step, odd_step, even_low, odd_low;

  uint16_t numbers(uint8_t codes) const {
    const auto even = static_cast<uint8_t>((codes & 15) * even_step + even_low);
    const auto odd = static_cast<uint8_t>((codes >> 4) * odd_step + odd_low);
    return static_cast<uint16_t>(even | odd << 8);
  }
};

inline void unpack_pairs(const uint8_t* codes, int64_t size, const StepPair& steps, int8_t* to) {
  for (int64_t i = 0; i < size; ++i) {
    const uint16_t word = steps.numbers(codes[i]);
    std::memcpy(to + 2 * i, &word, sizeof(word));
  }
}

#if defined(__AVX2__)

// Sixteen bytes of codes as words.
inline __m256i code_words(const uint8_t* codes) {
  return _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
}

// The steps and lows of sixteen positions, which both codes of a byte share.
struct KeySteps {
  __m256i steps, lows;

  explicit KeySteps(const uint8_t* group) : steps(code_words(group)) {
    const __m256i low = code_words(group + kTilePositions);
    lows = _mm256_or_si256(low, _mm256_slli_epi16(low, 8));
  }
  void unpack(const uint8_t* codes, int8_t* to) const {
    const __m256i words = code_words(codes);
    const __m256i apart = _mm256_and_si256(_mm256_or_si256(words, _mm256_slli_epi16(words, 4)), _mm256_set1_epi16(0x0f0f));
    const __m256i numbers = _mm256_add_epi8(_mm256_mullo_epi16(apart, steps), lows);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), numbers);
  }
#if defined(__AVX512F__)
  void unpack_two(const uint8_t* codes, int8_t* to) const {
    const __m512i words = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes)));
    const __m512i apart = _mm512_ternarylogic_epi32(words, _mm512_slli_epi16(words, 4), _mm512_set1_epi16(0x0f0f), 0xa8);
    const __m512i products = _mm512_mullo_epi16(apart, _mm512_broadcast_i64x4(steps));
    _mm512_storeu_si512(to, _mm512_add_epi8(products, _mm512_broadcast_i64x4(lows)));
  }
#endif
};

// `count` pairs of the dim of K, sixteen positions each.
inline void unpack_key_pairs(const uint8_t* codes, int64_t count, const uint8_t* group, int8_t* to) {
  const KeySteps steps(group);
  int64_t pair = 0;
#if defined(__AVX512F__)
  for (; pair + 2 <= count; pair += 2) steps.unpack_two(codes + pair * kTilePositions, to + pair * kTilePositions * 2);
#endif
  for (; pair < count; ++pair) steps.unpack(codes + pair * kTilePositions, to + pair * kTilePositions * 2);
}

// Up to kCodeGroup columns of a pair of positions of V.
inline void unpack_columns(const uint8_t* codes, int64_t size, const StepPair& steps, int8_t* to) {
  const auto low = static_cast<int16_t>(steps.even_low | steps.odd_low << 8);
  int64_t i = 0;
#if defined(__AVX512F__)
  for (; i + 32 <= size; i += 32) {
    const __m512i words = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + i)));
    const __m512i even = _mm512_and_si512(words, _mm512_set1_epi16(15));
    const __m512i odd = _mm512_and_si512(_mm512_slli_epi16(words, 4), _mm512_set1_epi16(0x0f00));
    const __m512i products = _mm512_add_epi16(_mm512_mullo_epi16(even, _mm512_set1_epi16(steps.even_step)),
                                              _mm512_mullo_epi16(odd, _mm512_set1_epi16(steps.odd_step)));
    _mm512_storeu_si512(to + 2 * i, _mm512_add_epi8(products, _mm512_set1_epi16(low)));
  }
#endif
  for (; i + 16 <= size; i += 16) {
    const __m256i words = code_words(codes + i);
    const __m256i even = _mm256_and_si256(words, _mm256_set1_epi16(15));
    const __m256i odd = _mm256_and_si256(_mm256_slli_epi16(words, 4), _mm256_set1_epi16(0x0f00));
    const __m256i products = _mm256_add_epi16(_mm256_mullo_epi16(even, _mm256_set1_epi16(steps.even_step)),
                                              _mm256_mullo_epi16(odd, _mm256_set1_epi16(steps.odd_step)));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + 2 * i), _mm256_add_epi8(products, _mm256_set1_epi16(low)));
  }
  unpack_pairs(codes + i, size - i, steps, to + 2 * i);
}

#elif defined(QUIRE_NEON)

// Sixteen bytes of codes -> [16][2] numbers.
inline void unpack_bytes(const uint8_t* codes, uint8x16_t even_steps, uint8x16_t odd_steps, uint8x16_t even_lows,
                         uint8x16_t odd_lows, int8_t* to) {
  const uint8x16_t bytes = vld1q_u8(codes);
  const uint8x16_t even = vmlaq_u8(even_lows, vandq_u8(bytes, vdupq_n_u8(15)), even_steps);
  const uint8x16_t odd = vmlaq_u8(odd_lows, vshrq_n_u8(bytes, 4), odd_steps);
  vst2q_s8(to, (int8x16x2_t{{vreinterpretq_s8_u8(even), vreinterpretq_s8_u8(odd)}}));
}

inline void unpack_key_pairs(const uint8_t* codes, int64_t count, const uint8_t* group, int8_t* to) {
  const uint8x16_t steps = vld1q_u8(group), lows = vld1q_u8(group + kTilePositions);
  for (int64_t pair = 0; pair < count; ++pair) {
    unpack_bytes(codes + pair * kTilePositions, steps, steps, lows, lows, to + pair * kTilePositions * 2);
  }
}

inline void unpack_columns(const uint8_t* codes, int64_t size, const StepPair& steps, int8_t* to) {
  const uint8x16_t even_steps = vdupq_n_u8(steps.even_step), odd_steps = vdupq_n_u8(steps.odd_step);
  const uint8x16_t even_lows = vdupq_n_u8(steps.even_low), odd_lows = vdupq_n_u8(steps.odd_low);
  int64_t i = 0;
  for (; i + 16 <= size; i += 16) unpack_bytes(codes + i, even_steps, odd_steps, even_lows, odd_lows, to + 2 * i);
  unpack_pairs(codes + i, size - i, steps, to + 2 * i);
}

#else

inline void unpack_key_pairs(const uint8_t* codes, int64_t count, const uint8_t* group, int8_t* to) {
  for (int64_t i = 0; i < count * kTilePositions; ++i) {
    const uint8_t step = group[i % kTilePositions], low = group[kTilePositions + i % kTilePositions];
    unpack_pairs(codes + i, 1, {step, step, low, low}, to + 2 * i);
  }
}

inline void unpack_columns(const uint8_t* codes, int64_t size, const StepPair& steps, int8_t* to) {
  unpack_pairs(codes, size, steps, to);
}

#endif

// K of a tile, [head_dim / 2][16] bytes of a pair of the dim each -> [head_dim / 2][16][2].
// `groups`: [code_groups][2][16 positions], steps and lows.
inline void unpack_keys(const uint8_t* codes, const uint8_t* groups, int64_t head_dim, int8_t* to) {
  for (int64_t begin = 0; begin < head_dim; begin += kCodeGroup) {
    const int64_t count = std::min(kCodeGroup, head_dim - begin) / 2;
    unpack_key_pairs(codes + begin / 2 * kTilePositions, count, groups, to + begin * kTilePositions);
    groups += 2 * kTilePositions;
  }
}

// V of a tile, [8][v_head_dim] bytes of a pair of positions each -> [8][v_head_dim][2].
inline void unpack_values(const uint8_t* codes, const uint8_t* groups, int64_t v_head_dim, int8_t* to) {
  for (int64_t begin = 0; begin < v_head_dim; begin += kCodeGroup) {
    const int64_t size = std::min(kCodeGroup, v_head_dim - begin);
    const uint8_t *steps = groups, *lows = groups + kTilePositions;
    for (int64_t pair = 0; pair < kTilePositions / 2; ++pair) {
      const StepPair both{steps[2 * pair], steps[2 * pair + 1], lows[2 * pair], lows[2 * pair + 1]};
      const int64_t at = pair * v_head_dim + begin;
      unpack_columns(codes + at, size, both, to + 2 * at);
    }
    groups += 2 * kTilePositions;
  }
}

#if defined(__AVX512F__)

constexpr bool kWidensCodes = true;

// Steps and bases of sixteen positions: a code is step * (2^19 + q) + base.
struct WideSteps {
  __m512 steps, bases;

  explicit WideSteps(const uint8_t* group)
      : steps(_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(group))))) {
    const __m128i low = _mm_loadu_si128(reinterpret_cast<const __m128i*>(group + kTilePositions));
    bases = _mm512_fnmadd_ps(steps, _mm512_set1_ps(524288.0f), _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(low)));
  }
};

// Sixteen bytes of codes -> [16][2] bf16, the upper halves of floats.
inline void widen_bytes(const uint8_t* codes, __m512 even_steps, __m512 even_bases, __m512 odd_steps, __m512 odd_bases,
                        uint16_t* to) {
  const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
  const auto number = [](__m512i shifted, __m512 steps, __m512 bases) {  // of the upper half of a byte
    const __m512i bits = _mm512_ternarylogic_epi32(shifted, _mm512_set1_epi32(0xf0), _mm512_set1_epi32(0x49000000), 0xea);
    return _mm512_castps_si512(_mm512_fmadd_ps(_mm512_castsi512_ps(bits), steps, bases));
  };
  const __m512i even = number(_mm512_slli_epi32(bytes, 4), even_steps, even_bases);
  const __m512i odd = number(bytes, odd_steps, odd_bases);
  _mm512_storeu_si512(to, _mm512_or_si512(odd, _mm512_srli_epi32(even, 16)));
}

inline void widen_keys(const uint8_t* codes, const uint8_t* groups, int64_t head_dim, uint16_t* to) {
  for (int64_t begin = 0; begin < head_dim / 2; begin += kCodeGroup / 2) {
    const WideSteps wide(groups);
    const int64_t end = std::min(begin + kCodeGroup / 2, head_dim / 2);
    for (int64_t pair = begin; pair < end; ++pair) {
      widen_bytes(codes + pair * kTilePositions, wide.steps, wide.bases, wide.steps, wide.bases,
                  to + pair * kTilePositions * 2);
    }
    groups += 2 * kTilePositions;
  }
}

// `v_head_dim`: a multiple of 16.
inline void widen_values(const uint8_t* codes, const uint8_t* groups, int64_t v_head_dim, uint16_t* to) {
  for (int64_t begin = 0; begin < v_head_dim; begin += kCodeGroup) {
    const WideSteps wide(groups);
    alignas(64) float steps[kTilePositions], bases[kTilePositions];
    _mm512_store_ps(steps, wide.steps);
    _mm512_store_ps(bases, wide.bases);
    const int64_t end = std::min(begin + kCodeGroup, v_head_dim);
    for (int64_t pair = 0; pair < kTilePositions / 2; ++pair) {
      const __m512 even_steps = _mm512_set1_ps(steps[2 * pair]), odd_steps = _mm512_set1_ps(steps[2 * pair + 1]);
      const __m512 even_bases = _mm512_set1_ps(bases[2 * pair]), odd_bases = _mm512_set1_ps(bases[2 * pair + 1]);
      for (int64_t i = begin; i < end; i += 16) {
        const int64_t at = pair * v_head_dim + i;
        widen_bytes(codes + at, even_steps, even_bases, odd_steps, odd_bases, to + 2 * at);
      }
    }
    groups += 2 * kTilePositions;
  }
}

#else

constexpr bool kWidensCodes = false;
inline void widen_keys(const uint8_t*, const uint8_t*, int64_t, uint16_t*) {}
inline void widen_values(const uint8_t*, const uint8_t*, int64_t, uint16_t*) {}

#endif

}  // namespace quire::cpu::QUIRE_ISA
