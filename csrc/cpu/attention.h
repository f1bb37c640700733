// Attention over the blocks of the KV cache, prompt chunks and single tokens alike (see kernels/attention/__init__.py).
//
// Keys are cut into tiles of 64 positions at absolute multiples of 64. A row goes through its tiles in order with an
// online softmax; a tile that it does not see changes no bit, so a row's bits do not depend on which rows share its
// work item, on chunks, batches, threads or on where the blocks lie.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/levels.h"
#include "cpu/linear.h"
#include "cpu/thread_pool.h"

namespace quire::cpu {

// The positions of a sequence that lie in this cache: `size` of every count * size, from index * size on. They are
// numbered without gaps, as the blocks that hold them. One stripe has all positions.
struct Stripe {
  int64_t index, count, size;

  // How many of the positions below `position` are here.
  int64_t below(int64_t position) const {
    if (count == 1) return position;
    const int64_t all = count * size, rest = position % all - index * size;
    return position / all * size + std::clamp<int64_t>(rest, 0, size);
  }
};

struct AttentionArgs {
  const void* q;       // [tokens, num_heads, head_dim], heads contiguous, tokens q_stride elements apart
  const void* pieces;  // [blocks, num_kv_heads, piece], see kernels/kv_blocks.py; strides in elements
  const float* sinks;  // [num_heads] or null
  void* y;             // [tokens, num_heads, v_head_dim], contiguous, of q's type; partial: see below
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
  bool int8;  // the tiles hold numbers of 8 or 4 bits (kv_tile.h)
  int64_t k_bits, v_bits;  // of these
  const float* q_factors;  // of queries, where keys have theirs: [num_kv_heads, head_dim], or null
  int64_t stripe_index, stripe_count;
  // y is fp32 [tokens, num_heads, v_head_dim + 2]: weighted values, the sum of the weights, and the maximum that they
  // refer to, in powers of two. `merge` makes attention of them.
  bool partial;

  int64_t num_seqs() const { return extents[0]; }
  int64_t table_width() const { return extents[1]; }
  Stripe stripe() const { return {stripe_index, stripe_count, block_size}; }
};

// Partial results of `ranks` stripes, added in their order.
struct MergeArgs {
  const float* parts;  // [tokens, ranks, num_heads, v_head_dim + 2]
  const float* sinks;  // [num_heads] or null
  void* y;             // [tokens, num_heads, v_head_dim], contiguous
  int64_t tokens, ranks, num_heads, v_head_dim;
  Type type;  // of y
};

// A piece may hold rows of K and V of any type, or tiles of 16 positions in bf16 (see attention_tiles_kernel.cpp).
struct AttentionKernels {
  void (*rows)(const AttentionArgs&, ThreadPool&);
  void (*merge)(const MergeArgs&, ThreadPool&);
};
struct AttentionTilesKernels {
  void (*tiles)(const AttentionArgs&, ThreadPool&);
};

QUIRE_LEVELS(AttentionKernels, kAttention)
QUIRE_LEVELS_VNNI(AttentionTilesKernels, kAttentionTiles)
QUIRE_AMX_LEVEL(AttentionTilesKernels)

}  // namespace quire::cpu
