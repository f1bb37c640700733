// Attention over rows of K and V, of one ISA level.
//
// Algorithm: work items of up to 48 rows (token, query head of one kv head's group); each reads the K and V rows of a
// tile of 64 positions once for all its rows. K is transposed into [dim / step][64][step] (step 2 for bf16), so that
// scores are the register tiles of the linear: one load of keys and one broadcast of q. P stays fp32 and multiplies V
// rows as they lie. Bytes: K and V once per item. Bound: memory bandwidth for single tokens (the transposes cost about
// as much as the products at 4 rows), the FMA units for chunks. Rows of two tiles ahead are prefetched into L2.
#include "cpu/attention.h"

#include <algorithm>
#include <vector>

#include "cpu/row_loops.h"
#include "cpu/vec_math.h"

namespace quire::cpu::QUIRE_ISA {

namespace {

constexpr int64_t kTile = 64;      // positions
constexpr int64_t kItemRows = 48;  // the state of an item stays in L1 and L2
constexpr int kTileRows = kLanes < 16 ? kRows : sizeof(Weights) > sizeof(Vec) ? 5 : 6;  // register tile, rows x vectors
constexpr int kWide = kLanes == 16 ? 4 : kTileVectors;
constexpr float kLowest = -1e30f;  // maximum of a row that has seen nothing: exp(anything - kLowest) is never used
constexpr float kMasked = -3e38f;  // exp(kMasked - maximum) is exactly 0
constexpr int64_t kSmallWork = 1 << 18;  // multiply-adds
constexpr float kLog2E = 1.44269504f, kLn2 = 0.693147181f;

struct Item {
  int64_t seq, kv_head, first_row, rows, first_tile, tiles;
};

// A thread's memory for one item; kept between calls.
struct Scratch {
  std::vector<float> keys, values, query, scores, acc;
  alignas(64) float total[kItemRows][kLanes];
  float top[kItemRows];
  const char *k_rows[kTile], *v_rows[kTile];
};

struct Bf16 {
  using Element = uint16_t;
  static constexpr int kStep = 2;
  static Weights load_keys(const Element* p) { return load_pairs(p); }
  static auto broadcast_q(const Element* q) { return broadcast_pair(q); }
  template <typename Q>
  static Vec step(Vec acc, const Weights& k, const Q& q) {
    return dot(acc, k, q);
  }
};

struct F32 {
  using Element = float;
  static constexpr int kStep = 1;
  static Vec load_keys(const Element* p) { return load(p); }
  static Vec broadcast_q(const Element* q) { return broadcast(*q); }
  static Vec step(Vec acc, const Vec& k, const Vec& q) { return fma(k, q, acc); }
};

inline float widen(float f) { return f; }
inline float widen(uint16_t h) { return bf16_to_float(h); }
template <typename From>
inline void put(const From* from, float* to) {
  *to = widen(*from);
}
inline void put(const uint16_t* from, uint16_t* to) { *to = *from; }

inline int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// K rows [begin, end) of the tile -> keys[dim / step][64][step]. Other columns keep what they had; they are masked.
template <typename C, typename Kv>
void transpose_keys(const Scratch& s, int64_t begin, int64_t end, int64_t dim, typename C::Element* keys) {
  const auto one_by_one = [&](int64_t first, int64_t last, int64_t from) {
    for (int64_t p = first; p < last; ++p) {
      const Kv* row = reinterpret_cast<const Kv*>(s.k_rows[p]);
      for (int64_t d = from; d < dim; ++d) {
        put(row + d, keys + (d / C::kStep * kTile + p) * C::kStep + d % C::kStep);
      }
    }
  };
  if constexpr (sizeof(Kv) == sizeof(typename C::Element)) {
    constexpr int64_t kElements = 8 * C::kStep;
    const int64_t full = dim / kElements * kElements;
    for (int64_t p = begin / 8 * 8; p < end; p += 8) {
      const int64_t first = std::max(p, begin), last = std::min(p + 8, end);
      if (last - first < 8) {
        one_by_one(first, last, 0);
        continue;
      }
      for (int64_t d = 0; d < full; d += kElements) {
        const uint32_t* rows[8];
        for (int i = 0; i < 8; ++i) {
          rows[i] = reinterpret_cast<const uint32_t*>(s.k_rows[p + i] + d * static_cast<int64_t>(sizeof(Kv)));
        }
        transpose8(rows, reinterpret_cast<uint32_t*>(keys) + d / C::kStep * kTile + p, kTile);
      }
      one_by_one(first, last, full);
    }
  } else {
    one_by_one(begin, end, 0);
  }
}

// R rows x 64 positions of q . k * scale, d ascending.
template <typename C, int R>
void score_rows(const typename C::Element* q, int64_t q_stride, const typename C::Element* keys, int64_t steps,
                Vec scale, float* scores) {
  for (int64_t column = 0; column < kTile; column += kWide * kLanes) {
    Vec acc[R][kWide];
    for (int r = 0; r < R; ++r) {
      for (int v = 0; v < kWide; ++v) acc[r][v] = zero();
    }
    const typename C::Element* k = keys + column * C::kStep;
    for (int64_t i = 0; i < steps; ++i) {
      decltype(C::load_keys(k)) loaded[kWide];
      for (int v = 0; v < kWide; ++v) {
        loaded[v] = C::load_keys(k + v * kLanes * C::kStep);
        keep(loaded[v]);
      }
      for (int r = 0; r < R; ++r) {
        const auto x = C::broadcast_q(q + r * q_stride + i * C::kStep);
        for (int v = 0; v < kWide; ++v) acc[r][v] = C::step(acc[r][v], loaded[v], x);
      }
      k += kTile * C::kStep;
    }
    for (int r = 0; r < R; ++r) {
      for (int v = 0; v < kWide; ++v) store(scores + r * kTile + column + v * kLanes, mul(acc[r][v], scale));
    }
  }
}

// acc[R][...] += p[R][begin ... end) . v, positions ascending; columns by kWide vectors, the rest one by one.
template <typename V, int R, int W>
void value_columns(const float* p, const char* const* v_rows, int64_t begin, int64_t end, int64_t column, float* acc,
                   int64_t acc_stride) {
  Vec sums[R][W];
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < W; ++v) sums[r][v] = load(acc + r * acc_stride + column + v * kLanes);
  }
  for (int64_t i = begin; i < end; ++i) {
    const V* row = reinterpret_cast<const V*>(v_rows[i]) + column;
    Vec values[W];
    for (int v = 0; v < W; ++v) {
      values[v] = load(row + v * kLanes);
      keep(values[v]);
    }
    for (int r = 0; r < R; ++r) {
      const Vec weight = broadcast(p[r * kTile + i]);
      for (int v = 0; v < W; ++v) sums[r][v] = fma(values[v], weight, sums[r][v]);
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < W; ++v) store(acc + r * acc_stride + column + v * kLanes, sums[r][v]);
  }
}

