// Attention over blocks whose keys and values lie as the dot units read them, bf16 or int8, of one ISA level.
//
//   tile   16 positions: K [head_dim / 2][16][2], then V [8][v_head_dim][2]: pairs of the dim, pairs of positions
//
// Numbers of 8 and 4 bits are of rotated heads (kv_tile.h), so a query is rotated as it is taken, and the output as it
// leaves. Those of 4 bits become bytes or bf16, tile by tile, before anything else (kv_unpack.h).
//
// Algorithm: units of rows (see attention_plan.h) go through their steps of 64 positions in order: scores, an online
// softmax in powers of two (Milakov and Gimelshein 2018), weights rounded to bf16, weighted values; each tile is read
// once for all rows of the unit, with nothing to transpose. int8 tiles are widened, exactly, to bf16, once for the rows of
// a step or by the products of few rows, or where the level has dots of words to int16 by the products of any number of
// rows; their scales multiply scores and weights. A query row then becomes int16 with one scale, a row's weights with one
// per step. Every split of 512 positions starts with new sums, which are folded into the row's in order. Units that read
// the same keys take turns by splits. Bytes: K and V once per group of units. Bound: memory bandwidth for single tokens,
// the dot units (and beside them the softmax) for chunks. Tiles that a row does not see change no bit of it, so a row's
// bits are those of its own keys.
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "cpu/attention.h"
#include "cpu/attention_ahead.h"
#include "cpu/attention_plan.h"
#include "cpu/attention_products.h"
#if defined(QUIRE_HAVE_AMX)
#include "cpu/attention_products_amx.h"
#endif
#include "cpu/kv_unpack.h"
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

// What a unit keeps between its turns.
struct UnitRows {
  Buffer<uint16_t> query;
  Buffer<float> sums;  // of the splits before, once there are any
  bool folded;
  int64_t lows[kUnitRows], ends[kUnitRows];  // the positions that a row sees: [low, end)
  // Where rows are words: what a query's words stand for, the part of it that the powers take in, and its inverse (whole
  // vectors may be read).
  float query_scales[kUnitRows], factors[kUnitRows], inverses[kUnitRows + kBlockRows];
};

struct Scratch {
  UnitRows units[kGroupUnits];
  Buffer<uint16_t> weights, tiles;
  Buffer<int8_t> bytes;
  Buffer<float> scores, split, row;
  float weight_scales[kBlockRows + 4];  // what the words of a row's weights stand for, where they are words
  alignas(64) float scales[2][2][kStep];  // of the step's positions for two heads, K's and V's; int8 only
};

inline int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

template <typename Products, bool kInt8>
class TilesKernel {
 public:
  TilesKernel(const AttentionArgs& args, Scratch& scratch)
      : a(args), s(scratch), dim(Products::padded_dim(args.head_dim)), width(round_up(args.v_head_dim, kLanes)),
        scale(args.cap != 0.0f ? args.scale / args.cap : args.scale * kLog2E),
        late(args.cap == 0.0f && scale > 1e-4f && scale < 1.0f ? scale : 1.0f), early(late != scale),
        form{args.head_dim, args.v_head_dim, args.k_bits, args.v_bits} {}

  int64_t part_floats() const { return Sums::floats(kUnitRows, width); }

  // Bytes of a row and its sums.
  int64_t row_bytes() const { return dim * 2 + (width + kLanes + 1) * 4; }

