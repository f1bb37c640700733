// Low-rank adapters over the rows of a step (cpu/lora.h).
//
// Algorithm: shrink, then expand. Shrink: an item is 16 ranks of one part of one slot by up to kBlockRows of its rows;
// A is read once per item, in order. Expand: a thread takes ranges of 64 columns of y and goes over the slots, so that
// B is read once per step too and y is written by one thread. Bytes: the A and B of the adapters that have rows in the
// step; for rank 16 on all linears of a 1B model 22 MB per adapter, against 2.5 GB of weights. Bound: memory bandwidth
// for few rows per adapter; the multiply-adds are rank * (k + n) per row, 1-3 % of the linear's own.
#include "cpu/lora.h"

#include <algorithm>

#include "cpu/isa.h"
#include "cpu/row_loops.h"

namespace quire::cpu::QUIRE_ISA {

namespace {

constexpr int kVectors = static_cast<int>(kLoraColumns) / kLanes;  // 1, 2 or 4
// Independent sums per row of the shrink: a single chain of dependent products would wait for each. Part of the level's
// order of summation. With them the tile fills the registers: 16 of 32, 8 of 16.
constexpr int kChains = kLanes == 16 ? 4 : kLanes == 8 ? 2 : 1;
constexpr int kTile = kLanes == 16 ? 4 : 2;       // rows
constexpr int kGroupPanels = 4;                   // panels of B that a thread takes together: 64 columns
constexpr int kWidth = kLanes == 16 ? 4 : 1;      // panels of B in registers
constexpr int64_t kBlockRows = 64;
constexpr int64_t kSmallWork = 1 << 16;

struct LoraBf16 {
  using Element = uint16_t;
  static constexpr int kStep = 2;
  using W = Weights;
  static W load_weights(const Element* p) { return load_pairs(p); }
  static Pair broadcast_x(const Element* x) { return broadcast_pair(x); }
  static Vec dot_step(Vec acc, const W& w, const Pair& x) { return dot(acc, w, x); }
};

struct LoraF32 {
  using Element = float;
  static constexpr int kStep = 1;
  using W = Vec;
  static W load_weights(const Element* p) { return load(p); }
  static Vec broadcast_x(const Element* x) { return broadcast(*x); }
  static Vec dot_step(Vec acc, const W& w, const Vec& x) { return fma(w, x, acc); }
};

inline int64_t over(int64_t n, int64_t unit) { return (n + unit - 1) / unit; }

// Where things lie, for one element type.
template <typename T>
struct Layout {
  using Element = typename T::Element;
  static constexpr int64_t kPair = kLoraColumns * T::kStep;  // elements of a step of a panel

  explicit Layout(const LoraArgs& args) : a(args), k_steps(over(args.k, T::kStep)) {
    for (int64_t p = 0; p < a.num_parts; ++p) {
      columns[p + 1] = columns[p] + a.widths[p];
      panels[p + 1] = panels[p] + over(a.widths[p], kLoraColumns);
    }
  }

  const Element* shrink_panel(int64_t s, int64_t p, int64_t panel) const {
    const int64_t part = a.max_rank * k_steps * T::kStep;
    return static_cast<const Element*>(a.a) + (s * a.num_parts + p) * part + panel * k_steps * kPair;
  }
  const Element* expand_panel(int64_t s, int64_t p, int64_t panel, int64_t steps) const {
    const int64_t before = (s * panels[a.num_parts] + panels[p]) * kLoraColumns * a.max_rank;
    return static_cast<const Element*>(a.b) + before + panel * steps * kPair;
  }
  const Element* x(int64_t place) const { return static_cast<const Element*>(a.x) + a.order[place] * a.x_stride; }
  Element* y(int64_t place) const { return static_cast<Element*>(a.y) + a.order[place] * a.y_stride; }
  Element* h(int64_t place, int64_t p) const {
    return static_cast<Element*>(a.h) + (place * a.num_parts + p) * a.max_rank;
  }
  int64_t rank(int64_t s, int64_t p) const { return a.ranks[s * a.num_parts + p]; }
  bool gained(int64_t s, int64_t p) const { return a.gained[s * a.num_parts + p] != 0; }
  // Of the gains and offsets of a slot: where those of a part begin.
  int64_t gain(int64_t s, int64_t p) const { return s * columns[a.num_parts] + columns[p]; }

