// Attention over blocks whose keys and values lie as the dot units read them, bf16 or int8, of one ISA level.
//
//   tile   16 positions: K [head_dim / 2][16][2], then V [8][v_head_dim][2]: pairs of the dim, pairs of positions
//
// Algorithm: units of rows (see attention_plan.h) go through their steps of 64 positions in order: scores, an online
// softmax in powers of two (Milakov and Gimelshein 2018), weights rounded to bf16, weighted values; each tile is read
// once for all rows of the unit, with nothing to transpose. int8 tiles are widened, exactly, once for the products of a
// step, or by the products of few rows; their scales multiply scores and weights. They are widened to bf16, or where the
// level has dots of words to int16: a query row then becomes int16 with one scale, a row's weights with one per step. Every split of 512 positions starts with new sums,
// which are folded into the row's in order. Bytes: K and V once per unit. Bound: memory bandwidth for single tokens,
// the dot units (and beside them the softmax) for chunks. Tiles that a row does not see change no bit of it, so a row's
// bits are those of its own keys.
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "cpu/attention.h"
#include "cpu/attention_plan.h"
#include "cpu/attention_products.h"
#if defined(QUIRE_HAVE_AMX)
#include "cpu/attention_products_amx.h"
#endif
#include "cpu/lane_masks.h"
#include "cpu/vec_math.h"

