// The linear of one ISA level (compiled once per level, see isa.h and CMakeLists.txt).
//
// Algorithm: panels of 32 columns outermost, split over threads; row tiles inside, so that a panel is read from DRAM
// once and stays in L2 (at most 512 KiB at K = 8192). A tile of R rows x 32 columns lives in registers over all of K:
// one load of the weights and one broadcast per row and k-pair. Bytes: N * K * 2 of weights per pass of at most 512
// rows, rows from L2/L3. Bound: memory bandwidth for few rows, dpbf16 (AVX-512) for many. While a tile computes, it
// prefetches its share of the next panel into L2: at 14-64 rows this is worth 10-16 %.
#include <algorithm>

#include "cpu/isa.h"
#include "cpu/linear.h"
#include "cpu/row_loops.h"

namespace quire::cpu::QUIRE_ISA {

namespace {

constexpr int64_t kPassRows = 512;  // more rows than this fall out of L3 while a panel is in use
constexpr int64_t kSmallWork = 1 << 16;  // multiply-adds: of one row, 128 KiB of weights
// What differs between element types: how many k a step takes, and how a step is computed.
struct Bf16 {
  using Element = uint16_t;
  static constexpr int kStep = 2;
  using W = Weights;
  static W load_weights(const Element* p) { return load_pairs(p); }
  static auto broadcast_x(const Element* x) { return broadcast_pair(x); }
  template <typename X>
  static Vec dot_step(Vec acc, const W& w, const X& x) {
    return dot(acc, w, x);
  }
};

struct F32 {
  using Element = float;
  static constexpr int kStep = 1;
  using W = Vec;
  static W load_weights(const Element* p) { return load(p); }
  static Vec broadcast_x(const Element* x) { return broadcast(*x); }
  static Vec dot_step(Vec acc, const W& w, const Vec& x) { return fma(w, x, acc); }
};

// kLanes results, the first at (row, column).
inline void write(const LinearArgs& a, int64_t row, int64_t column, Vec y) {
  const int n = static_cast<int>(std::min<int64_t>(kLanes, a.n - column));
  if (n <= 0) return;
  if (a.bias != nullptr) y = add(y, load_some(a.bias + column, n));
  if (a.y_type == Type::f32) {
    store_some(static_cast<float*>(a.y) + row * a.y_stride + column, y, n);
  } else {
    store_some(static_cast<uint16_t*>(a.y) + row * a.y_stride + column, y, n);
  }
}

// R rows x V vectors over all of K. `next` .. are lines of the next panel to prefetch, one per step; without
// them few rows stream through the weights, and fetch ahead what they read.
template <typename T, int R, int V>
void tile(const LinearArgs& a, const typename T::Element* w, int64_t row, int64_t column, const char* next,
          int64_t next_lines) {
  using Element = typename T::Element;
  const Element* x = static_cast<const Element*>(a.x) + row * a.x_stride;
  const int64_t steps = (a.k + T::kStep - 1) / T::kStep;
  Vec acc[R][V];
  UNROLL for (int r = 0; r < R; ++r) {
    UNROLL for (int v = 0; v < V; ++v) acc[r][v] = zero();
  }
  for (int64_t s = 0; s < steps; ++s) {
    typename T::W weights[V];
    UNROLL for (int v = 0; v < V; ++v) {
      weights[v] = T::load_weights(w + v * kLanes * T::kStep);
      keep(weights[v]);
    }
    UNROLL for (int r = 0; r < R; ++r) {
      const auto broadcasted = T::broadcast_x(x + r * a.x_stride + s * T::kStep);
      UNROLL for (int v = 0; v < V; ++v) acc[r][v] = T::dot_step(acc[r][v], weights[v], broadcasted);
    }
    if (s < next_lines) {
      __builtin_prefetch(next + s * 64, 0, 2);
    } else if (next == nullptr) {
      fetch_ahead<V * kLanes * T::kStep * sizeof(Element)>(w);
    }
    w += kPanel * T::kStep;
  }
  UNROLL for (int r = 0; r < R; ++r) {
    UNROLL for (int v = 0; v < V; ++v) write(a, row + r, column + v * kLanes, acc[r][v]);
  }
}

template <typename T, int R = kRows>
void tile_of(int rows, const LinearArgs& a, const typename T::Element* panel, int64_t row, int64_t column,
             const char* next, int64_t next_lines) {
  if (rows == R) {
    constexpr int kVectors = R == 1 ? static_cast<int>(kPanel) / kLanes : kTileVectors;  // one row streams through a panel
    constexpr int64_t kWidth = kVectors * kLanes;
    for (int64_t part = 0; part < kPanel && column + part < a.n; part += kWidth) {
      tile<T, R, kVectors>(a, panel + part * T::kStep, row, column + part, next, part == 0 ? next_lines : 0);
    }
  } else if constexpr (R > 1) {
    tile_of<T, R - 1>(rows, a, panel, row, column, next, next_lines);
  }
}

template <typename T>
void linear(const LinearArgs& args, ThreadPool& pool) {
  using Element = typename T::Element;
  const int64_t panels = (args.n + kPanel - 1) / kPanel;
  const int64_t panel_elements = (args.k + T::kStep - 1) / T::kStep * T::kStep * kPanel;
  const int64_t panel_lines = panel_elements * static_cast<int64_t>(sizeof(Element)) / 64;
  for (int64_t first = 0; first < args.rows; first += kPassRows) {
    const int64_t rows = std::min(kPassRows, args.rows - first);
    const int64_t tiles = (rows + kRows - 1) / kRows;
    over_panels(panels, panel_lines * 64, args.rows * args.n * args.k < kSmallWork, pool, [&](const Range& mine) {
      for (int64_t p = mine.begin; p < mine.end; ++p) {
        const Element* panel = static_cast<const Element*>(args.packed) + p * panel_elements;
        const bool streams = rows <= kRows, more = p + 1 < panels;
        for (int64_t t = 0; t < tiles; ++t) {
          // Rows are spread evenly over the tiles: 16 rows are 8 + 8, not 12 + 4.
          const Range tile_rows = share(rows, static_cast<int>(t), static_cast<int>(tiles));
          const Range lines = share(panel_lines, static_cast<int>(t), static_cast<int>(tiles));
          const char* next = reinterpret_cast<const char*>(panel + panel_elements) + lines.begin * 64;
          tile_of<T>(static_cast<int>(tile_rows.end - tile_rows.begin), args, panel, first + tile_rows.begin, p * kPanel,
                     streams ? nullptr : next, !streams && more ? lines.end - lines.begin : 0);
        }
      }
    });
  }
}

}  // namespace

extern const LinearKernels kLinear;
const LinearKernels kLinear = {linear<Bf16>, linear<F32>};

}  // namespace quire::cpu::QUIRE_ISA
