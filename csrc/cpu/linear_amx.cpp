// The bf16 linear of the amx level; fp32 is avx512's.
//
// Algorithm: the packed panels [K/2][32][2] are B tiles as they lie (16 pairs of k x 16 columns, rows 128 bytes apart).
// A tiles are 16 rows x 32 k: of x as it lies for up to 16 rows, else of rows packed once a pass as
// [chunk][block of 32 rows][step][2 tiles][16][32], one stream a block. 2 x 2 tiles of results, 32 rows x 32 columns,
// live in registers over all of K, as long as the rows of a pass stay in L2 (a MiB: 256 rows at K = 2048); longer rows
// are taken in chunks of 1024 k by 16 panels, and their sums spill in between (fp32, so no bit is lost). Short chunks,
// whose weights stay in L1, spill too often: 1.3 against 1.65 TFLOP/s (benchmarks/results/amx-gemm-2026-11-21.md). A
// block's sums become results while the tiles of the next are multiplied, and bypass caches that would not hold them.
//
// Exactness: every element is one sequence of tdpbf16ps over k, 32 at a time, whatever the number of rows: a row of a
// tile knows nothing of the others. A last step of less than 32 k is filled up with zeros, always.
//
// Bytes: N * K * 2 of weights a pass of 256 rows. Bound: memory bandwidth up to some 100 rows, the tile products above;
// between them the two tiles that each product needs half a KiB of, from L2, which gives some 45 bytes a cycle.
#include <algorithm>
#include <cstring>

#include "cpu/amx.h"
#include "cpu/isa.h"
#include "cpu/linear.h"
#include "cpu/scratch.h"

namespace quire::cpu::amx {

namespace {

constexpr int64_t kPassRows = 256;
constexpr int64_t kStepK = 32;          // k of a tile
constexpr int64_t kChunkSteps = 32;     // steps between spills of the sums, where rows are taken in chunks
constexpr int64_t kGroupPanels = 16;    // panels that a chunk of the rows serves
constexpr int64_t kBlockRows = 2 * kTileRows;
constexpr int64_t kTile = kTileRows * kStepK;           // elements of an A tile
constexpr int64_t kPanelStep = kPanel * kStepK;         // elements of a panel's step: two B tiles
constexpr int64_t kTileSums = kTileRows * kTileRows;    // of a tile of results
constexpr int64_t kBlockSums = 4 * kTileSums;           // of a block: its four tiles, one after the other
constexpr int64_t kCachedTiles = 1024;                  // A tiles that stay in L2: a MiB
constexpr int64_t kCachedResults = 1 << 20;             // bytes: more than these do not stay in L2
constexpr int64_t kSmallWork = 1 << 16;                 // multiply-adds: of one row, 128 KiB of weights
constexpr int64_t kAheadBytes = 16 << 10;               // how far ahead the weights of a single block are fetched
constexpr int64_t kWriteRows = 4;                       // results written a step

enum { kC00, kC01, kC10, kC11, kA0, kA1, kB0, kB1 };

TileShapes shapes_of(int64_t rows) {
  TileShapes shapes;
  for (const int t : {kC00, kC01, kC10, kC11, kA0, kA1}) shapes.set(t, static_cast<int>(rows), kTileBytes);
  for (const int t : {kB0, kB1}) shapes.set(t, kTileRows, kTileBytes);
  return shapes;
}

// The rows of one pass and how they lie.
struct Pass {
  int64_t first, rows, tiles, steps;  // steps: of 32 k, the last filled up
  int64_t chunk;                      // steps of a chunk
  const uint16_t* x;                  // packed, or as it lies: then there is one tile
  int64_t stride, step;               // of A tiles: bytes between rows, elements between steps
  bool packed;

