// Sums of two rows, factors and the soft cap of logits, between the other ops of some model families.
#pragma once

#include <cstdint>

#include "cpu/levels.h"
#include "cpu/linear.h"
#include "cpu/thread_pool.h"

namespace quire::cpu {

struct PointwiseArgs {
  const void *x, *other;  // [rows, size], rows `stride` elements apart; other: only for add
  void* y;                // [rows, size], contiguous; may be x
  int64_t rows, size, stride, other_stride;
  float scale, cap;  // cap 0: none
  Type type;
  Type x_type;  // only for add, whose x may be fp32
};

// y = x as fp32.
struct WidenArgs {
  const void* x;  // [rows, size], rows `stride` elements apart
  float* y;       // [rows, size], contiguous
  int64_t rows, size, stride;
  Type type;
};

// y = x + other * sigmoid(gate): a shared expert behind its gate.
struct AddGatedArgs {
  const void *x, *other, *gate;  // [rows, size], rows `stride` elements apart; gate [rows], `gate_stride` apart
  void* y;                       // [rows, size], contiguous
  int64_t rows, size, stride, other_stride, gate_stride;
  Type type;
};

// y = x * sigmoid(gate), or with `plain` x * gate: a gate for each `per` elements.
struct GateRowsArgs {
  const void *x, *gate;  // [rows, size] and [rows, size / per], rows `stride` apart
  void* y;               // [rows, size], contiguous
  int64_t rows, size, per, stride, gate_stride;
  bool plain;
  Type type;
};

// y = x, of parts of rows: [tokens, heads, size], both strided.
struct CopyArgs {
  const void* x;
  void* y;
  int64_t tokens, heads, size, x_token_stride, x_head_stride, y_token_stride, y_head_stride;
  Type type;
};

struct PointwiseKernels {
  void (*add)(const PointwiseArgs&, ThreadPool&);    // x + other
  void (*scale)(const PointwiseArgs&, ThreadPool&);  // x * scale, then cap * tanh(. / cap)
  void (*copy)(const CopyArgs&, ThreadPool&);
  void (*widen)(const WidenArgs&, ThreadPool&);
  void (*add_gated)(const AddGatedArgs&, ThreadPool&);
  void (*gate)(const GateRowsArgs&, ThreadPool&);
};

QUIRE_LEVELS(PointwiseKernels, kPointwise)

}  // namespace quire::cpu
