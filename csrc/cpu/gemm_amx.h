// Products of rows and packed panels on matrix tiles, bf16 and int8 alike: the panels of both hold B tiles of 16 rows
// of 64 bytes as they lie (pairs or quads of k x 16 columns, rows 128 bytes apart), two side by side per step of 64
// bytes of k.
//
// Algorithm: A tiles are 16 rows x 64 bytes: of x as it lies for up to 16 rows, else of rows packed once per pass as
// [chunk][block of 32 rows][step][2 tiles][16][64], one stream per block. 2 x 2 tiles of results, 32 rows x 32 columns,
// live in registers over a chunk of K, and in memory in between (unrounded, so no bit is lost). A chunk has up to 18
// steps: its weights then stay in L1 for all blocks, and rows come from L2 without being kept in L1. Otherwise both
// would come from L2, which gives 45 bytes per cycle where two operands want 64. A single block keeps its sums in
// registers over all of K. Where the rows of a pass are more than L2 holds, panels take turns by parts of K.
// No tile register is renamed: sums are stored, and the next ones loaded, between the products of a block's first step.
// A block's sums become results while the tiles of the next are multiplied, and bypass caches that would not hold them.
// Figures: benchmarks/results/amx-gemm-2026-11-25.md.
//
// Exactness: every element is one sequence of tile products over k, step by step, whatever the number of rows: a row of
// a tile does not affect the others. A last step of less than 64 bytes is always padded with zeros.
//
// Bytes: the weights once per pass. Bound: memory bandwidth up to about 100 rows, the tile products above. Beside loads
// from L1 they take 19 cycles instead of 16 (Granite Rapids), so 82 % of their peak is the most there is.
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
constexpr int64_t kChunkSteps = 18;                     // whose weights stay in L1: 36 KiB
constexpr int64_t kGroupPanels = 16;                    // panels that share a part of the rows, at most
constexpr int64_t kCachedTiles = 1024;                  // A tiles that stay in L2: 1 MiB
constexpr int64_t kPassTiles = 32;                      // of 16 rows: more do not share a read of the weights
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

  int64_t steps() const { return (k + kTileBytes - 1) / kTileBytes; }
  // Rows of a pass: as many as L2 holds, if they are at least half of what a pass may have.
  int64_t pass_rows() const {
    const int64_t cached = kCachedTiles / steps();
    return kTileRows * (cached < kPassTiles / 2 ? kPassTiles : std::min(cached / 2 * 2, kPassTiles));
  }
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

// Cache lines from `next` on to fetch into L2 while something else computes, `lines` of them evenly over `calls`: many at
// a time fill the queue of misses, and the tiles that are loaded next wait for them.
class Ahead {
 public:
  Ahead(const uint8_t* next, const uint8_t* end, int64_t lines, int64_t calls)
      : next_(next), end_(end), share_((lines * kLine + calls - 1) / calls) {}

  void fetch() {
    for (due_ += share_; due_ >= kLine && next_ < end_; due_ -= kLine, next_ += 64) __builtin_prefetch(next_, 0, 2);
  }

 private:
  static constexpr int64_t kLine = 1 << 10;
  const uint8_t *next_, *end_;
  int64_t share_, due_ = 0;  // in 1 / kLine of a line
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
  int64_t chunks, part;               // of K, even to within a step; chunks of a part, whose rows stay in L2
  const uint8_t* x;                   // packed; or as it lies, for a single tile
  int64_t stride, step;               // of A tiles: bytes between rows and between steps
  bool packed;

  Pass(const Gemm& g, int64_t first, int64_t rows)
      : first(first), rows(rows), tiles((rows + kTileRows - 1) / kTileRows),
        steps(g.steps()), x(g.x + first * g.x_stride), stride(g.x_stride), step(kTileBytes),
        packed(tiles > 1 || g.k % kTileBytes != 0) {
    chunks = blocks() == 1 ? 1 : (steps + kChunkSteps - 1) / kChunkSteps;
    // The sums of a group take as much of L2 as the rows of a part.
    const int64_t cached = tiles * steps <= kCachedTiles ? kCachedTiles : kCachedTiles / 2;
    part = std::max<int64_t>(1, cached / (tiles * most_steps()));
  }