template <typename V, int R>
void value_rows(const float* p, const char* const* v_rows, int64_t begin, int64_t end, int64_t width, float* acc) {
  int64_t column = 0;
  for (; column + kWide * kLanes <= width; column += kWide * kLanes) {
    value_columns<V, R, kWide>(p, v_rows, begin, end, column, acc, width);
  }
  for (; column < width; column += kLanes) value_columns<V, R, 1>(p, v_rows, begin, end, column, acc, width);
}

// Call f<R>(first row) for rows spread evenly over register tiles.
template <int R = kTileRows, typename F>
void with_rows(int rows, const F& f) {
  if (rows == R) {
    f.template operator()<R>();
  } else if constexpr (R > 1) {
    with_rows<R - 1>(rows, f);
  }
}
template <typename F>
void over_row_tiles(int64_t rows, const F& f) {
  const int tiles = static_cast<int>((rows + kTileRows - 1) / kTileRows);
  for (int t = 0; t < tiles; ++t) {
    const Range mine = share(rows, t, tiles);
    with_rows(static_cast<int>(mine.end - mine.begin), [&]<int R>() { f.template operator()<R>(mine.begin); });
  }
}

// One item: C how scores are computed, Q and Kv the elements in memory.
template <typename C, typename Q, typename Kv>
class ItemKernel {
 public:
  ItemKernel(const AttentionArgs& args, const Item& item, Scratch& scratch)
      : a(args), it(item), s(scratch), group(a.num_heads / a.num_kv_heads), dim(round_up(a.head_dim, C::kStep)),
        width(round_up(a.v_head_dim, kLanes)), start(a.seq_lens[it.seq] - length()), stripe(a.stripe()) {}

