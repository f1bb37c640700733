// Codes of weights in units (unit_layout.h) as bytes in registers, of one ISA level.
//
//   Bytes              kLanes columns of four bytes
//   bits_at<s, m>(b)   (b >> s) & m of every byte; a negative s shifts to the left
//   look_up(t, b)      number b of the Table t of 16 bytes, b = 0 ... 15
//   small_codes, codes_of   operands of `dot` (int_vec.h): numbers below 64; any, which count from kCodesZero
//   load_signed, load_unsigned   kLanes bytes as integers of 32 bits
//   low_four, high_four     of the integers of bytes
//   power_of(e)        2^(e - 127) for e = 1 ... 254, 0 for e = 0
#pragma once

#include "cpu/int_vec.h"
#include "cpu/unit_layout.h"

namespace quire::cpu::QUIRE_ISA {

#if defined(__AVX512F__)

using Bytes = __m512i;
using Table = __m512i;
inline Bytes load_bytes(const uint8_t* p) { return _mm512_loadu_si512(p); }
inline void store_bytes(uint8_t* p, Bytes b) { _mm512_storeu_si512(p, b); }
template <int kShift, int kMask>
inline Bytes bits_at(Bytes b) {
  if constexpr (kShift > 0) b = _mm512_srli_epi16(b, kShift);
  if constexpr (kShift < 0) b = _mm512_slli_epi16(b, -kShift);
  return _mm512_and_si512(b, _mm512_set1_epi8(kMask));
}
inline Bytes either(Bytes a, Bytes b) { return _mm512_or_si512(a, b); }
inline Bytes add_to_bytes(Bytes a, int n) { return _mm512_add_epi8(a, _mm512_set1_epi8(static_cast<char>(n))); }
inline Table table_of(const uint8_t* p) {
  return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline Bytes look_up(Table t, Bytes b) { return _mm512_shuffle_epi8(t, b); }
inline Nibbles small_codes(Bytes b) { return {b}; }
#if defined(__AVX512VNNI__)
inline Codes codes_of(Bytes b) { return {b}; }
#else
inline Codes codes_of(Bytes b) { return {_mm512_and_si512(b, _mm512_set1_epi16(255)), _mm512_srli_epi16(b, 8)}; }
#endif
inline IVec load_signed(const uint8_t* p) {
  return _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline IVec load_unsigned(const uint8_t* p) {
  return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline IVec low_four(IVec v) { return _mm512_and_si512(v, broadcast(15)); }
inline IVec high_four(IVec v) { return _mm512_srli_epi32(v, 4); }
inline Vec power_of(IVec e) { return bits_as_float(_mm512_slli_epi32(e, 23)); }

#elif defined(__AVX2__)

using Bytes = __m256i;
using Table = __m256i;
inline Bytes load_bytes(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
inline void store_bytes(uint8_t* p, Bytes b) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), b); }
template <int kShift, int kMask>
inline Bytes bits_at(Bytes b) {
  if constexpr (kShift > 0) b = _mm256_srli_epi16(b, kShift);
  if constexpr (kShift < 0) b = _mm256_slli_epi16(b, -kShift);
  return _mm256_and_si256(b, _mm256_set1_epi8(kMask));
}
inline Bytes either(Bytes a, Bytes b) { return _mm256_or_si256(a, b); }
inline Bytes add_to_bytes(Bytes a, int n) { return _mm256_add_epi8(a, _mm256_set1_epi8(static_cast<char>(n))); }
inline Table table_of(const uint8_t* p) {
  return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline Bytes look_up(Table t, Bytes b) { return _mm256_shuffle_epi8(t, b); }
inline Nibbles small_codes(Bytes b) { return {b}; }
#if defined(QUIRE_AVX_VNNI)
inline Codes codes_of(Bytes b) { return {b}; }
#else
inline Codes codes_of(Bytes b) { return {_mm256_and_si256(b, _mm256_set1_epi16(255)), _mm256_srli_epi16(b, 8)}; }
#endif
inline IVec load_signed(const uint8_t* p) {
  return _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}
inline IVec load_unsigned(const uint8_t* p) {
  return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}
inline IVec low_four(IVec v) { return _mm256_and_si256(v, broadcast(15)); }
inline IVec high_four(IVec v) { return _mm256_srli_epi32(v, 4); }
inline Vec power_of(IVec e) { return bits_as_float(_mm256_slli_epi32(e, 23)); }

#elif defined(QUIRE_NEON)

using Bytes = uint8x16_t;
using Table = uint8x16_t;
inline Bytes load_bytes(const uint8_t* p) { return vld1q_u8(p); }
inline void store_bytes(uint8_t* p, Bytes b) { vst1q_u8(p, b); }
template <int kShift, int kMask>
inline Bytes bits_at(Bytes b) {
  if constexpr (kShift > 0) b = vshrq_n_u8(b, kShift);
  if constexpr (kShift < 0) b = vshlq_n_u8(b, -kShift);
  return vandq_u8(b, vdupq_n_u8(kMask));
}
inline Bytes either(Bytes a, Bytes b) { return vorrq_u8(a, b); }
inline Bytes add_to_bytes(Bytes a, int n) { return vaddq_u8(a, vdupq_n_u8(static_cast<uint8_t>(n))); }
inline Table table_of(const uint8_t* p) { return vld1q_u8(p); }
inline Bytes look_up(Table t, Bytes b) { return vqtbl1q_u8(t, b); }
inline Nibbles small_codes(Bytes b) { return {b}; }
#if defined(QUIRE_NEON_I8MM)
inline Codes codes_of(Bytes b) { return {b}; }
#else
inline Codes codes_of(Bytes b) { return {vreinterpretq_s8_u8(veorq_u8(b, vdupq_n_u8(128)))}; }
#endif
inline uint8x8_t load_four(const uint8_t* p) {
  uint32_t four;
  std::memcpy(&four, p, 4);
  return vreinterpret_u8_u32(vdup_n_u32(four));
}
inline IVec load_signed(const uint8_t* p) {
  return vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u8(load_four(p)))));
}
inline IVec load_unsigned(const uint8_t* p) {
  return vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(vmovl_u8(load_four(p)))));
}
inline IVec low_four(IVec v) { return vandq_s32(v, broadcast(15)); }
inline IVec high_four(IVec v) { return vshrq_n_s32(v, 4); }
inline Vec power_of(IVec e) { return bits_as_float(vshlq_n_s32(e, 23)); }

