// Linears of the amx level whose weights have scales of groups, int8 or int4 (gemm_amx.h has what others share).
//
// Algorithm: the weights of a panel are unpacked to signed bytes when its first block of 32 rows uses them, and stay
// in L2 for the others. A part (quantized.h) is one tile product: a tile has as many bytes of k as the part, so
// parts of 32 take 16 rows x 32 bytes by 8 quads x 16 columns. Its integers are stored, and become floats while the
// tiles of the next parts are multiplied: two parts at a time, so that a row of floats is loaded and stored once for
// both.
//
// Exactness: sums of integers do not depend on their order, and the floats after them keep the order of
// quantized_kernel.cpp (parts ascending, one fma each, with offsets two), so results are those of avx512, bit for bit.
//
// Bytes: as avx512. Bound: memory bandwidth for few rows; for many the tile products, of which parts of 32 use half,
// and beside them three vector operations (load and convert, product of scales, fma) for 16 sums of a part.
#pragma once

#include "cpu/gemm_amx.h"
#include "cpu/group_tile.h"
#include "cpu/int_vec.h"
#include "cpu/quantized.h"
#include "cpu/unit_tile.h"

namespace quire::cpu::QUIRE_ISA {

constexpr int kChunkParts = 2;  // that become floats together
constexpr int64_t kUnpackAhead = 4;  // parts: bytes just stored cannot be loaded as tiles at once
constexpr int64_t kLineQuad = kPanel * 4;  // bytes of a panel's quad of k
constexpr int64_t kRowBytes = 1 << 20;     // of the rows of a pass: they stay in L2

static_assert(kMaxBlock <= kTileBytes, "a part is one tile product");

// Of a part of the rows of a block: their scales, and what their offsets are multiplied with.
struct PartScales {
  float scale[kBlockRows], total[kBlockRows];
};

// Rows of a pass as A tiles: [block of 32 rows][part][2 tiles][16][part.size].
struct GroupPass {
  int64_t first, rows;
  Parts parts;
  const uint8_t* x = nullptr;
  const PartScales* scales = nullptr;  // [block of 32 rows][part]

  int64_t blocks() const { return (rows + kBlockRows - 1) / kBlockRows; }
  int64_t tile() const { return kTileRows * parts.size; }
};

inline void pack_block(const QuantizedLinearArgs& a, const GroupPass& pass, int64_t b, uint8_t* packed,
                       PartScales* scales) {
  const Parts& parts = pass.parts;
  const int64_t first = pass.first + b * kBlockRows, rows = std::min(kBlockRows, pass.rows - b * kBlockRows);
  const int8_t* x = a.x.q + first * a.x.stride;
  uint8_t* to = packed + b * parts.count * 2 * pass.tile();
  scales += b * parts.count;
  const __mmask64 valid = ~__mmask64(0) >> (64 - parts.size);
  for (int64_t p = 0; p < parts.count; ++p) {
    for (int64_t r = 0; r < kBlockRows; ++r, to += parts.size) {
      const __m512i v = r < rows ? _mm512_maskz_loadu_epi8(valid, x + r * a.x.stride + p * parts.size) : __m512i{};
      _mm512_mask_storeu_epi8(to, valid, v);
    }
    for (int64_t r = 0; r < rows; ++r) {
      const RowPart of_row(a, parts, first + r, p);
      scales[p].scale[r] = of_row.scale;
      scales[p].total[r] = of_row.total();
    }
  }
}

// Parts of a block's integers on their way into floats, and finally into y.
struct PartSums {
  const int32_t* dots = nullptr;  // [parts] blocks of sums
  const uint8_t* panel = nullptr;
  const float* unit_scales = nullptr;  // of the panel, where it is in units
  const PartScales* scales = nullptr;  // of the rows, [parts]
  int64_t parts = 0, first_part = 0;
  int64_t row = 0, rows = 0, column = 0;
  bool last = false;
};

// Weights as they lie, int8 or int4: scales are read from the panel.
template <int kCodeBits, bool kHasOffsets>
struct StoredCodes {
  static constexpr int kBits = kCodeBits;
  static constexpr bool kHasOffset = kHasOffsets, kInUnits = false;
};

// Weights in units, of a UnitForm: codes and scales are unpacked together.
template <typename F>
struct UnitSource {
  using Form = F;
  static constexpr int kBits = F::kLayout.bits;
  static constexpr bool kHasOffset = F::kHasOffset, kInUnits = true;
};

// One thread's share of a pass: the panels that it takes.
template <typename Source>
class GroupWorker {
 public:
  GroupWorker(const QuantizedLinearArgs& a, const GroupPass& pass, ThreadPool& pool, int thread)
      : a_(a), pass_(pass), parts_(pass.parts), pool_(pool), thread_(thread),
        y_(a.y, a.y_type, a.y_stride, a.rows, a.n) {
    TileShapes shapes;
    const int rows = static_cast<int>(std::min<int64_t>(kTileRows, pass.rows));
    const int width = static_cast<int>(parts_.size);
    for (const int t : {kC00, kC01, kC10, kC11}) shapes.set(t, rows, kTileBytes);
    for (const int t : {kA0, kA1}) shapes.set(t, rows, width);
    for (const int t : {kB0, kB1}) shapes.set(t, width / 4, kTileBytes);
    tiles_.shape(shapes);
    const int64_t parts = (parts_.count + 1) / 2 * 2;  // units of two parts are whole
    codes_ = scratch_.get<uint8_t>(parts * part_bytes());
    if constexpr (Source::kInUnits) scales_ = scales_scratch_.get<float>(2 * parts * kPartScales);
    panel_scales_ = parts * kPartScales;
  }

