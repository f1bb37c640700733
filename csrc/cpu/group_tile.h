// Tiles of linears whose weights have scales of groups, and whose rows have scales of blocks, of one ISA level: integers
// within a part, then their product with the row's scale and one fma into the tile's floats (with offsets two), parts
// ascending.
//
// Integers need no conversion: they start from the bits of 1.5 * 2^23, whose last bit is worth 1, so their bits are those
// of the float 1.5 * 2^23 + D. A row's scale has 22 bits, so 1.5 * 2^23 times it is exact, and one fma that takes it away
// again gives D times the scale, rounded once.
//
// 6 x 2 sums and as many floats stay in 512-bit registers: a part of 32 is then 96 products beside 24 fmas, which take the
// same units, so 80 % of the products' peak is the most there is.
#pragma once

#include <bit>
#include <cstring>

#include "cpu/packed_quads.h"
#include "cpu/quantized_tile.h"

namespace quire::cpu::QUIRE_ISA {

// The parts of a row, and of a panel.
struct Parts {
  int64_t count, size, blocks, per_group;
  int block_shift, group_shift;  // part p >> shift: its block, its group
  int64_t codes, group_bytes;  // of a group of the panel: where its scales begin, and its end

  explicit Parts(const QuantizedLinearArgs& a) {
    const RowFormat rows = a.format.rows();
    count = rows.parts(a.k), size = rows.part(), blocks = rows.blocks(a.k);
    per_group = rows.group / size;
    block_shift = std::countr_zero(static_cast<uint64_t>(rows.block / size));
    group_shift = std::countr_zero(static_cast<uint64_t>(per_group));
    if (a.format.in_units()) {  // their int8 form (unit_tile.h)
      codes = size * kPanel, group_bytes = codes + kPanel * (a.format.has_offset ? 8 : 4);
    } else {
      codes = a.format.code_bytes(a.k), group_bytes = a.format.block_bytes(a.k);
    }
  }
};

constexpr float kStart = 12582912.0f;         // 1.5 * 2^23
constexpr int32_t kStartBits = 0x4b400000;  // as float: kStart

// Part p of a row.
struct RowPart {
  int32_t sum;
  float scale;

  RowPart(const QuantizedLinearArgs& a, const Parts& parts, int64_t row, int64_t p)
      : sum(a.x.sums[row * parts.count + p]), scale(a.x.scale[row * parts.blocks + (p >> parts.block_shift)]) {}
  int32_t start(int zero) const { return kStartBits - zero * sum; }
  float shift() const { return -kStart * scale; }
  float total() const { return scale * static_cast<float>(sum); }
};

// kNumber: bytes of a scale, fp16 or, of unpacked units, fp32.
template <int kBits, bool kOffset, int kNumber = 2>
struct Grouped {
  static constexpr int kTileRows = kGroupRows;
  static constexpr bool kUnpacked = kNumber == 4, kAlwaysPacks = false;
  static constexpr int kZero = kBits == 8 ? kCodesZero : 8;
  static constexpr int64_t kQuad = kBits == 8 ? kQuadBytes : 4;   // of a row that is laid out
  static constexpr int64_t kHead = kOffset ? 16 : 12;             // of a row before the quads of a part
  static constexpr int64_t kStep = kBits == 8 ? 4 : 8;            // inputs of a line of codes
  static constexpr int64_t kScales = kPanel * (kOffset ? 2 : 1) * kNumber;  // of a group

  // Bytes of a row that is laid out.
  static int64_t row_bytes(const QuantizedLinearArgs& a) {
    return a.format.rows().parts(a.k) * kHead + a.format.groups(a.k) * a.format.group / 4 * kQuad;
  }

