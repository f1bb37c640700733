// Tiles of linears whose weights have scales of groups, of one ISA level: integers within a group, then one fma into
// the tile's floats (with offsets two), groups ascending.
//
// 6 x 2 sums and as many floats stay in 512-bit registers: a group of 32 is then 96 products beside 12 fmas, which take
// the same units on Zen 4, so 89 % of the products' peak is the most there is.
#pragma once

#include <cstring>

#include "cpu/packed_quads.h"
#include "cpu/quantized_tile.h"

namespace quire::cpu::QUIRE_ISA {

template <int kBits, bool kOffset>
struct Grouped {
  static constexpr int kTileRows = kGroupRows;
  static constexpr bool kUnpacked = false, kAlwaysPacks = false;
  static constexpr int kZero = kBits == 8 ? kCodesZero : 8;
  static constexpr int64_t kQuad = kBits == 8 ? kQuadBytes : 4;   // of a row that is laid out
  static constexpr int64_t kHead = kOffset ? 8 : 4;               // of a row before the quads of a group
  static constexpr int64_t kStep = kBits == 8 ? 4 : 8;            // inputs of a line of codes
  static constexpr int64_t kScales = kPanel * (kOffset ? 4 : 2);  // of a group

  // Bytes of a row that is laid out.
  static int64_t row_bytes(const QuantizedLinearArgs& a) {
    return a.format.groups(a.k) * (kHead + a.format.group / 4 * kQuad);
  }

  static void pack(const QuantizedLinearArgs& a, int64_t row, int64_t rows, int8_t* to) {
    const int64_t groups = a.format.groups(a.k), quads = a.format.group / 4;
    const int8_t* x = a.x.q + row * a.x.stride;
    for (int64_t g = 0; g < groups; ++g, x += a.format.group, to += rows * quads * kQuad) {
      for (int64_t r = 0; r < rows; ++r) {
        const int32_t sum = a.x.sums[(row + r) * groups + g];
        put_number(-kZero * sum, to + r * 4);
        if constexpr (kOffset) put_number(static_cast<float>(sum), to + (rows + r) * 4);
      }
      to += rows * kHead;
      put_quads<kQuad>(x, a.x.stride, rows, quads, to);
    }
  }

  template <int R>
  static void tile(const QuantizedLinearArgs& a, const Place& at) {
    constexpr int V = kVectors<R>;
    alignas(64) float sums[R * V * kLanes];
    (at.packed != nullptr ? packed_sums<R> : streamed_sums<R>)(a, at, sums);
    Vec power[V];
    UNROLL for (int v = 0; v < V; ++v) power[v] = load(a.scale + at.column + v * kLanes);
    write_tile<R, V>(a, at, [&](int r, int v) { return mul(load(sums + (r * V + v) * kLanes), power[v]); });
  }

 private:
  template <int R, int V>
  static inline void clear(Vec (&f)[R][V]) {
    UNROLL for (int r = 0; r < R; ++r) {
      UNROLL for (int v = 0; v < V; ++v) f[r][v] = zero();
    }
  }

  template <int R, int V>
  static inline void store_all(const Vec (&f)[R][V], float* to) {
    UNROLL for (int r = 0; r < R; ++r) {
      UNROLL for (int v = 0; v < V; ++v) store(to + (r * V + v) * kLanes, f[r][v]);
    }
  }

  // A group's integers into the floats; `scales` of the tile's columns, offset_sum(r): a row's sum for its offsets.
  template <int R, int V, typename F>
  static inline void add_group(const IVec (&acc)[R][V], const uint8_t* scales, const F& offset_sum, Vec (&f)[R][V]) {
    UNROLL for (int v = 0; v < V; ++v) {
      const Vec scale = load_half(scales + v * kLanes * 2);
      UNROLL for (int r = 0; r < R; ++r) f[r][v] = fused(to_float(acc[r][v]), scale, f[r][v]);
      if constexpr (kOffset) {
        const Vec offset = load_half(scales + (kPanel + v * kLanes) * 2);
        UNROLL for (int r = 0; r < R; ++r) f[r][v] = fused(offset_sum(r), offset, f[r][v]);
      }
    }
  }

  // Packed rows. Results go into memory: with the rest of the tile beside the loop, gcc 12 keeps floats on the stack.
  template <int R>
  static __attribute__((noinline)) void packed_sums(const QuantizedLinearArgs& a, const Place& at, float* results) {
    constexpr int V = kVectors<R>;
    const int64_t steps = a.format.group / kStep, groups = a.format.groups(a.k);
    const int64_t lines = (at.next_lines + groups - 1) / groups;  // to prefetch per group
    const int8_t* x = at.packed;
    const uint8_t* w = at.panel + at.first_lane * 4;
    Vec f[R][V];
    clear(f);
    for (int64_t g = 0; g < groups; ++g) {
      IVec acc[R][V];
      UNROLL for (int r = 0; r < R; ++r) {
        const IVec start = broadcast_number(x + r * 4);
        UNROLL for (int v = 0; v < V; ++v) acc[r][v] = start;
      }
      const int8_t* const floats = x + R * 4;
      x += R * kHead;
      for (int64_t s = 0; s < steps; ++s) {
        add_step(acc, x, w);
        x += R * kQuad * (kStep / 4);
        w += kPanel * 4;
        if (s < lines) prefetch(at, g * lines + s);
      }
      for (int64_t i = steps; i < lines; ++i) prefetch(at, g * lines + i);
      add_group(acc, w - at.first_lane * 2, [&](int r) { return broadcast_float(floats + r * 4); }, f);
      w += kScales;
    }
    store_all(f, results);
  }

