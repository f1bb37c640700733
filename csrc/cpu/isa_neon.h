// The Arm branch of isa.h: vectors of four. Levels "neon" (Armv8.2 with byte dot products) and "neon_i8mm" (with the bf16
// and int8 extensions), which differ in the products of bf16 and in the rounding to bf16.
//
// The bf16 product of neon_i8mm is bfdot: per pair one sum of two products, rounded to odd, denormals flushed (Arm ARM,
// BFDotAdd; FPCR.EBF is 0). bfmmla is two of them in order, so that tiles of matrix_tile.h have the same bits.
// Included by isa.h, in the namespace of the level.

using Vec = float32x4_t;
constexpr int kLanes = 4;
constexpr int kRows = 12;        // 12 x 2 accumulators, 2 weights (widened: 4), 1 broadcast (2): at most 30 of 32 registers
constexpr int kTileVectors = 2;  // few rows take more (tile_vectors in linear_kernel.cpp)
inline Vec zero() { return vdupq_n_f32(0.0f); }
inline Vec load(const float* p) { return vld1q_f32(p); }
inline void store(float* p, Vec v) { vst1q_f32(p, v); }
inline Vec broadcast(float f) { return vdupq_n_f32(f); }
inline Vec fma(Vec a, Vec b, Vec c) { return vfmaq_f32(c, a, b); }
inline void keep(Vec& v) { __asm__("" : "+w"(v)); }
inline Vec add(Vec a, Vec b) { return vaddq_f32(a, b); }
inline Vec sub(Vec a, Vec b) { return vsubq_f32(a, b); }
inline Vec mul(Vec a, Vec b) { return vmulq_f32(a, b); }
inline Vec div(Vec a, Vec b) { return vdivq_f32(a, b); }
inline Vec max(Vec a, Vec b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }  // fmax would keep a NaN of either
inline Vec min(Vec a, Vec b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
inline Vec where_less(Vec a, Vec b, Vec x, Vec y) { return vbslq_f32(vcltq_f32(a, b), x, y); }
inline Vec times_power(Vec p, Vec n) {
  const int32x4_t bits = vshlq_n_s32(vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127)), 23);
  return vmulq_f32(p, vreinterpretq_f32_s32(bits));
}
inline Vec power(Vec y) {
  return vreinterpretq_f32_s32(vaddq_s32(vshlq_n_s32(vreinterpretq_s32_f32(y), 23), vdupq_n_s32(127 << 23)));
}
inline Vec reciprocal(Vec d) { return vdivq_f32(vdupq_n_f32(1.0f), d); }
inline Vec fraction(Vec x) {
  const Vec y = max(vdupq_n_f32(-127.0f), x);
  return vsubq_f32(y, vrndmq_f32(y));
}
inline Vec times_floor_power(Vec p, Vec x) {
  const int32x4_t power = vshlq_n_s32(vcvtmq_s32_f32(max(vdupq_n_f32(-127.0f), x)), 23);
  return vreinterpretq_f32_s32(vaddq_s32(vreinterpretq_s32_f32(p), power));
}
inline float sum(Vec v) {
  const float32x2_t s = vadd_f32(vget_low_f32(v), vget_high_f32(v));
  return vget_lane_f32(vpadd_f32(s, s), 0);
}
inline float largest(Vec v) {
  const Vec pairs = max(v, vextq_f32(v, v, 2));
  return vgetq_lane_f32(max(pairs, vextq_f32(pairs, pairs, 1)), 0);
}
inline Vec load(const uint16_t* p) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16)); }

constexpr int kWidened = 16;
inline void widen(uint16_t* to, const int8_t* from) {
  const int8x16_t v = vld1q_s8(from);
  const auto upper = [](int16x4_t i) {
    return vshrn_n_u32(vreinterpretq_u32_f32(vcvtq_f32_s32(vmovl_s16(i))), 16);
  };
  const int16x8_t low = vmovl_s8(vget_low_s8(v)), high = vmovl_s8(vget_high_s8(v));
  vst1q_u16(to, vcombine_u16(upper(vget_low_s16(low)), upper(vget_high_s16(low))));
  vst1q_u16(to + 8, vcombine_u16(upper(vget_low_s16(high)), upper(vget_high_s16(high))));
}

#if defined(QUIRE_NEON_I8MM)
struct Weights {
  bfloat16x8_t v;
};
using Pair = Weights;
inline Weights load_pairs(const uint16_t* p) { return {vreinterpretq_bf16_u16(vld1q_u16(p))}; }
inline Pair broadcast_pair(const uint16_t* x) {
  uint32_t two;
  std::memcpy(&two, x, 4);
  return {vreinterpretq_bf16_u32(vdupq_n_u32(two))};
}
inline Vec dot(Vec acc, const Weights& w, const Pair& x) { return vbfdotq_f32(acc, w.v, x.v); }
inline void keep(Weights& w) { __asm__("" : "+w"(w.v)); }
inline void store(uint16_t* p, Vec v) { vst1_u16(p, vreinterpret_u16_bf16(vcvt_bf16_f32(v))); }
#else
struct Weights {
  Vec even, odd;  // bf16 is the upper half of a float: widening is a shift or a mask
};
using Pair = Weights;
inline Weights widened(uint32x4_t v) {
  return {vreinterpretq_f32_u32(vshlq_n_u32(v, 16)), vreinterpretq_f32_u32(vandq_u32(v, vdupq_n_u32(0xffff0000u)))};
}
inline Weights load_pairs(const uint16_t* p) { return widened(vreinterpretq_u32_u16(vld1q_u16(p))); }
inline Pair broadcast_pair(const uint16_t* x) {
  uint32_t two;
  std::memcpy(&two, x, 4);
  return widened(vdupq_n_u32(two));
}
inline Vec dot(Vec acc, const Weights& w, const Pair& x) {
  return vfmaq_f32(vfmaq_f32(acc, w.even, x.even), w.odd, x.odd);
}
inline void keep(Weights& w) { __asm__("" : "+w"(w.even), "+w"(w.odd)); }
inline void store(uint16_t* p, Vec v) {
  const uint32x4_t u = vreinterpretq_u32_f32(v), half = vshrq_n_u32(u, 16);
  const uint32x4_t carried = vaddq_u32(vaddq_u32(u, vdupq_n_u32(0x7fff)), vandq_u32(half, vdupq_n_u32(1)));
  const uint32x4_t quiet = vorrq_u32(half, vdupq_n_u32(0x40));
  vst1_u16(p, vmovn_u32(vbslq_u32(vceqq_f32(v, v), vshrq_n_u32(carried, 16), quiet)));
}
#endif
inline void store(uint16_t* p, Vec a, Vec b) {
  store(p, a);
  store(p + kLanes, b);
}
