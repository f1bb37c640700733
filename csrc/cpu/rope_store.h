// The ops between a layer's q/k/v projection and its attention, in one pass over the projection's rows.
#pragma once

#include <cstdint>

#include "cpu/levels.h"
#include "cpu/linear.h"
#include "cpu/thread_pool.h"

namespace quire::cpu {

struct RopeStoreArgs {
  const void* qkv;                  // [tokens, (num_heads + num_kv_heads) * head_dim + num_kv_heads * v_head_dim]
  const float *cos, *sin;           // [tokens, half], or null: nothing is rotated
  const float *q_weight, *k_weight;  // of RMSNorm, of one head or of all; null: none
  void* q;                          // [tokens, num_heads, head_dim]
  void* pieces;                     // see kernels/kv_blocks.py; strides in elements
  const int64_t *block_ids, *offsets;  // [tokens]; a negative block: k and v are not stored
  int64_t tokens, num_heads, num_kv_heads, head_dim, v_head_dim, half, block_size;
  int64_t stride, block_stride, piece_stride;
  float eps;
  bool norm_all;     // the norms run over all heads of a token together
  bool interleaved;  // pairs (2i, 2i + 1) instead of (i, i + half)
  bool tiles;        // the pieces hold tiles (kv_tile.h), qkv is bf16
  bool int8;         // tiles of numbers of 8 or 4 bits
  int64_t k_bits, v_bits;  // of these
  const float* k_factors;  // of keys, before they are rotated: [num_kv_heads, head_dim], or null
  Type type, pieces_type;
};

struct RopeStoreKernels {
  void (*rope_store)(const RopeStoreArgs&, ThreadPool&);
};

QUIRE_LEVELS(RopeStoreKernels, kRopeStore)

}  // namespace quire::cpu
