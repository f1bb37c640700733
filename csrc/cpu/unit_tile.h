// Weights in units (unit_layout.h) by rows, of one ISA level: few rows by codes that are put together in registers, so that
// the weights are read at their size in the file; many by a panel that is unpacked to int8 once for all of them.
//
// The order of arithmetic is that of group_tile.h: integers within a group, one product with the row's scale and one fma
// with the group's (with offsets two), groups ascending. A nested scale is an exact product of two numbers in fp32.
//
// Bytes: the codes and scales, once per pass. Bound: memory bandwidth for one row where a level has dots of bytes; beside 8
// dots of a unit and vector stand 8 (4 bits) to 28 (3 bits) operations that put the codes together.
#pragma once

#include <utility>

#include "cpu/group_tile.h"
#include "cpu/unit_codes.h"

namespace quire::cpu::QUIRE_ISA {

constexpr int kUnitQuads = kUnit / 4;
// Rows that are multiplied without unpacking. The scalar level always unpacks: its loops over bytes would be unrolled into
// megabytes of code.
#if defined(__AVX2__) || defined(QUIRE_NEON)
constexpr int kUnitRows = kGroupRows < 4 ? kGroupRows : 4;
#else
constexpr int kUnitRows = 0;
#endif

template <int kFirst, int kCount, typename F>
inline void each_quad(const F& f) {
  [&]<int... i>(std::integer_sequence<int, i...>) {
    (f(std::integral_constant<int, kFirst + i>{}), ...);
  }(std::make_integer_sequence<int, kCount>{});
}

template <int kBits, Codebook kCodebook, Scales kScales, int kGroup, bool kOffset>
struct UnitForm {
  static constexpr UnitLayout kLayout{kBits, kGroup, kOffset, kCodebook, kScales};
  static constexpr bool kHasOffset = kOffset;
  static constexpr int kParts = kLayout.groups();  // of a unit
  static constexpr int kPartQuads = kUnitQuads / kParts;
  static constexpr bool kSmall = kCodebook != Codebook::iq4;  // numbers below 64
  static constexpr int kZero = kSmall ? kLayout.zero() : kCodesZero;
  using Operand = std::conditional_t<kSmall, Nibbles, Codes>;

  // Numbers by code, as bytes that count from the layout's zero.
  static Table table() {
    alignas(16) uint8_t bytes[16];
    const int8_t* levels = kCodebook == Codebook::iq4 ? kIq4Levels : kFp4Levels;
    for (int i = 0; i < 16; ++i) bytes[i] = static_cast<uint8_t>(levels[i] + kLayout.zero());
    return table_of(bytes);
  }

  // Quad i of kLanes columns: `codes` are those of the unit, from the first of these columns on.
  template <int i>
  static inline Bytes quad(const uint8_t* codes, [[maybe_unused]] const Table& table) {
    if constexpr (kBits < 4) {
      const Bytes low = bits_at<i % 4 * 2, 3>(load_bytes(codes + i / 4 * kLineBytes));
      if constexpr (kBits == 2) return low;
      return either(low, bits_at<i - 2, 4>(load_bytes(codes + 2 * kLineBytes)));
    } else {
      const Bytes low = bits_at<i % 2 * 4, 15>(load_bytes(codes + i / 2 * kLineBytes));
      if constexpr (kCodebook != Codebook::none) return look_up(table, low);
      if constexpr (kBits == 5) return either(low, bits_at<i - 4, 16>(load_bytes(codes + 4 * kLineBytes)));
      if constexpr (kBits == 6) return either(low, bits_at<i % 4 * 2 - 4, 48>(load_bytes(codes + (4 + i / 4) * kLineBytes)));
      return low;
    }
  }

  static inline Operand operand(const Bytes& b) {
    if constexpr (kSmall) {
      return small_codes(b);
    } else {
      return codes_of(b);
    }
  }

