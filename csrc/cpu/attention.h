// Attention over the blocks of the KV cache, prompt chunks and single tokens alike (see kernels/attention/__init__.py).
//
// Keys are cut into tiles of 64 positions at absolute multiples of 64. A row goes through its tiles in order with an
// online softmax; a tile that it does not see changes no bit, so a row's bits do not depend on which rows share its
// work item, on chunks, batches, threads or on where the blocks lie.
#pragma once

#include <cstdint>

#include "cpu/levels.h"
#include "cpu/linear.h"
#include "cpu/thread_pool.h"

namespace quire::cpu {

struct AttentionArgs {
  const void* q;       // [tokens, num_heads, head_dim], heads contiguous, tokens q_stride elements apart
  const void* pieces;  // [blocks, num_kv_heads, piece], see kernels/kv_blocks.py; strides in elements
  const float* sinks;  // [num_heads] or null
  void* y;             // [tokens, num_heads, v_head_dim], contiguous, of q's type
  // Everything that varies between steps with equal token counts is passed by address, which a replayed call reads
  // again.
  const int64_t *cu_seqlens_q, *seq_lens, *block_table;  // [num_seqs + 1], [num_seqs], [num_seqs, table_width]
  const int64_t* extents;                                // num_seqs, table_width
  int64_t num_heads, num_kv_heads, head_dim, v_head_dim, block_size;
  int64_t q_stride, block_stride, piece_stride;
  int64_t window;    // 0: none
  float scale, cap;  // cap 0: none
  bool v_in_k;
  Type q_type, kv_type;
  bool int8;  // the tiles hold int8 (kv_tile.h)

  int64_t num_seqs() const { return extents[0]; }
  int64_t table_width() const { return extents[1]; }
};

// A piece may hold rows of K and V of any type, or tiles of 16 positions in bf16 (see attention_tiles_kernel.cpp).
struct AttentionKernels {
  void (*rows)(const AttentionArgs&, ThreadPool&);
};
struct AttentionTilesKernels {
  void (*tiles)(const AttentionArgs&, ThreadPool&);
};

QUIRE_LEVELS(AttentionKernels, kAttention)
QUIRE_LEVELS(AttentionTilesKernels, kAttentionTiles)
QUIRE_AMX_LEVEL(AttentionTilesKernels)

}  // namespace quire::cpu
