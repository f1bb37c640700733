// Linears with int8 and int4 weights, of one ISA level (isa.h, int_vec.h).
//
// Algorithm: as linear_kernel.cpp: panels of 32 columns outermost and split over threads, row tiles inside, one
// template for every number of rows. Bytes: N * K (or half, and the scales) of weights per pass of at most 512 rows.
// Bound: memory bandwidth for few rows, the byte dot products for many; groups add one fma each (two with offsets).
// Unsigned storage adds zero * sum(x) to a dot, which the initial value of the accumulator subtracts.
#include "cpu/quantized.h"

#include <algorithm>
#include <cstring>

#include "cpu/group_tile.h"
#include "cpu/int_vec.h"
#include "cpu/matrix_tile.h"
#include "cpu/packed_quads.h"
#include "cpu/quantize_row.h"
#include "cpu/quantized_tile.h"
#include "cpu/rotate.h"
#include "cpu/row_loops.h"
#include "cpu/scratch.h"
#include "cpu/two_level.h"
#include "cpu/unit_tile.h"
#include "cpu/word_groups.h"

namespace quire::cpu::QUIRE_ISA {

namespace {

constexpr int64_t kPassRows = 512;  // more rows than this fall out of the caches while a panel is in use
constexpr int64_t kSmallWork = 1 << 17;  // multiply-adds: of one row, 128 KiB of int8 weights
constexpr int64_t kPackedRows = 8;       // from which on laying the rows out for the tiles pays
constexpr int64_t kOwnRows = 64;         // up to which each thread lays rows out for itself, which is faster
constexpr int64_t kOwnColumns = 256;     // if the thread has as many columns to multiply them with
constexpr int64_t kReadRows = 16;        // whose products take about as long as reading the weights

inline int32_t row_sum(const QuantizedLinearArgs& a, int64_t row) {
  const int64_t groups = a.format.groups(a.k);
  int32_t sum = 0;
  for (int64_t g = 0; g < groups; ++g) sum += a.x.sums[row * groups + g];
  return sum;
}

// One scale per column: integers over all of K.
struct Channel {
  static constexpr int kTileRows = kChannelRows;
  static constexpr bool kUnpacked = true, kAlwaysPacks = false;  // reads weights as int8; packs even one row

  static int64_t row_bytes(const QuantizedLinearArgs& a) { return 4 + (a.k + 3) / 4 * kQuadBytes; }

  static void pack(const QuantizedLinearArgs& a, int64_t row, int64_t rows, int8_t* to) {
    const int64_t quads = (a.k + 3) / 4;
    const RowLayout layout(rows, takes_matrix(quads));
    if (layout.width > rows) std::fill_n(to, layout.width * row_bytes(a), int8_t{0});
    for (int64_t r = 0; r < rows; ++r) put_number(-kCodesZero * row_sum(a, row + r), to + r * 4);
    to += layout.width * 4;
    const int8_t* x = a.x.q + row * a.x.stride;
    if (!layout.matrix) return put_quads<kQuadBytes>(x, a.x.stride, rows, quads, to);
    for (int64_t r = 0; r < rows; ++r, x += a.x.stride) {
      for (int64_t i = 0; i < quads; ++i) put_quad(x + i * 4, to + layout.at(i, r) * kQuadBytes);
    }
  }

  template <int R>
  static void tile(const QuantizedLinearArgs& a, const Place& at) {
    constexpr int V = kVectors<R>;
    alignas(64) int32_t sums[(R + 1) / 2 * 2 * V * kLanes];
    if (at.packed != nullptr && takes_matrix((a.k + 3) / 4)) {
      products<R>(a, at, sums);
    } else {
      (at.packed != nullptr ? dots<R, true> : dots<R, false>)(a, at, sums);
    }
    Vec scale[V];
    UNROLL for (int v = 0; v < V; ++v) scale[v] = load(a.scale + at.column + v * kLanes);
    const auto scaled = [&](int r, int v) {
      return mul(to_float(load_ints(sums + (r * V + v) * kLanes)), scale[v]);
    };
    if (a.offset == nullptr) return write_tile<R, V>(a, at, scaled);
    write_tile<R, V>(a, at, [&](int r, int v) {
      const Vec sum = broadcast(static_cast<float>(a.x.sums[at.row + r]));
      return fused(sum, load(a.offset + at.column + v * kLanes), scaled(r, v));
    });
  }

