// The bf16 linear of the amx level; fp32 is avx512's.
//
// Algorithm: the packed panels [K/2][32][2] are B tiles as they lie (16 pairs of k x 16 columns, rows 128 bytes apart).
// A tiles are 16 rows x 32 k: of x as it lies for up to 16 rows, else of rows packed once a pass as
// [chunk][tile][step][16][32], so that a tile is one KiB. 2 x 2 tiles of results, 32 rows x 32 columns, live in
// registers over a chunk of 2048 k. Longer rows spill their sums (fp32, so no bit is lost) and take 8 panels at a time,
// so that 256 rows of one chunk, a MiB, stay in L2. While a chunk computes, it prefetches the next into L2.
//
// Exactness: every element is one sequence of tdpbf16ps over k, 32 at a time, whatever the number of rows: a row of a
// tile knows nothing of the others. A last step of less than 32 k is filled up with zeros, always.
//
// Bytes: N * K * 2 of weights a pass of 256 rows. Bound: memory bandwidth up to some 100 rows, the tile products above;
// between them the two tiles that each product needs half a KiB of, from L2 (64 bytes a cycle at the bound).
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
constexpr int64_t kChunkSteps = 64;     // steps between spills of the sums
constexpr int64_t kGroupPanels = 8;     // panels that a chunk of the rows serves
constexpr int64_t kTile = kTileRows * kStepK;           // elements of an A tile
constexpr int64_t kPanelStep = kPanel * kStepK;         // elements of a panel's step: two B tiles
constexpr int64_t kTileSums = kTileRows * kPanel;       // sums of a tile of rows
constexpr int64_t kSmallWork = 1 << 16;                 // multiply-adds: of one row, 128 KiB of weights
constexpr int64_t kAheadSteps = 2;

enum { kC00, kC01, kC10, kC11, kA0, kA1, kB0, kB1 };

TileShapes shapes_of(int64_t rows) {
  TileShapes shapes;
  for (const int t : {kC00, kC01, kC10, kC11, kA0, kA1}) shapes.set(t, static_cast<int>(rows), kTileBytes);
  for (const int t : {kB0, kB1}) shapes.set(t, kTileRows, kTileBytes);
  return shapes;
}

// The rows of one pass and how they lie: A tile (t, s) is at tile(t, s), its rows `stride` bytes apart.
struct Pass {
  int64_t first, rows, tiles, steps;  // steps: of 32 k, the last filled up
  const uint16_t* x;                  // packed, or as it lies: then there is one tile
  int64_t stride, step;               // in bytes; in elements
  bool packed;

  int64_t chunks() const { return (steps + kChunkSteps - 1) / kChunkSteps; }
  int64_t chunk_steps(int64_t c) const { return std::min(kChunkSteps, steps - c * kChunkSteps); }
  const uint16_t* tile(int64_t t, int64_t c) const {
    return x + (packed ? (c * kChunkSteps * tiles + t * chunk_steps(c)) * kTile : c * kChunkSteps * kStepK);
  }
};

