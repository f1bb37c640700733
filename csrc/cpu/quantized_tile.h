// What the register tiles of quantized linears share, of one ISA level: where they work, what they fetch, and results.
#pragma once

#include <algorithm>

#include "cpu/int_vec.h"
#include "cpu/quantized.h"
#include "cpu/row_loops.h"

namespace quire::cpu::QUIRE_ISA {

// Where a tile works, and the lines of the next panel that it prefetches.
struct Place {
  const uint8_t* panel;
  int64_t row, column;  // the first of each; the column within the matrix
  int64_t first_lane;   // of the panel's 32
  const char* next;     // null: a single tile, which streams
  int64_t next_lines;
  const int8_t* packed = nullptr;  // the rows as packed_quads.h lays them out, or null: as they came
};

inline void prefetch(const Place& at, int64_t line) {
  __asm__ volatile("");  // else gcc drops calls of a function that only prefetches, as if it had no effect
  if (line < at.next_lines) __builtin_prefetch(at.next + line * 64, 0, 2);
}

// What a row's sums are still to be multiplied with: 1 where every block of it has a scale.
inline Vec row_scale(const QuantizedLinearArgs& a, int64_t row) {
  return broadcast(a.format.rows().block == 0 ? a.x.scale[row] : 1.0f);
}

// t * s_x (+ bias) of the first factor t; column of the first of the n results of it that exist.
inline Vec result(const QuantizedLinearArgs& a, Vec t, Vec x_scale, int64_t column, int n) {
  return a.bias == nullptr ? mul(t, x_scale) : fused(t, x_scale, load_some(a.bias + column, n));
}

// One vector of results, rounded to the type.
inline void write(const QuantizedLinearArgs& a, int64_t row, int64_t column, Vec t) {
  const int n = static_cast<int>(std::min<int64_t>(kLanes, a.n - column));
  if (n <= 0) return;
  const Vec y = result(a, t, row_scale(a, row), column, n);
  if (a.y_type == Type::f32) {
    store_some(static_cast<float*>(a.y) + row * a.y_stride + column, y, n);
  } else {
    store_some(static_cast<uint16_t*>(a.y) + row * a.y_stride + column, y, n);
  }
}

inline void store_pair(uint16_t* y, Vec left, Vec right) { store(y, left, right); }
inline void store_pair(float* y, Vec left, Vec right) {
  store(y, left);
  store(y + kLanes, right);
}

// The results of R rows by V vectors of columns, t(r, v) as in `write`; tests of the type and for the last panel are
// out of the loop over rows, and two vectors are rounded at once.
template <int R, int V, typename F>
inline void write_tile(const QuantizedLinearArgs& a, const Place& at, const F& t) {
  if (a.n - at.column < V * kLanes) {
    for (int r = 0; r < R; ++r) {
      UNROLL for (int v = 0; v < V; ++v) write(a, at.row + r, at.column + v * kLanes, t(r, v));
    }
    return;
  }
  const auto rows_to = [&](auto* y) {
    y += at.row * a.y_stride + at.column;
    for (int r = 0; r < R; ++r, y += a.y_stride) {
      const Vec x_scale = row_scale(a, at.row + r);
      const auto whole = [&](int v) { return result(a, t(r, v), x_scale, at.column + v * kLanes, kLanes); };
      UNROLL for (int v = 0; v < V; v += 2) store_pair(y + v * kLanes, whole(v), whole(v + 1));
    }
  };
  if (a.y_type == Type::f32) {
    rows_to(static_cast<float*>(a.y));
  } else {
    rows_to(static_cast<uint16_t*>(a.y));
  }
}

}  // namespace quire::cpu::QUIRE_ISA
