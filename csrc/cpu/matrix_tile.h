// Tiles of matrix products, of the level neon_i8mm: bfmmla and usmmla multiply two columns by two rows, with four bf16 or
// eight int8 of k at a time.
//
// Weights lie as they do for dot products: words of 32 bits, one per column of the panel, then the next words of k. Two
// vectors of four columns, of neighbouring words of k, are zipped into pairs of columns. Rows of a tile are laid out so
// that two words of a row lie beside those of its neighbour: [words of k / 2][rows, an even number][2].
#pragma once

#include <algorithm>

#include "cpu/int_vec.h"
#include "cpu/linear.h"

namespace quire::cpu::QUIRE_ISA {

#if defined(QUIRE_NEON_I8MM)
constexpr bool kMatrix = true;
#else
constexpr bool kMatrix = false;
#endif

// Whether rows of `words` words of k are laid out for matrix products: an odd word would need a sum of its own.
constexpr bool takes_matrix(int64_t words) { return kMatrix && words % 2 == 0; }

// The layout of one tile of rows: in words, where word s of row r lies.
struct RowLayout {
  int64_t width;
  bool matrix;

  RowLayout(int64_t rows, bool matrix) : width(matrix ? (rows + 1) / 2 * 2 : rows), matrix(matrix) {}
  int64_t at(int64_t s, int64_t r) const { return matrix ? (s / 2 * width + r) * 2 + s % 2 : s * width + r; }
};

#if defined(QUIRE_NEON_I8MM)

struct Bf16Matrix {
  using Vector = float32x4_t;
  static Vector product(Vector acc, uint32x4_t w, uint32x4_t x) {
    return vbfmmlaq_f32(acc, vreinterpretq_bf16_u32(w), vreinterpretq_bf16_u32(x));
  }
  static void put(float* p, uint32x4_t v) { vst1q_f32(p, vreinterpretq_f32_u32(v)); }
  static uint32x4_t words(Vector v) { return vreinterpretq_u32_f32(v); }
};

struct Int8Matrix {
  using Vector = int32x4_t;
  static Vector product(Vector acc, uint32x4_t w, uint32x4_t x) {
    return vusmmlaq_s32(acc, vreinterpretq_u8_u32(w), vreinterpretq_s8_u32(x));
  }
  static void put(int32_t* p, uint32x4_t v) { vst1q_s32(p, vreinterpretq_s32_u32(v)); }
  static uint32x4_t words(Vector v) { return vreinterpretq_u32_s32(v); }
};

// R rows x V vectors of columns over `words` words of k -> results [R, rounded up to even][V * kLanes]. Calls fetch(s) for
// every word.
template <typename M, int R, int V, typename Result, typename F>
inline void multiply_tile(const uint32_t* x, const uint32_t* w, int64_t words, Result* results, const F& fetch) {
  constexpr int P = (R + 1) / 2;
  typename M::Vector acc[P][2 * V];
  UNROLL for (int p = 0; p < P; ++p) {
    UNROLL for (int v = 0; v < 2 * V; ++v) acc[p][v] = typename M::Vector{};
  }
  for (int64_t s = 0; s < words; s += 2, x += 4 * P, w += 2 * kPanel) {
    uint32x4_t columns[2 * V];
    UNROLL for (int v = 0; v < V; ++v) {
      const uint32x4_t first = vld1q_u32(w + v * kLanes), second = vld1q_u32(w + kPanel + v * kLanes);
      columns[2 * v] = vzip1q_u32(first, second), columns[2 * v + 1] = vzip2q_u32(first, second);
    }
    UNROLL for (int p = 0; p < P; ++p) {
      const uint32x4_t rows = vld1q_u32(x + 4 * p);
      UNROLL for (int v = 0; v < 2 * V; ++v) acc[p][v] = M::product(acc[p][v], columns[v], rows);
    }
    fetch(s), fetch(s + 1);
  }
  // An accumulator holds column 0 of both rows, then column 1.
  UNROLL for (int p = 0; p < P; ++p) {
    UNROLL for (int v = 0; v < V; ++v) {
      const uint32x4_t left = M::words(acc[p][2 * v]), right = M::words(acc[p][2 * v + 1]);
      M::put(results + (2 * p * V + v) * kLanes, vuzp1q_u32(left, right));
      M::put(results + ((2 * p + 1) * V + v) * kLanes, vuzp2q_u32(left, right));
    }
  }
}

#endif

}  // namespace quire::cpu::QUIRE_ISA