namespace quire::cpu::QUIRE_ISA {

namespace {

constexpr float kLog2E = 1.44269504f;
constexpr float kLowest = -1e30f;  // maximum of a row that has seen nothing: 2^(anything - kLowest) is never used
constexpr float kMasked = -3e38f;  // 2^(scale * kMasked - maximum) is exactly 0
constexpr float kRoom = 8.0f;      // weights grow to 2^kRoom before the maximum that they refer to is moved
constexpr int64_t kSmallWork = 1 << 17;  // multiply-adds
constexpr float kColumns[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// Grows, keeps its memory between calls, and lies on whole cache lines.
template <typename T>
class Buffer {
 public:
  T* at_least(int64_t n) {
    if (n > size_) {
      size_ = (n + 63) / 64 * 64;
      data_.reset(static_cast<T*>(std::aligned_alloc(64, static_cast<size_t>(size_) * sizeof(T))));
    }
    return data_.get();
  }

 private:
  struct Free {
    void operator()(T* p) const { std::free(p); }
  };
  std::unique_ptr<T, Free> data_;
  int64_t size_ = 0;
};

// The softmax of some rows so far: maximum and sum per row, weighted values. Scores are in powers of two.
struct Sums {
  float* top;     // [rows]
  float* total;   // [rows][kLanes]: one sum per lane
  float* values;  // [rows][width]

  static int64_t floats(int64_t rows, int64_t width) { return (rows + kLanes - 1) / kLanes * kLanes + rows * (kLanes + width); }
  static Sums in(float* memory, int64_t rows) {
    float* total = memory + (rows + kLanes - 1) / kLanes * kLanes;
    return {memory, total, total + rows * kLanes};
  }
  void clear(int64_t rows, int64_t width) const {
    std::fill_n(top, rows, kLowest);
    std::fill_n(total, rows * (kLanes + width), 0.0f);
  }
  void scale_row(int64_t row, int64_t width, Vec factor) const {
    store(total + row * kLanes, mul(load(total + row * kLanes), factor));
    float* v = values + row * width;
    for (int64_t i = 0; i < width; i += kLanes) store(v + i, mul(load(v + i), factor));
  }
  // Add the next split.
  void fold(const Sums& next, int64_t rows, int64_t width) const {
    for (int64_t row = 0; row < rows; ++row) {
      if (next.top[row] == kLowest) continue;  // it saw nothing there
      const float both = std::max(top[row], next.top[row]);
      const Vec mine = exp2(broadcast(top[row] - both)), theirs = exp2(broadcast(next.top[row] - both));
      const auto add_in = [&](float* to, const float* from) {
        store(to, fma(load(from), theirs, mul(load(to), mine)));
      };
      add_in(total + row * kLanes, next.total + row * kLanes);
      for (int64_t i = 0; i < width; i += kLanes) add_in(values + row * width + i, next.values + row * width + i);
      top[row] = both;
    }
  }
};

struct Scratch {
  Buffer<uint16_t> query, weights, tiles;
  Buffer<float> scores, split, sums;
  float query_scales[kUnitRows], weight_scales[kUnitRows];  // where rows are words
  alignas(64) float scales[2][2][kStep];  // of the step's positions for two heads, K's and V's; int8 only
};

inline int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

template <typename Products, bool kInt8>
class TilesKernel {
 public:
  TilesKernel(const AttentionArgs& args, Scratch& scratch)
      : a(args), s(scratch), dim(Products::padded_dim(args.head_dim)), width(round_up(args.v_head_dim, kLanes)),
        scale(args.cap != 0.0f ? args.scale / args.cap : args.scale * kLog2E),
        late(args.cap == 0.0f && scale > 1e-4f && scale < 1.0f ? scale : 1.0f) {}

  int64_t part_floats() const { return Sums::floats(kUnitRows, width); }

  void run(const Unit& unit, Ahead& ahead, float* parts) {
    const SeqRows rows(a, unit.seq);
    const Products products(a, unit.rows);
    const int64_t count = unit.all_rows();
    take_query(unit, rows, products);
    Sums split = Sums::in(s.split.at_least(part_floats()), count);
    const int64_t first = unit.first_step(), last = unit.last_step();
    if (unit.part >= 0) split = Sums::in(parts + unit.part * part_floats(), count);
    const Sums sums = Sums::in(s.sums.at_least(part_floats()), count);
    split.clear(count, width);
    bool folded = false;
    for (int64_t i = first; i <= last; ++i) {
      if (i > first && i % kSplitSteps == 0) {
        if (!folded) sums.clear(count, width);
        folded = true;
        sums.fold(split, count, width);
        split.clear(count, width);
      }
      step(unit, rows, products, i * kStep, split, ahead);
    }
    if (unit.part >= 0) return;
    if (folded) sums.fold(split, count, width);
    finish(unit, rows, folded ? sums : split);
  }

  void fold(const Fold& fold, float* parts) {
    const int64_t count = fold.unit.all_rows();
    const Sums sums = Sums::in(parts + fold.first_part * part_floats(), count);
    for (int64_t i = 1; i < fold.parts; ++i) {
      sums.fold(Sums::in(parts + (fold.first_part + i) * part_floats(), count), count, width);
    }
    finish(fold.unit, SeqRows(a, fold.unit.seq), sums);
  }

 private:
  // Row `i` of a unit's buffers: which query head of which token it is.
  struct Place {
    int64_t token, head;
  };
  static Place place(const Unit& unit, const SeqRows& rows, int64_t i) {
    const int64_t r = unit.first_row + i % unit.rows;
    return {rows.token(r), (unit.kv_head + i / unit.rows) * rows.group + r % rows.group};
  }

  static constexpr bool kWords = kInt8 && Products::kWords;

  void take_query(const Unit& unit, const SeqRows& rows, const Products& products) {
    uint16_t* query = s.query.at_least(kUnitRows * dim);
    for (int64_t i = 0; i < unit.all_rows(); ++i) {
      const auto [token, head] = place(unit, rows, i);
      const uint16_t* q = static_cast<const uint16_t*>(a.q) + token * a.q_stride + head * a.head_dim;
      if constexpr (kWords) s.query_scales[i] = query_words(q, a.head_dim, products.query_most(), query + i * dim);
      else std::copy(q, q + a.head_dim, query + i * dim);
      std::fill(query + i * dim + a.head_dim, query + (i + 1) * dim, uint16_t{0});
    }
  }

  // Blocks of rows in turn: up to kBlockRows of one head, or all of each head. Scores of the next are computed first.
  void step(const Unit& unit, const SeqRows& rows, const Products& products, int64_t base, const Sums& sums,
            Ahead& ahead) {
    const uint16_t* query = s.query.at_least(0);
    float* scores = s.scores.at_least(kUnitRows * kStep);
    uint16_t* weights = s.weights.at_least(kUnitRows * kStep);
    const int64_t all = unit.all_rows(), block = unit.heads > 1 ? unit.rows : kBlockRows;
    const auto count = [&](int64_t first) { return std::min(block, all - first); };
    StepTiles tiles = take_tiles(unit, 0, base), next = tiles;
    const auto take_scores = [&](int64_t first) {
      products.scores(count(first), query + first * dim, dim, s.query_scales + first, next, scores + first * kStep,
                      ahead);
    };
    take_scores(0);
    for (int64_t first = 0; first < all; first += block) {
      if (first + block < all) {
        if (unit.heads > 1) next = take_tiles(unit, first / block + 1, base);
        take_scores(first + block);
      }
      soften(unit, rows, base, first, count(first), scores, weights, tiles, sums);
      products.values(count(first), weights + first * kStep, s.weight_scales + first, tiles,
                      sums.values + first * width, width, ahead);
      tiles = next;
    }
    ahead.advance();
  }

  StepTiles take_tiles(const Unit& unit, int64_t head, int64_t base) {
    StepTiles tiles{};
    tiles.bytes = kInt8 && unit.rows <= Products::kByteRows;
    tiles.words = kWords;
    tiles.first = std::max<int64_t>(0, unit.low - base) / kTile;
    tiles.last = (std::min(kStep, unit.high - base) + kTile - 1) / kTile;
    float(&scales)[2][kStep] = s.scales[head % 2];
    tiles.k_scales = scales[0], tiles.v_scales = scales[1];
    for (int64_t t = tiles.first; t < tiles.last; ++t) {
      const void* tile = tile_at(a, unit.seq, unit.kv_head + head, base + t * kTile);
      tiles.tile[t] = kInt8 && !tiles.bytes ? widened(head % 2, t, tile) : tile;
      if constexpr (kInt8) take_scales(tile, scales[0] + t * kTile, scales[1] + t * kTile);
    }
    return tiles;
  }

  void take_scales(const void* tile, float* k_scales, float* v_scales) const {
    const auto* from = static_cast<const int8_t*>(tile) + TileForm<int8_t>{a.head_dim, a.v_head_dim}.elements();
    std::memcpy(k_scales, from, kTile * 4);
    std::memcpy(v_scales, from + kTile * 4, kTile * 4);
  }

  // Tile t of the step as bf16 or words, which hold int8 exactly, in one of two places.
  const uint16_t* widened(int64_t place, int64_t t, const void* tile) {
    const TileForm<int8_t> form{a.head_dim, a.v_head_dim};
    const auto* from = static_cast<const int8_t*>(tile);
    // The last vector of a tile may go beyond it: into the next tile, which follows, and from the scales.
    const int64_t step = kStep / kTile * form.elements() + kWidened;
    uint16_t* to = s.tiles.at_least(2 * step) + place * step + t * form.elements();
    for (int64_t i = 0; i < form.elements(); i += kWidened) kWords ? widen_words(to + i, from + i) : widen(to + i, from + i);
    return to;
  }

  // Scores -> 2^(score - maximum) for up to kBlockRows rows. The maximum may be an earlier one of the row: while scores
  // stay below it + kRoom only the powers are computed. The rows that outgrow theirs are found together, since a branch
  // per row stalls the core more often. What a row does not see gets the weight 0.
  void soften(const Unit& unit, const SeqRows& rows, int64_t base, int64_t first, int64_t count, float* scores,
              uint16_t* weights, const StepTiles& tiles, const Sums& sums) {
    alignas(64) float limits[kBlockRows];
    for (int64_t i = 0; i < kBlockRows; i += kLanes) {
      store(limits + i, mul(add(load(sums.top + first + i), broadcast(kRoom)), broadcast(1.0f / late)));
    }
    Vec excess = broadcast(kMasked);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t r = unit.first_row + (first + i) % unit.rows;
      const int64_t begin = rows.lowest(r) - base, end = rows.end(r) - base;
      float* x = scores + (first + i) * kStep;
      if (begin > 0 || end < kStep || a.cap != 0.0f) prepare_part(x, begin, end, tiles);
      else if (kInt8 || late != scale) prepare(x, tiles);
      excess = max(sub(highest(x), broadcast(limits[i])), excess);  // a NaN must not hide the rows before it
    }
    if (above(excess, zero())) raise(first, count, scores, limits, sums);
    for (int64_t row = first; row < first + count; ++row) {
      const Vec top = broadcast(-sums.top[row]), factor = broadcast(late);
      const float* x = scores + row * kStep;
      Vec total = load(sums.total + row * kLanes), powers[kStep / kLanes];
      UNROLL for (int64_t i = 0; i < kStep; i += kLanes) {
        Vec& e = powers[i / kLanes];
        e = exp2(fma(load(x + i), factor, top));
        total = add(total, e);
        if constexpr (kInt8) e = mul(e, load(tiles.v_scales + i));
      }
      store(sums.total + row * kLanes, total);
      if constexpr (kWords) s.weight_scales[row] = scale_to_words(powers);
      UNROLL for (int64_t i = 0; i < kStep; i += 2 * kLanes) {
        const Vec e = powers[i / kLanes], f = powers[i / kLanes + 1];
        kWords ? store_words(weights + row * kStep + i, e, f) : store(weights + row * kStep + i, e, f);
      }
    }
  }

  // A row's weights of a step, none of which is negative, scaled to words; returns what a word stands for.
  static float scale_to_words(Vec (&weights)[kStep / kLanes]) {
    Vec most = weights[0];
    UNROLL for (int64_t i = 1; i < kStep / kLanes; ++i) most = max(most, weights[i]);
    const float top = largest(most);
    const bool counts = top >= kWordSmallest;
    const Vec factor = broadcast(counts ? kWordMost / top : 0.0f);
    UNROLL for (Vec& weight : weights) weight = mul(weight, factor);
    return counts ? top / kWordMost : 0.0f;
  }

  static Vec highest(const float* x) {
    Vec most = load(x);
    UNROLL for (int64_t i = kLanes; i < kStep; i += kLanes) most = max(most, load(x + i));
    return most;
  }

  // New maxima for the rows whose scores go beyond their limits.
  void raise(int64_t first, int64_t count, const float* scores, const float* limits, const Sums& sums) {
    alignas(64) float factors[kLanes];
    for (int64_t i = 0; i < count; ++i) {
      const float most = largest(highest(scores + (first + i) * kStep));
      if (!(most > limits[i])) continue;
      float& top = sums.top[first + i];
      const float before = top;
      top = most * late;
      if (before == kLowest) continue;  // its sums are 0
      store(factors, exp2(broadcast(before - top)));
      sums.scale_row(first + i, width, broadcast(factors[0]));
    }
  }

  // The scores that the products leave, in the cache's units.
  Vec prepared(const float* x, int64_t i, const StepTiles& tiles) const {
    Vec v = load(x + i);
    if (late != scale) v = mul(v, broadcast(scale));
    return kInt8 ? mul(v, load(tiles.k_scales + i)) : v;
  }

  // A row's scores as the softmax takes them, without the factor `late`; in place.
  void prepare(float* x, const StepTiles& tiles) const {
    UNROLL for (int64_t i = 0; i < kStep; i += kLanes) store(x + i, prepared(x, i, tiles));
  }

  // The same with a soft cap, and of columns [begin, end) alone.
  void prepare_part(float* x, int64_t begin, int64_t end, const StepTiles& tiles) const {
    const Vec first = broadcast(static_cast<float>(begin)), last = broadcast(static_cast<float>(end));
    const Vec masked = broadcast(kMasked);
    Vec column = load(kColumns);
    for (int64_t i = 0; i < kStep; i += kLanes) {
      Vec v = prepared(x, i, tiles);
      if (a.cap != 0.0f) v = mul(tanh(v), broadcast(a.cap * kLog2E));
      store(x + i, where_less(column, first, masked, where_less(column, last, v, masked)));
      column = add(column, broadcast(static_cast<float>(kLanes)));
    }
  }

  void finish(const Unit& unit, const SeqRows& rows, const Sums& sums) {
    for (int64_t row = 0; row < unit.all_rows(); ++row) {
      const auto [token, head] = place(unit, rows, row);
      float total = sum(load(sums.total + row * kLanes));
      if (a.partial) {
        float* y = static_cast<float*>(a.y) + (token * a.num_heads + head) * (a.v_head_dim + 2);
        std::copy_n(sums.values + row * width, a.v_head_dim, y);
        y[a.v_head_dim] = total;
        y[a.v_head_dim + 1] = sums.top[row];
        continue;
      }
      float factor = 1.0f;
      if (a.sinks != nullptr) {
        const float sink = a.sinks[head] * kLog2E, top = std::max(sums.top[row], sink);
        alignas(64) float powers[2][kLanes];
        store(powers[0], exp2(broadcast(sums.top[row] - top)));
        store(powers[1], exp2(broadcast(sink - top)));
        factor = powers[0][0];
        total = total * factor + powers[1][0];
      }
      uint16_t* y = static_cast<uint16_t*>(a.y) + (token * a.num_heads + head) * a.v_head_dim;
      const Vec scaled = broadcast(factor / total);
      for (int64_t i = 0; i < width; i += kLanes) {
        const Vec v = mul(load(sums.values + row * width + i), scaled);
        if (i + kLanes <= a.v_head_dim) {
          store(y + i, v);
        } else {
          uint16_t padded[kLanes];
          store(padded, v);
          std::copy(padded, padded + (a.v_head_dim - i), y + i);
        }
      }
    }
  }

  const AttentionArgs& a;
  Scratch& s;
  const int64_t dim, width;
  const float scale;  // of what the products leave
  const float late;   // the part of it that the powers take in: all, or 1
};

template <typename Products, bool kInt8>
void attention_as(const AttentionArgs& a, ThreadPool& pool) {
  static thread_local Plan plan;
  static thread_local Buffer<float> memory;
  plan.make(a, pool.num_threads());
  float* parts = nullptr;
  if (plan.parts > 0) parts = memory.at_least(plan.parts * Sums::floats(kUnitRows, round_up(a.v_head_dim, kLanes)));
  auto body = [&a, &all = plan, parts](int thread, int num_threads) {
    static thread_local Scratch scratch;
    const Range mine = all.units_of(thread, num_threads);
    TilesKernel<Products, kInt8> kernel(a, scratch);
    Ahead ahead(a, all, mine);
    for (int64_t i = mine.begin; i < mine.end; ++i) kernel.run(all.units[i], ahead, parts);
  };
  if (plan.units.size() < 2 || plan.cost * kStep * (a.head_dim + a.v_head_dim) < kSmallWork) {
    body(0, 1);
  } else {
    pool.run(body);
  }
  static thread_local Scratch scratch;
  for (const Fold& fold : plan.folds) TilesKernel<Products, kInt8>(a, scratch).fold(fold, parts);
}

template <typename Products>
void attention_with(const AttentionArgs& a, ThreadPool& pool) {
  (a.int8 ? attention_as<Products, true> : attention_as<Products, false>)(a, pool);
}

}  // namespace

#if defined(QUIRE_HAVE_AMX)

void attention(const AttentionArgs& a, ThreadPool& pool) {
  (TileProducts::can(a) ? attention_with<TileProducts> : attention_with<DotProducts>)(a, pool);
}

}  // namespace quire::cpu::QUIRE_ISA

namespace quire::cpu {

AttentionTilesKernels with_amx(const AttentionTilesKernels&) { return {amx::attention}; }

}  // namespace quire::cpu

#else

extern const AttentionTilesKernels kAttentionTiles;
const AttentionTilesKernels kAttentionTiles = {attention_with<DotProducts>};

}  // namespace quire::cpu::QUIRE_ISA

#endif
