// int4 weights of two levels (quantized.h has the layout) by many rows, without unpacking them: for levels whose product
// of bytes gives words and saturates (AVX2 and AVX-512 without VNNI).
//
// Algorithm: groups outermost, rows inside. The codes of a group and two vectors of columns are 8 vectors, loaded once for
// all rows of a tile; one is added to the codes of odd multipliers, so that every code counts from 8. A row then takes 8 products
// of bytes, summed in words, and two products of words with the multipliers. A word holds
// at most 4 * 2 * 16 * 127, less 8 times the row's sum, at most 8 * 16 * 127: 32,512. Sums of all groups stay in memory,
// which is L1. Everything is integer, so the bits are those of unpacked weights (two_level.h).
// Bound: with 256 bits 20 vector instructions for 256 multiply-adds, where int8 weights take 32; with 512 bits half.
#pragma once

#include "cpu/int_vec.h"
#include "cpu/packed_quads.h"
#include "cpu/quantized_tile.h"
#include "cpu/two_level.h"

#if defined(QUIRE_WORD_GROUPS)

namespace quire::cpu::QUIRE_ISA {

// Rows lie as [K/16][rows] { int32 start, 16 int8 }.
struct WordGroups {
  static constexpr int kTileRows = 32;
  static constexpr bool kUnpacked = false, kAlwaysPacks = true;

  static int64_t row_bytes(const QuantizedLinearArgs& a) { return a.format.groups(a.k) * kRowBytes; }

  static void pack(const QuantizedLinearArgs& a, int64_t row, int64_t rows, int8_t* to) {
    const int64_t groups = a.format.groups(a.k);
    for (int64_t first = 0; first < groups; first += kLineGroups) {
      for (int64_t r = row; r < row + rows; ++r) {
        for (int64_t g = first; g < std::min(first + kLineGroups, groups); ++g) {
          int8_t* p = to + (g * rows + r - row) * kRowBytes;
          put_number((-8 * a.x.sums[r * groups + g]) & 0xffff, p);
          std::memcpy(p + 4, a.x.q + r * a.x.stride + g * kTwoLevelGroup, kTwoLevelGroup);
        }
      }
    }
  }

  // `rows` rows by all 32 columns of a panel.
  static void panel_rows(int64_t rows, const QuantizedLinearArgs& a, Place at) {
    alignas(64) int32_t sums[kTileRows * kWidth];
    for (int64_t part = 0; part < kPanel / kWidth && at.column < a.n; ++part, at.column += kWidth) {
      (part == 0 ? add_groups<0> : add_groups<kPanel / kWidth - 1>)(a, at, rows, sums);
      const Vec scale[2] = {load(a.scale + at.column), load(a.scale + at.column + kLanes)};
      Place row = at;
      for (int64_t r = 0; r < rows; ++r, ++row.row) {
        const int32_t* of_row = sums + r * kWidth;
        write_tile<1, 2>(a, row, [&](int, int v) { return mul(to_float(load_ints(of_row + v * kLanes)), scale[v]); });
      }
    }
  }

 private:
  static constexpr int64_t kWidth = 2 * kLanes, kRowBytes = 4 + kTwoLevelGroup, kLineGroups = 64 / kTwoLevelGroup;

  // Four inputs each of 2 vectors of columns.
  struct GroupCodes {
    Nibbles quad[4][2];

    GroupCodes(const uint8_t* codes, const IVec (&m)[2]) {
      UNROLL for (int v = 0; v < 2; ++v) {
        UNROLL for (int i = 0; i < 2; ++i) {
          const Codes both = load_codes(codes + i * kQuadLine + v * kLanes * 4);
          quad[2 * i][v] = add_odd(low_nibbles(both), m[v]);
          quad[2 * i + 1][v] = add_odd(high_nibbles(both), m[v]);
        }
      }
    }
  };

  static inline void add_row(const int8_t* x, const GroupCodes& codes, const IVec (&m)[2], int32_t* sums) {
    const IVec start = broadcast_number(x);
    IVec d[2] = {start, start};
    UNROLL for (int i = 0; i < 4; ++i) {
      const IVec quad = broadcast_number(x + 4 + i * 4);
      UNROLL for (int v = 0; v < 2; ++v) d[v] = dot_group(d[v], codes.quad[i][v], Quad{quad, quad, quad});
    }
    UNROLL for (int v = 0; v < 2; ++v) {
      store_ints(sums + v * kLanes, add_scaled(load_ints(sums + v * kLanes), d[v], m[v]));
    }
  }

  template <int kPart>
  static __attribute__((noinline)) void add_groups(const QuantizedLinearArgs& a, const Place& at, int64_t rows,
                                                   int32_t* sums) {
    const int64_t groups = a.format.groups(a.k);
    const int64_t lines = kPart > 0 ? 0 : (at.next_lines + groups - 1) / groups;  // to prefetch per group
    const int8_t* x = at.packed;
    std::fill_n(sums, rows * kWidth, 0);
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t in_block = g % kBlockGroups;
      const uint8_t* block = at.panel + g / kBlockGroups * kTwoLevelBytes;
      const uint8_t* codes = block + kTwoLevelHead + in_block * kTwoLevelGroup * kPanel / 2;
      if (at.next == nullptr && kPart == 0) {
        if (in_block == 0) fetch_ahead<kTwoLevelHead>(block, kFarAhead);
        fetch_ahead<kTwoLevelGroup * kPanel / 2>(codes, kFarAhead);
      }
      for (int64_t i = 0; i < lines; ++i) prefetch(at, g * lines + i);
      IVec all[kPanelVectors];
      load_multipliers(block + in_block * kPanel / 2, all);
      const IVec m[2] = {all[2 * kPart], all[2 * kPart + 1]};
      const GroupCodes of_group(codes + kPart * kWidth * 4, m);
      int32_t* of_row = sums;
      for (int64_t r = 0; r < rows; ++r, x += kRowBytes, of_row += kWidth) add_row(x, of_group, m, of_row);
    }
  }
};

}  // namespace quire::cpu::QUIRE_ISA

#endif
