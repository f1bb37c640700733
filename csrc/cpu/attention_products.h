// The two products of attention over tiles of 16 positions, with the dot vocabulary of isa.h:
//
//   scores   query [rows, dim] x K [dim / 2][16][2]   ->  scores [rows, 64], 16 columns per tile
//   values   weights [rows, 64] x V [8][v_dim][2]     ->  added to sums [rows, width], tile by tile
//
// A tile of registers is up to 4 rows. Every element has one chain of dots, in order of the dim or of the positions,
// whatever the number of rows. int8 tiles that few rows read are widened in registers (byte_pairs.h): the same bits.
// Where the level has dots of words, rows for int8 tiles are int16 with one scale each, sums of a step are exact, and
// tiles are widened in registers for any number of rows: that takes no time beside the products, and L1 half the room.
#pragma once

#include <algorithm>
#include <cmath>

#include "cpu/attention_ahead.h"
#include "cpu/attention_plan.h"
#include "cpu/byte_pairs.h"
#include "cpu/isa.h"

namespace quire::cpu::QUIRE_ISA {

// The operands of a product: up to four tiles of a step, of which those in [first, last) exist.
struct StepTiles {
  const void* tile[kStep / kTile];
  bool bytes;  // int8 tiles as they lie, else bf16
  int64_t first, last;
  const float *k_scales, *v_scales;  // of the step's positions, int8 only
};

// Call f<R>(first row) for rows spread evenly over tiles of up to 4.
template <int R = 4, typename F>
inline void with_rows(int rows, const F& f) {
  if (rows == R) {
    f.template operator()<R>();
  } else if constexpr (R > 1) {
    with_rows<R - 1>(rows, f);
  }
}
template <typename F>
inline void over_row_tiles(int64_t rows, const F& f) {
  const int tiles = static_cast<int>((rows + 3) / 4);
  for (int t = 0; t < tiles; ++t) {
    const Range mine = share(rows, t, tiles);
    with_rows(static_cast<int>(mine.end - mine.begin), [&]<int R>() { f.template operator()<R>(mine.begin); });
  }
}

class DotProducts {
 public:
  // Products of one layer; `dim` is the padded width of a query row.
  DotProducts(const AttentionArgs& a, int64_t)
      : pairs_(a.head_dim / 2), k_elements_(kTile * a.head_dim), v_dim_(a.v_head_dim) {}

  // Up to so many rows int8 tiles are taken as they lie.
  static constexpr int64_t kByteRows = kWordProducts ? kUnitRows : kPairsFromBytes ? 8 : 0;

  static int64_t padded_dim(int64_t head_dim) { return head_dim; }

  // Whether rows for int8 tiles are words. Those of a query are within +-query_most(), so that sums stay below 2^31.
  static constexpr bool kWords = kWordProducts;
  static float query_most(int64_t head_dim) {
    return std::min(kWordMost, std::floor(0x7fffff00p0f / (127.0f * 2.0f * static_cast<float>(head_dim / 2))));
  }

  // A score; the products leave integers where rows are words.
  static Vec number(const float* score) { return WordProduct::number(score); }

  void scores(int64_t rows, const uint16_t* query, int64_t dim, const StepTiles& tiles, float* scores,
              Ahead& ahead) const {
    with_product(tiles, [&]<typename P>(P) { scores_of<P>(rows, query, dim, tiles, scores, ahead); });
  }

  // `scales`: what the words of a row's weights stand for, where they are words.
  void values(int64_t rows, const uint16_t* weights, const float* scales, const StepTiles& tiles, float* sums,
              int64_t width, Ahead& ahead) const {
    with_product(tiles, [&]<typename P>(P) { values_of<P>(rows, weights, scales, tiles, sums, width, ahead); });
  }

 private:
  static constexpr int kVectors = static_cast<int>(kTile) / kLanes;  // of one pair of a K tile
  static constexpr int kWide = kLanes == 16 ? 4 : 2;                 // vectors of V columns at a time

  template <typename F>
  static void with_product(const StepTiles& tiles, const F& f) {
    if constexpr (kWordProducts) {
      if (tiles.bytes) return f(WordProduct());
    } else if constexpr (kPairsFromBytes) {
      if (tiles.bytes) return f(Bf16Product<int8_t>());
    }
    f(Bf16Product<uint16_t>());
  }

  template <typename P>
  void scores_of(int64_t rows, const uint16_t* query, int64_t dim, const StepTiles& tiles, float* scores,
                 Ahead& ahead) const {
    over_row_tiles(rows, [&]<int R>(int64_t row) {
      const auto take = [&]<int T>(int64_t t) {
        score_tiles<P, R, T>(query + row * dim, dim, tiles.tile + t, scores + row * kStep + t * kTile, ahead);
        return T;
      };
      int64_t t = tiles.first;
      if constexpr (kVectors == 1) {
        if (t + 4 == tiles.last) t += take.template operator()<4>(t);
        while (t + 2 <= tiles.last) t += take.template operator()<2>(t);
      }
      while (t < tiles.last) t += take.template operator()<1>(t);
    });
  }

