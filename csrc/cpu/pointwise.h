// What lies between the other ops where a family wants it: a sum of two rows, a factor, the soft cap of logits.
#pragma once

#include <cstdint>

#include "cpu/levels.h"
#include "cpu/linear.h"
#include "cpu/thread_pool.h"

namespace quire::cpu {

struct PointwiseArgs {
  const void *x, *other;  // [rows, size], rows `stride` elements apart; other: of add alone
  void* y;                // [rows, size], contiguous; may be x
  int64_t rows, size, stride, other_stride;
  float scale, cap;  // cap 0: none
  Type type;
};

struct PointwiseKernels {
  void (*add)(const PointwiseArgs&, ThreadPool&);    // x + other
  void (*scale)(const PointwiseArgs&, ThreadPool&);  // x * scale, then cap * tanh(. / cap)
};

QUIRE_LEVELS(PointwiseKernels, kPointwise)

}  // namespace quire::cpu