  void run() {
    prepare();
    const int64_t last = it.first_row + it.rows - 1;
    const int64_t low = lowest(it.first_row), high = end(last);
    for (int64_t t = it.first_tile; t < it.first_tile + it.tiles; ++t) {
      const int64_t base = t * kTile;
      const int64_t begin = std::max<int64_t>(0, low - base), end = std::min(kTile, high - base);
      point_at(base, begin, end);
      // In quarters beside the work: a burst would fill the queue of misses and stop the loads behind it.
      prefetch(base + 2 * kTile, high, 0);
      transpose_keys<C, Kv>(s, begin, end, a.head_dim, keys());
      prefetch(base + 2 * kTile, high, 1);
      over_row_tiles(it.rows, [&]<int R>(int64_t row) {
        score_rows<C, R>(query() + row * dim, dim, keys(), dim / C::kStep, broadcast(a.scale), scores(row));
      });
      prefetch(base + 2 * kTile, high, 2);
      for (int64_t row = 0; row < it.rows; ++row) soften(row, base);
      prefetch(base + 2 * kTile, high, 3);
      add_values(begin, end);
    }
    for (int64_t row = 0; row < it.rows; ++row) finish(row);
  }

 private:
  using Element = typename C::Element;

  int64_t length() const { return a.cu_seqlens_q[it.seq + 1] - a.cu_seqlens_q[it.seq]; }
  // Of the positions in this cache, a row sees [lowest, end). There may be none.
  int64_t end(int64_t row) const { return stripe.below(start + row / group + 1); }
  int64_t lowest(int64_t row) const {
    return a.window == 0 ? 0 : stripe.below(std::max<int64_t>(0, start + row / group - a.window + 1));
  }
  int64_t token(int64_t row) const { return a.cu_seqlens_q[it.seq] + row / group; }
  int64_t head(int64_t row) const { return it.kv_head * group + row % group; }
  Element* keys() { return reinterpret_cast<Element*>(s.keys.data()); }
  Element* query() { return reinterpret_cast<Element*>(s.query.data()); }
  float* scores(int64_t row) { return s.scores.data() + row * kTile; }
  float* acc(int64_t row) { return s.acc.data() + row * width; }

  static void at_least(std::vector<float>& v, int64_t n) {
    if (static_cast<int64_t>(v.size()) < n) v.resize(n);
  }

  void prepare() {
    at_least(s.keys, dim * kTile);
    at_least(s.query, kItemRows * dim);
    at_least(s.scores, kItemRows * kTile);
    at_least(s.acc, kItemRows * width);
    at_least(s.values, kTile * width);
    if (dim != a.head_dim) std::fill_n(keys(), dim * kTile, Element{});  // the odd last element of a pair
    for (int64_t row = 0; row < it.rows; ++row) {
      const Q* q = static_cast<const Q*>(a.q) + token(it.first_row + row) * a.q_stride;
      q += head(it.first_row + row) * a.head_dim;
      Element* target = query() + row * dim;
      if (dim != a.head_dim) target[dim - 1] = Element{};
      for (int64_t d = 0; d < a.head_dim; ++d) put(q + d, target + d);
      std::fill_n(acc(row), width, 0.0f);
      std::fill_n(s.total[row], kLanes, 0.0f);
      s.top[row] = kLowest;
    }
  }

  const Kv* piece(int64_t block_index) const {
    const int64_t block = a.block_table[it.seq * a.table_width() + block_index];
    return static_cast<const Kv*>(a.pieces) + block * a.block_stride + it.kv_head * a.piece_stride;
  }

  // The rows of positions base + [begin, end).
  void point_at(int64_t base, int64_t begin, int64_t end) {
    int64_t block = (base + begin) / a.block_size, offset = (base + begin) % a.block_size;
    const Kv* k = piece(block);
    for (int64_t i = begin; i < end; ++i, ++offset) {
      if (offset == a.block_size) {
        k = piece(++block);
        offset = 0;
      }
      const Kv* row = k + offset * a.head_dim;
      s.k_rows[i] = reinterpret_cast<const char*>(row);
      s.v_rows[i] = a.v_in_k ? s.k_rows[i]
                             : reinterpret_cast<const char*>(k + a.block_size * a.head_dim + offset * a.v_head_dim);
    }
  }

  // A quarter of the bytes of every block that holds positions [begin, begin + kTile), as far as they are below `high`.
  void prefetch(int64_t begin, int64_t high, int quarter) const {
    __asm__ volatile("");  // as in attention_plan.h: gcc drops calls of what only prefetches
    const int64_t end = std::min(begin + kTile, high);
    const int64_t elements = a.block_size * (a.head_dim + (a.v_in_k ? 0 : a.v_head_dim));
    const Range lines = share((elements * static_cast<int64_t>(sizeof(Kv)) + 63) / 64, quarter, 4);
    for (int64_t block = begin / a.block_size; block * a.block_size < end; ++block) {
      const char* p = reinterpret_cast<const char*>(piece(block));
      for (int64_t i = lines.begin; i < lines.end; ++i) __builtin_prefetch(p + i * 64, 0, 2);
    }
  }

