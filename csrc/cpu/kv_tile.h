// Writing one position into a tile of the cache (attention_tiles_kernel.cpp): K [head_dim / 2][16][2], V [8][v_head_dim][2].
//
// The first position of a tile writes the whole tile, zeros beside its own: what another sequence left there may be inf
// or NaN, and 0 * NaN is NaN. Positions of a sequence are stored in order, so pages need no clearing.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/thread_pool.h"

namespace quire::cpu::QUIRE_ISA {

constexpr int64_t kTilePositions = 16;

struct TileWriter {
  int64_t head_dim, v_head_dim, block_size;

  // The tile of the position `offset` of a block's piece.
  uint16_t* tile(uint16_t* piece, int64_t offset) const {
    return piece + offset / kTilePositions * kTilePositions * (head_dim + v_head_dim);
  }

  // k [head_dim] and v [v_head_dim] in bf16 -> position offset % 16 of `tile`.
  void put(uint16_t* tile, int64_t offset, const uint16_t* k, const uint16_t* v) const {
    const int64_t position = offset % kTilePositions;
    if (position == 0) std::fill_n(tile, kTilePositions * (head_dim + v_head_dim), uint16_t{0});
    for (int64_t i = 0; i < head_dim / 2; ++i) {
      tile[(i * kTilePositions + position) * 2] = k[2 * i];
      tile[(i * kTilePositions + position) * 2 + 1] = k[2 * i + 1];
    }
    uint16_t* values = tile + kTilePositions * head_dim + position / 2 * v_head_dim * 2 + position % 2;
    for (int64_t i = 0; i < v_head_dim; ++i) values[2 * i] = v[i];
  }
};

// The tokens of one thread: a share of them, moved so that no tile is cut. Tokens of a tile are neighbours.
inline Range whole_tiles(const int64_t* block_ids, const int64_t* offsets, int64_t tokens, int thread, int num_threads) {
  const auto same_tile = [&](int64_t i) {
    return i > 0 && i < tokens && block_ids[i] == block_ids[i - 1] &&
           offsets[i] / kTilePositions == offsets[i - 1] / kTilePositions;
  };
  Range range = share(tokens, thread, num_threads);
  while (same_tile(range.begin)) ++range.begin;
  while (same_tile(range.end)) ++range.end;
  return range;
}

}  // namespace quire::cpu::QUIRE_ISA
