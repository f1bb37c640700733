// Comparisons of vectors as bits: bit i is lane i. A NaN compares false.
//
//   at_least(a,b)   a >= b
//   above(a,b)      a > b
//   is_nan(a)
#pragma once

#include "cpu/isa.h"

namespace quire::cpu::QUIRE_ISA {

#if defined(__AVX512F__)
inline uint32_t at_least(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
inline uint32_t above(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
inline uint32_t is_nan(Vec a) { return _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q); }
#elif defined(__AVX2__)
inline uint32_t at_least(Vec a, Vec b) { return uint32_t(_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GE_OQ))); }
inline uint32_t above(Vec a, Vec b) { return uint32_t(_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GT_OQ))); }
inline uint32_t is_nan(Vec a) { return uint32_t(_mm256_movemask_ps(_mm256_cmp_ps(a, a, _CMP_UNORD_Q))); }
#elif defined(QUIRE_NEON)
inline uint32_t bits_of(uint32x4_t mask) {
  const uint32x4_t bit = {1, 2, 4, 8};
  return vaddvq_u32(vandq_u32(mask, bit));
}
inline uint32_t at_least(Vec a, Vec b) { return bits_of(vcgeq_f32(a, b)); }
inline uint32_t above(Vec a, Vec b) { return bits_of(vcgtq_f32(a, b)); }
inline uint32_t is_nan(Vec a) { return bits_of(vmvnq_u32(vceqq_f32(a, a))); }
#else
template <typename F>
inline uint32_t bits_where(const F& f) {
  return uint32_t(f(0)) | uint32_t(f(1)) << 1 | uint32_t(f(2)) << 2 | uint32_t(f(3)) << 3;
}
inline uint32_t at_least(Vec a, Vec b) { return bits_where([&](int i) { return a.f[i] >= b.f[i]; }); }
inline uint32_t above(Vec a, Vec b) { return bits_where([&](int i) { return a.f[i] > b.f[i]; }); }
inline uint32_t is_nan(Vec a) { return bits_where([&](int i) { return a.f[i] != a.f[i]; }); }
#endif

}  // namespace quire::cpu::QUIRE_ISA
