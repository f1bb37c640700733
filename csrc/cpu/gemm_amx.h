// Products of rows and packed panels on matrix tiles, bf16 and int8 alike: the panels of both hold B tiles of 16 rows
// of 64 bytes as they lie (pairs or quads of k x 16 columns, rows 128 bytes apart), two side by side per step of 64
// bytes of k.
//
// Algorithm: A tiles are 16 rows x 64 bytes: of x as it lies for up to 16 rows, else of rows packed once per pass as
// [chunk][block of 32 rows][step][2 tiles][16][64], one stream per block. 2 x 2 tiles of results, 32 rows x 32 columns,
// live in registers over all of K, as long as the rows of a pass stay in L2 (1 MiB: 256 bf16 rows at K = 2048); longer
// rows are computed in chunks of 32 steps by 16 panels, and their sums spill in between (unrounded, so no bit is lost).
// Short chunks, whose weights stay in L1, spill too often: 1.3 against 1.65 TFLOP/s of bf16
// (benchmarks/results/amx-gemm-2026-11-21.md). A block's sums become results while the tiles of the next are
// multiplied, and bypass caches that would not hold them.
//
// Exactness: every element is one sequence of tile products over k, step by step, whatever the number of rows: a row of
// a tile does not affect the others. A last step of less than 64 bytes is always padded with zeros.
//
// Bytes: the weights once per pass. Bound: memory bandwidth up to about 100 rows, the tile products above; in between
// L2, which delivers about 45 bytes per cycle, of which each product needs half a KiB.
#pragma once

#include <algorithm>
#include <cstring>

#include "cpu/amx.h"
#include "cpu/isa.h"
#include "cpu/linear.h"
#include "cpu/scratch.h"

namespace quire::cpu::QUIRE_ISA {

constexpr int64_t kTile = kTileRows * kTileBytes;       // bytes of a tile of rows
constexpr int64_t kPanelStep = 2 * kTile;               // bytes of a panel's step: two B tiles
constexpr int64_t kBlockRows = 2 * kTileRows;
constexpr int64_t kTileSums = kTileRows * kTileRows;    // of a tile of results
constexpr int64_t kBlockSums = 4 * kTileSums;           // of a block: its four tiles, one after the other
constexpr int64_t kChunkSteps = 32;                     // between spills of the sums
constexpr int64_t kGroupPanels = 8;                     // panels that share a chunk of the rows
constexpr int64_t kCachedTiles = 1024;                  // A tiles that stay in L2: 1 MiB
constexpr int64_t kCachedResults = 1 << 20;             // bytes; more do not stay in L2
constexpr int64_t kSmallWork = 1 << 17;                 // bytes of weights times rows, see `over_threads`
constexpr int64_t kAheadBytes = 8 << 10;                // how far ahead the weights of a single block are fetched
constexpr int64_t kFetches = 4;                         // per step: see Ahead
constexpr int64_t kUnpackSteps = 4;                     // ahead: bytes just stored cannot be loaded as tiles at once
constexpr int64_t kUnpackSlots = 8;                     // of unpacked steps, where each is used once
constexpr int64_t kWriteRows = 4;                       // rows of results written per step

enum { kC00, kC01, kC10, kC11, kA0, kA1, kB0, kB1 };

// The operands, in bytes.
struct Gemm {
  const uint8_t *x, *w;
  int64_t rows, x_stride, k;  // k: bytes of a row
  int64_t n, panel;           // columns; bytes of a panel
  int64_t pass_rows;

  int64_t panels() const { return (n + kPanel - 1) / kPanel; }
  int64_t work() const { return rows * n * k; }
};

// Call body(thread) on the threads, which share `items`; for less than about 5 us of work the others are not woken.
// Which thread computes an item changes no bit.
template <typename F>
void over_threads(int64_t items, int64_t work, ThreadPool& pool, const F& body) {
  pool.deal(items);
  if (work < kSmallWork) {
    body(0);
  } else {
    pool.run([&](int thread, int) { body(thread); });
  }
}

// Cache lines to fetch into L2 while something else computes, a few at a time: more would fill the queue of misses, and
// the tiles that are loaded next would wait for them.
struct Ahead {
  const uint8_t *next, *end;
  int64_t lines;

