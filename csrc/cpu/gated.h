// Gated activations, one row at a time. Strides are in elements. A row's bits depend on that row alone.
#pragma once

#include <cstdint>

#include "cpu/levels.h"
#include "cpu/linear.h"
#include "cpu/quantized.h"
#include "cpu/thread_pool.h"

namespace quire::cpu {

// relu2 and xielu have no gate: their rows are those of `up` alone.
enum class Gate : int { silu = 0, gelu_tanh = 1, gelu = 2, swiglu_oai = 3, relu2 = 4, xielu = 5 };

// Columns of the first matrix's result per column of the block's.
constexpr int64_t parts_of(Gate gate) { return gate == Gate::relu2 || gate == Gate::xielu ? 1 : 2; }

struct GatedArgs {
  const void* gate_up;  // [tokens, parts * size], rows `stride` apart
  void* y;              // [tokens, size]
  int64_t tokens, size, stride;
  Gate gate;
  Type type;
  QuantizedRows rows;  // with rows.q the result, rounded to the type, is written there as int8 instead of to y
  RowFormat format;
  float scale = 1.0f;                    // of the gate, before its function
  float alpha_p = 0.0f, alpha_n = 0.0f;  // of xielu
};

struct GatedKernels {
  void (*gated)(const GatedArgs&, ThreadPool&);
};

QUIRE_LEVELS(GatedKernels, kGated)

}  // namespace quire::cpu
