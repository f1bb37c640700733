// Linears with int8 and int4 weights of the amx level, for rows enough to fill tiles; the rest is avx512's.
//
// Algorithm: the packed panels [K/4][32][4] are B tiles as they lie (16 quads of k x 16 columns, rows 128 bytes apart),
// and rows of int8 activations are A tiles as they lie. 2 x 2 tiles of results, 32 rows x 32 columns, live in registers
// over a chunk of 512 k or of one group, whose weights (16 KiB) stay in L1 while the rows of a pass, a chunk of which stays
// in L2, go by. int4 is unpacked once a chunk. Between chunks the sums lie in memory: int32, or fp32 where groups are
// added, so no bit is lost. A group's integers become floats while the tiles of the next one are multiplied.
//
// Exactness: integers have no order, and the floats after them keep the order of quantized_kernel.cpp, so results are
// those of avx512, bit for bit. The last tile of rows starts at rows - 16: a row that two tiles hold is the same twice.
//
// Bytes: as avx512. Bound: memory bandwidth up to some 100 rows, the tile products above.
#include <algorithm>
#include <cstring>

#include "cpu/amx.h"
#include "cpu/int_vec.h"
#include "cpu/quantized.h"
#include "cpu/quantized_write.h"
#include "cpu/scratch.h"

namespace quire::cpu::avx512 {
extern const QuantizedKernels kQuantized;
}

namespace quire::cpu::amx {

namespace {

constexpr int64_t kFewRows = 8;         // fewer: avx512 streams the weights as fast as memory gives them
constexpr int64_t kPassRows = 512;
constexpr int64_t kGroupPanels = 8;     // panels that a chunk of the rows serves while it is in L2
constexpr int64_t kStepK = 64;          // k of a tile
constexpr int64_t kChunkK = 512;
constexpr int64_t kLineQuad = kPanel * 4;               // bytes of a panel's quad of k
constexpr int64_t kStepBytes = kStepK * kPanel;         // of a panel's step: two B tiles
constexpr int64_t kChunkBytes = kChunkK * kPanel;
constexpr int64_t kTileSums = kTileRows * kPanel;       // sums of a tile of rows
constexpr int64_t kSmallWork = 1 << 17;                 // multiply-adds, as in quantized_kernel.cpp

enum { kC00, kC01, kC10, kC11, kA0, kA1, kB0, kB1 };

TileShapes shapes_of(int64_t rows) {
  TileShapes shapes;
  for (const int t : {kC00, kC01, kC10, kC11, kA0, kA1}) {
    shapes.set(t, static_cast<int>(std::min<int64_t>(rows, kTileRows)), kTileBytes);
  }
  for (const int t : {kB0, kB1}) shapes.set(t, kTileRows, kTileBytes);
  return shapes;
}

// Cache lines to fetch into L2 while something else computes, some every step.
struct Ahead {
  const uint8_t *next, *end;
  int64_t bytes;

  void fetch() {
    const uint8_t* stop = std::min(next + bytes, end);
    for (; next < stop; next += 64) __builtin_prefetch(next, 0, 2);
  }
};

// One or two tiles of rows, of which the second may begin within the first.
template <bool kLower>
struct Block {
  const int8_t *upper, *lower;
  int64_t stride;

  void clear() const {
    tile_zero<kC00>();
    tile_zero<kC01>();
    if constexpr (kLower) {
      tile_zero<kC10>();
      tile_zero<kC11>();
    }
  }

  // Adds `steps` steps from input k on, whose weights are at w.
  void add(int64_t k, const uint8_t* w, int64_t steps, Ahead& ahead) const {
    for (const int64_t end = k + steps * kStepK; k < end; k += kStepK, w += kStepBytes) {
      tile_load<kB0>(w, kLineQuad);
      tile_load<kA0>(upper + k, stride);
      tile_load<kB1>(w + kTileBytes, kLineQuad);
      tile_dot_su8<kC00, kA0, kB0>();
      if constexpr (kLower) tile_load<kA1>(lower + k, stride);
      tile_dot_su8<kC01, kA0, kB1>();
      if constexpr (kLower) {
        tile_dot_su8<kC10, kA1, kB0>();
        tile_dot_su8<kC11, kA1, kB1>();
      }
      ahead.fetch();
    }
  }

