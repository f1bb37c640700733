// Writing one position into a tile of the cache (kernels/kv_blocks.py): K [head_dim / 2][16][2], V [8][v_head_dim][2]
// in bf16, or in int8 followed by the scales of its positions: K's 16, V's 16, in fp32.
//
// The first position of a tile writes the whole tile, with zeros for the others: another sequence may have left
// inf or NaN there, and 0 * NaN is NaN. A sequence stores its positions in order, so blocks need no clearing.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "cpu/isa.h"
#include "cpu/thread_pool.h"

namespace quire::cpu::QUIRE_ISA {

constexpr int64_t kTilePositions = 16;

// The form of a tile: `Element` is uint16_t (bf16) or int8_t.
template <typename Element>
struct TileForm {
  static constexpr bool kScaled = sizeof(Element) == 1;
  int64_t head_dim, v_head_dim;

  int64_t elements() const { return kTilePositions * (head_dim + v_head_dim); }
  // From one tile to the next, in elements.
  int64_t stride() const { return elements() + (kScaled ? 2 * kTilePositions * 4 : 0); }
};

template <typename Element>
struct TileWriter {
  TileForm<Element> form;

  // k [head_dim] and v [v_head_dim] in bf16 -> position `offset` of a block's piece.
  void put(Element* piece, int64_t offset, const uint16_t* k, const uint16_t* v) const {
    Element* tile = piece + offset / kTilePositions * form.stride();
    const int64_t position = offset % kTilePositions;
    if (position == 0) std::fill_n(tile, form.stride(), Element{0});
    float inverse[2] = {1.0f, 1.0f};
    if constexpr (TileForm<Element>::kScaled) {
      const float scales[2] = {scale_of(k, form.head_dim, &inverse[0]), scale_of(v, form.v_head_dim, &inverse[1])};
      Element* places = tile + form.elements() + position * 4;
      std::memcpy(places, &scales[0], 4);
      std::memcpy(places + kTilePositions * 4, &scales[1], 4);
    }
    Element* keys = tile + position * 2;
    Element* values = tile + kTilePositions * form.head_dim + position / 2 * form.v_head_dim * 2;
    if constexpr (TileForm<Element>::kScaled) {
      for (int64_t i = 0; i < form.head_dim; ++i) {
        keys[i / 2 * kTilePositions * 2 + i % 2] = narrow(k[i], inverse[0]);
      }
      for (int64_t i = 0; i < form.v_head_dim; ++i) values[2 * i + position % 2] = narrow(v[i], inverse[1]);
    } else {
      for (int64_t i = 0; i < form.head_dim; i += 2) std::memcpy(keys + i * kTilePositions, k + i, 4);
      put_half(values, v, form.v_head_dim, position % 2 * 16);
    }
  }

  // Fetch the lines that `put` writes: when decoding, every token's tile lies elsewhere, and a line takes 100 ns.
  void prefetch(const Element* piece, int64_t offset) const {
    __asm__ volatile("");  // as in attention_plan.h: gcc drops calls of what only prefetches
    const Element* tile = piece + offset / kTilePositions * form.stride();
    const int64_t position = offset % kTilePositions, line = 64 / static_cast<int64_t>(sizeof(Element));
    const int64_t keys = position == 0 ? form.stride() : kTilePositions * form.head_dim;
    for (int64_t i = 0; i < keys; i += line) __builtin_prefetch(tile + i, 1, 3);
    const Element* values = tile + kTilePositions * form.head_dim + position / 2 * form.v_head_dim * 2;
    for (int64_t i = 0; i < 2 * form.v_head_dim; i += line) __builtin_prefetch(values + i, 1, 3);
  }

 private:
  // One half of `size` pairs of positions; `shift`: 0 or 16. A loop over words, which compilers vectorize.
  static void put_half(uint16_t* pairs, const uint16_t* x, int64_t size, int shift) {
    const uint32_t other = 0xffff0000u >> shift;
    for (int64_t i = 0; i < size; ++i) {
      uint32_t pair;
      std::memcpy(&pair, pairs + 2 * i, 4);
      pair = (pair & other) | static_cast<uint32_t>(x[i]) << shift;
      std::memcpy(pairs + 2 * i, &pair, 4);
    }
  }
  // The largest magnitude becomes 127.
  static float scale_of(const uint16_t* x, int64_t size, float* inverse) {
    float most = 0.0f;
    for (int64_t i = 0; i < size; ++i) most = std::max(most, std::fabs(bf16_to_float(x[i])));
    *inverse = most > 0.0f ? 127.0f / most : 0.0f;
    return most / 127.0f;
  }
  static Element narrow(uint16_t x, float inverse) {
    const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an even integer
    return static_cast<Element>(static_cast<int>((bf16_to_float(x) * inverse + magic) - magic));
  }
};

// One thread's share of the tokens, moved so that no tile is split. Tokens of a tile are neighbours.
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