// Copies the rows of tile t, filled up with zeros to 16 rows and whole steps.
void pack_tile(const LinearArgs& a, const Pass& pass, int64_t t, uint16_t* packed) {
  const int64_t rows = std::min<int64_t>(kTileRows, pass.rows - t * kTileRows), whole = a.k / kStepK;
  const uint16_t* x = static_cast<const uint16_t*>(a.x) + (pass.first + t * kTileRows) * a.x_stride;
  for (int64_t c = 0; c < pass.chunks(); ++c) {
    uint16_t* to = packed + (c * kChunkSteps * pass.tiles + t * pass.chunk_steps(c)) * kTile;
    for (int64_t s = c * kChunkSteps; s < c * kChunkSteps + pass.chunk_steps(c); ++s, to += kTile) {
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

template <bool kLower>
inline void step(const uint16_t* upper, const uint16_t* lower, int64_t stride, const uint16_t* w) {
  tile_load<kB0>(w, 2 * kTileBytes);
  tile_load<kA0>(upper, stride);
  tile_load<kB1>(w + kStepK, 2 * kTileBytes);
  tile_dot_bf16<kC00, kA0, kB0>();
  if constexpr (kLower) tile_load<kA1>(lower, stride);
  tile_dot_bf16<kC01, kA0, kB1>();
  if constexpr (kLower) {
    tile_dot_bf16<kC10, kA1, kB0>();
    tile_dot_bf16<kC11, kA1, kB1>();
  }
}

// Sums: [16 or 32][32] fp32.
template <bool kLower>
inline void load_sums(const float* sums) {
  constexpr int64_t kRow = kPanel * sizeof(float);
  tile_load<kC00>(sums, kRow);
  tile_load<kC01>(sums + kTileRows, kRow);
  if constexpr (kLower) {
    tile_load<kC10>(sums + kTileSums, kRow);
    tile_load<kC11>(sums + kTileSums + kTileRows, kRow);
  }
}

template <bool kLower>
inline void store_sums(float* sums) {
  constexpr int64_t kRow = kPanel * sizeof(float);
  tile_store<kC00>(sums, kRow);
  tile_store<kC01>(sums + kTileRows, kRow);
  if constexpr (kLower) {
    tile_store<kC10>(sums + kTileSums, kRow);
    tile_store<kC11>(sums + kTileSums + kTileRows, kRow);
  }
}

// One or two tiles of rows x one panel over chunk c. `w`: the panel's chunk; `last`: its last step if that is filled up
// apart, else null. `cold`: the first rows that meet this chunk bring it from L2 to L1 ahead of its use.
template <bool kLower>
void block(const Pass& pass, int64_t t, int64_t c, const uint16_t* w, const uint16_t* last, bool cold, float* sums,
           Ahead& ahead) {
  if (c == 0) {
    tile_zero<kC00>();
    tile_zero<kC01>();
    if constexpr (kLower) {
      tile_zero<kC10>();
      tile_zero<kC11>();
    }
  } else {
    load_sums<kLower>(sums);
  }
  const uint16_t* upper = pass.tile(t, c);
  const uint16_t* lower = upper + pass.chunk_steps(c) * kTile;
  const int64_t whole = pass.chunk_steps(c) - (last != nullptr);
  for (int64_t s = 0; s < whole; ++s) {
    step<kLower>(upper + s * pass.step, lower + s * pass.step, pass.stride, w + s * kPanelStep);
    if (cold) {
      const char* soon = reinterpret_cast<const char*>(w + (s + kAheadSteps) * kPanelStep);
      for (int64_t line = 0; line < kPanelStep * 2; line += 64) __builtin_prefetch(soon + line, 0, 3);
    }
    ahead.fetch();
  }
  if (last != nullptr) step<kLower>(upper + whole * pass.step, lower + whole * pass.step, pass.stride, last);
  store_sums<kLower>(sums);
}

void write_rows(const LinearArgs& a, int64_t row, int64_t rows, int64_t column, const float* sums) {
  const int64_t width = std::min<int64_t>(kPanel, a.n - column);
  alignas(64) float bias[kPanel] = {};
  if (a.bias != nullptr) std::copy(a.bias + column, a.bias + column + width, bias);
  const Vec left = load(bias), right = load(bias + kLanes);
  for (int64_t r = 0; r < rows; ++r, sums += kPanel) {
    alignas(64) float values[kPanel];
    const Vec v0 = add(load(sums), left), v1 = add(load(sums + kLanes), right);
    if (a.y_type == Type::f32) {
      store(values, v0);
      store(values + kLanes, v1);
      std::memcpy(static_cast<float*>(a.y) + (row + r) * a.y_stride + column, values, width * sizeof(float));
      continue;
    }
    uint16_t* y = static_cast<uint16_t*>(a.y) + (row + r) * a.y_stride + column;
    uint16_t* to = width == kPanel ? y : reinterpret_cast<uint16_t*>(values);
    store(to, v0);
    store(to + kLanes, v1);
    if (width != kPanel) std::memcpy(y, values, width * sizeof(uint16_t));
  }
}

// What one thread does of a pass: panels [begin, end), in groups.
class Worker {
 public:
  Worker(const LinearArgs& a, const Pass& pass, Range panels) : a_(a), pass_(pass), panels_(panels) {
    tiles_.shape(shapes_of(pass.packed ? kTileRows : pass.rows));
    sums_ = scratch_.get<float>(kGroupPanels * pass.tiles * kTileSums);
  }

  void run() {
    const int64_t group = pass_.chunks() == 1 ? 1 : kGroupPanels;
    for (int64_t first = panels_.begin; first < panels_.end; first += group) {
      const int64_t end = std::min(panels_.end, first + group);
      for (int64_t c = 0; c < pass_.chunks(); ++c) {
        for (int64_t p = first; p < end; ++p) {
          const bool more = p + 1 < end, same = more || c + 1 < pass_.chunks();
          chunk(p, c, sums_ + (p - first) * pass_.tiles * kTileSums,
                more ? p + 1 : same ? first : end, more ? c : same ? c + 1 : 0);
        }
      }
    }
  }

 private:
  const uint16_t* weights(int64_t p, int64_t c) const {
    const int64_t panel_elements = (a_.k + 1) / 2 * 2 * kPanel;
    return static_cast<const uint16_t*>(a_.packed) + p * panel_elements + c * kChunkSteps * kPanelStep;
  }

  // All rows by chunk c of panel p; chunk next_c of panel next_p comes after it.
  void chunk(int64_t p, int64_t c, float* sums, int64_t next_p, int64_t next_c) {
    const int64_t steps = pass_.chunk_steps(c), blocks = (pass_.tiles + 1) / 2;
    const bool final = c + 1 == pass_.chunks();
    const uint16_t* last = nullptr;
    if (final && a_.k % kStepK != 0) {
      std::memset(last_, 0, sizeof(last_));
      const int64_t left = (a_.k % kStepK + 1) / 2 * 2 * kPanel;
      std::memcpy(last_, weights(p, c) + (steps - 1) * kPanelStep, left * sizeof(uint16_t));
      last = last_;
    }
    const char* next = reinterpret_cast<const char*>(weights(next_p, next_c));
    const char* end = reinterpret_cast<const char*>(
        std::min(weights(next_p, next_c) + kChunkSteps * kPanelStep, weights(panels_.end, 0)));
    Ahead ahead{next, end, (kChunkSteps * kPanelStep * 2 / 64 + blocks * steps - 1) / (blocks * steps)};
    for (int64_t t = 0; t < pass_.tiles; t += 2, sums += 2 * kTileSums) {
      if (t + 1 < pass_.tiles) {
        block<true>(pass_, t, c, weights(p, c), last, t == 0, sums, ahead);
      } else {
        block<false>(pass_, t, c, weights(p, c), last, t == 0, sums, ahead);
      }
      if (final) {
        const int64_t row = t * kTileRows, rows = std::min<int64_t>(2 * kTileRows, pass_.rows - row);
        write_rows(a_, pass_.first + row, rows, p * kPanel, sums);
      }
    }
  }

  static thread_local Scratch scratch_;
  const LinearArgs& a_;
  const Pass& pass_;
  Range panels_;
  Tiles tiles_;
  float* sums_;
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
    Pass pass{first, rows, tiles, steps, x, a.x_stride * 2, kStepK, false};
    if (tiles > 1 || a.k % kStepK != 0) {
      uint16_t* packed = packed_rows.get<uint16_t>(tiles * steps * kTile);
      pass = {first, rows, tiles, steps, packed, kTileBytes, kTile, true};
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