  // Scores -> exp(score - maximum so far); earlier sums are rescaled to the new maximum.
  void soften(int64_t row, int64_t base) {
    float* p = scores(row);
    const int64_t first = lowest(it.first_row + row) - base, last = end(it.first_row + row) - base;
    if (a.cap != 0.0f) {
      const Vec cap = broadcast(a.cap);
      for (int64_t i = 0; i < kTile; i += kLanes) store(p + i, mul(tanh(div(load(p + i), cap)), cap));
    }
    for (int64_t i = 0; i < std::min(first, kTile); ++i) p[i] = kMasked;
    for (int64_t i = std::max<int64_t>(last, 0); i < kTile; ++i) p[i] = kMasked;
    Vec most = load(p);
    for (int64_t i = kLanes; i < kTile; i += kLanes) most = max(most, load(p + i));
    const float before = s.top[row], top = std::max(before, largest(most));
    Vec total = load(s.total[row]);
    if (top != before) {
      const Vec factor = QUIRE_ISA::exp(broadcast(before - top));
      total = mul(total, factor);
      for (int64_t i = 0; i < width; i += kLanes) store(acc(row) + i, mul(load(acc(row) + i), factor));
      s.top[row] = top;
    }
    for (int64_t i = 0; i < kTile; i += kLanes) {
      const Vec e = QUIRE_ISA::exp(sub(load(p + i), broadcast(top)));
      store(p + i, e);
      total = add(total, e);
    }
    store(s.total[row], total);
  }

  void add_values(int64_t begin, int64_t end) {
    // Widened once for many rows, or where a row ends inside a vector. The same numbers either way.
    if (width == a.v_head_dim && it.rows <= kTileRows) {
      over_row_tiles(it.rows, [&]<int R>(int64_t row) {
        value_rows<Kv, R>(scores(row), s.v_rows, begin, end, width, acc(row));
      });
      return;
    }
    const int64_t whole = a.v_head_dim / kLanes * kLanes;
    for (int64_t i = begin; i < end; ++i) {
      const Kv* row = reinterpret_cast<const Kv*>(s.v_rows[i]);
      float* target = s.values.data() + i * width;
      for (int64_t d = 0; d < whole; d += kLanes) store(target + d, load(row + d));
      for (int64_t d = whole; d < width; ++d) target[d] = d < a.v_head_dim ? widen(row[d]) : 0.0f;
      s.v_rows[i] = reinterpret_cast<const char*>(target);
    }
    over_row_tiles(it.rows, [&]<int R>(int64_t row) {
      value_rows<float, R>(scores(row), s.v_rows, begin, end, width, acc(row));
    });
  }

  void finish(int64_t row) {
    float total = sum(load(s.total[row]));
    const int64_t h = head(it.first_row + row);
    if (a.partial) {
      float* y = static_cast<float*>(a.y) + (token(it.first_row + row) * a.num_heads + h) * (a.v_head_dim + 2);
      std::copy_n(acc(row), a.v_head_dim, y);
      y[a.v_head_dim] = total;
      y[a.v_head_dim + 1] = s.top[row] * kLog2E;
      return;
    }
    Vec factor = broadcast(1.0f);
    if (a.sinks != nullptr) {
      const float top = std::max(s.top[row], a.sinks[h]);
      alignas(64) float lanes[kLanes];
      factor = QUIRE_ISA::exp(broadcast(s.top[row] - top));
      store(lanes, add(mul(broadcast(total), factor), QUIRE_ISA::exp(broadcast(a.sinks[h] - top))));
      total = lanes[0];
    }
    Q* y = static_cast<Q*>(a.y) + (token(it.first_row + row) * a.num_heads + h) * a.v_head_dim;
    for (int64_t i = 0; i < width; i += kLanes) {
      const Vec v = div(mul(load(acc(row) + i), factor), broadcast(total));
      if (i + kLanes <= a.v_head_dim) {
        store(y + i, v);
      } else {
        Q padded[kLanes];
        store(padded, v);
        std::copy(padded, padded + (a.v_head_dim - i), y + i);
      }
    }
  }

  const AttentionArgs& a;
  const Item& it;
  Scratch& s;
  const int64_t group, dim, width, start;
  const Stripe stripe;
};