  static void pack(const QuantizedLinearArgs& a, int64_t row, int64_t rows, int8_t* to) {
    const Parts parts(a);
    const int8_t* x = a.x.q + row * a.x.stride;
    for (int64_t p = 0; p < parts.count; ++p, x += parts.size, to += rows * parts.size / 4 * kQuad) {
      for (int64_t r = 0; r < rows; ++r) {
        const RowPart of_row(a, parts, row + r, p);
        put_number(of_row.start(kZero), to + r * 4);
        put_number(of_row.scale, to + (rows + r) * 4);
        put_number(of_row.shift(), to + (2 * rows + r) * 4);
        if constexpr (kOffset) put_number(of_row.total(), to + (3 * rows + r) * 4);
      }
      to += rows * kHead;
      put_quads<kQuad>(x, a.x.stride, rows, parts.size / 4, to);
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
  static inline Vec number_at(const uint8_t* p) {
    if constexpr (kNumber == 2) {
      return load_half(p);
    } else {
      return load(reinterpret_cast<const float*>(p));
    }
  }

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

  // A part's integers into the floats; `scales` of the tile's columns, number(i, r) i of those of a row: its scale, its
  // shift and its total.
  template <int R, int V, typename F>
  static inline void add_part(const IVec (&acc)[R][V], const uint8_t* scales, const F& number, Vec (&f)[R][V]) {
    UNROLL for (int v = 0; v < V; ++v) {
      // Else gcc keeps the numbers of all rows from vector to vector, and floats on the stack.
      if constexpr (R > 1) __asm__ volatile("" ::: "memory");
      const Vec scale = number_at(scales + v * kLanes * kNumber);
      UNROLL for (int r = 0; r < R; ++r) {
        const Vec scaled = fused(bits_as_float(acc[r][v]), number(0, r), number(1, r));
        f[r][v] = fused(scaled, scale, f[r][v]);
      }
      if constexpr (kOffset) {
        const Vec offset = number_at(scales + (kPanel + v * kLanes) * kNumber);
        UNROLL for (int r = 0; r < R; ++r) f[r][v] = fused(number(2, r), offset, f[r][v]);
      }
    }
  }

  // Packed rows. Results go into memory: with the rest of the tile beside the loop, gcc 12 keeps floats on the stack.
  template <int R>
  static __attribute__((noinline)) void packed_sums(const QuantizedLinearArgs& a, const Place& at, float* results) {
    constexpr int V = kVectors<R>;
    const Parts parts(a);
    const int64_t steps = parts.size / kStep;
    const int64_t lines = (at.next_lines + parts.count - 1) / parts.count;  // to prefetch per part
    const int8_t* x = at.packed;
    const uint8_t* w = at.panel + at.first_lane * 4;
    const uint8_t* scales = at.panel + parts.codes + at.first_lane * kNumber;
    Vec f[R][V];
    clear(f);
    for (int64_t p = 0; p < parts.count; ++p) {
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
      }
      for (int64_t i = 0; i < lines; ++i) prefetch(at, p * lines + i);
      add_part(acc, scales, [&](int i, int r) { return broadcast_float(floats + (i * R + r) * 4); }, f);
      if (((p + 1) & (parts.per_group - 1)) == 0) {
        w += kScales;
        scales += parts.group_bytes;
      }
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
    const Parts parts(a);
    const int64_t lines = (at.next_lines + parts.count - 1) / parts.count;
    const int8_t* x = a.x.q + at.row * a.x.stride;
    const uint8_t* w = at.panel + at.first_lane * 4;
    const uint8_t* scales = at.panel + parts.codes + at.first_lane * kNumber;
    Vec f[R][V];
    clear(f);
    for (int64_t p = 0, left = parts.per_group; p < parts.count; ++p) {
      IVec acc[R][V];
      UNROLL for (int r = 0; r < R; ++r) {
        const IVec start = broadcast(RowPart(a, parts, at.row + r, p).start(kZero));
        UNROLL for (int v = 0; v < V; ++v) acc[r][v] = start;
      }
      add_codes<R, V>(acc, x, a.x.stride, w, parts.size, at.next == nullptr);
      for (int64_t i = 0; i < lines; ++i) prefetch(at, p * lines + i);
      if (at.next == nullptr && left == 1) fetch_ahead<kScales>(scales, ahead<R>());
      const auto number = [&](int i, int r) {
        const RowPart of_row(a, parts, at.row + r, p);
        return broadcast(i == 0 ? of_row.scale : i == 1 ? of_row.shift() : of_row.total());
      };
      add_part(acc, scales, number, f);
      x += parts.size;
      w += parts.size * kPanel * kBits / 8;
      if (--left == 0) {
        left = parts.per_group;
        w += kScales;
        scales += parts.group_bytes;
      }
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
