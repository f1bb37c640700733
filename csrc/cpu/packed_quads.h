// Rows of int8 laid out for a register tile: four inputs of each row of the tile beside each other, then the next four.
// The rows of a tile then share cache lines, and not, as those of 4096 bytes do, one set of the L1 cache.
//
//     one scale per column   { [rows] int32, [K/4][rows] quads }
//     groups, P: their parts [K/P] { [rows] int32, [rows] fp32, [rows] fp32 (, [rows] fp32), [P/4][rows] quads }
//
// The integers are what the sums of a row start from; the floats its scales, what takes the start from the product with
// them, and what its offsets are multiplied with.
//
//   kQuadBytes          of four inputs of a row in tiles of Codes; those of Nibbles take bytes as they came
//   put_quad(x, to)     lays them out
//   take_quad(p)        the Quad of int_vec.h
#pragma once

#include <cstdint>
#include <cstring>

#include "cpu/int_vec.h"

namespace quire::cpu::QUIRE_ISA {

#if defined(QUIRE_WORD_GROUPS)
// Without products of bytes a tile takes words: widened here once, and not for every panel.
constexpr int64_t kQuadBytes = 8;
inline void put_quad(const int8_t* x, int8_t* to) {
  const int16_t words[4] = {x[0], x[2], x[1], x[3]};
  std::memcpy(to, words, 8);
}
inline Quad take_quad(const int8_t* p) {
  int32_t even, odd;
  std::memcpy(&even, p, 4);
  std::memcpy(&odd, p + 4, 4);
  return {broadcast(0), broadcast(even), broadcast(odd)};  // bytes: for Nibbles alone
}
#else
constexpr int64_t kQuadBytes = 4;
inline void put_quad(const int8_t* x, int8_t* to) { std::memcpy(to, x, 4); }
inline Quad take_quad(const int8_t* p) { return broadcast_quad(p); }
#endif

// `quads` of each of `rows` rows, `stride` bytes apart, as [quads][rows] of kBytes each: as they came, or by put_quad.
template <int64_t kBytes>
inline void put_quads(const int8_t* x, int64_t stride, int64_t rows, int64_t quads, int8_t* to) {
  const auto some = [&](int64_t r, int64_t first) {
    for (int64_t i = first; i < quads; ++i) {
      int8_t* target = to + (i * rows + r) * kBytes;
      if constexpr (kBytes == 4) {
        std::memcpy(target, x + r * stride + i * 4, 4);
      } else {
        put_quad(x + r * stride + i * 4, target);
      }
    }
  };
  int64_t r = 0;
  for (; kBytes == 4 && r + 8 <= rows; r += 8) {
    int64_t i = 0;
    for (; i + 8 <= quads; i += 8) {
      const uint32_t* eight[8];
      for (int j = 0; j < 8; ++j) eight[j] = reinterpret_cast<const uint32_t*>(x + (r + j) * stride + i * 4);
      transpose8(eight, reinterpret_cast<uint32_t*>(to) + i * rows + r, rows);
    }
    for (int64_t j = r; j < r + 8; ++j) some(j, i);
  }
  for (; r < rows; ++r) some(r, 0);
}

template <typename T>
inline void put_number(T number, int8_t* to) {
  std::memcpy(to, &number, sizeof(T));
}

inline IVec broadcast_number(const int8_t* p) {
  int32_t number;
  std::memcpy(&number, p, 4);
  return broadcast(number);
}

inline Vec broadcast_float(const int8_t* p) {
  float number;
  std::memcpy(&number, p, 4);
  return broadcast(number);
}

}  // namespace quire::cpu::QUIRE_ISA