// Items in the order (sequence, kv head, rows), so that neighbours share keys.
void cut(const AttentionArgs& a, std::vector<Item>& items) {
  items.clear();
  const int64_t group = a.num_heads / a.num_kv_heads;
  const Stripe stripe = a.stripe();
  for (int64_t seq = 0; seq < a.num_seqs(); ++seq) {
    const int64_t length = a.cu_seqlens_q[seq + 1] - a.cu_seqlens_q[seq], start = a.seq_lens[seq] - length;
    const int64_t rows = length * group;
    for (int64_t kv_head = 0; kv_head < a.num_kv_heads; ++kv_head) {
      for (int64_t row = 0; row < rows; row += kItemRows) {
        const int64_t count = std::min(kItemRows, rows - row);
        const int64_t low = a.window == 0 ? 0 : stripe.below(std::max<int64_t>(0, start + row / group - a.window + 1));
        const int64_t end = stripe.below(start + (row + count - 1) / group + 1);
        const int64_t tiles = end > low ? (end - 1) / kTile - low / kTile + 1 : 0;
        items.push_back({seq, kv_head, row, count, low / kTile, tiles});
      }
    }
  }
}

// The cost of a tile: its transpose, and its rows. An item without tiles still writes its rows.
int64_t cost(const Item& item) { return std::max<int64_t>(1, item.tiles) * (item.rows + 4); }

template <typename C, typename Q, typename Kv>
void attention_as(const AttentionArgs& a, ThreadPool& pool) {
  static thread_local std::vector<Item> items;
  cut(a, items);
  int64_t total = 0;
  for (const Item& item : items) total += cost(item);
  const std::vector<Item>& all = items;
  auto body = [&](int thread, int num_threads) {
    static thread_local Scratch scratch;
    const Range mine = share(total, thread, num_threads);
    int64_t before = 0;
    for (const Item& item : all) {
      const int64_t middle = before + cost(item) / 2;
      before += cost(item);
      if (middle >= mine.begin && middle < mine.end) ItemKernel<C, Q, Kv>(a, item, scratch).run();
    }
  };
  if (items.size() < 2 || total * kTile * (a.head_dim + a.v_head_dim) < kSmallWork) {
    body(0, 1);
  } else {
    pool.run(body);
  }
}

void attention(const AttentionArgs& a, ThreadPool& pool) {
  if (a.q_type == Type::bf16) {
    (a.kv_type == Type::bf16 ? attention_as<Bf16, uint16_t, uint16_t> : attention_as<F32, uint16_t, float>)(a, pool);
  } else {
    (a.kv_type == Type::bf16 ? attention_as<F32, float, uint16_t> : attention_as<F32, float, float>)(a, pool);
  }
}

// y = sum of w_r values_r / sum of w_r total_r, w_r = 2^(top_r - the highest of them), in order of r. A rank whose part
// of a row saw nothing has the weight 0.
template <typename T>
void merge_as(const MergeArgs& a, ThreadPool& pool) {
  const int64_t stride = a.v_head_dim + 2;
  over_rows(a.tokens * a.num_heads, a.ranks * stride, pool, [&](int64_t row) {
    static thread_local std::vector<float> weights;
    weights.resize(a.ranks);
    const int64_t token = row / a.num_heads, head = row % a.num_heads;
    const float* first = a.parts + (token * a.ranks * a.num_heads + head) * stride;
    const auto part = [&](int64_t r) { return first + r * a.num_heads * stride; };
    const auto power = [](float exponent) { return largest(QUIRE_ISA::exp(broadcast(exponent * kLn2))); };
    float top = a.sinks == nullptr ? kLowest : a.sinks[head] * kLog2E, total = 0.0f;
    for (int64_t r = 0; r < a.ranks; ++r) top = std::max(top, part(r)[a.v_head_dim + 1]);
    for (int64_t r = 0; r < a.ranks; ++r) {
      weights[r] = power(part(r)[a.v_head_dim + 1] - top);
      total += weights[r] * part(r)[a.v_head_dim];
    }
    if (a.sinks != nullptr) total += power(a.sinks[head] * kLog2E - top);
    T* y = static_cast<T*>(a.y) + row * a.v_head_dim;
    over_vectors(a.v_head_dim, [&](int64_t i, int n) {
      Vec sum = zero();
      for (int64_t r = 0; r < a.ranks; ++r) sum = fma(load_some(part(r) + i, n), broadcast(weights[r]), sum);
      store_some(y + i, div(sum, broadcast(total)), n);
    });
  });
}

void merge(const MergeArgs& a, ThreadPool& pool) {
  (a.type == Type::bf16 ? merge_as<uint16_t> : merge_as<float>)(a, pool);
}

}  // namespace

extern const AttentionKernels kAttention;
const AttentionKernels kAttention = {attention, merge};

}  // namespace quire::cpu::QUIRE_ISA