  void run() {
    pool_.take_all(thread_, 1, [&](const Range& mine) {
      const int64_t p = mine.begin;
      Ahead ahead = ahead_of(p);
      // The last sums of a panel become floats while the next one is unpacked, so the scales of both are kept.
      if constexpr (Source::kInUnits) scales_ += panel_scales_, panel_scales_ = -panel_scales_;
      for (int64_t b = 0; b < pass_.blocks(); ++b) {
        if (pass_.rows - b * kBlockRows > kTileRows) {
          block<true>(p, b, ahead);
        } else {
          block<false>(p, b, ahead);
        }
      }
    });
    finish(0, 1);
    _mm_sfence();  // makes streamed results visible to other threads
  }

 private:
  int64_t part_bytes() const { return parts_.size * kPanel; }  // of unpacked codes
  const uint8_t* panel(int64_t p) const { return a_.packed + p * a_.format.panel_bytes(a_.k); }
  static constexpr int kBits = Source::kBits;
  static constexpr bool kOffset = Source::kHasOffset;
  static constexpr int64_t kPartScales = kPanel * (kOffset ? 2 : 1);  // unpacked

  // The group of a part, in the panel at w, and the part's codes.
  const uint8_t* group_of(const uint8_t* w, int64_t part) const {
    return w + (part >> parts_.group_shift) * parts_.group_bytes;
  }
  const uint8_t* codes_of(const uint8_t* w, int64_t part) const {
    return group_of(w, part) + (part & (parts_.per_group - 1)) * part_bytes() * kBits / 8;
  }

  // Several blocks of a panel have time to fetch the next panel. A single one streams through the weights: see
  // `unpack`.
  Ahead ahead_of(int64_t p) const {
    if (pass_.blocks() == 1) return {nullptr, nullptr, 0, 1};
    const uint8_t* end = std::min(panel(p + 2), panel((a_.n + kPanel - 1) / kPanel));
    return {panel(p + 1), end, a_.format.panel_bytes(a_.k) / 64 + 1, pass_.blocks() * parts_.count};
  }

  // The codes of one part as signed bytes. Where weights are used once, each line read fetches one further ahead.
  void unpack(const uint8_t* w, uint8_t* to) const {
    const int64_t ahead = pass_.blocks() == 1 ? kAheadBytes : 0;
    const uint8_t* end = to + part_bytes();
    for (; to < end; w += 64) {
      __builtin_prefetch(w + ahead, 0, 2);
      const __m512i codes = _mm512_loadu_si512(w);
      if constexpr (kBits == 8) {
        _mm512_store_si512(to, _mm512_xor_si512(codes, _mm512_set1_epi8(-128)));
        to += 64;
        continue;
      }
      const __m512i eight = _mm512_set1_epi8(8);
      _mm512_store_si512(to, _mm512_sub_epi8(low_nibbles({codes}).v, eight));
      _mm512_store_si512(to + kLineQuad, _mm512_sub_epi8(high_nibbles({codes}).v, eight));
      // The other half of the columns, then the next two quads.
      to += reinterpret_cast<uintptr_t>(to) % kLineQuad == 0 ? 64 : kLineQuad + 64;
    }
    for (int64_t i = 0; i < kPanel * 2 * (kOffset ? 2 : 1); i += 64) __builtin_prefetch(w + ahead + i, 0, 2);  // scales
  }

  // The codes of a part of the panel at w, if there is one.
  void unpack(const uint8_t* w, int64_t part) const {
    if (part >= parts_.count) return;
    if constexpr (Source::kInUnits) {
      unpack_whole_unit<typename Source::Form>(w, part);
    } else {
      unpack(codes_of(w, part), codes_ + part * part_bytes());
    }
  }

