// Recurrent layers: the gated delta rule, Mamba-2's scan, short convolutions, and what lies between (kernels/recurrent).
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

// y = silu(conv(x) + bias), or with gates y = after * (conv(before * x) + bias).
struct ConvArgs {
  const void* x;        // [tokens, channels], rows `stride` apart
  const void *before, *after;  // the same, or null both
  const float* weight;  // [kernel, channels], the oldest token's first
  const float* bias;    // [channels], or null
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

// The rule with a decay per channel of the key; `bounded`: the decay is exp(floor * sigmoid(-rate * x)).
struct ChannelInputsArgs {
  const void *qkv, *f, *b;      // [tokens, ..], rows `stride`, `f_stride`, `b_stride` apart
  const float *rate, *dt_bias;  // [heads], [heads * k_dim]
  float* qkd;                   // [tokens, 3, heads, k_dim]
  float* beta;                  // [tokens, heads]
  int64_t tokens, heads, k_dim, stride, f_stride, b_stride;
  float eps, floor;
  bool bounded;
  Type type;
};

// Mamba-2: C and B in fp32, decay and step size of each head.
struct MambaInputsArgs {
  const void *xbc, *dt;         // [tokens, ..], rows `stride`, `dt_stride` apart; B begins at column `width`, then C
  const float *rate, *dt_bias;  // [heads]
  float* qk;                    // [tokens, 2, groups, k_dim]
  float* gates;                 // [tokens, 2, heads]
  int64_t tokens, groups, heads, k_dim, width, stride, dt_stride;
  float scale, least, most;     // of the step size: factor before the bias, limits
  Type type;
};

// With `skip` Mamba-2's scan, else the delta rule. With 3 `parts`, `qk` has a decay per channel behind q and k, and
// `gates` beta alone; with 2, `gates` has a decay and beta per head.
struct DeltaRuleArgs {
  const float *qk, *gates;  // of DeltaInputsArgs, ChannelInputsArgs or MambaInputsArgs
  const float* skip;        // [v_heads], or null
  const void* v;            // [tokens, v_heads * v_dim], rows `stride` apart
  float* state;             // [slots, v_heads, k_dim, v_dim], slots `slot_stride` apart
  void* y;                  // [tokens, v_heads * v_dim], contiguous
  StateBatch batch;
  int64_t tokens, k_heads, v_heads, k_dim, v_dim, stride, slot_stride, parts;
  Type type;
};

// y = x / sqrt(mean(x^2) + eps) * weight * silu(z), or `plain` * sigmoid(z), head by head.
struct GatedNormArgs {
  const void *x, *z;    // [tokens, heads * size], rows `stride` apart
  const float* weight;  // [size]
  void* y;              // [tokens, heads * size], contiguous
  int64_t tokens, heads, size, x_stride, z_stride;
  float eps;
  bool plain;
  Type type;
};

// y = norm(x * silu(scale * z)), or norm(x) * silu(scale * z), group by group; the norm has a weight for each column.
struct GroupNormArgs {
  const void *x, *z;    // [tokens, groups * size], rows `stride` apart
  const float* weight;  // [groups * size]; null: no norm
  void* y;              // [tokens, groups * size], contiguous
  int64_t tokens, groups, size, x_stride, z_stride;
  float eps, scale;
  bool gate_first;
  Type type;
};

struct RecurrentKernels {
  void (*conv)(const ConvArgs&, ThreadPool&);
  void (*delta_inputs)(const DeltaInputsArgs&, ThreadPool&);
  void (*channel_inputs)(const ChannelInputsArgs&, ThreadPool&);
  void (*mamba_inputs)(const MambaInputsArgs&, ThreadPool&);
  void (*delta_rule)(const DeltaRuleArgs&, ThreadPool&);
  void (*gated_norm)(const GatedNormArgs&, ThreadPool&);
  void (*group_norm)(const GroupNormArgs&, ThreadPool&);
};

QUIRE_LEVELS(RecurrentKernels, kRecurrent)

}  // namespace quire::cpu
