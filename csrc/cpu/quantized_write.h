// The end of every quantized linear, of one ISA level: the sums of its tiles become results.
#pragma once

#include <algorithm>

#include "cpu/int_vec.h"
#include "cpu/quantized.h"
#include "cpu/row_loops.h"

namespace quire::cpu::QUIRE_ISA {

// t * s_x (+ bias), rounded to the type; column and lane of the first of kLanes results.
inline void write(const QuantizedLinearArgs& a, int64_t row, int64_t column, Vec t) {
  const int n = static_cast<int>(std::min<int64_t>(kLanes, a.n - column));
  if (n <= 0) return;
  const Vec x_scale = broadcast(a.x.scale[row]);
  const Vec y = a.bias == nullptr ? mul(t, x_scale) : fused(t, x_scale, load_some(a.bias + column, n));
  if (a.y_type == Type::f32) {
    store_some(static_cast<float*>(a.y) + row * a.y_stride + column, y, n);
  } else {
    store_some(static_cast<uint16_t*>(a.y) + row * a.y_stride + column, y, n);
  }
}

}  // namespace quire::cpu::QUIRE_ISA