  const LoraArgs& a;
  int64_t k_steps;
  int64_t columns[kMaxLoraParts + 1] = {};  // of y, before each part
  int64_t panels[kMaxLoraParts + 1] = {};   // of B, before each part
};

// R rows, the first at `place` of the order, by 16 ranks.
template <typename T, int R>
void shrink_tile(const Layout<T>& at, int64_t place, int64_t p, const typename T::Element* panel, int64_t first,
                 float scale) {
  using Element = typename T::Element;
  Vec acc[R][kChains][kVectors];
  const Element* x[R];
  UNROLL for (int r = 0; r < R; ++r) {
    x[r] = at.x(place + r);
    UNROLL for (int c = 0; c < kChains; ++c) {
      UNROLL for (int v = 0; v < kVectors; ++v) acc[r][c][v] = zero();
    }
  }
  const auto step = [&](int c, const Element* w, int64_t k) {
    UNROLL for (int v = 0; v < kVectors; ++v) {
      const typename T::W weights = T::load_weights(w + v * kLanes * T::kStep);
      UNROLL for (int r = 0; r < R; ++r) acc[r][c][v] = T::dot_step(acc[r][c][v], weights, T::broadcast_x(x[r] + k));
    }
  };
  const int64_t whole = at.a.k / T::kStep;  // steps that a row has in full
  int64_t s = 0;
  for (; s + kChains <= whole; s += kChains) {
    UNROLL for (int c = 0; c < kChains; ++c) step(c, panel + (s + c) * at.kPair, (s + c) * T::kStep);
  }
  UNROLL for (int c = 0; c < kChains; ++c) {
    if (s + c < whole) step(c, panel + (s + c) * at.kPair, (s + c) * T::kStep);
  }
  Element last[R][2] = {};
  if (whole < at.k_steps) {  // an odd k: its last pair has one element
    const Element* row[R];
    UNROLL for (int r = 0; r < R; ++r) {
      row[r] = x[r];
      last[r][0] = x[r][at.a.k - 1];
      x[r] = last[r];
    }
    UNROLL for (int c = 0; c < kChains; ++c) {
      if (whole % kChains == c) step(c, panel + whole * at.kPair, 0);
    }
    UNROLL for (int r = 0; r < R; ++r) x[r] = row[r];
  }
  UNROLL for (int r = 0; r < R; ++r) {
    UNROLL for (int v = 0; v < kVectors; ++v) {
      UNROLL for (int half = kChains / 2; half > 0; half /= 2) {
        UNROLL for (int c = 0; c < half; ++c) acc[r][c][v] = add(acc[r][c][v], acc[r][c + half][v]);
      }
      store(at.h(place + r, p) + first + v * kLanes, mul(acc[r][0][v], broadcast(scale)));
    }
  }
}

// R rows by P panels of part p, the first panel being `panel`. G: the part has gains.
template <typename T, int R, int P, bool G>
void expand_tile(const Layout<T>& at, int64_t place, int64_t s, int64_t p, int64_t panel) {
  using Element = typename T::Element;
  const int64_t steps = over(at.rank(s, p), T::kStep);
  Vec acc[R][P][kVectors];
  const Element *h[R], *w[P];
  UNROLL for (int r = 0; r < R; ++r) {
    h[r] = at.h(place + r, p);
    UNROLL for (int i = 0; i < P; ++i) {
      UNROLL for (int v = 0; v < kVectors; ++v) acc[r][i][v] = zero();
    }
  }
  UNROLL for (int i = 0; i < P; ++i) w[i] = at.expand_panel(s, p, panel + i, steps);
  for (int64_t j = 0; j < steps; ++j) {
    UNROLL for (int i = 0; i < P; ++i) {
      UNROLL for (int v = 0; v < kVectors; ++v) {
        typename T::W weights = T::load_weights(w[i] + j * at.kPair + v * kLanes * T::kStep);
        UNROLL for (int r = 0; r < R; ++r) {
          acc[r][i][v] = T::dot_step(acc[r][i][v], weights, T::broadcast_x(h[r] + j * T::kStep));
        }
      }
    }
  }
  const int64_t first = panel * kLoraColumns;
  const bool whole = first + P * kLoraColumns <= at.a.widths[p];
  const float* gain = at.a.gains + at.gain(s, p) + first;
  const float* offset = at.a.offsets + at.gain(s, p) + first;
  float sums[R][P * kLoraColumns];  // of the last columns: a loop over accumulators would have them in memory
  UNROLL for (int r = 0; r < R; ++r) {
    Element* y = at.y(place + r) + at.columns[p] + first;
    UNROLL for (int i = 0; i < P; ++i) {
      UNROLL for (int v = 0; v < kVectors; ++v) {
        const int64_t column = i * kLoraColumns + v * kLanes;
        if (whole) {
          Vec base = load(y + column);
          if constexpr (G) base = fma(base, load(gain + column), load(offset + column));
          store(y + column, add(base, acc[r][i][v]));
        } else {
          store(sums[r] + column, acc[r][i][v]);
        }
      }
    }
  }
  if (whole) return;
  for (int r = 0; r < R; ++r) {
    Element* y = at.y(place + r) + at.columns[p] + first;
    over_vectors(at.a.widths[p] - first, [&](int64_t column, int n) {
      Vec base = load_some(y + column, n);
      if constexpr (G) base = fma(base, load_some(gain + column, n), load_some(offset + column, n));
      store_some(y + column, add(base, load(sums[r] + column)), n);
    });
  }
}

template <typename T, int R = kTile>
void shrink_rows(int rows, const Layout<T>& at, int64_t place, int64_t p, const typename T::Element* panel,
                 int64_t first, float scale) {
  if (rows == R) {
    shrink_tile<T, R>(at, place, p, panel, first, scale);
  } else if constexpr (R > 1) {
    shrink_rows<T, R - 1>(rows, at, place, p, panel, first, scale);
  }
}

template <typename T, bool G, int R = kTile>
void expand_rows(int rows, const Layout<T>& at, int64_t place, int64_t s, int64_t p, int64_t panel, int64_t count) {
  if (rows == R) {
    int64_t i = 0;
    for (; i + kWidth <= count; i += kWidth) expand_tile<T, R, kWidth, G>(at, place, s, p, panel + i);
    for (; i < count; ++i) expand_tile<T, R, 1, G>(at, place, s, p, panel + i);
  } else if constexpr (R > 1) {
    expand_rows<T, G, R - 1>(rows, at, place, s, p, panel, count);
  }
}

// Calls f(index, slot, part, panel, first place, end) for every item of the shrink; returns how many there are.
template <typename F>
int64_t over_items(const LoraArgs& a, const F& f) {
  int64_t index = 0;
  for (int64_t s = 0; s < a.num_slots; ++s) {
    for (int64_t p = 0; p < a.num_parts; ++p) {
      const int64_t panels = over(a.ranks[s * a.num_parts + p], kLoraColumns);
      for (int64_t place = a.starts[s]; place < a.starts[s + 1]; place += kBlockRows) {
        const int64_t end = std::min(place + kBlockRows, a.starts[s + 1]);
        for (int64_t panel = 0; panel < panels; ++panel) f(index++, s, p, panel, place, end);
      }
    }
  }
  return index;
}

template <typename T>
void shrink(const Layout<T>& at, Range mine) {
  over_items(at.a, [&](int64_t index, int64_t s, int64_t p, int64_t panel, int64_t place, int64_t end) {
    if (index < mine.begin || index >= mine.end) return;
    const float scale = at.a.scales[s * at.a.num_parts + p];
    for (; place < end; place += kTile) {
      const int rows = static_cast<int>(std::min<int64_t>(kTile, end - place));
      shrink_rows<T>(rows, at, place, p, at.shrink_panel(s, p, panel), panel * kLoraColumns, scale);
    }
  });
}

template <typename T>
void expand(const Layout<T>& at, int64_t p, int64_t panel, int64_t count) {
  for (int64_t s = 0; s < at.a.num_slots; ++s) {
    if (at.rank(s, p) == 0) continue;
    for (int64_t place = at.a.starts[s]; place < at.a.starts[s + 1]; place += kTile) {
      const int rows = static_cast<int>(std::min<int64_t>(kTile, at.a.starts[s + 1] - place));
      if (at.gained(s, p)) {
        expand_rows<T, true>(rows, at, place, s, p, panel, count);
      } else {
        expand_rows<T, false>(rows, at, place, s, p, panel, count);
      }
    }
  }
}

template <typename T>
void add_lora(const LoraArgs& a, ThreadPool& pool) {
  if (a.starts[a.num_slots] == 0) return;  // a step of the base model alone
  const Layout<T> at(a);
  int64_t work = 0, groups = 0;
  const int64_t items = over_items(a, [&](int64_t, int64_t, int64_t p, int64_t, int64_t place, int64_t end) {
    work += (end - place) * kLoraColumns * (a.k + a.widths[p]);
  });
  for (int64_t p = 0; p < a.num_parts; ++p) groups += over(at.panels[p + 1] - at.panels[p], kGroupPanels);
  const auto run_shrink = [&](int thread, int n) { shrink<T>(at, share(items, thread, n)); };
  const auto run_expand = [&](int thread, int n) {
    const Range mine = share(groups, thread, n);
    int64_t group = 0;
    for (int64_t p = 0; p < a.num_parts; ++p) {
      const int64_t panels = at.panels[p + 1] - at.panels[p];
      for (int64_t panel = 0; panel < panels; panel += kGroupPanels, ++group) {
        if (group < mine.begin || group >= mine.end) continue;
        expand<T>(at, p, panel, std::min<int64_t>(kGroupPanels, panels - panel));
      }
    }
  };
  if (work < kSmallWork) {
    run_shrink(0, 1);
    run_expand(0, 1);
  } else {
    pool.run(run_shrink);
    pool.run(run_expand);
  }
}

}  // namespace

extern const LoraKernels kLora;
const LoraKernels kLora = {by_type<LoraArgs, add_lora<LoraF32>, add_lora<LoraBf16>>};

}  // namespace quire::cpu::QUIRE_ISA
