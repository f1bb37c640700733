// The small ops of a layer, a row at a time: norms, gated activations, RoPE, and the store into the KV cache.
// Strides are in elements. A row's bits depend on that row alone.
#pragma once

#include <cstdint>

#include "cpu/levels.h"
#include "cpu/linear.h"
#include "cpu/thread_pool.h"

namespace quire::cpu {

// y = x / sqrt(mean(x^2) + eps) * weight, for rows (token, head). With `residual`, x + residual is rounded to the type,
// written to `sum` and normalised.
struct NormArgs {
  const void *x, *residual;  // residual and sum [tokens, size] of stride residual_stride and size, or null
  const float* weight;       // head h has weight + h * weight_stride
  void *y, *sum;             // y is contiguous
  int64_t tokens, heads, size;
  int64_t token_stride, head_stride, residual_stride, weight_stride;
  float eps;
  Type type;
};

enum class Gate : int { silu = 0, gelu_tanh = 1, gelu = 2, swiglu_oai = 3 };

struct GatedArgs {
  const void* gate_up;  // [tokens, 2 * size], rows `stride` apart
  void* y;              // [tokens, size]
  int64_t tokens, size, stride;
  Gate gate;
  Type type;
};

struct RopeArgs {
  const void* x;  // [tokens, heads, head_dim]
  const float *cos, *sin;  // [tokens, half]
  void* y;                 // contiguous
  int64_t tokens, heads, head_dim, half, token_stride, head_stride;
  bool interleaved;
  Type type;
};

struct StoreArgs {
  const void *k, *v;  // [tokens, heads, dim]; v null where it is a part of k
  void* pieces;       // see kernels/kv_view.py
  const int64_t *block_ids, *offsets;
  int64_t tokens, heads, head_dim, v_head_dim, block_size;
  int64_t k_token_stride, k_head_stride, v_token_stride, v_head_stride, block_stride, piece_stride;
  Type type, pieces_type;
};

struct RowKernels {
  void (*norm)(const NormArgs&, ThreadPool&);
  void (*gated)(const GatedArgs&, ThreadPool&);
  void (*rope)(const RopeArgs&, ThreadPool&);
  void (*store)(const StoreArgs&, ThreadPool&);
};

QUIRE_LEVELS(RowKernels, kRowOps)

}  // namespace quire::cpu