  int64_t blocks() const { return (tiles + 1) / 2; }
  int64_t chunks() const { return (steps + chunk - 1) / chunk; }
  int64_t chunk_steps(int64_t c) const { return std::min(chunk, steps - c * chunk); }
  // Where the A tiles of block b and chunk c begin, counted in steps.
  int64_t place(int64_t b, int64_t c) const { return packed ? c * chunk * blocks() + b * chunk_steps(c) : c * chunk; }
};

// Copies the rows of tile t, filled up with zeros to 16 rows and whole steps.
void pack_tile(const LinearArgs& a, const Pass& pass, int64_t t, uint16_t* packed) {
  const int64_t rows = std::min<int64_t>(kTileRows, pass.rows - t * kTileRows), whole = a.k / kStepK;
  const uint16_t* x = static_cast<const uint16_t*>(a.x) + (pass.first + t * kTileRows) * a.x_stride;
  for (int64_t c = 0; c < pass.chunks(); ++c) {
    uint16_t* to = packed + pass.place(t / 2, c) * pass.step + t % 2 * kTile;
    for (int64_t s = c * pass.chunk; s < c * pass.chunk + pass.chunk_steps(c); ++s, to += pass.step) {
      const __mmask32 valid = s < whole ? ~__mmask32(0) : (__mmask32(1) << a.k % kStepK) - 1;
      for (int64_t r = 0; r < kTileRows; ++r) {
        const __m512i v = r < rows ? _mm512_maskz_loadu_epi16(valid, x + r * a.x_stride + s * kStepK) : __m512i{};
        _mm512_store_si512(to + r * kStepK, v);
      }
    }
  }
}

// Cache lines to fetch into L2 while something else computes, some every step.
struct Ahead {
  const char *next, *end;
  int64_t lines;

  void fetch() {
    const char* stop = std::min(next + lines * 64, end);
    for (; next < stop; next += 64) __builtin_prefetch(next, 0, 2);
  }
};

// A block's sums on their way into y, some rows at a time.
struct Results {
  const float* sums = nullptr;  // [2][2][16][16]
  int64_t row = 0, rows = 0, column = 0;  // where they go; rows is 0 when all are there
  int64_t done = 0;
  bool stream = false;  // past the caches

  void write(const LinearArgs& a, int64_t count) {
    for (const int64_t end = std::min(rows, done + count); done < end; ++done) write_row(a);
  }