  template <typename P>
  void values_of(int64_t rows, const uint16_t* weights, const float* scales, const StepTiles& tiles, float* sums,
                 int64_t width, Ahead& ahead) const {
    over_row_tiles(rows, [&]<int R>(int64_t row) {
      const uint16_t* w = weights + row * kStep;
      float* s = sums + row * width;
      int64_t column = 0;
      for (; column + kWide * kLanes <= v_dim_; column += kWide * kLanes) {
        value_columns<P, R, kWide, true>(w, scales + row, tiles, column, kWide * kLanes, s, width, ahead);
      }
      for (; column + kLanes <= v_dim_; column += kLanes) {
        value_columns<P, R, 1, true>(w, scales + row, tiles, column, kLanes, s, width, ahead);
      }
      if (column < v_dim_) {
        value_columns<P, R, 1, false>(w, scales + row, tiles, column, v_dim_ - column, s, width, ahead);
      }
    });
  }

  // Not inlined, as value_columns: there gcc 12 keeps accumulators in memory.
  template <typename P, int R, int T>
  __attribute__((noinline)) void score_tiles(const uint16_t* query, int64_t dim, const void* const* tiles,
                                             float* scores, Ahead& ahead) const {
    using Element = typename P::Element;
    Vec acc[R][T * kVectors];
    UNROLL for (int r = 0; r < R; ++r) {
      UNROLL for (int v = 0; v < T * kVectors; ++v) acc[r][v] = zero();
    }
    for (int64_t i = 0; i < pairs_; ++i) {
      decltype(P::take(static_cast<const Element*>(nullptr))) k[T * kVectors];
      UNROLL for (int v = 0; v < T * kVectors; ++v) {
        k[v] = P::take(static_cast<const Element*>(tiles[v / kVectors]) + (i * kTile + v % kVectors * kLanes) * 2);
      }
      UNROLL for (int r = 0; r < R; ++r) {
        const auto q = P::broadcast_x(query + r * dim + 2 * i);
        UNROLL for (int v = 0; v < T * kVectors; ++v) acc[r][v] = P::dot(acc[r][v], k[v], q);
      }
      ahead.few();
    }
    UNROLL for (int r = 0; r < R; ++r) {
      UNROLL for (int v = 0; v < T * kVectors; ++v) store(scores + r * kStep + v * kLanes, acc[r][v]);
    }
  }

  // `columns` <= W * kLanes of them exist, all if kWhole; the rest of a row of sums is padding.
  template <typename P, int R, int W, bool kWhole>
  __attribute__((noinline)) void value_columns(const uint16_t* weights, const float* scales, const StepTiles& tiles,
                                               int64_t column, int64_t columns, float* sums, int64_t width,
                                               Ahead& ahead) const {
    using Element = typename P::Element;
    Vec acc[R][W];
    UNROLL for (int r = 0; r < R; ++r) {
      UNROLL for (int v = 0; v < W; ++v) acc[r][v] = P::start(sums + r * width + column + v * kLanes);
    }
    for (int64_t t = tiles.first; t < tiles.last; ++t) {
      const Element* values = static_cast<const Element*>(tiles.tile[t]) + k_elements_ + column * 2;
      for (int64_t pair = 0; pair < kTile / 2; ++pair) {
        decltype(P::take(values)) loaded[W];
        UNROLL for (int v = 0; v < W; ++v) {
          const Element* from = values + pair * v_dim_ * 2 + v * kLanes * 2;
          loaded[v] = kWhole ? P::take(from) : take_columns<P>(from, columns);
        }
        UNROLL for (int r = 0; r < R; ++r) {
          const auto w = P::broadcast_x(weights + r * kStep + t * kTile + pair * 2);
          UNROLL for (int v = 0; v < W; ++v) acc[r][v] = P::dot(acc[r][v], loaded[v], w);
        }
        ahead.few();
      }
    }
    alignas(64) float exact[R * W * kLanes];
    float* to = P::kScaled ? exact : sums + column;
    const int64_t stride = P::kScaled ? W * kLanes : width;
    UNROLL for (int r = 0; r < R; ++r) {
      UNROLL for (int v = 0; v < W; ++v) store(to + r * stride + v * kLanes, acc[r][v]);
    }
    if (P::kScaled) add_exact<P, R, W>(exact, scales, sums + column, width);
  }

  template <typename P, int R, int W>
  static void add_exact(const float* exact, const float* scales, float* sums, int64_t width) {
    for (int r = 0; r < R; ++r) {
      for (int v = 0; v < W; ++v) {
        float* to = sums + r * width + v * kLanes;
        store(to, fma(P::number(exact + (r * W + v) * kLanes), broadcast(scales[r]), load(to)));
      }
    }
  }

  template <typename P>
  static auto take_columns(const typename P::Element* p, int64_t columns) {
    typename P::Element padded[kLanes * 2] = {};
    std::copy(p, p + columns * 2, padded);
    return P::take(padded);
  }

  const int64_t pairs_, k_elements_, v_dim_;
};

}  // namespace quire::cpu::QUIRE_ISA