  // The unit that begins with this part.
  template <typename F>
  void unpack_whole_unit(const uint8_t* w, int64_t part) const {
    if (part % F::kParts != 0) return;
    const UnitPlace at(F::kLayout, part / F::kParts);
    const int64_t ahead = pass_.blocks() == 1 ? kAheadBytes : 0;
    fetch_ahead<F::kLayout.scale_bytes()>(w + at.scales, ahead);
    fetch_ahead<F::kLayout.code_bytes()>(w + at.codes, ahead);
    unpack_unit<F>(w, part / F::kParts, 0, [&](int g) { return codes_ + (part + g) * part_bytes(); },
                   [&](int g) { return scales_ + (part + g) * kPartScales; });
  }

  // Rows of one tile of a part by both tiles of columns: rows x and weights w, which may be loaded already.
  template <int kLeft, int kRight, int kA, bool kLoad>
  void multiply(const uint8_t* x, const uint8_t* w) const {
    tile_zero<kLeft>();
    tile_zero<kRight>();
    if constexpr (kLoad) tile_load<kB0>(w, kLineQuad);
    tile_load<kA>(x, parts_.size);
    if constexpr (kLoad) tile_load<kB1>(w + kTileBytes, kLineQuad);
    tile_dot_ss8<kLeft, kA, kB0>();
    tile_dot_ss8<kRight, kA, kB1>();
  }

  void store_upper(int32_t* sums) {
    tile_store<kC00>(sums, kTileBytes);
    tile_store<kC01>(sums + kTileSums, kTileBytes);
  }

  // The sums of an earlier part that C10 and C11 still hold.
  void store_lower() {
    if (lower_ == nullptr) return;
    tile_store<kC10>(lower_, kTileBytes);
    tile_store<kC11>(lower_ + kTileSums, kTileBytes);
    lower_ = nullptr;
  }

  // A part of block b, i of `count` that will become floats together; those of the parts before are converted
  // meanwhile.
  //
  // Tile registers are not renamed: a product waits until the sums that it overwrites are stored. So one half of the
  // rows multiplies while that of the other is stored (7 % at groups of 32), and for a single tile of rows every other
  // part alternates. Floats are made before stores, which cover every offset within a page: a load behind a store of
  // its offset waits for it.
  template <bool kLower>
  void add_part(int64_t b, int64_t part, int64_t i, int64_t count, int32_t* dots) {
    const uint8_t* x = pass_.x + (b * parts_.count + part) * 2 * pass_.tile();
    const uint8_t* w = codes_ + part * part_bytes();
    if constexpr (!kLower) {
      if (i == 0) {
        multiply<kC00, kC01, kA0, true>(x, w);
        store_lower();
        finish(i, count);
        store_upper(dots);
      } else {
        multiply<kC10, kC11, kA1, true>(x, w);
        finish(i, count);
        lower_ = dots;
      }
    } else {
      multiply<kC00, kC01, kA0, true>(x, w);
      finish(2 * i, 2 * count);
      store_lower();
      multiply<kC10, kC11, kA1, false>(x + pass_.tile(), w);
      finish(2 * i + 1, 2 * count);
      store_upper(dots);
      lower_ = dots + 2 * kTileSums;
    }
  }

  // One or two tiles of rows by panel p.
  template <bool kLower>
  void block(int64_t p, int64_t b, Ahead& ahead) {
    const int64_t row = b * kBlockRows;
    const uint8_t* w = panel(p);
    for (int64_t i = 0; b == 0 && i < kUnpackAhead; ++i) unpack(w, i);
    for (int64_t first = 0; first < parts_.count; first += kChunkParts) {
      const int64_t count = std::min<int64_t>(kChunkParts, parts_.count - first);
      turn_ = 1 - turn_;
      for (int64_t i = 0; i < count; ++i) {
        if (b == 0) unpack(w, first + i + kUnpackAhead);
        add_part<kLower>(b, first + i, i, count, dots_[turn_] + i * kBlockSums);
        ahead.fetch();
      }
      sums_ = {dots_[turn_], w, scales_, pass_.scales + b * parts_.count + first, count, first, pass_.first + row,
               std::min(kBlockRows, pass_.rows - row), p * kPanel, first + count == parts_.count};
    }
    store_lower();
  }

  // Share i of `shares` of the rows whose integers are to become floats.
  void finish(int64_t i, int64_t shares) {
    const Range rows = share(sums_.rows, static_cast<int>(i), static_cast<int>(shares));
    if (rows.begin == rows.end) return;
    if (sums_.parts == kChunkParts) {
      add<kChunkParts>(rows);
    } else {
      add<1>(rows);
    }
  }

