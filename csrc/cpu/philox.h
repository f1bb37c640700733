// Random words of neighbouring token ids: Philox4x32-10 (Salmon et al. 2011) with the counter of kernels/sampling:
// (position, id >> 2, purpose, sample_index), word id & 3. And a cheap upper bound of their Gumbel noise.
#pragma once

#include "cpu/isa.h"

namespace quire::cpu::QUIRE_ISA {

constexpr uint32_t kPhiloxM0 = 0xD2511F53, kPhiloxM1 = 0xCD9E8D57;
constexpr int kPhiloxRounds = 10;
constexpr int kGroupIds = 4 * kLanes;  // a group: one block of four ids per lane

struct Stream {
  uint32_t position, purpose, sample_index;
  uint32_t key0[kPhiloxRounds], key1[kPhiloxRounds];

  Stream(int64_t seed, int64_t index, int64_t at, uint32_t why)
      : position(uint32_t(at)), purpose(why), sample_index(uint32_t(index)) {
    for (uint32_t i = 0; i < kPhiloxRounds; ++i) {
      key0[i] = uint32_t(seed) + i * 0x9E3779B9u;
      key1[i] = uint32_t(uint64_t(seed) >> 32) + i * 0xBB67AE85u;
    }
  }
};

inline void philox_block(const Stream& s, uint32_t block, uint32_t* words) {
  uint32_t c0 = s.position, c1 = block, c2 = s.purpose, c3 = s.sample_index;
  for (int i = 0; i < kPhiloxRounds; ++i) {
    const uint64_t p0 = uint64_t(c0) * kPhiloxM0, p1 = uint64_t(c2) * kPhiloxM1;
    c0 = uint32_t(p1 >> 32) ^ c1 ^ s.key0[i];
    c2 = uint32_t(p0 >> 32) ^ c3 ^ s.key1[i];
    c1 = uint32_t(p1);
    c3 = uint32_t(p0);
  }
  words[0] = c0, words[1] = c1, words[2] = c2, words[3] = c3;
}

inline uint32_t word_of(const Stream& s, int64_t id) {
  uint32_t words[4];
  philox_block(s, uint32_t(id >> 2), words);
  return words[id & 3];
}

// words[i] is the word of id 4 * first_block + i, for a whole group.
//
// A product of 32 bits takes a lane of 64, so blocks are computed in lanes of 64 whose upper halves hold remains of
// earlier products, which no operation reads. Blocks are dealt to lanes so that the four words of a block end up side
// by side with a transposition inside each 128 bits.
#if defined(__AVX512F__)

inline void philox_lanes(const Stream& s, __m512i block, __m512i* c) {
  const __m512i m0 = _mm512_set1_epi64(kPhiloxM0), m1 = _mm512_set1_epi64(kPhiloxM1);
  c[0] = _mm512_set1_epi64(s.position), c[1] = block;
  c[2] = _mm512_set1_epi64(s.purpose), c[3] = _mm512_set1_epi64(s.sample_index);
  for (int i = 0; i < kPhiloxRounds; ++i) {
    const __m512i p0 = _mm512_mul_epu32(c[0], m0), p1 = _mm512_mul_epu32(c[2], m1);
    const __m512i k0 = _mm512_set1_epi64(s.key0[i]), k1 = _mm512_set1_epi64(s.key1[i]);
    c[0] = _mm512_ternarylogic_epi64(_mm512_srli_epi64(p1, 32), c[1], k0, 0x96);  // 0x96: xor of three
    c[2] = _mm512_ternarylogic_epi64(_mm512_srli_epi64(p0, 32), c[3], k1, 0x96);
    c[1] = p1, c[3] = p0;
  }
}

inline void philox_group(const Stream& s, uint32_t first_block, uint32_t* words) {
  const __m512i first = _mm512_set1_epi64(first_block);
  __m512i even[4], odd[4], w[4];
  philox_lanes(s, _mm512_add_epi64(first, _mm512_setr_epi64(0, 8, 1, 9, 2, 10, 3, 11)), even);
  philox_lanes(s, _mm512_add_epi64(first, _mm512_setr_epi64(4, 12, 5, 13, 6, 14, 7, 15)), odd);
  for (int i = 0; i < 4; ++i) w[i] = _mm512_mask_blend_epi32(0xAAAA, even[i], _mm512_slli_epi64(odd[i], 32));
  const __m512i a = _mm512_unpacklo_epi32(w[0], w[1]), b = _mm512_unpacklo_epi32(w[2], w[3]);
  const __m512i c = _mm512_unpackhi_epi32(w[0], w[1]), d = _mm512_unpackhi_epi32(w[2], w[3]);
  _mm512_storeu_si512(words, _mm512_unpacklo_epi64(a, b));
  _mm512_storeu_si512(words + 16, _mm512_unpackhi_epi64(a, b));
  _mm512_storeu_si512(words + 32, _mm512_unpacklo_epi64(c, d));
  _mm512_storeu_si512(words + 48, _mm512_unpackhi_epi64(c, d));
}

#elif defined(__AVX2__)

inline void philox_lanes(const Stream& s, __m256i block, __m256i* c) {
  const __m256i m0 = _mm256_set1_epi64x(kPhiloxM0), m1 = _mm256_set1_epi64x(kPhiloxM1);
  c[0] = _mm256_set1_epi64x(s.position), c[1] = block;
  c[2] = _mm256_set1_epi64x(s.purpose), c[3] = _mm256_set1_epi64x(s.sample_index);
  for (int i = 0; i < kPhiloxRounds; ++i) {
    const __m256i p0 = _mm256_mul_epu32(c[0], m0), p1 = _mm256_mul_epu32(c[2], m1);
    const __m256i k0 = _mm256_set1_epi64x(s.key0[i]), k1 = _mm256_set1_epi64x(s.key1[i]);
    c[0] = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(p1, 32), c[1]), k0);
    c[2] = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(p0, 32), c[3]), k1);
    c[1] = p1, c[3] = p0;
  }
}

