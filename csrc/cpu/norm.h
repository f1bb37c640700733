// RMSNorm and LayerNorm without a bias, one row at a time. Strides are in elements. A row's bits depend on that row alone.
#pragma once

#include <cstdint>

#include "cpu/levels.h"
#include "cpu/linear.h"
#include "cpu/quantized.h"
#include "cpu/thread_pool.h"

namespace quire::cpu {

// y = x / sqrt(mean(x^2) + eps) * weight, for rows (token, head). With `residual`, x + residual is rounded to `sum_type`,
// written to `sum` and normalised. With `rows.q` the result, rounded to the type, is written there as int8 instead of
// to y. residual_type and sum_type are the type or fp32; a residual of fp32 has a sum of fp32. `centered`: the mean of the
// row is taken from its numbers first.
struct NormArgs {
  const void *x, *residual;  // residual and sum [tokens, size] of stride residual_stride and size, or null
  const float* weight;       // head h has weight + h * weight_stride
  void *y, *sum;             // y is contiguous
  int64_t tokens, heads, size;
  int64_t token_stride, head_stride, residual_stride, weight_stride;
  float eps;
  Type type;
  QuantizedRows rows;  // heads must be 1
  RowFormat format;
  Type residual_type, sum_type;
  bool centered;
};

struct NormKernels {
  void (*norm)(const NormArgs&, ThreadPool&);
};

QUIRE_LEVELS(NormKernels, kNorm)

}  // namespace quire::cpu