  // Sums: [16 or 32][32] int32.
  void load_sums(const int32_t* sums) const {
    tile_load<kC00>(sums, kPanel * 4);
    tile_load<kC01>(sums + kTileRows, kPanel * 4);
    if constexpr (kLower) {
      tile_load<kC10>(sums + kTileSums, kPanel * 4);
      tile_load<kC11>(sums + kTileSums + kTileRows, kPanel * 4);
    }
  }

  void store_sums(int32_t* sums) const {
    tile_store<kC00>(sums, kPanel * 4);
    tile_store<kC01>(sums + kTileRows, kPanel * 4);
    if constexpr (kLower) {
      tile_store<kC10>(sums + kTileSums, kPanel * 4);
      tile_store<kC11>(sums + kTileSums + kTileRows, kPanel * 4);
    }
  }
};

inline IVec load_ints(const int32_t* p) { return _mm512_loadu_si512(p); }
inline Vec whole_sum(const int32_t* dot, int32_t correction) {
  return to_float(_mm512_add_epi32(load_ints(dot), broadcast(correction)));
}

// One scale a column: a chunk is 512 k of the only group.
struct Channel {
  using Sum = int32_t;
  static int64_t chunk_k(const QuantizedFormat&) { return kChunkK; }
  static int64_t raw_begin(const QuantizedLinearArgs& a, int64_t c) {
    return std::min(c * kChunkBytes, a.format.panel_bytes(a.k));
  }

  // Weights of `steps` steps from k on; what is missing of the last step is zeros.
  static const uint8_t* prepare(const QuantizedLinearArgs& a, const uint8_t* panel, int64_t k, int64_t steps,
                                uint8_t* buffer) {
    const uint8_t* w = panel + k * kPanel;
    const int64_t there = a.format.panel_bytes(a.k) - k * kPanel;
    if (there >= steps * kStepBytes) return w;
    std::memcpy(buffer, w, there);
    std::memset(buffer + there, 0, steps * kStepBytes - there);
    return buffer;
  }

  template <bool kLower>
  static void add(const QuantizedLinearArgs&, const Block<kLower>& block, const uint8_t*, const int64_t (&)[2],
                  int64_t k, int64_t steps, const uint8_t* w, int32_t* sums, Ahead& ahead) {
    if (k == 0) {
      block.clear();
    } else {
      block.load_sums(sums);
    }
    block.add(k, w, steps, ahead);
    block.store_sums(sums);
  }

  static void finish(const QuantizedLinearArgs& a, int64_t row, int64_t column, const int32_t* sums) {
    const Vec scale = load(a.scale + column);
    Vec t = mul(whole_sum(sums, -128 * a.x.sums[row]), scale);
    if (a.offset != nullptr) {
      t = fused(broadcast(static_cast<float>(a.x.sums[row])), load(a.offset + column), t);
    }
    write(a, row, column, t);
  }
};

// Groups of 64 or 128: integers within a group, then one fma into floats, groups ascending.
template <int kBits, bool kOffset>
struct Grouped {
  using Sum = float;
  static constexpr int kZero = kBits == 8 ? 128 : 8;
  static int64_t chunk_k(const QuantizedFormat&) { return kChunkK; }
  static int64_t raw_begin(const QuantizedLinearArgs& a, int64_t c) {
    return std::min(c * (kChunkK / a.format.group) * a.format.block_bytes(a.k), a.format.panel_bytes(a.k));
  }

  static const uint8_t* prepare(const QuantizedLinearArgs& a, const uint8_t* panel, int64_t k, int64_t steps,
                                uint8_t* buffer) {
    const int64_t group = a.format.group, block = a.format.block_bytes(a.k);
    const uint8_t* w = panel + k / group * block;
    if constexpr (kBits == 8) return w;
    for (uint8_t *to = buffer, *end = buffer + steps * kStepBytes; to < end; w += block) {
      for (int64_t i = 0; i < group * kPanel / 2; i += kLineQuad, to += 2 * kLineQuad) {
        for (int64_t half = 0; half < kLineQuad; half += 64) {
          const Codes codes = load_codes(w + i + half);
          _mm512_store_si512(to + half, low_nibbles(codes).v);
          _mm512_store_si512(to + kLineQuad + half, high_nibbles(codes).v);
        }
      }
    }
    return buffer;
  }