  void fetch() {
    const uint8_t* stop = std::min(next + lines * 64, end);
    for (; next < stop; next += 64) __builtin_prefetch(next, 0, 2);
  }
};

// A row of a panel's width.
struct Halves {
  Vec left, right;
};

// Where results go: rows of a panel's width, as fp32 or rounded to bf16, past the caches if there are many. Whatever
// depends on the panel alone stays out of the loop over rows, so that writing a row costs little beside its products.
class RowWriter {
 public:
  RowWriter(void* y, Type type, int64_t stride, int64_t rows, int64_t n) : y_(y), type_(type), stride_(stride), n_(n) {
    const bool whole_lines = (reinterpret_cast<uintptr_t>(y) | (stride * 2)) % 64 == 0;
    stream_ = type == Type::bf16 && whole_lines && rows * n * 2 > kCachedResults;
  }

  // Which of a panel's columns exist.
  __mmask32 valid(int64_t column) const {
    return static_cast<__mmask32>((uint64_t(1) << std::min<int64_t>(kPanel, n_ - column)) - 1);
  }

  // Added to the panel's columns. Without a bias it is -0, which changes no bit of a sum.
  Halves bias(const float* bias, int64_t column) const {
    if (bias == nullptr) return {broadcast(-0.0f), broadcast(-0.0f)};
    const __mmask32 mask = valid(column);
    return {_mm512_maskz_loadu_ps(mask & 0xffff, bias + column),
            _mm512_maskz_loadu_ps(mask >> 16, bias + column + kLanes)};
  }

  // Write `rows` rows from `row` on; `of(r)` are the Halves of row `row` + r.
  template <typename F>
  void put(int64_t row, int64_t rows, int64_t column, const F& of) const {
    const int64_t to = row * stride_ + column;
    const __mmask32 mask = valid(column);
    if (type_ == Type::f32) {
      float* y = static_cast<float*>(y_) + to;
      for (int64_t r = 0; r < rows; ++r, y += stride_) {
        const Halves v = of(r);
        _mm512_mask_storeu_ps(y, mask & 0xffff, v.left);
        _mm512_mask_storeu_ps(y + kLanes, mask >> 16, v.right);
      }
      return;
    }
    uint16_t* y = static_cast<uint16_t*>(y_) + to;
    const bool stream = stream_ && mask == ~__mmask32(0);
    for (int64_t r = 0; r < rows; ++r, y += stride_) {
      const Halves v = of(r);
      const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(v.right, v.left);
      if (stream) {
        _mm512_stream_si512(reinterpret_cast<__m512i*>(y), both);
      } else {
        _mm512_mask_storeu_epi16(y, mask, both);
      }
    }
  }

 private:
  void* y_;
  Type type_;
  int64_t stride_, n_;
  bool stream_;
};

// The rows of one pass and their layout.
struct Pass {
  int64_t first, rows, tiles, steps;  // steps: of 64 bytes, the last filled up
  int64_t chunk;                      // steps of a chunk
  const uint8_t* x;                   // packed; or as it lies, for a single tile
  int64_t stride, step;               // of A tiles: bytes between rows and between steps
  bool packed;