  int64_t blocks() const { return (tiles + 1) / 2; }
  int64_t begin(int64_t c) const { return steps * c / chunks; }
  int64_t chunk_steps(int64_t c) const { return begin(c + 1) - begin(c); }
  int64_t most_steps() const { return (steps + chunks - 1) / chunks; }
  // Where the A tiles of block b and chunk c begin, counted in steps.
  int64_t place(int64_t b, int64_t c) const { return packed ? begin(c) * blocks() + b * chunk_steps(c) : begin(c); }
  int64_t packed_bytes() const { return blocks() * steps * 2 * kTile; }

  // Read the rows from `to`, where pack_tile writes them.
  void pack_to(const uint8_t* to) { x = to, stride = kTileBytes, step = 2 * kTile; }
};

// Copies the rows of tile t, filled up with zeros to 16 rows and whole steps.
inline void pack_tile(const Gemm& g, const Pass& pass, int64_t t, uint8_t* packed) {
  const int64_t rows = std::min<int64_t>(kTileRows, pass.rows - t * kTileRows), whole = g.k / kTileBytes;
  const uint8_t* x = g.x + (pass.first + t * kTileRows) * g.x_stride;
  for (int64_t c = 0; c < pass.chunks; ++c) {
    uint8_t* to = packed + pass.place(t / 2, c) * pass.step + t % 2 * kTile;
    for (int64_t s = pass.begin(c); s < pass.begin(c + 1); ++s, to += pass.step) {
      const __mmask64 valid = s < whole ? ~__mmask64(0) : (__mmask64(1) << g.k % kTileBytes) - 1;
      for (int64_t r = 0; r < kTileRows; ++r) {
        const __m512i v = r < rows ? _mm512_maskz_loadu_epi8(valid, x + r * g.x_stride + s * kTileBytes) : __m512i{};
        _mm512_store_si512(to + r * kTileBytes, v);
      }
    }
  }
}

template <bool kPastL1, int kTile>
inline void load_tile(const uint8_t* p, int64_t stride) {
  if constexpr (kPastL1) {
    tile_load_past_l1<kTile>(p, stride);
  } else {
    tile_load<kTile>(p, stride);
  }
}

// One or two tiles of rows by the two tiles of a panel's step, and kFetches from `ahead` between them. What `before`
// does with an accumulator comes ahead of its product. L1 keeps the rows of a single block (kSingle), else the weights.
template <bool kLower, bool kSingle, typename Op, typename F>
inline void step(const uint8_t* x, int64_t stride, const uint8_t* w, Ahead& ahead, const F& before) {
  constexpr bool kWeightsPast = kSingle && !Op::kUnpacks;
  load_tile<kWeightsPast, kB0>(w, 2 * kTileBytes);
  ahead.fetch();
  load_tile<!kSingle, kA0>(x, stride);
  load_tile<kWeightsPast, kB1>(w + kTileBytes, 2 * kTileBytes);
  ahead.fetch();
  before.template tile<kC00>();
  Op::template dot<kC00, kA0, kB0>();
  if constexpr (kLower) load_tile<!kSingle, kA1>(x + kTile, stride);
  before.template tile<kC01>();
  Op::template dot<kC01, kA0, kB1>();
  ahead.fetch();
  before.template tile<kC10>();
  if constexpr (kLower) Op::template dot<kC10, kA1, kB0>();
  before.template tile<kC11>();
  if constexpr (kLower) Op::template dot<kC11, kA1, kB1>();
  ahead.fetch();
}

// Sums that go on within a block.
struct Continued {
  template <int kTile>
  void tile() const {}
};

// The accumulators of a block take over from those of the one before, whose sums go to `done` (or null). Its own are
// at `sums`, or null where they begin with zero. Sums are four tiles, one after the other.
template <bool kLower, typename Sum>
struct TakeOver {
  Sum* done;
  bool done_lower;
  const Sum* sums;