  // f += scale * dot (+ offset * sum of the row) of one group, 16 rows.
  static void add_group(const QuantizedLinearArgs& a, const uint8_t* scales, int64_t g, int64_t row, int64_t rows,
                        const int32_t* dots, bool first, float* f) {
    const int32_t* sums = a.x.sums + row * a.format.groups(a.k) + g;
    const Vec s0 = load_half(scales), s1 = load_half(scales + kLanes * 2);
    const Vec o0 = kOffset ? load_half(scales + kPanel * 2) : zero();
    const Vec o1 = kOffset ? load_half(scales + (kPanel + kLanes) * 2) : zero();
    for (int64_t r = 0; r < rows; ++r, dots += kPanel, f += kPanel, sums += a.format.groups(a.k)) {
      Vec f0 = fused(whole_sum(dots, -kZero * *sums), s0, first ? zero() : load(f));
      Vec f1 = fused(whole_sum(dots + kLanes, -kZero * *sums), s1, first ? zero() : load(f + kLanes));
      if constexpr (kOffset) {
        const Vec sum = broadcast(static_cast<float>(*sums));
        f0 = fused(sum, o0, f0);
        f1 = fused(sum, o1, f1);
      }
      store(f, f0);
      store(f + kLanes, f1);
    }
  }

  template <bool kLower>
  static void add(const QuantizedLinearArgs& a, const Block<kLower>& block, const uint8_t* panel,
                  const int64_t (&rows)[2], int64_t k, int64_t steps, const uint8_t* w, float* f, Ahead& ahead) {
    alignas(64) int32_t dots[2][2 * kTileSums];
    const int64_t group = a.format.group, bytes = a.format.block_bytes(a.k), codes = a.format.code_bytes(a.k);
    const int64_t tile_rows = std::min<int64_t>(kTileRows, a.rows), end = (k + steps * kStepK) / group;
    const int64_t next_w = kBits == 8 ? bytes : group * kPanel;
    const auto floats_of = [&](int64_t g) {
      const uint8_t* scales = panel + g * bytes + codes;
      add_group(a, scales, g, rows[0], tile_rows, dots[g % 2], g == 0, f);
      if constexpr (kLower) add_group(a, scales, g, rows[1], tile_rows, dots[g % 2] + kTileSums, g == 0, f + kTileSums);
    };
    for (int64_t g = k / group; g < end; ++g, w += next_w) {
      block.clear();
      block.add(g * group, w, group / kStepK, ahead);
      block.store_sums(dots[g % 2]);
      if (g > k / group) floats_of(g - 1);
    }
    floats_of(end - 1);
  }

  static void finish(const QuantizedLinearArgs& a, int64_t row, int64_t column, const float* f) {
    write(a, row, column, mul(load(f), load(a.scale + column)));
  }
};

// What one thread does of a pass of rows [first, first + rows): panels [begin, end), in groups.
template <typename F>
class Worker {
 public:
  Worker(const QuantizedLinearArgs& a, int64_t first, int64_t rows, Range panels)
      : a_(a), first_(first), rows_(rows), tiles_((rows + kTileRows - 1) / kTileRows), panels_(panels) {
    tile_state_.shape(shapes_of(a.rows));
    const int64_t group = a.format.group;
    padded_ = group == 0 ? (a.k + kStepK - 1) / kStepK * kStepK : a.format.groups(a.k) * group;
    chunks_ = (padded_ + kChunkK - 1) / kChunkK;
    sums_ = scratch_.get<typename F::Sum>(kGroupPanels * tiles_ * kTileSums);
  }

  void run() {
    for (int64_t first = panels_.begin; first < panels_.end; first += kGroupPanels) {
      const int64_t end = std::min(panels_.end, first + kGroupPanels);
      for (int64_t c = 0; c < chunks_; ++c) {
        for (int64_t p = first; p < end; ++p) {
          const bool more = p + 1 < end, same = more || c + 1 < chunks_;
          chunk(p, c, sums_ + (p - first) * tiles_ * kTileSums, more ? p + 1 : same ? first : end,
                more ? c : same ? c + 1 : 0);
        }
      }
    }
  }

 private:
  const uint8_t* panel(int64_t p) const { return a_.packed + p * a_.format.panel_bytes(a_.k); }

  // The first row of tile t; all tiles are full where there are 16 rows.
  int64_t row_of(int64_t t) const {
    return first_ + std::max<int64_t>(0, std::min(t * kTileRows, rows_ - kTileRows));
  }