  // Scale and offset of group g of a unit at `lane` and the columns after it.
  static inline Vec scale(const uint8_t* head, const uint8_t* scales, int g, int64_t lane) {
    const uint8_t* at = scales + g * kLayout.number_bytes();
    if constexpr (kScales == Scales::half) return load_half(at + lane * 2);
    if constexpr (kScales == Scales::power) return power_of(load_unsigned(at + lane));
    const Vec outer = load_half(head + lane * 2);
    if constexpr (kLayout.shares_bytes()) return mul(outer, to_float(low_four(load_unsigned(at + lane))));
    return mul(outer, to_float(load_signed(at + lane)));
  }
  static inline Vec offset(const uint8_t* head, const uint8_t* scales, int g, int64_t lane) {
    const uint8_t* at = scales + (kLayout.shares_bytes() ? g : kParts + g) * kLayout.number_bytes();
    if constexpr (kScales == Scales::half) return load_half(at + lane * 2);
    const Vec outer = load_half(head + (kPanel + lane) * 2);
    if constexpr (kLayout.shares_bytes()) return mul(outer, to_float(high_four(load_unsigned(at + lane))));
    return mul(outer, to_float(load_unsigned(at + lane)));
  }
};

// What lies where in the int8 form of a panel: parts of [part / 4][32][4] bytes, 32 fp32 scales (, 32 fp32 offsets).
constexpr int64_t wide_scale_bytes(bool has_offset) { return kPanel * (has_offset ? 8 : 4); }
inline int64_t wide_panel_bytes(const QuantizedFormat& f, int64_t k) {
  const UnitLayout layout = unit_layout(f);
  return layout.num_units(k) * (kUnit * kPanel + layout.groups() * wide_scale_bytes(f.has_offset));
}

// Unit u of a panel: part g's bytes, which count from `zero`, to `codes(g)`, its scales and offsets to `scales(g)`.
template <typename F, typename ToCodes, typename ToScales>
inline void unpack_unit(const uint8_t* panel, int64_t u, int zero, const ToCodes& codes, const ToScales& scales) {
  const UnitPlace at(F::kLayout, u);
  const Table table = F::table();
  const int shift = zero - F::kLayout.zero();
  for (int v = 0; v < kPanel / kLanes; ++v) {
    const uint8_t* from = panel + at.codes + v * kLanes * 4;
    each_quad<0, kUnitQuads>([&](auto i) {
      constexpr int kPart = i / F::kPartQuads;
      uint8_t* to = codes(kPart) + (i % F::kPartQuads) * kLineBytes + v * kLanes * 4;
      store_bytes(to, add_to_bytes(F::template quad<i>(from, table), shift));
    });
    for (int g = 0; g < F::kParts; ++g) {
      float* to = scales(g) + v * kLanes;
      store(to, F::scale(panel + at.head, panel + at.scales, g, v * kLanes));
      if constexpr (F::kHasOffset) {
        store(to + kPanel, F::offset(panel + at.head, panel + at.scales, g, v * kLanes));
      }
    }
  }
}

template <typename F>
void unpack_panel(const QuantizedLinearArgs& a, const uint8_t* panel, uint8_t* to) {
  constexpr int64_t kPartBytes = F::kPartQuads * kLineBytes, kStep = kPartBytes + wide_scale_bytes(F::kHasOffset);
  const int64_t units = F::kLayout.num_units(a.k);
  for (int64_t u = 0; u < units; ++u, to += F::kParts * kStep) {
    const UnitPlace at(F::kLayout, u);
    fetch_ahead<F::kLayout.scale_bytes()>(panel + at.scales, kFarAhead);
    fetch_ahead<F::kLayout.code_bytes()>(panel + at.codes, kFarAhead);
    unpack_unit<F>(panel, u, 128, [&](int g) { return to + g * kStep; },
                   [&](int g) { return reinterpret_cast<float*>(to + g * kStep + kPartBytes); });
  }
}

// Call f.template operator()<Form>() with the form of `format`.
template <typename F>
auto with_form(const QuantizedFormat& format, const F& f) {
  constexpr Codebook kIntegers = Codebook::none;
  constexpr Scales kHalf = Scales::half, kNested = Scales::nested;
  if (format.codebook == Codebook::fp4) return f.template operator()<UnitForm<4, Codebook::fp4, Scales::power, 32, false>>();
  if (format.codebook == Codebook::iq4) {
    return format.scales == kHalf ? f.template operator()<UnitForm<4, Codebook::iq4, kHalf, 32, false>>()
                                  : f.template operator()<UnitForm<4, Codebook::iq4, kNested, 32, false>>();
  }
  if (format.scales == kHalf) {
    return format.has_offset ? f.template operator()<UnitForm<5, kIntegers, kHalf, 32, true>>()
                             : f.template operator()<UnitForm<5, kIntegers, kHalf, 32, false>>();
  }
  switch (format.bits) {
    case 2: return f.template operator()<UnitForm<2, kIntegers, kNested, 16, true>>();
    case 3: return f.template operator()<UnitForm<3, kIntegers, kNested, 16, false>>();
    case 4: return f.template operator()<UnitForm<4, kIntegers, kNested, 32, true>>();
    case 5: return f.template operator()<UnitForm<5, kIntegers, kNested, 32, true>>();
    default: return f.template operator()<UnitForm<6, kIntegers, kNested, 16, false>>();
  }
}

// R rows from `row` on by V vectors of a panel's columns from `lane` on.
template <typename F, int R, int V>
inline void unit_sums(const QuantizedLinearArgs& a, int64_t row, const uint8_t* panel, int64_t lane, Vec (&f)[R][V]) {
  const Parts parts(a);
  const int64_t units = F::kLayout.num_units(a.k), ahead = R == 1 ? kNearAhead : kFarAhead;
  const int8_t* x = a.x.q + row * a.x.stride;
  const Table table = F::table();
  UNROLL for (int r = 0; r < R; ++r) {
    UNROLL for (int v = 0; v < V; ++v) f[r][v] = zero();
  }
  for (int64_t u = 0; u < units; ++u, x += kUnit) {
    const UnitPlace at(F::kLayout, u);
    const uint8_t* codes = panel + at.codes + lane * 4;
    if (lane == 0) {
      fetch_ahead<F::kLayout.scale_bytes()>(panel + at.scales, ahead);
      fetch_ahead<F::kLayout.code_bytes()>(panel + at.codes, ahead);
    }
    UNROLL for (int g = 0; g < F::kParts; ++g) {
      const int64_t p = u * F::kParts + g;
      if (F::kParts > 1 && p >= parts.count) break;  // a short last unit of two groups has one
      IVec acc[R][V];
      UNROLL for (int r = 0; r < R; ++r) {
        const IVec start = broadcast(RowPart(a, parts, row + r, p).start(F::kZero));
        UNROLL for (int v = 0; v < V; ++v) acc[r][v] = start;
      }
      const auto add_quad = [&](auto i) {
        typename F::Operand w[V];
        UNROLL for (int v = 0; v < V; ++v) w[v] = F::operand(F::template quad<i>(codes + v * kLanes * 4, table));
        UNROLL for (int r = 0; r < R; ++r) {
          const Quad four = broadcast_quad(x + r * a.x.stride + i * 4);
          UNROLL for (int v = 0; v < V; ++v) acc[r][v] = dot(acc[r][v], w[v], four);
        }
      };
      if (F::kParts == 1 || g == 0) {
        each_quad<0, F::kPartQuads>(add_quad);
      } else {
        each_quad<F::kPartQuads % kUnitQuads, F::kPartQuads>(add_quad);
      }
      UNROLL for (int v = 0; v < V; ++v) {
        const Vec scale = F::scale(panel + at.head, panel + at.scales, g, lane + v * kLanes);
        UNROLL for (int r = 0; r < R; ++r) {
          const RowPart of_row(a, parts, row + r, p);
          const Vec scaled = fused(bits_as_float(acc[r][v]), broadcast(of_row.scale), broadcast(of_row.shift()));
          f[r][v] = fused(scaled, scale, f[r][v]);
        }
        if constexpr (F::kHasOffset) {
          const Vec offset = F::offset(panel + at.head, panel + at.scales, g, lane + v * kLanes);
          UNROLL for (int r = 0; r < R; ++r) {
            f[r][v] = fused(broadcast(RowPart(a, parts, row + r, p).total()), offset, f[r][v]);
          }
        }
      }
    }
  }
}

template <typename F, int R>
void unit_rows_of_panel(const QuantizedLinearArgs& a, int64_t p) {
  constexpr int V = kVectors<R>;
  const uint8_t* panel = a.packed + p * a.format.panel_bytes(a.k);
  for (int64_t lane = 0; lane < kPanel && p * kPanel + lane < a.n; lane += V * kLanes) {
    Vec f[R][V];
    unit_sums<F, R, V>(a, 0, panel, lane, f);
    for (int v = 0; v < V; ++v) {
      const int64_t column = p * kPanel + lane + v * kLanes;
      for (int r = 0; r < R; ++r) write(a, r, column, mul(f[r][v], load(a.scale + column)));
    }
  }
}

// At most R rows.
template <typename F, int R>
void unit_rows(const QuantizedLinearArgs& a, int64_t small_work, ThreadPool& pool) {
  if constexpr (R > 1) {
    if (a.rows < R) return unit_rows<F, R - 1>(a, small_work, pool);
  }
  const int64_t panels = (a.n + kPanel - 1) / kPanel;
  over_panels(panels, a.format.panel_bytes(a.k), a.rows * a.n * a.k < small_work, pool, [&](const Range& mine) {
    for (int64_t p = mine.begin; p < mine.end; ++p) unit_rows_of_panel<F, R>(a, p);
  });
}

}  // namespace quire::cpu::QUIRE_ISA
