// Linears of the amx level whose weights have scales of groups, int8 or int4 (gemm_amx.h has what others share).
//
// Algorithm: the weights of a panel are unpacked to signed bytes when its first block of 32 rows uses them, and stay
// in L2 for the others. A group of up to 64 inputs is one tile product: a tile has as many bytes of k as the group, so
// groups of 32 take 16 rows x 32 bytes by 8 quads x 16 columns. Its integers are stored, and become floats while the
// tiles of the next groups are multiplied: two groups at a time, so that a row of floats is loaded and stored once for
// both.
//
// Exactness: sums of integers do not depend on their order, and the floats after them keep the order of
// quantized_kernel.cpp (groups ascending, one fma each, with offsets two), so results are those of avx512, bit for bit.
//
// Bytes: as avx512. Bound: memory bandwidth for few rows; for many the tile products, of which groups of 32 use half,
// and beside them two vector operations (load and convert, fma) for 16 sums of a group.
#pragma once

#include "cpu/gemm_amx.h"
#include "cpu/int_vec.h"
#include "cpu/quantized.h"

namespace quire::cpu::QUIRE_ISA {

constexpr int kChunkGroups = 2;  // that become floats together
constexpr int64_t kUnpackAhead = 4;  // groups: bytes just stored cannot be loaded as tiles at once
constexpr int64_t kLineQuad = kPanel * 4;  // bytes of a panel's quad of k
constexpr int64_t kRowBytes = 1 << 20;     // of the rows of a pass: they stay in L2

// The shape of a group's tiles.
struct GroupShape {
  int64_t group, width, steps;  // width: bytes of k of a tile

  explicit GroupShape(int64_t group)
      : group(group), width(std::min<int64_t>(group, kTileBytes)), steps(group / width) {}
  int64_t tile() const { return kTileRows * width; }
};

// Rows of a pass as A tiles: [block of 32 rows][group][step][2 tiles][16][width].
struct GroupPass {
  int64_t first, rows, groups;
  const uint8_t* x;

  int64_t blocks() const { return (rows + kBlockRows - 1) / kBlockRows; }
};

inline void pack_block(const QuantizedLinearArgs& a, const GroupShape& shape, const GroupPass& pass, int64_t b,
                       uint8_t* packed) {
  const int64_t steps = pass.groups * shape.steps, rows = std::min(kBlockRows, pass.rows - b * kBlockRows);
  const int8_t* x = a.x.q + (pass.first + b * kBlockRows) * a.x.stride;
  uint8_t* to = packed + b * steps * 2 * shape.tile();
  const __mmask64 valid = ~__mmask64(0) >> (64 - shape.width);
  for (int64_t s = 0; s < steps; ++s) {
    for (int64_t r = 0; r < kBlockRows; ++r, to += shape.width) {
      const __m512i v = r < rows ? _mm512_maskz_loadu_epi8(valid, x + r * a.x.stride + s * shape.width) : __m512i{};
      _mm512_mask_storeu_epi8(to, valid, v);
    }
  }
}

// Groups of a block's integers on their way into floats, and finally into y.
struct GroupSums {
  const int32_t* dots = nullptr;  // [groups] blocks of sums
  const uint8_t* scales = nullptr;
  int64_t groups = 0, first_group = 0;
  int64_t row = 0, rows = 0, column = 0;
  bool last = false;
};

template <bool kLower>
inline void clear_sums() {
  tile_zero<kC00>();
  tile_zero<kC01>();
  if constexpr (kLower) {
    tile_zero<kC10>();
    tile_zero<kC11>();
  }
}

template <bool kLower>
inline void store_sums(int32_t* sums) {
  tile_store<kC00>(sums, kTileBytes);
  tile_store<kC01>(sums + kTileSums, kTileBytes);
  if constexpr (kLower) {
    tile_store<kC10>(sums + 2 * kTileSums, kTileBytes);
    tile_store<kC11>(sums + 3 * kTileSums, kTileBytes);
  }
}

// One thread's share of a pass: the panels that it takes.
template <int kBits, bool kOffset>
class GroupWorker {
 public:
  GroupWorker(const QuantizedLinearArgs& a, const GroupShape& shape, const GroupPass& pass, ThreadPool& pool,
              int thread)
      : a_(a), shape_(shape), pass_(pass), pool_(pool), thread_(thread), y_(a.y, a.y_type, a.y_stride, a.rows, a.n) {
    TileShapes shapes;
    const int rows = static_cast<int>(std::min<int64_t>(kTileRows, pass.rows)), width = static_cast<int>(shape.width);
    for (const int t : {kC00, kC01, kC10, kC11}) shapes.set(t, rows, kTileBytes);
    for (const int t : {kA0, kA1}) shapes.set(t, rows, width);
    for (const int t : {kB0, kB1}) shapes.set(t, width / 4, kTileBytes);
    tiles_.shape(shapes);
    codes_ = scratch_.get<uint8_t>(pass.groups * group_bytes());
  }