  // `units`: those of the group, which take turns by splits.
  void run(const Group& group, const Unit* units, Ahead& ahead, float* parts) {
    const SeqRows rows(a, units[0].seq);
    const int64_t count = group.units();
    for (int64_t i = 0; i < count; ++i) start(units[i], rows, s.units[i]);
    for (int64_t split = group.first_split(); split <= group.last_split(); ++split) {
      const int64_t begin = split * kSplitSteps, end = begin + kSplitSteps;
      int64_t turns = 0;
      for (int64_t i = 0; i < count; ++i) turns += units[i].steps_in(begin, end);
      ahead.start_split(split, turns);
      for (int64_t i = 0; i < count; ++i) {
        if (units[i].steps_in(begin, end) > 0) run_split(units[i], rows, begin, end, s.units[i], ahead, parts);
      }
    }
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

  void start(const Unit& unit, const SeqRows& rows, UnitRows& state) {
    own = &state;
    own->folded = false;
    take_query(unit, rows);
    if (unit.last_step() >= unit.first_step()) return;
    const Sums none = split_sums(unit, nullptr);  // its rows see nothing
    none.clear(unit.all_rows(), width);
    finish(unit, rows, none);
  }

  // The sums of a split: a part's own, or the buffer of all units.
  Sums split_sums(const Unit& unit, float* parts) {
    return Sums::in(unit.part >= 0 ? parts + unit.part * part_floats() : s.split.at_least(part_floats()), unit.all_rows());
  }

  // A unit's steps of the split [begin, end).
  void run_split(const Unit& unit, const SeqRows& rows, int64_t begin, int64_t end, UnitRows& state, Ahead& ahead,
                 float* parts) {
    own = &state;
    const Products products(a, unit.rows);
    const int64_t count = unit.all_rows(), last = unit.last_step();
    const Sums split = split_sums(unit, parts);
    split.clear(count, width);
    for (int64_t i = std::max(begin, unit.first_step()); i <= std::min(last, end - 1); ++i) {
      step(unit, products, i * kStep, split, ahead);
    }
    if (unit.part >= 0) return;
    const bool only = !own->folded && last < end;
    if (!only) {
      const Sums sums = Sums::in(own->sums.at_least(part_floats()), count);
      if (!own->folded) sums.clear(count, width);
      own->folded = true;
      sums.fold(split, count, width);
    }
    if (last < end) finish(unit, rows, only ? split : Sums::in(own->sums.at_least(0), count));
  }

  void take_query(const Unit& unit, const SeqRows& rows) {
    uint16_t* query = own->query.at_least(kUnitRows * dim);
    const auto row_at = [&](int64_t i) {
      const auto [token, head] = place(unit, rows, i);
      return static_cast<const uint16_t*>(a.q) + token * a.q_stride + head * a.head_dim;
    };
    for (int64_t i = 0; i < unit.all_rows(); ++i) {  // each lies elsewhere, and lines are waited for one after the other
      for (int64_t j = 0; j < a.head_dim; j += 32) __builtin_prefetch(row_at(i) + j, 0, 3);
    }
    for (int64_t i = 0; i < unit.all_rows(); ++i) {
      const uint16_t* q = row_at(i);
      if constexpr (kInt8 && !kWords) {
        const float* rotated = rotated_query(q, unit.kv_head + i / unit.rows);
        over_vectors(a.head_dim, [&](int64_t j, int n) { store_some(query + i * dim + j, load_some(rotated + j, n), n); });
      } else if constexpr (kWords) {
        const float* rotated = rotated_query(q, unit.kv_head + i / unit.rows);
        own->query_scales[i] = query_words(rotated, a.head_dim, Products::query_most(a.head_dim), query + i * dim);
        own->factors[i] = a.cap != 0.0f ? late : late * own->query_scales[i];
        own->inverses[i] = 1.0f / own->factors[i];
      } else {
        std::copy(q, q + a.head_dim, query + i * dim);
      }
      const int64_t r = unit.first_row + i % unit.rows;
      own->lows[i] = rows.lowest(r), own->ends[i] = rows.end(r);
      std::fill(query + i * dim + a.head_dim, query + (i + 1) * dim, uint16_t{0});
    }
  }

  // A query as it multiplies keys of the cache.
  const float* rotated_query(const uint16_t* q, int64_t kv_head) {
    float* row = s.row.at_least(round_up(a.head_dim, kLanes));
    const float* factors = a.q_factors == nullptr ? nullptr : a.q_factors + kv_head * a.head_dim;
    const Vec part = broadcast(1.0f / static_cast<float>(head_block(a.head_dim)));
    over_vectors(a.head_dim, [&](int64_t i, int n) {
      const Vec value = mul(load_some(q + i, n), part);
      store_some(row + i, factors == nullptr ? value : mul(value, load_some(factors + i, n)), n);
    });
    rotate_head(row, a.head_dim);
    return row;
  }

  // Blocks of rows in turn: up to kBlockRows of one head, or all of each head. Scores of the next are computed first.
  void step(const Unit& unit, const Products& products, int64_t base, const Sums& sums, Ahead& ahead) {
    const uint16_t* query = own->query.at_least(0);
    float* buffer = s.scores.at_least(2 * kBlockRows * kStep);  // of two blocks in turn, so that L1 holds them
    uint16_t* weights = s.weights.at_least(kBlockRows * kStep);
    const int64_t all = unit.all_rows(), block = unit.heads > 1 ? unit.rows : kBlockRows;
    const auto count = [&](int64_t first) { return std::min(block, all - first); };
    const auto scores = [&](int64_t first) { return buffer + first / block % 2 * kBlockRows * kStep; };
    ahead.start_step(base / kStep);
    StepTiles tiles = take_tiles(unit, 0, base), next = tiles;
    const auto take_scores = [&](int64_t first) {
      products.scores(count(first), query + first * dim, dim, next, scores(first), ahead);
    };
    take_scores(0);
    for (int64_t first = 0; first < all; first += block) {
      if (first + block < all) {
        if (unit.heads > 1) next = take_tiles(unit, first / block + 1, base);
        take_scores(first + block);
      }
      soften(base, first, count(first), scores(first), weights, tiles, sums);
      products.values(count(first), weights, s.weight_scales, tiles, sums.values + first * width, width, ahead);
      tiles = next;
    }
    ahead.finish_step();
  }

  StepTiles take_tiles(const Unit& unit, int64_t head, int64_t base) {
    StepTiles tiles{};
    tiles.bytes = kInt8 && unit.rows <= Products::kByteRows;
    tiles.first = std::max<int64_t>(0, unit.low - base) / kTile;
    tiles.last = (std::min(kStep, unit.high - base) + kTile - 1) / kTile;
    float(&scales)[2][kStep] = s.scales[head % 2];
    tiles.k_scales = scales[0], tiles.v_scales = scales[1];
    for (int64_t t = tiles.first; t < tiles.last; ++t) {
      const void* tile = tile_at(a, unit.seq, unit.kv_head + head, base + t * kTile);
      if constexpr (kInt8) {
        take_scales(tile, scales[0] + t * kTile, scales[1] + t * kTile);
        if (!tiles.bytes) tile = widened(head % 2, t, tile);
        else if (has_nibbles()) tile = unpacked(head % 2, t, tile);
      }
      tiles.tile[t] = tile;
    }
    return tiles;
  }

  void take_scales(const void* tile, float* k_scales, float* v_scales) const {
    const auto* from = static_cast<const int8_t*>(tile);
    std::memcpy(k_scales, from + form.k_scales(), kTile * 4);
    std::memcpy(v_scales, from + form.v_scales(), kTile * 4);
  }

  bool has_nibbles() const { return form.k_bits + form.v_bits < 16; }

  // Codes of tile t of the step in 8 bits, in one of two places.
  const int8_t* unpacked(int64_t place, int64_t t, const void* tile) {
    const TileForm<int8_t> to_form{a.head_dim, a.v_head_dim};
    const auto* from = static_cast<const uint8_t*>(tile);
    const int64_t step = kStep / kTile * to_form.elements() + 2 * kWidened;  // whole vectors may be read
    int8_t* to = s.bytes.at_least(2 * step) + place * step + t * to_form.elements();
    if (form.k_bits == 4) unpack_keys(from, from + form.k_groups(), a.head_dim, to);
    else std::memcpy(to, from, static_cast<size_t>(form.k_elements()));
    from += form.k_elements();
    int8_t* values = to + to_form.k_elements();
    if (form.v_bits == 4) unpack_values(from, from + form.v_groups() - form.k_elements(), a.v_head_dim, values);
    else std::memcpy(values, from, static_cast<size_t>(to_form.elements() - to_form.k_elements()));
    return to;
  }

  // Tile t of the step as bf16, which holds numbers of 8 bits exactly, in one of two places.
  const uint16_t* widened(int64_t place, int64_t t, const void* tile) {
    const TileForm<int8_t> bytes{a.head_dim, a.v_head_dim};
    // The last vector of a tile may go beyond it: into the next tile, which follows, and from the scales.
    const int64_t step = kStep / kTile * bytes.elements() + kWidened;
    uint16_t* to = s.tiles.at_least(2 * step) + place * step + t * bytes.elements();
    if (!has_nibbles()) {
      widen_all(static_cast<const int8_t*>(tile), bytes.elements(), to);
    } else if constexpr (kWidensCodes) {
      const auto* codes = static_cast<const uint8_t*>(tile);
      const auto* numbers = static_cast<const int8_t*>(tile);
      if (form.k_bits == 4) widen_keys(codes, codes + form.k_groups(), a.head_dim, to);
      else widen_all(numbers, bytes.k_elements(), to);
      uint16_t* values = to + bytes.k_elements();
      if (form.v_bits == 4) widen_values(codes + form.k_elements(), codes + form.v_groups(), a.v_head_dim, values);
      else widen_all(numbers + form.k_elements(), bytes.elements() - bytes.k_elements(), values);
    } else {
      widen_all(unpacked(place, t, tile), bytes.elements(), to);
    }
    return to;
  }

  static void widen_all(const int8_t* from, int64_t size, uint16_t* to) {
    for (int64_t i = 0; i < size; i += kWidened) widen(to + i, from + i);
  }

  // Scores -> 2^(score - maximum) for up to kBlockRows rows. The maximum may be an earlier one of the row: while scores
  // stay below it + kRoom only the powers are computed. The rows that outgrow theirs are found together, since a branch
  // per row stalls the core more often. What a row does not see gets the weight 0.
  void soften(int64_t base, int64_t first, int64_t count, float* scores, uint16_t* weights, const StepTiles& tiles,
              const Sums& sums) {
    alignas(64) float limits[kBlockRows];
    for (int64_t i = 0; i < kBlockRows; i += kLanes) {
      const Vec inverse = kWords ? load(own->inverses + first + i) : broadcast(1.0f / late);
      store(limits + i, mul(add(load(sums.top + first + i), broadcast(kRoom)), inverse));
    }
    Vec excess = broadcast(kMasked);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t begin = own->lows[first + i] - base, end = own->ends[first + i] - base;
      float* x = scores + i * kStep;
      Vec most;
      if (begin > 0 || end < kStep || a.cap != 0.0f) most = prepare_part(x, begin, end, own->query_scales[first + i], tiles);
      else most = prepare(x, tiles);
      excess = max(sub(most, broadcast(limits[i])), excess);  // a NaN must not hide the rows before it
    }
    if (above(excess, zero())) raise(first, count, scores, limits, sums);
    over_row_tiles(count, [&]<int R>(int64_t i) {
      weigh<R>(scores + i * kStep, first + i, weights + i * kStep, s.weight_scales + i, tiles, sums);
    });
  }