  // All rows by chunk c of panel p; chunk next_c of panel next_p comes after it.
  void chunk(int64_t p, int64_t c, typename F::Sum* sums, int64_t next_p, int64_t next_c) {
    const int64_t k = c * kChunkK, steps = std::min(kChunkK, padded_ - k) / kStepK;
    const uint8_t* w = F::prepare(a_, panel(p), k, steps, buffer_);
    Ahead ahead{nullptr, nullptr, 0};
    if (next_p < panels_.end) {
      const int64_t begin = F::raw_begin(a_, next_c), end = F::raw_begin(a_, next_c + 1);
      const int64_t turns = (tiles_ + 1) / 2 * steps;
      ahead = {panel(next_p) + begin, panel(next_p) + end, (end - begin + turns * 64 - 1) / (turns * 64) * 64};
    }
    for (int64_t t = 0; t < tiles_; t += 2, sums += 2 * kTileSums) {
      const bool lower = t + 1 < tiles_;
      const int64_t rows[2] = {row_of(t), row_of(lower ? t + 1 : t)};
      const int8_t* x = a_.x.q;
      const int64_t stride = a_.x.stride;
      if (lower) {
        const Block<true> block{x + rows[0] * stride, x + rows[1] * stride, stride};
        F::template add<true>(a_, block, panel(p), rows, k, steps, w, sums, ahead);
      } else {
        const Block<false> block{x + rows[0] * stride, nullptr, stride};
        F::template add<false>(a_, block, panel(p), rows, k, steps, w, sums, ahead);
      }
      if (c + 1 == chunks_) finish(p, rows, lower, sums);
    }
  }

  void finish(int64_t p, const int64_t (&rows)[2], bool lower, const typename F::Sum* sums) const {
    const int64_t tile_rows = std::min<int64_t>(kTileRows, rows_);
    for (int64_t tile = 0; tile <= (lower ? 1 : 0); ++tile) {
      for (int64_t r = 0; r < tile_rows; ++r) {
        for (int64_t lane = 0; lane < kPanel; lane += kLanes) {
          F::finish(a_, rows[tile] + r, p * kPanel + lane, sums + tile * kTileSums + r * kPanel + lane);
        }
      }
    }
  }

  static thread_local Scratch scratch_;
  const QuantizedLinearArgs& a_;
  int64_t first_, rows_, tiles_, padded_, chunks_;
  Range panels_;
  Tiles tile_state_;
  typename F::Sum* sums_;
  alignas(64) uint8_t buffer_[kChunkBytes];
};

template <typename F>
thread_local Scratch Worker<F>::scratch_;

template <typename F>
void linear_as(const QuantizedLinearArgs& a, ThreadPool& pool) {
  const int64_t panels = (a.n + kPanel - 1) / kPanel, passes = (a.rows + kPassRows - 1) / kPassRows;
  auto body = [&](int thread, int num_threads) {
    const Range mine = share(panels, thread, num_threads);
    if (mine.begin == mine.end) return;
    for (int64_t pass = 0; pass < passes; ++pass) {
      const Range rows = share(a.rows, static_cast<int>(pass), static_cast<int>(passes));
      Worker<F>(a, rows.begin, rows.end - rows.begin, mine).run();
    }
  };
  // Below some 5 us of work the other threads are not worth waking. The split changes no bit.
  if (a.rows * a.n * a.k < kSmallWork) {
    body(0, 1);
  } else {
    pool.run(body);
  }
}

void linear(const QuantizedLinearArgs& a, ThreadPool& pool) {
  const QuantizedFormat& f = a.format;
  if (a.rows < kFewRows || (f.group != 0 && f.group < kStepK)) return avx512::kQuantized.linear(a, pool);
  if (f.group == 0) return linear_as<Channel>(a, pool);
  if (f.bits == 8) return (f.has_offset ? linear_as<Grouped<8, true>> : linear_as<Grouped<8, false>>)(a, pool);
  return (f.has_offset ? linear_as<Grouped<4, true>> : linear_as<Grouped<4, false>>)(a, pool);
}

}  // namespace

}  // namespace quire::cpu::amx

namespace quire::cpu {

QuantizedKernels with_amx(const QuantizedKernels& avx512) {
  QuantizedKernels kernels = avx512;
  kernels.linear = amx::linear;
  return kernels;
}

}  // namespace quire::cpu
