// exp, log and sum with the bits of kernels/sampling/noise.py: the same IEEE operations in the same order, and
// nothing contracted. (vec_math.h is faster, and may differ in the last bits.)
#pragma once

#include <cmath>

#include "cpu/isa.h"

namespace quire::cpu::QUIRE_ISA {

// exp of values <= 0; 0 below -87 and for -inf.
inline Vec exact_exp(Vec x) {
  const Vec magic = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer, halves to even
  const Vec y = max(broadcast(-88.0f), x);
  const Vec k = sub(add(mul(y, broadcast(1.44269504088896341f)), magic), magic);
  const Vec r = sub(sub(y, mul(k, broadcast(0.693359375f))), mul(k, broadcast(-2.12194440054690583e-4f)));
  Vec series = broadcast(float(1.0 / 5040.0));
  for (const float c : {float(1.0 / 720.0), float(1.0 / 120.0), float(1.0 / 24.0), float(1.0 / 6.0), 0.5f, 1.0f, 1.0f}) {
    series = add(mul(series, r), broadcast(c));
  }
  return where_less(x, broadcast(-87.0f), zero(), times_power(series, k));
}

// Natural logarithm of a positive, finite value.
inline double exact_log(double x) {
  int exponent;
  double mantissa = std::frexp(x, &exponent);
  if (mantissa < 0.7071067811865476) {
    mantissa *= 2.0;
    --exponent;
  }
  const double s = (mantissa - 1.0) / (mantissa + 1.0), z = s * s;
  double series = 1.0 / 23.0;
  for (int odd = 21; odd > 0; odd -= 2) series = series * z + 1.0 / double(odd);
  return double(exponent) * 0.6931471805599453 + 2.0 * s * series;
}

inline double gumbel_of_word(uint32_t word) {
  return -exact_log(-exact_log((double(word) + 0.5) * (1.0 / 4294967296.0)));
}

// Sum of n > 0 values, halves added until one is left. `scratch` has room for n / 2 + 1.
inline double tree_sum(const float* x, int64_t n, double* scratch) {
  if (n == 1) return x[0];
  const int64_t half = n / 2;
  for (int64_t i = 0; i < half; ++i) scratch[i] = double(x[i]) + double(x[half + i]);
  if (n % 2) scratch[half] = x[n - 1];
  for (int64_t left = half + n % 2; left > 1;) {
    const int64_t h = left / 2;
    const double* upper = scratch + h;
    for (int64_t i = 0; i < h; ++i) scratch[i] += upper[i];
    if (left % 2) scratch[h] = scratch[left - 1];
    left = h + left % 2;
  }
  return scratch[0];
}

}  // namespace quire::cpu::QUIRE_ISA
