// RoPE and the store into the KV cache, one row at a time. Strides are in elements. A row's bits depend on that row
// alone.
#pragma once

#include <cstdint>

#include "cpu/levels.h"
#include "cpu/linear.h"
#include "cpu/thread_pool.h"

namespace quire::cpu {

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
  void* pieces;       // see kernels/kv_blocks.py
  const int64_t *block_ids, *offsets;
  int64_t tokens, heads, head_dim, v_head_dim, block_size;
  int64_t k_token_stride, k_head_stride, v_token_stride, v_head_stride, block_stride, piece_stride;
  Type type, pieces_type;
  bool tiles;  // the pieces hold tiles (kv_tile.h), k and v are bf16
  bool int8;   // of numbers of 8 or 4 bits
  int64_t k_bits, v_bits;  // of these
  const float* k_factors;  // of keys, before they are rotated: [heads, head_dim], or null
};

struct RowKernels {
  void (*rope)(const RopeArgs&, ThreadPool&);
  void (*store)(const StoreArgs&, ThreadPool&);
};

QUIRE_LEVELS(RowKernels, kRowOps)

}  // namespace quire::cpu
