// K and V of a head as numbers of 8 or 4 bits (kernels/kv_codes.py states them).
//
//   8 bits   x = scale * c,               c = -127 ... 127, scale = largest magnitude / 127
//   4 bits   x = scale * (low + step * q), q = 0 ... 15: the numbers of 8 bits once more, with a low and a step, integers
//            of their own, for every 32 of them
//
// So 4 bits become 8 bits by integers alone, and products are those of 8 bits.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "cpu/row_loops.h"

namespace quire::cpu::QUIRE_ISA {

constexpr int64_t kTilePositions = 16;
constexpr int64_t kCodeGroup = 32;  // numbers that share a low and a step

inline int64_t code_groups(int64_t size) { return (size + kCodeGroup - 1) / kCodeGroup; }

// x / scale in place, where the largest magnitude becomes 127; returns the scale.
inline float scale_to_codes(float* x, int64_t size) {
  Vec tops = zero();
  over_vectors(size, [&](int64_t i, int n) {
    const Vec v = load_some(x + i, n);
    tops = max(max(v, sub(zero(), v)), tops);
  });
  const float most = largest(tops);
  const Vec inverse = broadcast(most > 0.0f ? 127.0f / most : 0.0f);
  over_vectors(size, [&](int64_t i, int n) { store_some(x + i, mul(load_some(x + i, n), inverse), n); });
  return most / 127.0f;
}

// To the nearest integer, ties to even.
inline float round_even(float x) {
  const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an even integer
  return (x + magic) - magic;
}

// The low and the step of one group.
struct CodeGroup {
  float low, step;

  // Sixteen steps reach over the group, so that its ends are half a step from a code, and codes stay within 8 bits.
  static CodeGroup of(const float* x, int64_t size) {
    float least = x[0], most = x[0];
    for (int64_t i = 1; i < size; ++i) least = std::min(least, x[i]), most = std::max(most, x[i]);
    const float step = std::max(1.0f, std::ceil((most - least) * 0.0625f));
    const float low = round_even((least + most) * 0.5f - 7.5f * step);
    return {std::min(std::max(-128.0f, low), 127.0f - 15.0f * step), step};
  }
  int code(float x) const {
    return static_cast<int>(std::min(std::max(0.0f, std::floor((x - low) / step + 0.5f)), 15.0f));
  }
};

}  // namespace quire::cpu::QUIRE_ISA