  int64_t blocks() const { return (tiles + 1) / 2; }
  int64_t chunks() const { return (steps + chunk - 1) / chunk; }
  int64_t chunk_steps(int64_t c) const { return std::min(chunk, steps - c * chunk); }
  // Where the A tiles of block b and chunk c begin, counted in steps.
  int64_t place(int64_t b, int64_t c) const { return packed ? c * chunk * blocks() + b * chunk_steps(c) : c * chunk; }
};

// Copies the rows of tile t, filled up with zeros to 16 rows and whole steps.
inline void pack_tile(const Gemm& g, const Pass& pass, int64_t t, uint8_t* packed) {
  const int64_t rows = std::min<int64_t>(kTileRows, pass.rows - t * kTileRows), whole = g.k / kTileBytes;
  const uint8_t* x = g.x + (pass.first + t * kTileRows) * g.x_stride;
  for (int64_t c = 0; c < pass.chunks(); ++c) {
    uint8_t* to = packed + pass.place(t / 2, c) * pass.step + t % 2 * kTile;
    for (int64_t s = c * pass.chunk; s < c * pass.chunk + pass.chunk_steps(c); ++s, to += pass.step) {
      const __mmask64 valid = s < whole ? ~__mmask64(0) : (__mmask64(1) << g.k % kTileBytes) - 1;
      for (int64_t r = 0; r < kTileRows; ++r) {
        const __m512i v = r < rows ? _mm512_maskz_loadu_epi8(valid, x + r * g.x_stride + s * kTileBytes) : __m512i{};
        _mm512_store_si512(to + r * kTileBytes, v);
      }
    }
  }
}

// One or two tiles of rows by the two tiles of a panel's step, and kFetches from `ahead` between them.
template <bool kLower, typename Op>
inline void step(const uint8_t* x, int64_t stride, const uint8_t* w, Ahead& ahead) {
  tile_load<kB0>(w, 2 * kTileBytes);
  ahead.fetch();
  tile_load<kA0>(x, stride);
  tile_load<kB1>(w + kTileBytes, 2 * kTileBytes);
  ahead.fetch();
  Op::template dot<kC00, kA0, kB0>();
  if constexpr (kLower) tile_load<kA1>(x + kTile, stride);
  Op::template dot<kC01, kA0, kB1>();
  ahead.fetch();
  if constexpr (kLower) {
    Op::template dot<kC10, kA1, kB0>();
    Op::template dot<kC11, kA1, kB1>();
  }
  ahead.fetch();
}

template <bool kLower>
inline void clear_sums() {
  tile_zero<kC00>();
  tile_zero<kC01>();
  if constexpr (kLower) {
    tile_zero<kC10>();
    tile_zero<kC11>();
  }
}

template <bool kLower, typename Sum>
inline void load_sums(const Sum* sums) {
  tile_load<kC00>(sums, kTileBytes);
  tile_load<kC01>(sums + kTileSums, kTileBytes);
  if constexpr (kLower) {
    tile_load<kC10>(sums + 2 * kTileSums, kTileBytes);
    tile_load<kC11>(sums + 3 * kTileSums, kTileBytes);
  }
}

template <bool kLower, typename Sum>
inline void store_sums(Sum* sums) {
  tile_store<kC00>(sums, kTileBytes);
  tile_store<kC01>(sums + kTileSums, kTileBytes);
  if constexpr (kLower) {
    tile_store<kC10>(sums + 2 * kTileSums, kTileBytes);
    tile_store<kC11>(sums + 3 * kTileSums, kTileBytes);
  }
}

// Row r of a block's sums: the left 16 columns; the right ones are kTileSums further.
template <typename Sum>
inline Sum* row_of_sums(Sum* sums, int64_t r) {
  return sums + r / kTileRows * 2 * kTileSums + r % kTileRows * kTileRows;
}

// One thread's share of a pass: the panels that it takes, in groups. Op has the type `Sum`, the products `dot` of
// three tiles, and `write(row, rows, column, sums)`, which makes results of some rows' sums (`row_of_sums`). Where its
// weights are packed more tightly (`kUnpacks`), `unpack(step, to)` makes B tiles of one step of kStepBytes while the
// first block of rows is multiplied with those before it; a single block needs few of them at a time, and they stay in
// L1.
template <typename Op>
class PanelWorker {
 public:
  using Sum = typename Op::Sum;