#else

struct Bytes {
  uint8_t b[16];
};
using Table = Bytes;
template <typename F>
inline Bytes each_byte(const F& f) {
  Bytes r;
  for (int i = 0; i < 16; ++i) r.b[i] = static_cast<uint8_t>(f(i));
  return r;
}
inline Bytes load_bytes(const uint8_t* p) {
  Bytes r;
  std::memcpy(r.b, p, 16);
  return r;
}
inline void store_bytes(uint8_t* p, const Bytes& b) { std::memcpy(p, b.b, 16); }
template <int kShift, int kMask>
inline Bytes bits_at(const Bytes& b) {
  return each_byte([&](int i) { return (kShift >= 0 ? b.b[i] >> kShift : b.b[i] << -kShift) & kMask; });
}
inline Bytes either(const Bytes& a, const Bytes& b) {
  return each_byte([&](int i) { return a.b[i] | b.b[i]; });
}
inline Bytes add_to_bytes(const Bytes& a, int n) {
  return each_byte([&](int i) { return a.b[i] + n; });
}
inline Table table_of(const uint8_t* p) { return load_bytes(p); }
inline Bytes look_up(const Table& t, const Bytes& b) {
  return each_byte([&](int i) { return t.b[b.b[i]]; });
}
inline Nibbles small_codes(const Bytes& b) {
  Nibbles n;
  std::memcpy(n.b, b.b, 16);
  return n;
}
inline Codes codes_of(const Bytes& b) { return load_codes(b.b); }
inline IVec load_signed(const uint8_t* p) {
  return {{static_cast<int8_t>(p[0]), static_cast<int8_t>(p[1]), static_cast<int8_t>(p[2]), static_cast<int8_t>(p[3])}};
}
inline IVec load_unsigned(const uint8_t* p) { return {{p[0], p[1], p[2], p[3]}}; }
inline IVec low_four(const IVec& v) { return {{v.i[0] & 15, v.i[1] & 15, v.i[2] & 15, v.i[3] & 15}}; }
inline IVec high_four(const IVec& v) { return {{v.i[0] >> 4, v.i[1] >> 4, v.i[2] >> 4, v.i[3] >> 4}}; }
inline Vec power_of(const IVec& e) {
  return bits_as_float({{e.i[0] << 23, e.i[1] << 23, e.i[2] << 23, e.i[3] << 23}});
}

#endif

}  // namespace quire::cpu::QUIRE_ISA