inline void philox_group(const Stream& s, uint32_t first_block, uint32_t* words) {
  const __m256i first = _mm256_set1_epi64x(first_block);
  __m256i even[4], odd[4], w[4];
  philox_lanes(s, _mm256_add_epi64(first, _mm256_setr_epi64x(0, 4, 1, 5)), even);
  philox_lanes(s, _mm256_add_epi64(first, _mm256_setr_epi64x(2, 6, 3, 7)), odd);
  for (int i = 0; i < 4; ++i) w[i] = _mm256_blend_epi32(even[i], _mm256_slli_epi64(odd[i], 32), 0xAA);
  const __m256i a = _mm256_unpacklo_epi32(w[0], w[1]), b = _mm256_unpacklo_epi32(w[2], w[3]);
  const __m256i c = _mm256_unpackhi_epi32(w[0], w[1]), d = _mm256_unpackhi_epi32(w[2], w[3]);
  auto* to = reinterpret_cast<__m256i*>(words);
  _mm256_storeu_si256(to, _mm256_unpacklo_epi64(a, b));
  _mm256_storeu_si256(to + 1, _mm256_unpackhi_epi64(a, b));
  _mm256_storeu_si256(to + 2, _mm256_unpacklo_epi64(c, d));
  _mm256_storeu_si256(to + 3, _mm256_unpackhi_epi64(c, d));
}

#elif defined(QUIRE_NEON)

inline void philox_group(const Stream& s, uint32_t first_block, uint32_t* words) {
  const uint32x4_t lanes = {0, 1, 2, 3};
  const uint32x2_t m0 = vdup_n_u32(kPhiloxM0), m1 = vdup_n_u32(kPhiloxM1);
  uint32x4x4_t c = {{vdupq_n_u32(s.position), vaddq_u32(vdupq_n_u32(first_block), lanes), vdupq_n_u32(s.purpose),
                     vdupq_n_u32(s.sample_index)}};
  const auto product = [](uint32x4_t x, uint32x2_t m) {  // the low halves, then the high ones
    return vuzpq_u32(vreinterpretq_u32_u64(vmull_u32(vget_low_u32(x), m)),
                     vreinterpretq_u32_u64(vmull_u32(vget_high_u32(x), m)));
  };
  for (int i = 0; i < kPhiloxRounds; ++i) {
    const uint32x4x2_t p0 = product(c.val[0], m0), p1 = product(c.val[2], m1);
    c.val[0] = veorq_u32(veorq_u32(p1.val[1], c.val[1]), vdupq_n_u32(s.key0[i]));
    c.val[2] = veorq_u32(veorq_u32(p0.val[1], c.val[3]), vdupq_n_u32(s.key1[i]));
    c.val[1] = p1.val[0], c.val[3] = p0.val[0];
  }
  vst4q_u32(words, c);
}

#else

inline void philox_group(const Stream& s, uint32_t first_block, uint32_t* words) {
  for (uint32_t i = 0; i < kLanes; ++i) philox_block(s, first_block + i, words + 4 * i);
}

#endif

// At least the Gumbel noise of each word, and at most 0.07 more where it is large. With u = (word + 1/2) / 2^32,
// -log(-log u) <= -log(1 - u); log2 of a float lies above its exponent plus its mantissa's fraction, which are its
// bits.
constexpr float kBoundScale = -0.69314718f / 8388608.0f;  // log 2 / 2^23
constexpr float kBoundShift = 109.51726f + 1e-3f;         // log 2 * (127 + 31), and room for the rounding of this bound
#if defined(__AVX512F__)
inline Vec noise_bound(const uint32_t* words) {
  const __m512i half = _mm512_srli_epi32(_mm512_xor_si512(_mm512_loadu_si512(words), _mm512_set1_epi32(-1)), 1);
  const Vec bits = _mm512_cvtepi32_ps(_mm512_castps_si512(_mm512_cvtepi32_ps(half)));
  return fma(bits, broadcast(kBoundScale), broadcast(kBoundShift));
}
#elif defined(__AVX2__)
inline Vec noise_bound(const uint32_t* words) {
  const __m256i loaded = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(words));
  const __m256i half = _mm256_srli_epi32(_mm256_xor_si256(loaded, _mm256_set1_epi32(-1)), 1);
  const Vec bits = _mm256_cvtepi32_ps(_mm256_castps_si256(_mm256_cvtepi32_ps(half)));
  return fma(bits, broadcast(kBoundScale), broadcast(kBoundShift));
}
#elif defined(QUIRE_NEON)
inline Vec noise_bound(const uint32_t* words) {
  const int32x4_t half = vreinterpretq_s32_u32(vshrq_n_u32(vmvnq_u32(vld1q_u32(words)), 1));
  const Vec bits = vcvtq_f32_s32(vreinterpretq_s32_f32(vcvtq_f32_s32(half)));
  return fma(bits, broadcast(kBoundScale), broadcast(kBoundShift));
}
#else
inline Vec noise_bound(const uint32_t* words) {
  return each([&](int i) {
    const float half = float(int32_t(~words[i] >> 1));
    int32_t bits;
    std::memcpy(&bits, &half, 4);
    return float(bits) * kBoundScale + kBoundShift;
  });
}
#endif

}  // namespace quire::cpu::QUIRE_ISA