  PanelWorker(const Gemm& g, const Op& op, const Pass& pass, ThreadPool& pool, int thread)
      : g_(g), op_(op), pass_(pass), pool_(pool), thread_(thread), group_(pass.chunks() == 1 ? 1 : kGroupPanels) {
    TileShapes shapes;
    const int rows = static_cast<int>(pass.packed ? kTileRows : pass.rows);
    for (const int t : {kC00, kC01, kC10, kC11, kA0, kA1}) shapes.set(t, rows, kTileBytes);
    for (const int t : {kB0, kB1}) shapes.set(t, kTileRows, kTileBytes);
    tiles_.shape(shapes);
    sums_ = scratch_.get<Sum>((group_ * pass.blocks() + 1) * kBlockSums);
    if constexpr (Op::kUnpacks) {
      slots_ = pass.blocks() == 1 ? kUnpackSlots : std::min(pass.chunk, pass.steps);
      unpacked_ = unpack_scratch_.get<uint8_t>(slots_ * kPanelStep);
    }
  }

  void run() {
    pool_.take_all(thread_, group_, [&](const Range& mine) {
      const auto [first, end] = mine;
      for (int64_t c = 0; c < pass_.chunks(); ++c) {
        for (int64_t p = first; p < end; ++p) {
          const bool more = p + 1 < end, same = more || c + 1 < pass_.chunks();
          chunk(p, c, (p - first) * pass_.blocks(), more ? p + 1 : same ? first : end, more ? c : same ? c + 1 : 0);
        }
      }
    });
    write(kBlockRows);
    _mm_sfence();  // makes streamed results visible to other threads
  }

 private:
  const uint8_t* weights(int64_t p, int64_t c) const { return g_.w + p * g_.panel + c * pass_.chunk * Op::kStepBytes; }

  // What to fetch during a chunk: a single block streams through the weights, several have time to fetch the next
  // chunk.
  Ahead ahead_of(int64_t p, int64_t c, int64_t next_p, int64_t next_c) const {
    const uint8_t* end = weights(g_.panels(), 0);
    if (pass_.blocks() == 1) return {weights(p, c) + kAheadBytes, end, (Op::kStepBytes / 64 + kFetches - 1) / kFetches};
    const int64_t lines = pass_.chunk * Op::kStepBytes / 64, turns = pass_.blocks() * pass_.chunk_steps(c) * kFetches;
    const uint8_t* next = weights(next_p, next_c);
    return {next, std::min(next + lines * 64, end), (lines + turns - 1) / turns};
  }

  // All rows by chunk c of panel p, whose blocks have their sums from `first` on; chunk next_c of panel next_p is next.
  void chunk(int64_t p, int64_t c, int64_t first, int64_t next_p, int64_t next_c) {
    const int64_t steps = pass_.chunk_steps(c);
    const bool final = c + 1 == pass_.chunks();
    const uint8_t* last = nullptr;
    if (final && !Op::kUnpacks && g_.k % kTileBytes != 0) {
      std::memset(last_, 0, sizeof(last_));
      std::memcpy(last_, weights(p, c) + (steps - 1) * kPanelStep, g_.panel - (pass_.steps - 1) * kPanelStep);
      last = last_;
    }
    Ahead ahead = ahead_of(p, c, next_p, next_c);
    for (int64_t b = 0; b < pass_.blocks(); ++b) {
      // With one chunk two places alternate: one is written to y while the other is summed.
      Sum* sums = sums_ + (group_ == 1 ? (spare_ = 1 - spare_) : first + b) * kBlockSums;
      const int64_t row = b * kBlockRows, rows = std::min(kBlockRows, pass_.rows - row);
      if (rows > kTileRows) {
        block<true>(b, c, weights(p, c), last, sums, ahead);
      } else {
        block<false>(b, c, weights(p, c), last, sums, ahead);
      }
      if (final) results_ = {sums, pass_.first + row, rows, p * kPanel, 0};
    }
  }

