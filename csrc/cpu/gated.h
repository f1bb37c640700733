// Gated activations, one row at a time. Strides are in elements. A row's bits depend on that row alone.
#pragma once

#include <cstdint>

#include "cpu/levels.h"
#include "cpu/linear.h"
#include "cpu/quantized.h"
#include "cpu/thread_pool.h"

namespace quire::cpu {

enum class Gate : int { silu = 0, gelu_tanh = 1, gelu = 2, swiglu_oai = 3 };

struct GatedArgs {
  const void* gate_up;  // [tokens, 2 * size], rows `stride` apart
  void* y;              // [tokens, size]
  int64_t tokens, size, stride;
  Gate gate;
  Type type;
  QuantizedRows rows;  // with rows.q the result, rounded to the type, is written there as int8 instead of to y
  RowFormat format;
};


struct GatedKernels {
  void (*gated)(const GatedArgs&, ThreadPool&);
};

QUIRE_LEVELS(GatedKernels, kGated)

}  // namespace quire::cpu