 private:
#if defined(QUIRE_NEON_I8MM)
  template <int R>
  static void products(const QuantizedLinearArgs& a, const Place& at, int32_t* sums) {
    constexpr int V = kVectors<R>;
    const auto* w = reinterpret_cast<const uint32_t*>(at.panel) + at.first_lane;
    const int8_t* x = at.packed + (R + 1) / 2 * 2 * 4;
    multiply_tile<Int8Matrix, R, V>(reinterpret_cast<const uint32_t*>(x), w, (a.k + 3) / 4, sums,
                                    [&](int64_t s) { prefetch(at, s); });
    for (int r = 0; r < R; ++r) {
      const IVec start = broadcast_number(at.packed + r * 4);
      for (int v = 0; v < V; ++v, sums += kLanes) store_ints(sums, vaddq_s32(load_ints(sums), start));
    }
  }
#else
  template <int R>
  static void products(const QuantizedLinearArgs&, const Place&, int32_t*) {}
#endif

  // Into memory: with tails of rows beside the loop, gcc 12 keeps half of the accumulators on the stack in it.
  template <int R, bool kPacked>
  static void dots(const QuantizedLinearArgs& a, const Place& at, int32_t* sums) {
    constexpr int V = kVectors<R>;
    const int8_t* x = kPacked ? at.packed : a.x.q + at.row * a.x.stride;
    const int64_t stride = kPacked ? kQuadBytes : a.x.stride;
    IVec acc[R][V];
    UNROLL for (int r = 0; r < R; ++r) {
      const IVec start = kPacked ? broadcast_number(x + r * 4) : broadcast(-kCodesZero * row_sum(a, at.row + r));
      UNROLL for (int v = 0; v < V; ++v) acc[r][v] = start;
    }
    if (kPacked) x += R * 4;
    const uint8_t* w = at.panel + at.first_lane * 4;
    const int64_t quads = (a.k + 3) / 4;
    for (int64_t s = 0; s < quads; ++s) {
      Codes codes[V];
      UNROLL for (int v = 0; v < V; ++v) codes[v] = load_codes(w + v * kLanes * 4);
      UNROLL for (int r = 0; r < R; ++r) {
        const Quad quad = kPacked ? take_quad(x + r * stride) : broadcast_quad(x + r * stride);
        UNROLL for (int v = 0; v < V; ++v) acc[r][v] = dot(acc[r][v], codes[v], quad);
      }
      x += kPacked ? kQuadBytes * R : 4;
      if (at.next == nullptr) {
        fetch_ahead<V * kLanes * 4>(w, kNearAhead);
      } else {
        prefetch(at, s);
      }
      w += kPanel * 4;
    }
    UNROLL for (int r = 0; r < R; ++r) {
      UNROLL for (int v = 0; v < V; ++v) store_ints(sums + (r * V + v) * kLanes, acc[r][v]);
    }
  }
};

// R rows by all 32 columns of a panel, as many columns at a time as fit into registers.
template <typename F, int R>
void panel_rows(const QuantizedLinearArgs& a, Place at) {
  constexpr int64_t kWidth = kVectors<R> * kLanes;
  const int64_t lines = at.next_lines;
  for (int64_t lane = 0; lane < kPanel && at.column < a.n; lane += kWidth) {
    at.first_lane = lane;
    at.next_lines = lane == 0 ? lines : 0;
    F::template tile<R>(a, at);
    at.column += kWidth;
  }
}

template <typename F, int R = F::kTileRows>
void rows_of(int64_t rows, const QuantizedLinearArgs& a, const Place& at) {
  if (rows == R) {
    panel_rows<F, R>(a, at);
  } else if constexpr (R > 1) {
    rows_of<F, R - 1>(rows, a, at);
  }
}

// int4 of two levels: by groups where the level sums them in words, else unpacked panel by panel.
#if defined(QUIRE_WORD_GROUPS)
using TwoLevel = WordGroups;
template <>
void rows_of<WordGroups>(int64_t rows, const QuantizedLinearArgs& a, const Place& at) {
  WordGroups::panel_rows(rows, a, at);
}
#else
using TwoLevel = Channel;
#endif

// Whether F reads panels of the format unpacked.
template <typename F>
bool unpacks(const QuantizedFormat& f) {
  return F::kUnpacked && (f.two_level() || f.in_units());
}

// The panel of two levels or of units unpacked to int8, in memory of this thread.
const uint8_t* unpacked_panel(const QuantizedLinearArgs& a, const uint8_t* panel) {
  static thread_local Scratch scratch;
  if (a.format.in_units()) {
    uint8_t* wide = scratch.get<uint8_t>(wide_panel_bytes(a.format, a.k));
    with_form(a.format, [&]<typename F>() { unpack_panel<F>(a, panel, wide); });
    return wide;
  }
  const int64_t blocks = a.format.blocks(a.k);
  uint8_t* unpacked = scratch.get<uint8_t>(blocks * kUnpackedBytes);
  for (int64_t b = 0; b < blocks; ++b) {
    fetch_ahead<kTwoLevelBytes>(panel + b * kTwoLevelBytes, kFarAhead);
    unpack_block(panel + b * kTwoLevelBytes, 128, unpacked + b * kUnpackedBytes);
  }
  return unpacked;
}

// R rows from `first` on by a panel of two levels as it lies, from vector kFirst on.
template <int R, int kFirst = 0>
void two_level_panel(const QuantizedLinearArgs& a, int64_t p, int64_t first, const int32_t (*zeros)[2]) {
  if constexpr (kFirst < kPanelVectors) {
    constexpr int V = kFewVectors<R>;
    IVec acc[R][V];
    const int64_t groups = a.format.groups(a.k);
    const int8_t* x = a.x.q + first * a.x.stride;
    dot_panel<kFirst>(a.packed + p * a.format.panel_bytes(a.k), x, a.x.stride, zeros + first * groups, groups, acc);
    for (int v = 0; v < V; ++v) {
      const int64_t column = p * kPanel + (kFirst + v) * kLanes;
      for (int r = 0; r < R; ++r) write(a, first + r, column, mul(to_float(acc[r][v]), load(a.scale + column)));
    }
    two_level_panel<R, kFirst + V>(a, p, first, zeros);
  }
}

template <int R = kFewRows>
void two_level_tile(const QuantizedLinearArgs& a, int64_t p, const Range& rows, const int32_t (*zeros)[2]) {
  if constexpr (R > 1) {
    if (rows.end - rows.begin < R) return two_level_tile<R - 1>(a, p, rows, zeros);
  }
  two_level_panel<R>(a, p, rows.begin, zeros);
}

// Few tiles of rows: the second finds the panel in the cache.
void two_level_rows(const QuantizedLinearArgs& a, ThreadPool& pool) {
  const int64_t panels = (a.n + kPanel - 1) / kPanel, sums = a.rows * a.format.groups(a.k);
  const int tiles = static_cast<int>((a.rows + kFewRows - 1) / kFewRows);
  static thread_local Scratch scratch;
  auto* zeros = scratch.get<int32_t[2]>(sums);
  for (int64_t i = 0; i < sums; ++i) zeros[i][0] = -8 * a.x.sums[i], zeros[i][1] = -7 * a.x.sums[i];
  over_panels(panels, a.format.panel_bytes(a.k), a.rows * a.n * a.k < kSmallWork, pool, [&](const Range& mine) {
    for (int64_t p = mine.begin; p < mine.end; ++p) {
      for (int t = 0; t < tiles; ++t) two_level_tile(a, p, share(a.rows, t, tiles), zeros);
    }
  });
}

// Rows of a pass, cut into tiles.
template <typename F>
struct Pass {
  int64_t first, rows;
  int tiles;