  // One or two tiles of rows x one panel over chunk c. `w`: the panel's chunk; `last`: its last step if that was
  // padded separately, else null.
  template <bool kLower>
  void block(int64_t b, int64_t c, const uint8_t* w, const uint8_t* last, Sum* sums, Ahead& ahead) {
    if (c == 0) {
      clear_sums<kLower>();
    } else {
      load_sums<kLower>(sums);
    }
    const uint8_t* x = pass_.x + pass_.place(b, c) * pass_.step;
    const int64_t whole = pass_.chunk_steps(c) - (last != nullptr);
    const int64_t fresh = Op::kUnpacks && b == 0 ? whole : 0;
    for (int64_t s = 0; s < std::min(kUnpackSteps, fresh); ++s) unpack(w, s);
    for (int64_t s = 0; s < whole; ++s) {
      if (s + kUnpackSteps < fresh) unpack(w, s + kUnpackSteps);
      step<kLower, Op>(x + s * pass_.step, pass_.stride, Op::kUnpacks ? slot(s) : w + s * kPanelStep, ahead);
      write(kWriteRows);
    }
    if (last != nullptr) step<kLower, Op>(x + whole * pass_.step, pass_.stride, last, ahead);
    write(kBlockRows);
    store_sums<kLower>(sums);
  }

  uint8_t* slot(int64_t s) const { return unpacked_ + (s < slots_ ? s : s % kUnpackSlots) * kPanelStep; }

  void unpack(const uint8_t* w, int64_t s) const {
    if constexpr (Op::kUnpacks) op_.unpack(w + s * Op::kStepBytes, slot(s));
  }

  // A block's sums on their way into y.
  struct Results {
    const Sum* sums = nullptr;
    int64_t row = 0, rows = 0, column = 0;  // where they go
    int64_t done = 0;
  };

  // Up to `count` more rows of them.
  void write(int64_t count) {
    Results& r = results_;
    static_assert(kTileRows % kWriteRows == 0, "rows that are written together are of one tile");
    for (const int64_t end = std::min(r.rows, r.done + count); r.done < end; r.done += kWriteRows) {
      op_.write(r.row + r.done, std::min(kWriteRows, end - r.done), r.column, row_of_sums(r.sums, r.done));
    }
  }

  static thread_local Scratch scratch_, unpack_scratch_;
  const Gemm& g_;
  const Op& op_;
  const Pass& pass_;
  ThreadPool& pool_;
  int thread_;
  int64_t group_, spare_ = 0, slots_ = 0;
  uint8_t* unpacked_ = nullptr;
  Tiles tiles_;
  Sum* sums_;
  Results results_;
  alignas(64) uint8_t last_[kPanelStep];
};

template <typename Op>
thread_local Scratch PanelWorker<Op>::scratch_;
template <typename Op>
thread_local Scratch PanelWorker<Op>::unpack_scratch_;

template <typename Op>
void gemm(const Gemm& g, const Op& op, ThreadPool& pool) {
  static thread_local Scratch packed_rows;
  const int64_t steps = (g.k + kTileBytes - 1) / kTileBytes;
  for (int64_t first = 0; first < g.rows; first += g.pass_rows) {
    const int64_t rows = std::min(g.pass_rows, g.rows - first), tiles = (rows + kTileRows - 1) / kTileRows;
    const int64_t chunk = tiles * steps <= kCachedTiles ? steps : kChunkSteps;
    Pass pass{first, rows, tiles, steps, chunk, g.x + first * g.x_stride, g.x_stride, kTileBytes, false};
    if (tiles > 1 || g.k % kTileBytes != 0) {
      uint8_t* packed = packed_rows.get<uint8_t>(pass.blocks() * steps * 2 * kTile);
      pass = {first, rows, tiles, steps, chunk, packed, kTileBytes, 2 * kTile, true};
      over_threads(tiles, g.work(), pool, [&](int thread) {
        pool.take_all(thread, 1, [&](const Range& tile) { pack_tile(g, pass, tile.begin, packed); });
      });
    }
    over_threads(g.panels(), g.work(), pool, [&](int thread) { PanelWorker<Op>(g, op, pass, pool, thread).run(); });
  }
}

}  // namespace quire::cpu::QUIRE_ISA