  void run() {
    pool_.take_all(thread_, 1, [&](const Range& mine) {
      const int64_t p = mine.begin;
      Ahead ahead = ahead_of(p);
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
  int64_t group_bytes() const { return shape_.group * kPanel; }  // of unpacked codes
  const uint8_t* panel(int64_t p) const { return a_.packed + p * a_.format.panel_bytes(a_.k); }

  // Several blocks of a panel have time to fetch the next panel. A single one streams through the weights: see
  // `unpack`.
  Ahead ahead_of(int64_t p) const {
    if (pass_.blocks() == 1) return {nullptr, nullptr, 0, 1};
    const uint8_t* end = std::min(panel(p + 2), panel((a_.n + kPanel - 1) / kPanel));
    return {panel(p + 1), end, a_.format.panel_bytes(a_.k) / 64 + 1, pass_.blocks() * pass_.groups};
  }

  // The codes of one group as signed bytes. Where weights are used once, each line read fetches one further ahead.
  void unpack(const uint8_t* w, uint8_t* to) const {
    const int64_t ahead = pass_.blocks() == 1 ? kAheadBytes : 0;
    const uint8_t* end = to + group_bytes();
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

  // The codes of group g of the panel at w, if there is one.
  void unpack(const uint8_t* w, int64_t g) const {
    if (g < pass_.groups) unpack(w + g * a_.format.block_bytes(a_.k), codes_ + g * group_bytes());
  }

  // Rows of one tile of a group by both tiles of columns: rows x and weights w, which may be loaded already.
  template <int kLeft, int kRight, int kA, bool kLoad>
  void multiply(const uint8_t* x, const uint8_t* w) const {
    tile_zero<kLeft>();
    tile_zero<kRight>();
    for (int64_t s = 0; s < shape_.steps; ++s, x += 2 * shape_.tile(), w += shape_.width * kPanel) {
      if constexpr (kLoad) tile_load<kB0>(w, kLineQuad);
      tile_load<kA>(x, shape_.width);
      if constexpr (kLoad) tile_load<kB1>(w + kTileBytes, kLineQuad);
      tile_dot_ss8<kLeft, kA, kB0>();
      tile_dot_ss8<kRight, kA, kB1>();
    }
  }

  void multiply_both(const uint8_t* x, const uint8_t* w) const {
    clear_sums<true>();
    for (int64_t s = 0; s < shape_.steps; ++s, x += 2 * shape_.tile(), w += shape_.width * kPanel) {
      tile_load<kB0>(w, kLineQuad);
      tile_load<kA0>(x, shape_.width);
      tile_load<kB1>(w + kTileBytes, kLineQuad);
      tile_dot_ss8<kC00, kA0, kB0>();
      tile_dot_ss8<kC01, kA0, kB1>();
      tile_load<kA1>(x + shape_.tile(), shape_.width);
      tile_dot_ss8<kC10, kA1, kB0>();
      tile_dot_ss8<kC11, kA1, kB1>();
    }
  }

  // The sums of an earlier group that C10 and C11 still hold.
  void store_lower() {
    if (lower_ == nullptr) return;
    tile_store<kC10>(lower_, kTileBytes);
    tile_store<kC11>(lower_ + kTileSums, kTileBytes);
    lower_ = nullptr;
  }

  // Group g of block b, i of `count` that will become floats together; those of the groups before are converted
  // meanwhile.
  //
  // Tile registers are not renamed: a product waits until the sums that it overwrites are stored. So where a group is
  // one product, one half of the rows multiplies while that of the other is stored (7 % at groups of 32), and for a
  // single tile of rows every other group alternates. Floats are made before stores, which cover every offset within a
  // page: a load behind a store of its offset waits for it.
  template <bool kLower>
  void add_group(int64_t b, int64_t g, int64_t i, int64_t count, int32_t* dots) {
    const uint8_t* x = pass_.x + (b * pass_.groups + g) * shape_.steps * 2 * shape_.tile();
    const uint8_t* w = codes_ + g * group_bytes();
    if constexpr (!kLower) {
      if (i == 0) {
        multiply<kC00, kC01, kA0, true>(x, w);
        store_lower();
        finish(i, count);
        store_sums<false>(dots);
      } else {
        multiply<kC10, kC11, kA1, true>(x, w);
        finish(i, count);
        lower_ = dots;
      }
    } else if (shape_.steps == 1) {
      multiply<kC00, kC01, kA0, true>(x, w);
      finish(2 * i, 2 * count);
      store_lower();
      multiply<kC10, kC11, kA1, false>(x + shape_.tile(), w);
      finish(2 * i + 1, 2 * count);
      store_sums<false>(dots);
      lower_ = dots + 2 * kTileSums;
    } else {
      multiply_both(x, w);
      finish(i, count);
      store_sums<true>(dots);
    }
  }

  // One or two tiles of rows by panel p.
  template <bool kLower>
  void block(int64_t p, int64_t b, Ahead& ahead) {
    const int64_t bytes = a_.format.block_bytes(a_.k), row = b * kBlockRows;
    const uint8_t* w = panel(p);
    for (int64_t g = 0; b == 0 && g < kUnpackAhead; ++g) unpack(w, g);
    for (int64_t first = 0; first < pass_.groups; first += kChunkGroups) {
      const int64_t count = std::min<int64_t>(kChunkGroups, pass_.groups - first);
      turn_ = 1 - turn_;
      for (int64_t i = 0; i < count; ++i) {
        if (b == 0) unpack(w, first + i + kUnpackAhead);
        add_group<kLower>(b, first + i, i, count, dots_[turn_] + i * kBlockSums);
        ahead.fetch();
      }
      sums_ = {dots_[turn_], w + first * bytes + a_.format.code_bytes(a_.k), count, first, pass_.first + row,
               std::min(kBlockRows, pass_.rows - row), p * kPanel, first + count == pass_.groups};
    }
    store_lower();
  }

  // Part i of `parts` of the rows whose integers are to become floats.
  void finish(int64_t i, int64_t parts) {
    const Range rows = share(sums_.rows, static_cast<int>(i), static_cast<int>(parts));
    if (rows.begin == rows.end) return;
    if (sums_.groups == kChunkGroups) {
      add<kChunkGroups>(rows);
    } else {
      add<1>(rows);
    }
  }

  template <int kGroups>
  void add(Range rows) {
    static_assert(kChunkGroups == 2, "what is left of a row's groups is one");
    const GroupSums& d = sums_;
    const int64_t groups = pass_.groups, bytes = a_.format.block_bytes(a_.k);
    Vec scale[kGroups][2], offset[kGroups][2];
    UNROLL for (int i = 0; i < kGroups; ++i) {
      UNROLL for (int half = 0; half < 2; ++half) {
        const uint8_t* at = d.scales + i * bytes + half * kLanes * 2;
        scale[i][half] = load_half(at);
        if constexpr (kOffset) offset[i][half] = load_half(at + kPanel * 2);
      }
    }
    const auto sum_of = [&](int64_t r) {
      const int32_t* dots = row_of_sums(d.dots, r);
      const float* f = row_of_sums(floats_, r);
      const int32_t* sums = a_.x.sums + (d.row + r) * groups + d.first_group;
      Vec v[2] = {zero(), zero()};
      if (d.first_group != 0) UNROLL for (int half = 0; half < 2; ++half) v[half] = load(f + half * kTileSums);
      UNROLL for (int i = 0; i < kGroups; ++i) {
        UNROLL for (int half = 0; half < 2; ++half) {
          const __m512i dot = _mm512_load_si512(dots + i * kBlockSums + half * kTileSums);
          v[half] = fused(to_float(dot), scale[i][half], v[half]);
          if constexpr (kOffset) v[half] = fused(broadcast(static_cast<float>(sums[i])), offset[i][half], v[half]);
        }
      }
      return Halves{v[0], v[1]};
    };
    if (d.last) {
      const Halves power{load(a_.scale + d.column), load(a_.scale + d.column + kLanes)}, bias = y_.bias(a_.bias, d.column);
      y_.put(d.row + rows.begin, rows.end - rows.begin, d.column, [&](int64_t r) {
        const Vec x_scale = broadcast(a_.x.scale[d.row + rows.begin + r]);
        const Halves v = sum_of(rows.begin + r);
        return Halves{fused(mul(v.left, power.left), x_scale, bias.left),
                      fused(mul(v.right, power.right), x_scale, bias.right)};
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

  static thread_local Scratch scratch_;
  const QuantizedLinearArgs& a_;
  const GroupShape& shape_;
  const GroupPass& pass_;
  ThreadPool& pool_;
  int thread_;
  RowWriter y_;
  Tiles tiles_;
  uint8_t* codes_;
  GroupSums sums_;
  int turn_ = 0;
  int32_t* lower_ = nullptr;  // where the sums of the lower tile go that are not stored yet
  alignas(64) int32_t dots_[2][kChunkGroups * kBlockSums];
  alignas(64) float floats_[kBlockSums];
};

template <int kBits, bool kOffset>
thread_local Scratch GroupWorker<kBits, kOffset>::scratch_;

template <int kBits, bool kOffset>
void linear_of_groups(const QuantizedLinearArgs& a, ThreadPool& pool) {
  static thread_local Scratch packed_rows;
  const GroupShape shape(a.format.group);
  const int64_t groups = a.format.groups(a.k), k = groups * shape.group, panels = (a.n + kPanel - 1) / kPanel;
  const int64_t pass_rows = std::clamp(kRowBytes / k / kBlockRows, int64_t{2}, int64_t{16}) * kBlockRows;
  for (int64_t first = 0; first < a.rows; first += pass_rows) {
    GroupPass pass{first, std::min(pass_rows, a.rows - first), groups, nullptr};
    uint8_t* packed = packed_rows.get<uint8_t>(pass.blocks() * kBlockRows * k);
    pass.x = packed;
    over_threads(pass.blocks(), a.rows * a.n * k, pool, [&](int thread) {
      pool.take_all(thread, 1, [&](const Range& block) { pack_block(a, shape, pass, block.begin, packed); });
    });
    over_threads(panels, a.rows * a.n * k, pool, [&](int thread) {
      GroupWorker<kBits, kOffset>(a, shape, pass, pool, thread).run();
    });
  }
}

}  // namespace quire::cpu::QUIRE_ISA
