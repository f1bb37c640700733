// Recurrent layers: the gated delta rule, the short convolution before it, and what lies between (kernels/recurrent).
// Strides are in elements. States are fp32 whatever the type of the rows.
#pragma once

#include <cstdint>

#include "cpu/levels.h"
#include "cpu/linear.h"
#include "cpu/thread_pool.h"

namespace quire::cpu {

// Sequences of a step and their slots. All is read by address at each call, so that a recorded step can be replayed.
struct StateBatch {
  const int64_t* cu_seqlens;  // [num_seqs + 1]
  const int64_t* slots;       // [num_seqs]
  const int64_t* fresh;       // [num_seqs]: 1: from zeros, whatever the slot holds
  const int64_t* saves;       // [num_saves, 3]: (sequence, tokens of this step after which, slot), ascending
  const int64_t* extents;     // num_seqs, num_saves
};

struct ConvArgs {
  const void* x;        // [tokens, channels], rows `stride` apart
  const float* weight;  // [kernel, channels], the oldest token's first
  float* past;          // [slots, kernel - 1, channels], slots `slot_stride` apart
  void* y;              // [tokens, channels], contiguous
  StateBatch batch;
  int64_t tokens, channels, kernel, stride, slot_stride;
  Type type;
};

struct DeltaInputsArgs {
  const void *qkv, *a, *b;  // [tokens, ..], rows `stride`, `gate_stride` apart
  const float *rate, *dt_bias;  // [v_heads]
  float* qk;     // [tokens, 2, k_heads, k_dim]
  float* gates;  // [tokens, 2, v_heads]
  int64_t tokens, k_heads, v_heads, k_dim, stride, a_stride, b_stride;
  float eps;
  Type type;
};

struct DeltaRuleArgs {
  const float *qk, *gates;  // of DeltaInputsArgs
  const void* v;            // [tokens, v_heads * v_dim], rows `stride` apart
  float* state;             // [slots, v_heads, k_dim, v_dim], slots `slot_stride` apart
  void* y;                  // [tokens, v_heads * v_dim], contiguous
  StateBatch batch;
  int64_t tokens, k_heads, v_heads, k_dim, v_dim, stride, slot_stride;
  Type type;
};

// y = x / sqrt(mean(x^2) + eps) * weight * silu(z), head by head.
struct GatedNormArgs {
  const void *x, *z;    // [tokens, heads * size], rows `stride` apart
  const float* weight;  // [size]
  void* y;              // [tokens, heads * size], contiguous
  int64_t tokens, heads, size, x_stride, z_stride;
  float eps;
  Type type;
};

struct RecurrentKernels {
  void (*conv)(const ConvArgs&, ThreadPool&);
  void (*delta_inputs)(const DeltaInputsArgs&, ThreadPool&);
  void (*delta_rule)(const DeltaRuleArgs&, ThreadPool&);
  void (*gated_norm)(const GatedNormArgs&, ThreadPool&);
};

QUIRE_LEVELS(RecurrentKernels, kRecurrent)

}  // namespace quire::cpu
