// Writing one position into a tile of the cache (kernels/kv_blocks.py): K [head_dim / 2][16][2], V [8][v_head_dim][2]
// in bf16, or in numbers of 8 or 4 bits (kv_codes.h), rotated, followed by the scales of its positions: K's 16, V's 16,
// in fp32, and where K or V has 4 bits by the steps and lows of its groups, [groups][2][16] bytes.
//
// The first position of a tile writes the whole tile, with zeros for the others: another sequence may have left
// inf or NaN there, and 0 * NaN is NaN. A sequence stores its positions in order, so blocks need no clearing.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "cpu/isa.h"
#include "cpu/kv_codes.h"
#include "cpu/rotate.h"
#include "cpu/thread_pool.h"

namespace quire::cpu::QUIRE_ISA {

// The form of a tile: `Element` is uint16_t (bf16) or int8_t (bytes of codes). Sizes are in elements.
template <typename Element>
struct TileForm {
  static constexpr bool kScaled = sizeof(Element) == 1;
  int64_t head_dim, v_head_dim;
  int64_t k_bits = 8, v_bits = 8;  // of a code

  int64_t k_elements() const { return codes(head_dim, k_bits); }
  int64_t elements() const { return k_elements() + codes(v_head_dim, v_bits); }
  // Where K's scales lie, V's, K's groups and V's.
  int64_t k_scales() const { return elements(); }
  int64_t v_scales() const { return k_scales() + kTilePositions * 4; }
  int64_t k_groups() const { return v_scales() + kTilePositions * 4; }
  int64_t v_groups() const { return k_groups() + groups(head_dim, k_bits); }
  // From one tile to the next.
  int64_t stride() const { return kScaled ? v_groups() + groups(v_head_dim, v_bits) : elements(); }

 private:
  static int64_t codes(int64_t dim, int64_t bits) { return kTilePositions * dim * (kScaled ? bits : 8) / 8; }
  static int64_t groups(int64_t dim, int64_t bits) { return bits == 4 ? code_groups(dim) * 2 * kTilePositions : 0; }
};

// Of one thread.
template <typename Element>
class TileWriter {
 public:
  // `factors`: of keys, [kv heads, head_dim], or null.
  explicit TileWriter(const TileForm<Element>& form, const float* factors = nullptr)
      : form_(form), factors_(factors),
        row_(TileForm<Element>::kScaled ? static_cast<size_t>(std::max(form.head_dim, form.v_head_dim)) : 0) {}

  // k [head_dim] and v [v_head_dim] of kv head `head` in bf16 -> position `offset` of a block's piece.
  void put(Element* piece, int64_t offset, int64_t head, const uint16_t* k, const uint16_t* v) {
    Element* tile = piece + offset / kTilePositions * form_.stride();
    const int64_t position = offset % kTilePositions;
    if (position == 0) std::fill_n(tile, form_.stride(), Element{0});
    if constexpr (TileForm<Element>::kScaled) {
      put_keys(tile, position, k, factors_ == nullptr ? nullptr : factors_ + head * form_.head_dim);
      put_values(tile, position, v);
    } else {
      Element* keys = tile + position * 2;
      for (int64_t i = 0; i < form_.head_dim; i += 2) std::memcpy(keys + i * kTilePositions, k + i, 4);
      put_half(tile + form_.k_elements() + position / 2 * form_.v_head_dim * 2, v, form_.v_head_dim, position % 2 * 16);
    }
  }

  // Fetch the lines that `put` writes: when decoding, every token's tile lies elsewhere, and a line takes 100 ns.
  void prefetch(const Element* piece, int64_t offset) const {
    __asm__ volatile("");  // as in attention_plan.h: gcc drops calls of what only prefetches
    const Element* tile = piece + offset / kTilePositions * form_.stride();
    const int64_t position = offset % kTilePositions, line = 64 / static_cast<int64_t>(sizeof(Element));
    const int64_t keys = position == 0 ? form_.stride() : form_.k_elements();
    for (int64_t i = 0; i < keys; i += line) __builtin_prefetch(tile + i, 1, 3);
    const int64_t pair = (form_.elements() - form_.k_elements()) / (kTilePositions / 2);
    const Element* values = tile + form_.k_elements() + position / 2 * pair;
    for (int64_t i = 0; i < pair; i += line) __builtin_prefetch(values + i, 1, 3);
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

  // row_ becomes a head of K or V, rotated, over its scale, which is returned.
  float take(const uint16_t* x, int64_t size, const float* factors) {
    float* row = row_.data();
    over_vectors(size, [&](int64_t i, int n) {
      const Vec value = load_some(x + i, n);
      store_some(row + i, factors == nullptr ? value : mul(value, load_some(factors + i, n)), n);
    });
    rotate_head(row, size);
    return scale_to_codes(row, size);
  }

  void put_keys(int8_t* tile, int64_t position, const uint16_t* k, const float* factors) {
    const float scale = take(k, form_.head_dim, factors), *row = row_.data();
    std::memcpy(tile + form_.k_scales() + position * 4, &scale, 4);
    if (form_.k_bits == 8) {
      int8_t* to = tile + position * 2;
      for (int64_t i = 0; i < form_.head_dim; ++i) to[i / 2 * kTilePositions * 2 + i % 2] = byte_of(row[i]);
      return;
    }
    put_codes(tile + form_.k_groups() + position, form_.head_dim, [&](int64_t i, int code) {
      int8_t& to = tile[i / 2 * kTilePositions + position];
      to = with_code(to, code, i % 2 * 4);
    });
  }

  void put_values(int8_t* tile, int64_t position, const uint16_t* v) {
    const float scale = take(v, form_.v_head_dim, nullptr), *row = row_.data();
    std::memcpy(tile + form_.v_scales() + position * 4, &scale, 4);
    int8_t* values = tile + form_.k_elements();
    if (form_.v_bits == 8) {
      int8_t* to = values + position / 2 * form_.v_head_dim * 2 + position % 2;
      for (int64_t i = 0; i < form_.v_head_dim; ++i) to[2 * i] = byte_of(row[i]);
      return;
    }
    values += position / 2 * form_.v_head_dim;
    put_codes(tile + form_.v_groups() + position, form_.v_head_dim, [&](int64_t i, int code) {
      values[i] = with_code(values[i], code, position % 2 * 4);
    });
  }

  // row_ in 4 bits: put(i, code) for each number, and `groups` of its position.
  template <typename Put>
  void put_codes(int8_t* groups, int64_t size, const Put& put) const {
    for (int64_t begin = 0; begin < size; begin += kCodeGroup, groups += 2 * kTilePositions) {
      const int64_t count = std::min(kCodeGroup, size - begin);
      const float* row = row_.data() + begin;
      const CodeGroup group = CodeGroup::of(row, count);
      groups[0] = static_cast<int8_t>(static_cast<int>(group.step));
      groups[kTilePositions] = static_cast<int8_t>(static_cast<int>(group.low));
      for (int64_t i = 0; i < count; ++i) put(begin + i, group.code(row[i]));
    }
  }

  static int8_t byte_of(float x) { return static_cast<int8_t>(static_cast<int>(round_even(x))); }
  static int8_t with_code(int8_t byte, int code, int64_t shift) {
    return static_cast<int8_t>((byte & (0xf0 >> shift)) | code << shift);
  }

  const TileForm<Element> form_;
  const float* factors_;
  std::vector<float> row_;
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
