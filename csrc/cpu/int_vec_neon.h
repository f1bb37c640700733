// The Arm branch of int_vec.h. Weights stay unsigned where usdot takes them so (neon_i8mm); sdot wants them signed.
// Included by int_vec.h, in the namespace of the level.

using IVec = int32x4_t;
constexpr int kChannelRows = 12, kGroupRows = 3, kFewRows = 2, kFewTiles = 2;
template <int R>
constexpr int kVectors = R == 1 ? 8 : R <= 5 ? 4 : 2;  // one row: a whole panel at once, so that it streams
template <int R>
constexpr int kFewVectors = 4;
struct Nibbles {
  uint8x16_t v;
};
struct Quad {
  int8x16_t v;
};
inline IVec broadcast(int32_t i) { return vdupq_n_s32(i); }
inline IVec load_ints(const int32_t* p) { return vld1q_s32(p); }
inline void store_ints(int32_t* p, IVec v) { vst1q_s32(p, v); }
inline IVec dot(IVec acc, const Nibbles& w, const Quad& x) { return vdotq_s32(acc, vreinterpretq_s8_u8(w.v), x.v); }
#if defined(QUIRE_NEON_I8MM)
constexpr int kCodesZero = 128;
struct Codes {
  uint8x16_t v;
};
inline Codes load_codes(const uint8_t* p) { return {vld1q_u8(p)}; }
inline uint8x16_t raw(const Codes& c) { return c.v; }
inline IVec dot(IVec acc, const Codes& w, const Quad& x) { return vusdotq_s32(acc, w.v, x.v); }
#else
constexpr int kCodesZero = 0;
struct Codes {
  int8x16_t v;
};
inline Codes load_codes(const uint8_t* p) { return {vreinterpretq_s8_u8(veorq_u8(vld1q_u8(p), vdupq_n_u8(128)))}; }
inline uint8x16_t raw(const Codes& c) { return veorq_u8(vreinterpretq_u8_s8(c.v), vdupq_n_u8(128)); }
inline IVec dot(IVec acc, const Codes& w, const Quad& x) { return vdotq_s32(acc, w.v, x.v); }
#endif
inline Nibbles low_nibbles(const Codes& c) { return {vandq_u8(raw(c), vdupq_n_u8(15))}; }
inline Nibbles high_nibbles(const Codes& c) { return {vshrq_n_u8(raw(c), 4)}; }
inline Quad broadcast_quad(const int8_t* x) {
  int32_t four;
  std::memcpy(&four, x, 4);
  return {vreinterpretq_s8_s32(vdupq_n_s32(four))};
}
inline Vec to_float(IVec v) { return vcvtq_f32_s32(v); }
inline Vec bits_as_float(IVec v) { return vreinterpretq_f32_s32(v); }
inline Vec fused(Vec a, Vec b, Vec c) { return fma(a, b, c); }
inline int16x8_t rounded(Vec a, Vec b) {
  return vcombine_s16(vqmovn_s32(vcvtnq_s32_f32(a)), vqmovn_s32(vcvtnq_s32_f32(b)));
}
inline void store_rounded(int8_t* p, Vec v) {
  const int8x8_t bytes = vqmovn_s16(rounded(v, v));
  std::memcpy(p, &bytes, 4);
}
inline void store_rounded(int8_t* p, Vec a, Vec b, Vec c, Vec d) {
  vst1q_s8(p, vcombine_s8(vqmovn_s16(rounded(a, b)), vqmovn_s16(rounded(c, d))));
}
inline IVec add_quads(IVec acc, const int8_t* p) { return vdotq_s32(acc, vld1q_s8(p), vdupq_n_s8(1)); }
inline int32_t sum(IVec v) { return vaddvq_s32(v); }
inline Vec load_half(const uint8_t* p) {
  return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p)));
}
inline void load_multipliers(const uint8_t* p, IVec (&m)[8]) {
  const uint8x16_t both = vld1q_u8(p), halves[2] = {vandq_u8(both, vdupq_n_u8(15)), vshrq_n_u8(both, 4)};
  UNROLL for (int h = 0; h < 2; ++h) {
    const uint16x8_t low = vmovl_u8(vget_low_u8(halves[h])), high = vmovl_u8(vget_high_u8(halves[h]));
    m[4 * h] = vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(low)));
    m[4 * h + 1] = vreinterpretq_s32_u32(vmovl_u16(vget_high_u16(low)));
    m[4 * h + 2] = vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(high)));
    m[4 * h + 3] = vreinterpretq_s32_u32(vmovl_u16(vget_high_u16(high)));
  }
}
inline IVec start_group(IVec m, const int32_t* p) {
  return vbslq_s32(vtstq_s32(m, vdupq_n_s32(1)), broadcast(p[1]), broadcast(p[0]));
}
inline IVec add_scaled(IVec acc, IVec d, IVec m) { return vmlaq_s32(acc, d, m); }
class Scaler {
 public:
  Scaler(IVec m, int zero) : each_(vreinterpretq_u8_s32(vmulq_s32(m, broadcast(0x01010101)))) {
    const uint8x16_t eight = vsubq_u8(vdupq_n_u8(8), vandq_u8(each_, vdupq_n_u8(1)));
    offset_ = vmlsq_u8(vdupq_n_u8(static_cast<uint8_t>(zero)), each_, eight);
  }
  void store(const Nibbles& n, uint8_t* p) const { vst1q_u8(p, vmlaq_u8(offset_, n.v, each_)); }

 private:
  uint8x16_t each_, offset_;
};