  // The weights of R rows, from `row` of the unit on.
  template <int R>
  void weigh(const float* scores, int64_t row, uint16_t* weights, float* scales, const StepTiles& tiles,
             const Sums& sums) {
    constexpr int kVectors = kStep / kLanes;
    Vec powers[R][kVectors], most[R];
    UNROLL for (int r = 0; r < R; ++r) {
      const Vec top = broadcast(-sums.top[row + r]), factor = broadcast(kWords ? own->factors[row + r] : late);
      Vec total = load(sums.total + (row + r) * kLanes);
      UNROLL for (int v = 0; v < kVectors; ++v) {
        Vec& e = powers[r][v];
        e = exp2(fma(load(scores + r * kStep + v * kLanes), factor, top));
        total = add(total, e);
        if constexpr (kInt8) e = mul(e, load(tiles.v_scales + v * kLanes));
        if constexpr (kWords) most[r] = v == 0 ? e : max(most[r], e);
        else if (v % 2 == 1) store(weights + r * kStep + (v - 1) * kLanes, powers[r][v - 1], e);
      }
      store(sums.total + (row + r) * kLanes, total);
    }
    if constexpr (kWords) {
      Vec factors[4];
      scale_to_words(most[0], most[R > 1 ? 1 : 0], most[R > 2 ? 2 : 0], most[R > 3 ? 3 : 0], factors, scales);
      UNROLL for (int r = 0; r < R; ++r) {
        UNROLL for (int v = 0; v < kVectors; v += 2) {
          store_words(weights + r * kStep + v * kLanes, powers[r][v], powers[r][v + 1], factors[r]);
        }
      }
    }
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
      const float most = largest(highest(scores + i * kStep));
      if (!(most > limits[i])) continue;
      float& top = sums.top[first + i];
      const float before = top;
      top = most * (kWords ? own->factors[first + i] : late);
      if (before == kLowest) continue;  // its sums are 0
      store(factors, exp2(broadcast(before - top)));
      sums.scale_row(first + i, width, broadcast(factors[0]));
    }
  }

  // The scores that the products leave, in the cache's units.
  template <bool kEarly>
  Vec prepared(const float* x, int64_t i, const StepTiles& tiles) const {
    Vec v = kWords ? Products::number(x + i) : load(x + i);
    if (kEarly) v = mul(v, broadcast(scale));
    return kInt8 ? mul(v, load(tiles.k_scales + i)) : v;
  }

  // A row's scores as the softmax takes them, without the factor of the row; in place. Returns the largest.
  Vec prepare(float* x, const StepTiles& tiles) const {
    if (!kInt8 && !early) return highest(x);
    return early ? prepare_as<true>(x, tiles) : prepare_as<false>(x, tiles);
  }
  template <bool kEarly>
  Vec prepare_as(float* x, const StepTiles& tiles) const {
    Vec most;
    UNROLL for (int64_t i = 0; i < kStep; i += kLanes) {
      const Vec v = prepared<kEarly>(x, i, tiles);
      store(x + i, v);
      most = i == 0 ? v : max(most, v);
    }
    return most;
  }

  // The same with a soft cap, and of columns [begin, end) alone.
  Vec prepare_part(float* x, int64_t begin, int64_t end, float query_scale, const StepTiles& tiles) const {
    const Vec first = broadcast(static_cast<float>(begin)), last = broadcast(static_cast<float>(end));
    const Vec masked = broadcast(kWords ? -INFINITY : kMasked);
    Vec column = load(kColumns);
    for (int64_t i = 0; i < kStep; i += kLanes) {
      Vec v = early ? prepared<true>(x, i, tiles) : prepared<false>(x, i, tiles);
      if (a.cap != 0.0f) {
        if constexpr (kWords) v = mul(v, broadcast(query_scale));
        v = mul(tanh(v), broadcast(a.cap * kLog2E));
      }
      store(x + i, where_less(column, first, masked, where_less(column, last, v, masked)));
      column = add(column, broadcast(static_cast<float>(kLanes)));
    }
    return highest(x);
  }

  void finish(const Unit& unit, const SeqRows& rows, const Sums& sums) {
    for (int64_t row = 0; row < unit.all_rows() && !a.partial; ++row) {  // stores wait for lines as the loads of queries do
      const auto [token, head] = place(unit, rows, row);
      const uint16_t* y = static_cast<const uint16_t*>(a.y) + (token * a.num_heads + head) * a.v_head_dim;
      for (int64_t i = 0; i < a.v_head_dim; i += 32) __builtin_prefetch(y + i, 1, 3);
    }
    for (int64_t row = 0; row < unit.all_rows(); ++row) {
      const auto [token, head] = place(unit, rows, row);
      float total = sum(load(sums.total + row * kLanes));
      if (a.partial) {
        float* y = static_cast<float*>(a.y) + (token * a.num_heads + head) * (a.v_head_dim + 2);
        std::copy_n(sums.values + row * width, a.v_head_dim, y);
        if constexpr (kInt8) rotate_output(y, 1.0f);
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
      float* values = sums.values + row * width;
      if constexpr (kInt8) rotate_output(values, factor / total);
      const Vec scaled = broadcast(kInt8 ? 1.0f : factor / total);
      for (int64_t i = 0; i < width; i += kLanes) {
        const Vec v = kInt8 ? load(values + i) : mul(load(values + i), scaled);
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

  // Weighted values of the cache -> of V, times `factor`.
  void rotate_output(float* values, float factor) const {
    const Vec part = broadcast(factor / static_cast<float>(head_block(a.v_head_dim)));
    over_vectors(a.v_head_dim, [&](int64_t i, int n) { store_some(values + i, mul(load_some(values + i, n), part), n); });
    rotate_head(values, a.v_head_dim);
  }

  const AttentionArgs& a;
  Scratch& s;
  UnitRows* own = nullptr;  // of the unit whose turn it is
  const int64_t dim, width;
  const float scale;  // of what the products leave
  const float late;   // the part of it that the powers take in: all, or 1
  const bool early;   // the scores are multiplied by `scale` before
  const TileForm<int8_t> form;  // of codes, where the cache has these
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
    static thread_local std::vector<Group> groups;
    TilesKernel<Products, kInt8> kernel(a, scratch);
    all.groups_of(all.units_of(thread, num_threads), kernel.row_bytes(), groups);
    Ahead ahead(a, all, groups);
    for (size_t i = 0; i < groups.size(); ++i) {
      ahead.start_group(static_cast<int64_t>(i));
      kernel.run(groups[i], &all.units[groups[i].begin], ahead, parts);
    }
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
