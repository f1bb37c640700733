// The rotation of kernels/rotation.py: every block of inputs times a Hadamard matrix, in fp32. A step makes of inputs at
// a distance of 1, 2, 4 ... their sum and their difference; up to a vector's lanes the two lie in one vector.
#pragma once

#include <cstdint>

#include "cpu/isa.h"
#include "cpu/row_loops.h"

namespace quire::cpu::QUIRE_ISA {

// Powers of two that make 1 / block.
inline float row_factor(int64_t block) { return block == 64 ? 0.125f : 0.25f; }
inline float weight_factor(int64_t block) { return block == 16 ? 0.25f : 0.125f; }

// Lanes i and i ^ kDistance: the sum in the lower one, the difference in the upper one. The product with +-1 is exact.
#if defined(__AVX512F__)
template <int kDistance>
inline Vec swapped(Vec v) {
  if constexpr (kDistance == 1) return _mm512_permute_ps(v, 0xb1);
  if constexpr (kDistance == 2) return _mm512_permute_ps(v, 0x4e);
  if constexpr (kDistance == 4) return _mm512_shuffle_f32x4(v, v, 0xb1);
  return _mm512_shuffle_f32x4(v, v, 0x4e);
}
#elif defined(__AVX2__)
template <int kDistance>
inline Vec swapped(Vec v) {
  if constexpr (kDistance == 1) return _mm256_permute_ps(v, 0xb1);
  if constexpr (kDistance == 2) return _mm256_permute_ps(v, 0x4e);
  return _mm256_permute2f128_ps(v, v, 1);
}
#elif defined(QUIRE_NEON)
template <int kDistance>
inline Vec swapped(Vec v) {
  return kDistance == 1 ? vrev64q_f32(v) : vextq_f32(v, v, 2);
}
#else
template <int kDistance>
inline Vec swapped(Vec v) {
  return each([&](int i) { return v.f[i ^ kDistance]; });
}
#endif

template <int kDistance>
inline Vec signs() {
  alignas(64) float sign[kLanes];
  for (int i = 0; i < kLanes; ++i) sign[i] = (i & kDistance) != 0 ? -1.0f : 1.0f;
  return load(sign);
}

template <int kDistance, int kCount>
inline void mix_lanes(Vec (&v)[kCount]) {
  if constexpr (kDistance < kLanes) {
    const Vec sign = signs<kDistance>();
    UNROLL for (int i = 0; i < kCount; ++i) v[i] = fma(v[i], sign, swapped<kDistance>(v[i]));
  }
}

template <int kDistance, int kCount>
inline void mix_vectors(Vec (&v)[kCount]) {
  if constexpr (kDistance < kCount) {
    UNROLL for (int i = 0; i < kCount; ++i) {
      if ((i & kDistance) != 0) continue;
      const Vec low = v[i], high = v[i + kDistance];
      v[i] = add(low, high);
      v[i + kDistance] = sub(low, high);
    }
  }
}

template <int kBlock, typename T>
inline void rotate_blocks(const T* x, int64_t k, float* y) {
  constexpr int kCount = kBlock / kLanes;
  for (int64_t begin = 0; begin < k; begin += kBlock) {
    Vec v[kCount];
    UNROLL for (int i = 0; i < kCount; ++i) v[i] = load(x + begin + i * kLanes);
    mix_lanes<1>(v), mix_lanes<2>(v), mix_lanes<4>(v), mix_lanes<8>(v);
    mix_vectors<1>(v), mix_vectors<2>(v), mix_vectors<4>(v), mix_vectors<8>(v);
    UNROLL for (int i = 0; i < kCount; ++i) store(y + begin + i * kLanes, v[i]);
  }
}

// y = x times the matrix of +-1, which lacks the factors above. `y` may be `x`.
template <typename T>
inline void rotate(const T* x, int64_t k, int64_t block, float* y) {
  switch (block) {
    case 64: return rotate_blocks<64>(x, k, y);
    case 32: return rotate_blocks<32>(x, k, y);
    default: return rotate_blocks<16>(x, k, y);
  }
}

// The blocks of a head: its largest power of two.
inline int64_t head_block(int64_t head_dim) { return head_dim & -head_dim; }

// The same for a head of K, V, a query or an output, in place. Applied twice, it multiplies by `head_block`.
inline void rotate_head(float* x, int64_t head_dim) {
  const int64_t block = head_block(head_dim);
  int64_t distance = 1;
  if (block >= 16) {
    distance = std::min<int64_t>(block, 64);
    rotate(x, head_dim, distance, x);
  }
  for (; distance < block; distance *= 2) {
    for (int64_t begin = 0; begin < head_dim; begin += 2 * distance) {
      float *low = x + begin, *high = low + distance;
      over_vectors(distance, [&](int64_t i, int n) {
        const Vec a = load_some(low + i, n), b = load_some(high + i, n);
        store_some(low + i, add(a, b), n);
        store_some(high + i, sub(a, b), n);
      });
    }
  }
}

}  // namespace quire::cpu::QUIRE_ISA