  Pass(int64_t first, int64_t rows)
      : first(first), rows(rows), tiles(static_cast<int>(num_tiles(rows, F::kTileRows))) {}
  // Even: 16 rows are 8 + 8, not 12 + 4.
  Range tile(int64_t t) const { return share(rows, static_cast<int>(t), tiles); }
  static int64_t tile_bytes(const QuantizedLinearArgs& a) { return F::kTileRows * F::row_bytes(a); }
  void pack(const QuantizedLinearArgs& a, int64_t t, int8_t* to) const {
    F::pack(a, first + tile(t).begin, tile(t).end - tile(t).begin, to + t * tile_bytes(a));
  }
};

// The rows of a pass laid out for their tiles by all threads together.
template <typename F>
const int8_t* pack_rows(const QuantizedLinearArgs& a, const Pass<F>& pass, ThreadPool& pool) {
  static thread_local Scratch scratch;
  auto* packed = scratch.get<int8_t>(static_cast<std::size_t>(pass.tiles * pass.tile_bytes(a)));
  over_rows(pass.tiles, pass.rows / pass.tiles * a.k, pool, [&](int64_t t) { pass.pack(a, t, packed); });
  return packed;
}

// The same by one thread for itself.
template <typename F>
const int8_t* pack_own_rows(const QuantizedLinearArgs& a, const Pass<F>& pass) {
  static thread_local Scratch scratch;
  auto* packed = scratch.get<int8_t>(static_cast<std::size_t>(pass.tiles * pass.tile_bytes(a)));
  for (int t = 0; t < pass.tiles; ++t) pass.pack(a, t, packed);
  return packed;
}

template <typename F>
void linear_as(const QuantizedLinearArgs& a, ThreadPool& pool) {
  const int64_t panels = (a.n + kPanel - 1) / kPanel, panel_bytes = a.format.panel_bytes(a.k);
  const bool small = a.rows * a.n * a.k < kSmallWork;
  for (int64_t first = 0; first < a.rows; first += kPassRows) {
    const Pass<F> pass(first, std::min(kPassRows, a.rows - first));
    const int tiles = pass.tiles;
    const bool packs = F::kAlwaysPacks || (pass.rows >= kPackedRows && !small);
    const bool own = packs && pass.rows <= kOwnRows && a.n >= kOwnColumns * pool.num_threads();
    const int8_t* const together = packs && !own ? pack_rows<F>(a, pass, pool) : nullptr;
    const auto rows_of_thread = [&] { return own ? pack_own_rows<F>(a, pass) : together; };
    const bool streams = tiles == 1 && !unpacks<F>(a.format);
    const auto multiply = [&](const Range& mine, const int8_t* packed) {
      for (int64_t p = mine.begin; p < mine.end; ++p) {
        const uint8_t* panel = a.packed + p * panel_bytes;
        if (unpacks<F>(a.format)) panel = unpacked_panel(a, panel);
        const bool ahead = p + 1 < panels && tiles > 1;
        for (int t = 0; t < tiles; ++t) {
          const Range tile = pass.tile(t), lines = ahead ? share(panel_bytes / 64, t, tiles) : Range{0, 0};
          const auto* next = reinterpret_cast<const char*>(a.packed + (p + 1) * panel_bytes) + lines.begin * 64;
          rows_of<F>(tile.end - tile.begin, a,
                     {panel, first + tile.begin, p * kPanel, 0, streams ? nullptr : next, lines.end - lines.begin,
                      packed == nullptr ? nullptr : packed + t * pass.tile_bytes(a)});
        }
      }
    };
    if (small) {
      multiply({0, panels}, rows_of_thread());
      continue;
    }
    const int64_t work = panel_bytes * ((pass.rows + kReadRows - 1) / kReadRows);
    const int64_t most = std::clamp<int64_t>(kTakenBytes / work, 1, 8);
    pool.deal(panels);
    pool.run([&](int thread, int) {
      const int8_t* packed = rows_of_thread();
      pool.take_all(thread, most, [&](const Range& mine) { multiply(mine, packed); });
    });
  }
}

// Whether the rows are few enough to be multiplied by codes in registers; they are then.
template <int kRows>
bool few_rows_of_units([[maybe_unused]] const QuantizedLinearArgs& a, [[maybe_unused]] ThreadPool& pool) {
  if constexpr (kRows > 0) {
    if (a.rows > kRows) return false;
    if (a.rows > 0) with_form(a.format, [&]<typename F>() { unit_rows<F, kRows>(a, kSmallWork, pool); });
    return true;
  }
  return false;
}

void linear(const QuantizedLinearArgs& a, ThreadPool& pool) {
  const QuantizedFormat& f = a.format;
  if (f.two_level() && a.rows > 0 && a.rows <= kFewTiles * kFewRows) return two_level_rows(a, pool);
  if (f.in_units()) {
    if (few_rows_of_units<kUnitRows>(a, pool)) return;
    return (f.has_offset ? linear_as<Grouped<8, true, 4>> : linear_as<Grouped<8, false, 4>>)(a, pool);
  }
  if (f.group == 0) return linear_as<Channel>(a, pool);
  if (f.two_level()) return linear_as<TwoLevel>(a, pool);
  if (f.bits == 8) return (f.has_offset ? linear_as<Grouped<8, true>> : linear_as<Grouped<8, false>>)(a, pool);
  return (f.has_offset ? linear_as<Grouped<4, true>> : linear_as<Grouped<4, false>>)(a, pool);
}

template <typename T>
void quantize(const QuantizeArgs& a, ThreadPool& pool) {
  over_rows(a.rows, a.k, pool, [&](int64_t row) {
    quantize_row(static_cast<const T*>(a.x) + row * a.x_stride, a.k, a.format, a.y, row);
  });
}

inline int code_of(const QuantizedFormat& format, const uint8_t* column, int64_t i) {
  if (format.bits == 8) return column[i / 4 * kPanel * 4 + i % 4] - 128;
  const int both = column[i / 8 * kPanel * 4 + i % 4];
  return (i / 4 % 2 == 0 ? both & 15 : both >> 4) - 8;
}

inline int multiplier_of(const uint8_t* multipliers, int64_t lane, int64_t group) {
  return multipliers[group * kPanel / 2 + lane % (kPanel / 2)] >> (lane < kPanel / 2 ? 0 : 4) & 15;
}

inline int scaled(int level, int m) { return m * (level + m % 2); }

inline void put(float f, float* p) { *p = f; }
inline void put(float f, uint16_t* p) { *p = float_to_bf16(f); }

template <typename T>
void take_from_units(const TakeArgs& a, ThreadPool& pool) {
  const UnitLayout layout = unit_layout(a.format);
  over_rows(a.rows, a.k * 8, pool, [&](int64_t row) {
    const int64_t id = a.ids[row];
    float* held = scratch_row<float>(a.k);
    read_unit_row(layout, a.packed + id / kPanel * a.format.panel_bytes(a.k), id % kPanel, a.k, a.scale[id], held);
    T* y = static_cast<T*>(a.y) + row * a.k;
    for (int64_t i = 0; i < a.k; ++i) put(held[i], y + i);
  });
}

template <typename T>
void take(const TakeArgs& a, ThreadPool& pool) {
  if (a.format.in_units()) return take_from_units<T>(a, pool);
  const int64_t groups = a.format.blocks(a.k), size = a.format.group == 0 ? a.k : a.format.block_inputs(a.k);
  const int64_t codes = a.format.code_bytes(a.k), block = a.format.block_bytes(a.k);
  over_rows(a.rows, a.k * 8, pool, [&](int64_t row) {  // every four inputs lie in a line of their own
    const int64_t id = a.ids[row], lane = id % kPanel;
    const uint8_t* panel = a.packed + id / kPanel * groups * block;
    float* held = scratch_row<float>(a.k);
    for (int64_t g = 0; g < groups; ++g, panel += block) {
      float scale = a.scale[id], offset = a.offset != nullptr ? a.offset[id] : 0.0f;
      const bool has_offset = a.format.has_offset;
      if (a.format.group != 0 && !a.format.two_level()) {
        if (has_offset) offset = half_to_float(panel + codes + (kPanel + lane) * 2) * scale;
        scale = half_to_float(panel + codes + lane * 2) * scale;
      }
      for (int64_t i = g * size; i < std::min(a.k, (g + 1) * size); ++i) {
        int code = code_of(a.format, panel + a.format.code_begin() + lane * 4, i - g * size);
        if (a.format.two_level()) code = scaled(code, multiplier_of(panel, lane, (i - g * size) / kTwoLevelGroup));
        const float w = static_cast<float>(code) * scale;
        held[i] = has_offset ? w + offset : w;
      }
    }
    if (a.rotation != 0) rotate(held, a.k, a.rotation, held);
    const float factor = a.rotation == 0 ? 1.0f : row_factor(a.rotation);
    T* y = static_cast<T*>(a.y) + row * a.k;
    for (int64_t i = 0; i < a.k; ++i) put(held[i] * factor, y + i);
  });
}

}  // namespace

extern const QuantizedKernels kQuantized;
const QuantizedKernels kQuantized = {linear, by_type<QuantizeArgs, quantize<float>, quantize<uint16_t>>,
                                     by_type<TakeArgs, take<float>, take<uint16_t>>};

}  // namespace quire::cpu::QUIRE_ISA