  // kStep inputs of packed rows.
  template <int R, int V>
  static inline void add_step(IVec (&acc)[R][V], const int8_t* x, const uint8_t* w) {
    Codes codes[V];
    UNROLL for (int v = 0; v < V; ++v) codes[v] = load_codes(w + v * kLanes * 4);
    if constexpr (kBits == 8) {
      UNROLL for (int r = 0; r < R; ++r) {
        const Quad quad = take_quad(x + r * kQuad);
        UNROLL for (int v = 0; v < V; ++v) acc[r][v] = dot(acc[r][v], codes[v], quad);
      }
    } else {
      Nibbles nibbles[V];
      UNROLL for (int v = 0; v < V; ++v) nibbles[v] = low_nibbles(codes[v]);
      add_quad<R, V>(acc, x, kQuad, nibbles);
      UNROLL for (int v = 0; v < V; ++v) nibbles[v] = high_nibbles(codes[v]);
      add_quad<R, V>(acc, x + R * kQuad, kQuad, nibbles);
    }
  }

  // Several rows have much work for each byte of nibbles.
  template <int R>
  static int64_t ahead() {
    return kBits == 4 && R > 1 ? kFarAhead : kNearAhead;
  }

  // Few rows, as they came.
  template <int R>
  static void streamed_sums(const QuantizedLinearArgs& a, const Place& at, float* results) {
    constexpr int V = kVectors<R>;
    const int64_t group = a.format.group, groups = a.format.groups(a.k);
    const int64_t codes = a.format.code_bytes(a.k), block = a.format.block_bytes(a.k);
    const int64_t lines = (at.next_lines + groups - 1) / groups;
    const int32_t* sums = a.x.sums + at.row * groups;
    const int8_t* x = a.x.q + at.row * a.x.stride;
    const uint8_t* w = at.panel;
    Vec f[R][V];
    clear(f);
    for (int64_t g = 0; g < groups; ++g) {
      IVec acc[R][V];
      UNROLL for (int r = 0; r < R; ++r) {
        UNROLL for (int v = 0; v < V; ++v) acc[r][v] = broadcast(-kZero * sums[r * groups + g]);
      }
      add_codes<R, V>(acc, x, a.x.stride, w + at.first_lane * 4, group, at.next == nullptr);
      for (int64_t i = 0; i < lines; ++i) prefetch(at, g * lines + i);
      const uint8_t* scales = w + codes + at.first_lane * 2;
      if (at.next == nullptr) fetch_ahead<kOffset ? 128 : 64>(scales, ahead<R>());
      add_group(acc, scales, [&](int r) { return broadcast(static_cast<float>(sums[r * groups + g])); }, f);
      x += group;
      w += block;
    }
    store_all(f, results);
  }

  template <int R, int V>
  static inline void add_codes(IVec (&acc)[R][V], const int8_t* x, int64_t stride, const uint8_t* w, int64_t group,
                               bool streams) {
    for (int64_t i = 0; i < group; i += kBits == 8 ? 4 : 8) {
      Codes codes[V];
      UNROLL for (int v = 0; v < V; ++v) codes[v] = load_codes(w + v * kLanes * 4);
      if constexpr (kBits == 8) {
        add_quad<R, V>(acc, x + i, stride, codes);
      } else {
        Nibbles nibbles[V];
        UNROLL for (int v = 0; v < V; ++v) nibbles[v] = low_nibbles(codes[v]);
        add_quad<R, V>(acc, x + i, stride, nibbles);
        UNROLL for (int v = 0; v < V; ++v) nibbles[v] = high_nibbles(codes[v]);
        add_quad<R, V>(acc, x + i + 4, stride, nibbles);
      }
      if (streams) fetch_ahead<V * kLanes * 4>(w, ahead<R>());
      w += kPanel * 4;
    }
  }

  template <int R, int V, typename W>
  static inline void add_quad(IVec (&acc)[R][V], const int8_t* x, int64_t stride, const W (&w)[V]) {
    UNROLL for (int r = 0; r < R; ++r) {
      const Quad quad = broadcast_quad(x + r * stride);
      UNROLL for (int v = 0; v < V; ++v) acc[r][v] = dot(acc[r][v], w[v], quad);
    }
  }
};

}  // namespace quire::cpu::QUIRE_ISA