  template <int kParts>
  void add(Range rows) {
    static_assert(kChunkParts == 2, "what is left of a row's parts is one");
    const PartSums& d = sums_;
    Vec scale[kParts][2], offset[kParts][2];
    UNROLL for (int i = 0; i < kParts; ++i) {
      UNROLL for (int half = 0; half < 2; ++half) {
        if constexpr (Source::kInUnits) {
          const float* at = d.unit_scales + (d.first_part + i) * kPartScales + half * kLanes;
          scale[i][half] = load(at);
          if constexpr (kOffset) offset[i][half] = load(at + kPanel);
        } else {
          const uint8_t* at = group_of(d.panel, d.first_part + i) + parts_.codes + half * kLanes * 2;
          scale[i][half] = load_half(at);
          if constexpr (kOffset) offset[i][half] = load_half(at + kPanel * 2);
        }
      }
    }
    const auto sum_of = [&](int64_t r) {
      const int32_t* dots = row_of_sums(d.dots, r);
      const float* f = row_of_sums(floats_, r);
      Vec v[2] = {zero(), zero()};
      if (d.first_part != 0) UNROLL for (int half = 0; half < 2; ++half) v[half] = load(f + half * kTileSums);
      UNROLL for (int i = 0; i < kParts; ++i) {
        const Vec x_scale = broadcast(d.scales[i].scale[r]), total = broadcast(d.scales[i].total[r]);
        UNROLL for (int half = 0; half < 2; ++half) {
          const __m512i dot = _mm512_load_si512(dots + i * kBlockSums + half * kTileSums);
          v[half] = fused(mul(to_float(dot), x_scale), scale[i][half], v[half]);
          if constexpr (kOffset) v[half] = fused(total, offset[i][half], v[half]);
        }
      }
      return Halves{v[0], v[1]};
    };
    if (d.last) {
      const Halves power{load(a_.scale + d.column), load(a_.scale + d.column + kLanes)}, bias = y_.bias(a_.bias, d.column);
      y_.put(d.row + rows.begin, rows.end - rows.begin, d.column, [&](int64_t r) {
        const Halves v = sum_of(rows.begin + r);
        return Halves{fused(v.left, power.left, bias.left), fused(v.right, power.right, bias.right)};
      });
      return;
    }
    for (int64_t r = rows.begin; r < rows.end; ++r) {
      const Halves v = sum_of(r);
      float* f = row_of_sums(floats_, r);
      store(f, v.left);
      store(f + kTileSums, v.right);
    }
  }

  static thread_local Scratch scratch_, scales_scratch_;
  const QuantizedLinearArgs& a_;
  const GroupPass& pass_;
  const Parts& parts_;
  ThreadPool& pool_;
  int thread_;
  RowWriter y_;
  Tiles tiles_;
  uint8_t* codes_;
  float* scales_ = nullptr;  // of a panel in units, unpacked: [parts] { 32 scales (, 32 offsets) }
  int64_t panel_scales_;     // from scales_ to those of the next panel
  PartSums sums_;
  int turn_ = 0;
  int32_t* lower_ = nullptr;  // where the sums of the lower tile go that are not stored yet
  alignas(64) int32_t dots_[2][kChunkParts * kBlockSums];
  alignas(64) float floats_[kBlockSums];
};

template <typename Source>
thread_local Scratch GroupWorker<Source>::scratch_;
template <typename Source>
thread_local Scratch GroupWorker<Source>::scales_scratch_;

template <typename Source>
void linear_of_groups(const QuantizedLinearArgs& a, ThreadPool& pool) {
  static thread_local Scratch packed_rows, packed_scales;
  const Parts parts(a);
  const int64_t k = parts.count * parts.size, panels = (a.n + kPanel - 1) / kPanel;
  const int64_t pass_rows = std::clamp(kRowBytes / k / kBlockRows, int64_t{2}, int64_t{16}) * kBlockRows;
  for (int64_t first = 0; first < a.rows; first += pass_rows) {
    GroupPass pass{first, std::min(pass_rows, a.rows - first), parts};
    uint8_t* packed = packed_rows.get<uint8_t>(pass.blocks() * kBlockRows * k);
    PartScales* scales = packed_scales.get<PartScales>(pass.blocks() * parts.count);
    pass.x = packed, pass.scales = scales;
    over_threads(pass.blocks(), a.rows * a.n * k, pool, [&](int thread) {
      pool.take_all(thread, 1, [&](const Range& block) { pack_block(a, pass, block.begin, packed, scales); });
    });
    over_threads(panels, a.rows * a.n * k, pool, [&](int thread) {
      GroupWorker<Source>(a, pass, pool, thread).run();
    });
  }
}

}  // namespace quire::cpu::QUIRE_ISA