 private:
  void write_row(const LinearArgs& a) const {
    const float* from = sums + done / kTileRows * 2 * kTileSums + done % kTileRows * kTileRows;
    const int64_t width = std::min<int64_t>(kPanel, a.n - column);
    const __mmask32 valid = static_cast<__mmask32>((uint64_t(1) << width) - 1);
    __m512 left = _mm512_load_ps(from), right = _mm512_load_ps(from + kTileSums);
    if (a.bias != nullptr) {
      left = _mm512_add_ps(left, _mm512_maskz_loadu_ps(valid & 0xffff, a.bias + column));
      right = _mm512_add_ps(right, _mm512_maskz_loadu_ps(valid >> 16, a.bias + column + kLanes));
    }
    const int64_t to = (row + done) * a.y_stride + column;
    if (a.y_type == Type::f32) {
      _mm512_mask_storeu_ps(static_cast<float*>(a.y) + to, valid & 0xffff, left);
      _mm512_mask_storeu_ps(static_cast<float*>(a.y) + to + kLanes, valid >> 16, right);
      return;
    }
    uint16_t* y = static_cast<uint16_t*>(a.y) + to;
    const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(right, left);
    if (stream && width == kPanel) {
      _mm512_stream_si512(reinterpret_cast<__m512i*>(y), both);
    } else {
      _mm512_mask_storeu_epi16(y, valid, both);
    }
  }
};

template <bool kLower>
inline void step(const uint16_t* x, int64_t stride, const uint16_t* w) {
  tile_load<kB0>(w, 2 * kTileBytes);
  tile_load<kA0>(x, stride);
  tile_load<kB1>(w + kStepK, 2 * kTileBytes);
  tile_dot_bf16<kC00, kA0, kB0>();
  if constexpr (kLower) tile_load<kA1>(x + kTile, stride);
  tile_dot_bf16<kC01, kA0, kB1>();
  if constexpr (kLower) {
    tile_dot_bf16<kC10, kA1, kB0>();
    tile_dot_bf16<kC11, kA1, kB1>();
  }
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

template <bool kLower>
inline void load_sums(const float* sums) {
  tile_load<kC00>(sums, kTileBytes);
  tile_load<kC01>(sums + kTileSums, kTileBytes);
  if constexpr (kLower) {
    tile_load<kC10>(sums + 2 * kTileSums, kTileBytes);
    tile_load<kC11>(sums + 3 * kTileSums, kTileBytes);
  }
}

template <bool kLower>
inline void store_sums(float* sums) {
  tile_store<kC00>(sums, kTileBytes);
  tile_store<kC01>(sums + kTileSums, kTileBytes);
  if constexpr (kLower) {
    tile_store<kC10>(sums + 2 * kTileSums, kTileBytes);
    tile_store<kC11>(sums + 3 * kTileSums, kTileBytes);
  }
}

// What one thread does of a pass: panels [begin, end), in groups.
class Worker {
 public:
  Worker(const LinearArgs& a, const Pass& pass, Range panels)
      : a_(a), pass_(pass), panels_(panels), group_(pass.chunks() == 1 ? 1 : kGroupPanels) {
    tiles_.shape(shapes_of(pass.packed ? kTileRows : pass.rows));
    // One block more than is summed up: it may still be on its way into y while the next one is begun.
    sums_ = scratch_.get<float>((group_ * pass.blocks() + 1) * kBlockSums);
    const int64_t bytes = a.rows * a.n * 2;
    const bool whole_lines = (reinterpret_cast<uintptr_t>(a.y) | (a.y_stride * 2)) % 64 == 0;
    results_.stream = a.y_type == Type::bf16 && whole_lines && bytes > kCachedResults;
  }

  void run() {
    for (int64_t first = panels_.begin; first < panels_.end; first += group_) {
      const int64_t end = std::min(panels_.end, first + group_);
      for (int64_t c = 0; c < pass_.chunks(); ++c) {
        for (int64_t p = first; p < end; ++p) {
          const bool more = p + 1 < end, same = more || c + 1 < pass_.chunks();
          chunk(p, c, (p - first) * pass_.blocks(), more ? p + 1 : same ? first : end, more ? c : same ? c + 1 : 0);
        }
      }
    }
    results_.write(a_, kBlockRows);
    _mm_sfence();  // streamed results are there for other threads too
  }

 private:
  const uint16_t* weights(int64_t p, int64_t c) const {
    const int64_t panel_elements = (a_.k + 1) / 2 * 2 * kPanel;
    return static_cast<const uint16_t*>(a_.packed) + p * panel_elements + c * pass_.chunk * kPanelStep;
  }

  // What to fetch during a chunk: a single block streams through the weights, more of them have the time to fetch the
  // next chunk.
  Ahead ahead_of(int64_t p, int64_t c, int64_t next_p, int64_t next_c) const {
    const auto bytes = [](const uint16_t* w) { return reinterpret_cast<const char*>(w); };
    const char* end = bytes(weights(panels_.end, 0));
    if (pass_.blocks() == 1) return {bytes(weights(p, c)) + kAheadBytes, end, kPanelStep * 2 / 64};
    const char* next = bytes(weights(next_p, next_c));
    const int64_t lines = pass_.chunk * kPanelStep * 2 / 64, turns = pass_.blocks() * pass_.chunk_steps(c);
    return {next, std::min(next + lines * 64, end), (lines + turns - 1) / turns};
  }

  // All rows by chunk c of panel p, whose blocks have their sums from `first` on; chunk next_c of panel next_p is next.
  void chunk(int64_t p, int64_t c, int64_t first, int64_t next_p, int64_t next_c) {
    const int64_t steps = pass_.chunk_steps(c);
    const bool final = c + 1 == pass_.chunks();
    const uint16_t* last = nullptr;
    if (final && a_.k % kStepK != 0) {
      std::memset(last_, 0, sizeof(last_));
      const int64_t left = (a_.k % kStepK + 1) / 2 * 2 * kPanel;
      std::memcpy(last_, weights(p, c) + (steps - 1) * kPanelStep, left * sizeof(uint16_t));
      last = last_;
    }
    Ahead ahead = ahead_of(p, c, next_p, next_c);
    for (int64_t b = 0; b < pass_.blocks(); ++b) {
      // In one chunk, two places take turns: one is written to y while the other is summed up.
      float* sums = sums_ + (group_ == 1 ? (spare_ = 1 - spare_) : first + b) * kBlockSums;
      const int64_t row = b * kBlockRows, rows = std::min(kBlockRows, pass_.rows - row);
      if (rows > kTileRows) {
        block<true>(b, c, weights(p, c), last, sums, ahead);
      } else {
        block<false>(b, c, weights(p, c), last, sums, ahead);
      }
      if (!final) continue;
      results_.sums = sums;
      results_.row = pass_.first + row;
      results_.rows = rows;
      results_.column = p * kPanel;
      results_.done = 0;
    }
  }

  // One or two tiles of rows x one panel over chunk c. `w`: the panel's chunk; `last`: its last step if that is filled
  // up apart, else null.
  template <bool kLower>
  void block(int64_t b, int64_t c, const uint16_t* w, const uint16_t* last, float* sums, Ahead& ahead) {
    if (c == 0) {
      clear_sums<kLower>();
    } else {
      load_sums<kLower>(sums);
    }
    const uint16_t* x = pass_.x + pass_.place(b, c) * pass_.step;
    const int64_t whole = pass_.chunk_steps(c) - (last != nullptr);
    for (int64_t s = 0; s < whole; ++s) {
      step<kLower>(x + s * pass_.step, pass_.stride, w + s * kPanelStep);
      ahead.fetch();
      results_.write(a_, kWriteRows);
    }
    if (last != nullptr) step<kLower>(x + whole * pass_.step, pass_.stride, last);
    results_.write(a_, kBlockRows);
    store_sums<kLower>(sums);
  }

  static thread_local Scratch scratch_;
  const LinearArgs& a_;
  const Pass& pass_;
  Range panels_;
  int64_t group_, spare_ = 0;
  Tiles tiles_;
  float* sums_;
  Results results_;
  alignas(64) uint16_t last_[kPanelStep];
};

thread_local Scratch Worker::scratch_;
thread_local Scratch packed_rows;

void linear(const LinearArgs& a, ThreadPool& pool) {
  const int64_t panels = (a.n + kPanel - 1) / kPanel, steps = (a.k + kStepK - 1) / kStepK;
  // Below some 5 us of work the other threads are not worth waking. The split changes no bit.
  auto run = [&](const auto& body) { a.rows * a.n * a.k < kSmallWork ? body(0, 1) : pool.run(body); };
  for (int64_t first = 0; first < a.rows; first += kPassRows) {
    const int64_t rows = std::min(kPassRows, a.rows - first), tiles = (rows + kTileRows - 1) / kTileRows;
    const uint16_t* x = static_cast<const uint16_t*>(a.x) + first * a.x_stride;
    const int64_t chunk = tiles * steps <= kCachedTiles ? steps : kChunkSteps;
    Pass pass{first, rows, tiles, steps, chunk, x, a.x_stride * 2, kStepK, false};
    if (tiles > 1 || a.k % kStepK != 0) {
      uint16_t* packed = packed_rows.get<uint16_t>(pass.blocks() * steps * 2 * kTile);
      pass = {first, rows, tiles, steps, chunk, packed, kTileBytes, 2 * kTile, true};
      run([&](int thread, int num_threads) {
        const Range mine = share(tiles, thread, num_threads);
        for (int64_t t = mine.begin; t < mine.end; ++t) pack_tile(a, pass, t, packed);
      });
    }
    run([&](int thread, int num_threads) {
      const Range mine = share(panels, thread, num_threads);
      if (mine.begin < mine.end) Worker(a, pass, mine).run();
    });
  }
}

}  // namespace

}  // namespace quire::cpu::amx

namespace quire::cpu {

LinearKernels with_amx(const LinearKernels& avx512) {
  LinearKernels kernels = avx512;
  kernels.bf16 = amx::linear;
  return kernels;
}

}  // namespace quire::cpu
