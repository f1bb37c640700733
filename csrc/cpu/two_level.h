// int4 weights of two levels (quantized.h has the layout), of one ISA level: unpacking to the layout of int8 weights,
// and the product with few rows.
//
// Everything is integer until the row's scale, so any order of summation has the same bits, those of int8 weights
// m * (q + m mod 2). In a 16-bit lane lie two levels n = 0 ... 15: times m both stay bytes (at most 225), so one
// multiplication gives two weights.
//
// Few rows do not need them unpacked: the sum of a group, less m's zero (8, for odd m 7) times the row's sum, fits into
// 16 bits (16 * 8 * 127), and one product of words adds m times it. Bytes: 4.25 bits per weight; bound: memory
// bandwidth.
#pragma once

#include "cpu/int_vec.h"
#include "cpu/quantized.h"
#include "cpu/row_loops.h"

namespace quire::cpu::QUIRE_ISA {

constexpr int kPanelVectors = kPanel / kLanes;
constexpr int64_t kBlockGroups = kTwoLevelBlock / kTwoLevelGroup;
constexpr int64_t kTwoLevelBytes = kTwoLevelHead + kTwoLevelBlock * kPanel / 2;      // of a block
constexpr int64_t kUnpackedBytes = kTwoLevelBlock * kPanel;                         // of a block as int8
constexpr int64_t kQuadLine = kPanel * 4;                                           // of four inputs of a panel as int8

// A block as weights + `zero`, the layout of int8 weights: 128 for unsigned products, 0 for signed ones.
inline void unpack_block(const uint8_t* block, int zero, uint8_t* to) {
  for (int64_t g = 0; g < kBlockGroups; ++g) {
    IVec m[kPanelVectors];
    load_multipliers(block + g * kPanel / 2, m);
    UNROLL for (int v = 0; v < kPanelVectors; ++v) {
      const Scaler scaler(m[v], zero);
      const uint8_t* from = block + kTwoLevelHead + g * kTwoLevelGroup * kPanel / 2 + v * kLanes * 4;
      uint8_t* target = to + g * kTwoLevelGroup * kPanel + v * kLanes * 4;
      for (int64_t i = 0; i < kTwoLevelGroup / 8; ++i) {
        const Codes codes = load_codes(from + i * kQuadLine);
        scaler.store(low_nibbles(codes), target + 2 * i * kQuadLine);
        scaler.store(high_nibbles(codes), target + (2 * i + 1) * kQuadLine);
      }
    }
  }
}

// The integers of R rows, `stride` bytes apart, by vectors kFirst ... of a panel. `zeros`: of every row and group -8
// and -7 times the row's sum.
template <int kFirst, int R, int V>
inline void dot_panel(const uint8_t* panel, const int8_t* x, int64_t stride, const int32_t (*zeros)[2], int64_t groups,
                      IVec (&acc)[R][V]) {
  const int64_t ahead = R == 1 ? kNearAhead : kFarAhead;
  UNROLL for (int r = 0; r < R; ++r) {
    UNROLL for (int v = 0; v < V; ++v) acc[r][v] = broadcast(0);
  }
  for (int64_t first = 0; first < groups; first += kBlockGroups, panel += kTwoLevelBytes) {
    if constexpr (kFirst == 0) fetch_ahead<kTwoLevelHead>(panel, ahead);
    for (int64_t g = 0; g < kBlockGroups && first + g < groups; ++g, x += kTwoLevelGroup) {
      const uint8_t* codes = panel + kTwoLevelHead + g * kTwoLevelGroup * kPanel / 2;
      if constexpr (kFirst == 0) fetch_ahead<kTwoLevelGroup * kPanel / 2>(codes, ahead);
      IVec m[kPanelVectors], d[R][V];
      load_multipliers(panel + g * kPanel / 2, m);
      UNROLL for (int r = 0; r < R; ++r) {
        const int32_t* zero = zeros[r * groups + first + g];
        UNROLL for (int v = 0; v < V; ++v) d[r][v] = start_group(m[kFirst + v], zero);
      }
      UNROLL for (int64_t i = 0; i < kTwoLevelGroup / 8; ++i) {
        Nibbles low[V], high[V];
        UNROLL for (int v = 0; v < V; ++v) {
          const Codes both = load_codes(codes + i * kQuadLine + (kFirst + v) * kLanes * 4);
          low[v] = low_nibbles(both), high[v] = high_nibbles(both);
        }
        UNROLL for (int r = 0; r < R; ++r) {
          const int8_t* eight = x + r * stride + i * 8;
          const Quad even = broadcast_quad(eight), odd = broadcast_quad(eight + 4);
          UNROLL for (int v = 0; v < V; ++v) d[r][v] = dot_group(dot_group(d[r][v], low[v], even), high[v], odd);
        }
      }
      UNROLL for (int r = 0; r < R; ++r) {
        UNROLL for (int v = 0; v < V; ++v) acc[r][v] = add_scaled(acc[r][v], d[r][v], m[kFirst + v]);
      }
    }
  }
}

}  // namespace quire::cpu::QUIRE_ISA
