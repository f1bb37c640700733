// The linear of one ISA level (compiled once per level, see isa.h and CMakeLists.txt).
//
// Algorithm: panels of 32 columns outermost, split over threads; row tiles inside, so that a panel is read from DRAM
// once and stays in L2 (at most 512 KiB at K = 8192). A tile of R rows x 32 columns lives in registers over all of K:
// one load of the weights and one broadcast per row and k-pair. Levels without bf16 products widen pairs in registers,
// and the rows, where they are many, once before (the same arithmetic, so the same bits). Bytes: N * K * 2 of weights
// per pass of at most 512 rows, rows from L2/L3. Bound: memory bandwidth for few rows, dpbf16 or fma for many. While a
// tile computes, it prefetches its share of the next panel into L2: at 14-64 rows this is worth 10-16 %. The only tile
// of a pass fetches all columns of its own panel, so that its second half finds them in L2 where it takes 16 at a time.
#include <algorithm>
#include <type_traits>

#include "cpu/isa.h"
#include "cpu/linear.h"
#include "cpu/matrix_tile.h"
#include "cpu/row_loops.h"
#include "cpu/scratch.h"

namespace quire::cpu::QUIRE_ISA {

namespace {

constexpr int64_t kPassRows = 512;  // more rows than this fall out of L3 while a panel is in use
constexpr int64_t kSmallWork = 1 << 16;  // multiply-adds: of one row, 128 KiB of weights
constexpr int64_t kPackedRows = 8;       // from which on laying the rows out for the tiles pays

// What differs between element types: how many k a step takes, and how a step is computed. `Step` is the part of a row
// that a step takes, as it lies in rows that are laid out for the tiles.
struct Bf16 {
  using Element = uint16_t;
  struct Step {
    uint16_t x[2];
  };
  static constexpr int kStep = 2;
  static constexpr bool kIsMatrix = false;
  using W = Weights;
  static W load_weights(const Element* p) { return load_pairs(p); }
  static Pair broadcast_x(const Element* x) { return broadcast_pair(x); }
  static Pair broadcast_x(const Step& x) { return broadcast_pair(x.x); }
  static Step step_of(Element even, Element odd) { return {{even, odd}}; }
  static Vec dot_step(Vec acc, const W& w, const Pair& x) { return dot(acc, w, x); }
  static Vec dot_step(Vec acc, const Vec& w, const Vec& x) { return fma(w, x, acc); }  // of the even k, or of the odd
};

// The same of levels without bf16 products, where a pair of floats spares every panel a shift and a mask.
template <typename P>
struct WidenedBf16 : Bf16 {
  struct Step {
    float x[2];
  };
  using Bf16::broadcast_x;
  static P broadcast_x(const Step& x) { return {broadcast(x.x[0]), broadcast(x.x[1])}; }
  static Step step_of(Element even, Element odd) { return {{bf16_to_float(even), bf16_to_float(odd)}}; }
};

struct F32 {
  using Element = float;
  struct Step {
    float x;
  };
  static constexpr int kStep = 1;
  static constexpr bool kIsMatrix = false;
  using W = Vec;
  static W load_weights(const Element* p) { return load(p); }
  static Vec broadcast_x(const Element* x) { return broadcast(*x); }
  static Vec broadcast_x(const Step& x) { return broadcast(x.x); }
  static Step step_of(Element x, Element) { return {x}; }
  static Vec dot_step(Vec acc, const W& w, const Vec& x) { return fma(w, x, acc); }
};

// The same by products of two rows and two columns (matrix_tile.h).
struct MatrixBf16 : Bf16 {
  static constexpr bool kIsMatrix = true;
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

// R x V of them, all of which exist.
template <int R, int V>
inline void write_whole(const LinearArgs& a, int64_t row, int64_t column, const float* from) {
  const auto rows_to = [&](auto* y) {
    y += row * a.y_stride + column;
    for (int r = 0; r < R; ++r, y += a.y_stride, from += V * kLanes) {
      UNROLL for (int v = 0; v < V; ++v) store(y + v * kLanes, load(from + v * kLanes));
    }
  };
  if (a.y_type == Type::f32) {
    rows_to(static_cast<float*>(a.y));
  } else {
    rows_to(static_cast<uint16_t*>(a.y));
  }
}

// Where a tile reads and writes, and what it prefetches: lines of the next panel, one per step, or, where it is the only
// tile, the panel itself, which then streams.
template <typename T>
struct Place {
  const typename T::Element* panel;
  const typename T::Step* steps;  // [k steps][rows of the tile], or null: rows as they came
  int64_t row, column;            // the first of each
  bool streams;
  const char* next;
  int64_t next_lines;
};

// R rows x V vectors of results.
template <typename T, int R, int V>
inline void write_tile(const LinearArgs& a, const Place<T>& at, const float* results) {
  if (a.bias == nullptr && a.n - at.column >= V * kLanes) return write_whole<R, V>(a, at.row, at.column, results);
  for (int i = 0; i < R * V; ++i) write(a, at.row + i / V, at.column + i % V * kLanes, load(results + i * kLanes));
}

#if defined(QUIRE_NEON_I8MM)
template <typename T, int R, int V>
void matrix_tile(const LinearArgs& a, const Place<T>& at) {
  alignas(64) float results[(R + 1) / 2 * 2 * V * kLanes];
  const auto *x = reinterpret_cast<const uint32_t*>(at.steps), *w = reinterpret_cast<const uint32_t*>(at.panel);
  multiply_tile<Bf16Matrix, R, V>(x, w, a.k / T::kStep, results, [&](int64_t s) {
    if (s < at.next_lines) __builtin_prefetch(at.next + s * 64, 0, 2);
  });
  write_tile<T, R, V>(a, at, results);
}
#else
template <typename T, int R, int V>
void matrix_tile(const LinearArgs&, const Place<T>&) {}
#endif

// The parts of a step: the even k, the odd, or both. With 16 registers a tile of more than two rows holds one widened
// vector of each weight at a time, which leaves registers for twelve accumulators in place of eight.
constexpr int kEven = 0, kOdd = 1, kBoth = 2;
template <typename T>
constexpr bool halves(int rows) { return kLanes == 8 && T::kStep == 2 && rows > 2; }

template <int part, typename P>
inline auto part_of(const P& pair) {
  if constexpr (part == kBoth) return pair;
  else return part == kEven ? pair.even : pair.odd;
}

// R rows x V vectors of products.
template <typename T, int part, bool kPacked, int R, int V>
inline void add_products(Vec (&acc)[R][V], const typename T::Element* w, const typename T::Element* x, int64_t x_stride,
                         const typename T::Step* packed) {
  // Else gcc holds what the other part loaded, in more registers than there are.
  if constexpr (part != kBoth) __asm__("" : "+r"(w), "+r"(x) : "i"(part));
  decltype(part_of<part>(T::load_weights(w))) weights[V];
  UNROLL for (int v = 0; v < V; ++v) {
    auto loaded = part_of<part>(T::load_weights(w + v * kLanes * T::kStep));
    keep(loaded);
    weights[v] = loaded;
  }
  UNROLL for (int r = 0; r < R; ++r) {
    const auto x_r = part_of<part>(kPacked ? T::broadcast_x(packed[r]) : T::broadcast_x(x + r * x_stride));
    UNROLL for (int v = 0; v < V; ++v) acc[r][v] = T::dot_step(acc[r][v], weights[v], x_r);
  }
}

// R rows x V vectors over all of K.
template <typename T, int R, int V, bool kPacked>
void tile(const LinearArgs& a, const Place<T>& at) {
  using Element = typename T::Element;
  const Element *x = static_cast<const Element*>(a.x) + at.row * a.x_stride, *w = at.panel;
  const typename T::Step* packed = at.steps;
  const char* next = at.next;
  const int64_t steps = (a.k + T::kStep - 1) / T::kStep, next_lines = at.next_lines;
  const bool streams = at.streams;
  Vec acc[R][V];
  UNROLL for (int r = 0; r < R; ++r) {
    UNROLL for (int v = 0; v < V; ++v) acc[r][v] = zero();
  }
  for (int64_t s = 0; s < steps; ++s) {
    const Element* x_s = x + s * T::kStep;
    if constexpr (halves<T>(R)) {
      add_products<T, kEven, kPacked>(acc, w, x_s, a.x_stride, packed);
      add_products<T, kOdd, kPacked>(acc, w, x_s, a.x_stride, packed);
    } else {
      add_products<T, kBoth, kPacked>(acc, w, x_s, a.x_stride, packed);
    }
    if (s < next_lines) {
      __builtin_prefetch(next + s * 64, 0, 2);
    } else if (streams) {
      fetch_ahead<kPanel * T::kStep * sizeof(Element)>(w, kNearAhead);
    }
    if constexpr (kPacked) packed += R;
    w += kPanel * T::kStep;
  }
  // Through memory: with tails of rows beside the loop, gcc 12 keeps half of the accumulators on the stack in it.
  alignas(64) float results[R * V * kLanes];
  UNROLL for (int r = 0; r < R; ++r) {
    UNROLL for (int v = 0; v < V; ++v) store(results + (r * V + v) * kLanes, acc[r][v]);
  }
  write_tile<T, R, V>(a, at, results);
}

// Vectors of the columns that R rows take: few rows have registers left for more than a full tile.
constexpr int tile_vectors(int rows) {
  return rows == 1 ? static_cast<int>(kPanel) / kLanes : kLanes == 4 && rows <= 5 ? 4 : kTileVectors;
}

template <typename T, bool kPacked, int R = kRows>
void tile_of(int rows, const LinearArgs& a, Place<T> at) {
  if (rows == R) {
    constexpr int kVectors = tile_vectors(R);
    constexpr int64_t kWidth = kVectors * kLanes;
    for (int64_t part = 0; part < kPanel && at.column < a.n; part += kWidth) {
      if constexpr (T::kIsMatrix) matrix_tile<T, R, kVectors>(a, at);
      else tile<T, R, kVectors, kPacked>(a, at);
      at.panel += kWidth * T::kStep;
      at.column += kWidth;
      at.streams = false, at.next_lines = 0;
    }
  } else if constexpr (R > 1) {
    tile_of<T, kPacked, R - 1>(rows, a, at);
  }
}

// Rows [first, first + rows) laid out for their tiles, each [k steps][rows of the tile], kRows * steps apart: the rows of a tile then share
// cache lines, and not, as those of 4096 bytes do, one set of the L1 cache.
template <typename T>
void pack_steps(const LinearArgs& a, int64_t first, int64_t rows, int64_t tiles, typename T::Step* to, ThreadPool& pool) {
  const int64_t steps = (a.k + T::kStep - 1) / T::kStep;
  over_rows(tiles, rows / tiles * a.k, pool, [&](int64_t t) {
    const Range mine = share(rows, static_cast<int>(t), static_cast<int>(tiles));
    const int64_t width = mine.end - mine.begin;
    const RowLayout layout(width, T::kIsMatrix);
    typename T::Step* tile = to + t * kRows * steps;
    if (layout.width > width) std::fill_n(tile, layout.width * steps, typename T::Step{});
    for (int64_t r = 0; r < width; ++r) {
      const auto* x = static_cast<const typename T::Element*>(a.x) + (first + mine.begin + r) * a.x_stride;
      for (int64_t s = 0; s < steps; ++s) {
        const int64_t k = s * T::kStep;
        tile[layout.at(s, r)] = T::step_of(x[k], k + 1 < a.k ? x[k + T::kStep - 1] : typename T::Element{});
      }
    }
  });
}

template <typename T, bool kPacked>
void passes(const LinearArgs& args, ThreadPool& pool) {
  using Element = typename T::Element;
  static thread_local Scratch scratch;
  const int64_t panels = (args.n + kPanel - 1) / kPanel, steps = (args.k + T::kStep - 1) / T::kStep;
  const int64_t panel_elements = steps * T::kStep * kPanel;
  const int64_t panel_lines = panel_elements * static_cast<int64_t>(sizeof(Element)) / 64;
  for (int64_t first = 0; first < args.rows; first += kPassRows) {
    const int64_t rows = std::min(kPassRows, args.rows - first);
    const int64_t tiles = num_tiles(rows, kRows);
    typename T::Step* packed = nullptr;
    if constexpr (kPacked) {
      packed = scratch.get<typename T::Step>(static_cast<std::size_t>(tiles * kRows * steps));
      pack_steps<T>(args, first, rows, tiles, packed, pool);
    }
    over_panels(panels, panel_lines * 64, args.rows * args.n * args.k < kSmallWork, pool, [&](const Range& mine) {
      for (int64_t p = mine.begin; p < mine.end; ++p) {
        const Element* panel = static_cast<const Element*>(args.packed) + p * panel_elements;
        const bool streams = tiles == 1, more = p + 1 < panels;
        for (int64_t t = 0; t < tiles; ++t) {
          // Rows are spread evenly over the tiles: 16 rows are 8 + 8, not 12 + 4.
          const Range tile_rows = share(rows, static_cast<int>(t), static_cast<int>(tiles));
          const Range lines = share(panel_lines, static_cast<int>(t), static_cast<int>(tiles));
          const char* next = reinterpret_cast<const char*>(panel + panel_elements) + lines.begin * 64;
          tile_of<T, kPacked>(static_cast<int>(tile_rows.end - tile_rows.begin), args,
                              {panel, kPacked ? packed + t * kRows * steps : nullptr, first + tile_rows.begin,
                               p * kPanel, streams, next, !streams && more ? lines.end - lines.begin : 0});
        }
      }
    });
  }
}

template <typename Direct, typename Packed>
void linear(const LinearArgs& args, ThreadPool& pool) {
  const bool many = args.rows >= kPackedRows && args.rows * args.n * args.k >= kSmallWork;
  if constexpr (kMatrix && std::is_same_v<Direct, Bf16>) {
    if (many && args.k % 2 == 0 && takes_matrix(args.k / 2)) return passes<MatrixBf16, true>(args, pool);
  }
  (many ? passes<Packed, true> : passes<Direct, false>)(args, pool);
}

template <typename P>
using PackedBf16 = std::conditional_t<(sizeof(P) > sizeof(Vec)), WidenedBf16<P>, Bf16>;

}  // namespace

extern const LinearKernels kLinear;
const LinearKernels kLinear = {linear<Bf16, PackedBf16<Pair>>, linear<F32, F32>};

}  // namespace quire::cpu::QUIRE_ISA
