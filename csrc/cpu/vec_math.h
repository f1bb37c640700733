// exp and what follows from it, in the vocabulary of isa.h: the same operations for every lane, no libm, so that a
// value has the same bits wherever it lies. Errors are a few 1e-7, relative unless said otherwise.
#pragma once

#include "cpu/isa.h"

namespace quire::cpu::QUIRE_ISA {

// e^x; exactly 1 at 0, exactly 0 below -87.3 (masked scores rely on it), 1.6e38 from 88 on.
inline Vec exp(Vec x) {
  const Vec magic = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const Vec y = max(broadcast(-87.3f), min(broadcast(88.0f), x));
  const Vec n = sub(fma(y, broadcast(1.44269504f), magic), magic);
  // ln 2 in two parts; the first has few bits, so that n times it is exact (Cody and Waite).
  Vec r = fma(n, broadcast(-0.693359375f), y);
  r = fma(n, broadcast(2.12194440e-4f), r);
  Vec p = broadcast(1.9875691500e-4f);  // minimax on [-ln2/2, ln2/2] (Cephes expf)
  p = fma(p, r, broadcast(1.3981999507e-3f));
  p = fma(p, r, broadcast(8.3334519073e-3f));
  p = fma(p, r, broadcast(4.1665795894e-2f));
  p = fma(p, r, broadcast(1.6666665459e-1f));
  p = fma(p, r, broadcast(5.0000001201e-1f));
  p = add(fma(p, mul(r, r), r), broadcast(1.0f));
  return where_less(x, broadcast(-87.3f), zero(), times_power(p, n));
}

// 2^x for x < 127; exactly 1 at 0, exactly 0 far below -127 (masked scores). Relative error 3e-6: for weights that
// become bf16.
inline Vec exp2(Vec x) {
  const Vec f = fraction(x);
  Vec p = broadcast(1.342668436e-2f);  // minimax of (2^f - 1) / f on [0, 1], relative to 2^f
  p = fma(p, f, broadcast(5.224247403e-2f));
  p = fma(p, f, broadcast(2.412802049e-1f));
  p = fma(p, f, broadcast(6.930448449e-1f));
  return times_floor_power(fma(p, f, broadcast(1.0f)), x);
}

// 1 / (1 + 2^t), t = -x / ln 2 within +-126.
inline Vec sigmoid(Vec x) {
  const Vec magic = broadcast(12582912.0f);
  const Vec t = max(broadcast(-126.0f), min(broadcast(126.0f), mul(x, broadcast(-1.44269504f))));
  const Vec y = add(t, magic), f = sub(t, sub(y, magic));
  Vec p = broadcast(1.326472731e-3f);  // minimax of (2^f - 1) / f on [-1/2, 1/2]: relative error of 2^f 1e-7
  p = fma(p, f, broadcast(9.671512991e-3f));
  p = fma(p, f, broadcast(5.550733581e-2f));
  p = fma(p, f, broadcast(2.402224243e-1f));
  p = fma(p, f, broadcast(6.931470037e-1f));
  p = fma(p, f, broadcast(1.0f));
  return reciprocal(fma(p, power(y), broadcast(1.0f)));
}

inline Vec magnitude(Vec x) { return max(sub(zero(), x), x); }

// Near 0 an odd polynomial (Cephes tanhf), else from exp.
inline Vec tanh(Vec x) {
  const Vec z = mul(x, x);
  Vec p = broadcast(-5.70498872745e-3f);
  p = fma(p, z, broadcast(2.06390887954e-2f));
  p = fma(p, z, broadcast(-5.37397155531e-2f));
  p = fma(p, z, broadcast(1.33314422036e-1f));
  p = fma(p, z, broadcast(-3.33332819422e-1f));
  p = fma(mul(p, z), x, x);
  const Vec a = magnitude(x);
  const Vec far = sub(broadcast(1.0f), div(broadcast(2.0f), add(exp(add(a, a)), broadcast(1.0f))));
  const Vec signed_far = where_less(x, zero(), sub(zero(), far), far);
  return where_less(a, broadcast(0.625f), p, signed_far);
}

// erfc(a) for a >= 0 (Numerical Recipes, erfcc: relative error 1.2e-7, plus that of exp's argument).
inline Vec erfc_positive(Vec a) {
  const Vec t = div(broadcast(1.0f), fma(broadcast(0.5f), a, broadcast(1.0f)));
  Vec p = broadcast(0.17087277f);
  for (const float c : {-0.82215223f, 1.48851587f, -1.13520398f, 0.27886807f, -0.18628806f, 0.09678418f, 0.37409196f,
                        1.00002368f, -1.26551223f}) {
    p = fma(p, t, broadcast(c));
  }
  return mul(t, exp(sub(p, mul(a, a))));
}

// 1 + erf(x)
inline Vec one_plus_erf(Vec x) {
  const Vec c = erfc_positive(magnitude(x));
  return where_less(x, zero(), c, sub(broadcast(2.0f), c));
}

}  // namespace quire::cpu::QUIRE_ISA