  template <int kTile>
  void tile() const {
    constexpr bool lower = kTile == kC10 || kTile == kC11;
    if (done != nullptr && (!lower || done_lower)) tile_store<kTile>(done + kTile * kTileSums, kTileBytes);
    if constexpr (lower && !kLower) return;
    if (sums == nullptr) {
      tile_zero<kTile>();
    } else {
      tile_load<kTile>(sums + kTile * kTileSums, kTileBytes);
    }
  }
};

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
      : g_(g), op_(op), pass_(pass), pool_(pool), thread_(thread), group_(group(pool.num_threads())) {
    TileShapes shapes;
    const int rows = static_cast<int>(pass.packed ? kTileRows : pass.rows);
    for (const int t : {kC00, kC01, kC10, kC11, kA0, kA1}) shapes.set(t, rows, kTileBytes);
    for (const int t : {kB0, kB1}) shapes.set(t, kTileRows, kTileBytes);
    tiles_.shape(shapes);
    sums_ = scratch_.get<Sum>(group_ * pass.blocks() * kBlockSums);
    if constexpr (Op::kUnpacks) {
      slots_ = pass.blocks() == 1 ? kUnpackSlots : pass.most_steps();
      unpacked_ = unpack_scratch_.get<uint8_t>(slots_ * kPanelStep);
    }
  }

  void run() {
    pool_.take_all(thread_, group_, [&](const Range& mine) {
      for (int64_t c = 0; c < pass_.chunks; c += pass_.part) {
        const Range part{c, std::min(c + pass_.part, pass_.chunks)};
        for (int64_t p = mine.begin; p < mine.end; ++p) panel(p, part, mine);
      }
    });
    const TakeOver<false, Sum> end{held_.sums, held_.rows > kTileRows, nullptr};
    end.template tile<kC00>(), end.template tile<kC01>(), end.template tile<kC10>(), end.template tile<kC11>();
    hold({}, false);
    write(kBlockRows);
    _mm_sfence();  // makes streamed results visible to other threads
  }

 private:
  // Panels that take turns by parts of K, where there are several: every thread gets at least two groups.
  int64_t group(int threads) const {
    return pass_.part < pass_.chunks ? std::clamp<int64_t>(g_.panels() / (2 * threads), 1, kGroupPanels) : 1;
  }

  const uint8_t* weights(int64_t p, int64_t c) const { return g_.w + p * g_.panel + pass_.begin(c) * Op::kStepBytes; }

  // A part's chunks of panel p, one of the group `mine`, whose panels take turns.
  void panel(int64_t p, const Range& part, const Range& mine) {
    for (int64_t c = part.begin; c < part.end; ++c) {
      const uint8_t* next = weights(mine.end, 0);
      if (c + 1 < part.end) {
        next = weights(p, c + 1);
      } else if (p + 1 < mine.end) {
        next = weights(p + 1, part.begin);
      } else if (part.end < pass_.chunks) {
        next = weights(mine.begin, part.end);
      }
      Ahead ahead = ahead_of(p, c, next);
      chunk(p, c, sums_ + (p - mine.begin) * pass_.blocks() * kBlockSums, ahead);
    }
  }

  // What to fetch during a chunk: a single block streams through the weights, several have time to fetch the next
  // chunk.
  Ahead ahead_of(int64_t p, int64_t c, const uint8_t* next) const {
    const uint8_t* end = weights(g_.panels(), 0);
    if (pass_.blocks() == 1) return {weights(p, c) + kAheadBytes, end, Op::kStepBytes / 64, kFetches};
    const int64_t lines = pass_.most_steps() * Op::kStepBytes / 64;
    return {next, std::min(next + lines * 64, end), lines, pass_.blocks() * pass_.chunk_steps(c) * kFetches};
  }

  // All rows by chunk c of panel p. Their sums are at `sums`, block by block.
  void chunk(int64_t p, int64_t c, Sum* sums, Ahead& ahead) {
    Chunk at{c, pass_.chunk_steps(c), weights(p, c), nullptr};
    if (c + 1 == pass_.chunks && !Op::kUnpacks && g_.k % kTileBytes != 0) {
      std::memset(last_, 0, sizeof(last_));
      std::memcpy(last_, at.w + (at.steps - 1) * kPanelStep, g_.panel - (pass_.steps - 1) * kPanelStep);
      at.last = last_;
    }
    if (pass_.blocks() == 1) {
      const Block of{sums, pass_.first, pass_.rows, p * kPanel};
      return of.rows > kTileRows ? block<true, true>(0, at, of, ahead) : block<false, true>(0, at, of, ahead);
    }
    for (int64_t b = 0; b < pass_.blocks(); ++b) {
      const int64_t row = b * kBlockRows;
      const Block of{sums + b * kBlockSums, pass_.first + row, std::min(kBlockRows, pass_.rows - row), p * kPanel};
      of.rows > kTileRows ? block<true, false>(b, at, of, ahead) : block<false, false>(b, at, of, ahead);
    }
  }

  // A chunk of a panel. `last`: its last step if that was padded separately, else null.
  struct Chunk {
    int64_t index, steps;
    const uint8_t *w, *last;
  };

  // A block of rows by a panel: its sums, and the results that they become.
  struct Block {
    Sum* sums = nullptr;
    int64_t row = 0, rows = 0, column = 0;
  };

  // One or two tiles of rows x one panel over a chunk. The sums stay in tiles until the next block takes over.
  template <bool kLower, bool kSingle>
  void block(int64_t b, const Chunk& at, const Block& of, Ahead& ahead) {
    const uint8_t* x = pass_.x + pass_.place(b, at.index) * pass_.step;
    const int64_t fresh = Op::kUnpacks && b == 0 ? at.steps : 0;
    for (int64_t s = 0; s < std::min(kUnpackSteps, fresh); ++s) unpack(at.w, s);
    const TakeOver<kLower, Sum> first{held_.sums, held_.rows > kTileRows, at.index == 0 ? nullptr : of.sums};
    for (int64_t s = 0; s < at.steps; ++s, x += pass_.step) {
      if (s + kUnpackSteps < fresh) unpack(at.w, s + kUnpackSteps);
      const uint8_t* w = Op::kUnpacks ? slot(s) : at.w + s * kPanelStep;
      if (s + 1 == at.steps && at.last != nullptr) w = at.last;
      if (s == 0) {
        step<kLower, kSingle, Op>(x, pass_.stride, w, ahead, first);
        hold(of, at.index + 1 == pass_.chunks);
      } else {
        step<kLower, kSingle, Op>(x, pass_.stride, w, ahead, Continued());
      }
      write(kWriteRows);
    }
    write(kBlockRows);
  }

  // The tiles hold the sums of `block` from now on; those before them are in memory, and become results if they are of
  // all K.
  void hold(const Block& block, bool whole) {
    if (held_whole_) results_ = held_, written_ = 0;
    held_ = block, held_whole_ = whole;
  }

  uint8_t* slot(int64_t s) const { return unpacked_ + (s < slots_ ? s : s % kUnpackSlots) * kPanelStep; }

  void unpack(const uint8_t* w, int64_t s) const {
    if constexpr (Op::kUnpacks) op_.unpack(w + s * Op::kStepBytes, slot(s));
  }

  // Up to `count` more rows of the results.
  void write(int64_t count) {
    static_assert(kTileRows % kWriteRows == 0, "rows that are written together are of one tile");
    const Block& r = results_;
    for (const int64_t end = std::min(r.rows, written_ + count); written_ < end; written_ += kWriteRows) {
      op_.write(r.row + written_, std::min(kWriteRows, end - written_), r.column, row_of_sums(r.sums, written_));
    }
  }

  static thread_local Scratch scratch_, unpack_scratch_;
  const Gemm& g_;
  const Op& op_;
  const Pass& pass_;
  ThreadPool& pool_;
  int thread_;
  int64_t group_, slots_ = 0;
  uint8_t* unpacked_ = nullptr;
  Tiles tiles_;
  Sum* sums_;
  Block held_, results_;       // in tiles; on their way into y
  bool held_whole_ = false;    // over all of K
  int64_t written_ = 0;        // rows of the results
  alignas(64) uint8_t last_[kPanelStep];
};

template <typename Op>
thread_local Scratch PanelWorker<Op>::scratch_;
template <typename Op>
thread_local Scratch PanelWorker<Op>::unpack_scratch_;

template <typename Op>
void gemm(const Gemm& g, const Op& op, ThreadPool& pool) {
  static thread_local Scratch packed_rows;
  const int64_t pass_rows = g.pass_rows();
  for (int64_t first = 0; first < g.rows; first += pass_rows) {
    Pass pass(g, first, std::min(pass_rows, g.rows - first));
    if (pass.packed) {
      uint8_t* packed = packed_rows.get<uint8_t>(pass.packed_bytes());
      pass.pack_to(packed);
      over_threads(pass.tiles, g.work(), pool, [&](int thread) {
        pool.take_all(thread, 1, [&](const Range& tile) { pack_tile(g, pass, tile.begin, packed); });
      });
    }
    over_threads(g.panels(), g.work(), pool, [&](int thread) { PanelWorker<Op>(g, op, pass, pool, thread).run(); });
  }
}

}  // namespace quire::cpu::QUIRE_ISA
