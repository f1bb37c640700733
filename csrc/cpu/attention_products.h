// The two products of attention over tiles of 16 positions, with the dot vocabulary of isa.h:
//
//   scores   query [rows, dim] x K [dim / 2][16][2]   ->  scores [rows, 64], 16 columns per tile
//   values   weights [rows, 64] x V [8][v_dim][2]     ->  added to sums [rows, width], tile by tile
//
// A tile of registers is up to 4 rows. Every element has one chain of dots, in order of the dim or of the positions,
// whatever the number of rows. int8 tiles that few rows read are widened in registers (byte_pairs.h): the same bits.
#pragma once

#include <algorithm>

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

// The dot of isa.h, but not by the intrinsic, with which gcc 12 copies accumulators and spills in these loops.
inline Vec dot_in_place(Vec acc, const Weights& w, const Pair& x) {
#if defined(__AVX512BF16__)
  __asm__("vdpbf16ps %2, %1, %0" : "+v"(acc) : "v"(w.v), "v"(x));
  return acc;
#else
  return dot(acc, w, x);
#endif
}

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
  static constexpr int64_t kByteRows = kPairsFromBytes ? 8 : 0;

  static int64_t padded_dim(int64_t head_dim) { return head_dim; }

  void scores(int64_t rows, const uint16_t* query, int64_t dim, const StepTiles& tiles, float* scores,
              Ahead& ahead) const {
    if constexpr (kPairsFromBytes) {
      if (tiles.bytes) return scores_of<int8_t>(rows, query, dim, tiles, scores, ahead);
    }
    scores_of<uint16_t>(rows, query, dim, tiles, scores, ahead);
  }

  void values(int64_t rows, const uint16_t* weights, const StepTiles& tiles, float* sums, int64_t width,
              Ahead& ahead) const {
    if constexpr (kPairsFromBytes) {
      if (tiles.bytes) return values_of<int8_t>(rows, weights, tiles, sums, width, ahead);
    }
    values_of<uint16_t>(rows, weights, tiles, sums, width, ahead);
  }

 private:
  static constexpr int kVectors = static_cast<int>(kTile) / kLanes;  // of one pair of a K tile
  static constexpr int kWide = kLanes == 16 ? 4 : 2;                 // vectors of V columns at a time

  template <typename Element>
  void scores_of(int64_t rows, const uint16_t* query, int64_t dim, const StepTiles& tiles, float* scores,
                 Ahead& ahead) const {
    over_row_tiles(rows, [&]<int R>(int64_t row) {
      const auto take = [&]<int T>(int64_t t) {
        score_tiles<Element, R, T>(query + row * dim, dim, tiles.tile + t, scores + row * kStep + t * kTile, ahead);
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

  template <typename Element>
  void values_of(int64_t rows, const uint16_t* weights, const StepTiles& tiles, float* sums, int64_t width,
                 Ahead& ahead) const {
    over_row_tiles(rows, [&]<int R>(int64_t row) {
      const uint16_t* w = weights + row * kStep;
      float* s = sums + row * width;
      int64_t column = 0;
      for (; column + kWide * kLanes <= v_dim_; column += kWide * kLanes) {
        value_columns<Element, R, kWide, true>(w, tiles, column, kWide * kLanes, s, width, ahead);
      }
      for (; column + kLanes <= v_dim_; column += kLanes) {
        value_columns<Element, R, 1, true>(w, tiles, column, kLanes, s, width, ahead);
      }
      if (column < v_dim_) value_columns<Element, R, 1, false>(w, tiles, column, v_dim_ - column, s, width, ahead);
    });
  }

  template <typename Element, int R, int T>
  void score_tiles(const uint16_t* query, int64_t dim, const void* const* tiles, float* scores,
                   Ahead& ahead) const {
    Vec acc[R][T * kVectors];
    UNROLL for (int r = 0; r < R; ++r) {
      UNROLL for (int v = 0; v < T * kVectors; ++v) acc[r][v] = zero();
    }
    for (int64_t i = 0; i < pairs_; ++i) {
      Weights k[T * kVectors];
      UNROLL for (int v = 0; v < T * kVectors; ++v) {
        k[v] = load_pairs(static_cast<const Element*>(tiles[v / kVectors]) + (i * kTile + v % kVectors * kLanes) * 2);
        keep(k[v]);
      }
      UNROLL for (int r = 0; r < R; ++r) {
        const Pair q = broadcast_pair(query + r * dim + 2 * i);
        UNROLL for (int v = 0; v < T * kVectors; ++v) acc[r][v] = dot_in_place(acc[r][v], k[v], q);
      }
      ahead.few();
    }
    UNROLL for (int r = 0; r < R; ++r) {
      UNROLL for (int v = 0; v < T * kVectors; ++v) store(scores + r * kStep + v * kLanes, acc[r][v]);
    }
  }

  // `columns` <= W * kLanes of them exist, all if kWhole; the rest of a row of sums is padding.
  template <typename Element, int R, int W, bool kWhole>
  void value_columns(const uint16_t* weights, const StepTiles& tiles, int64_t column, int64_t columns, float* sums,
                     int64_t width, Ahead& ahead) const {
    Vec acc[R][W];
    UNROLL for (int r = 0; r < R; ++r) {
      UNROLL for (int v = 0; v < W; ++v) acc[r][v] = load(sums + r * width + column + v * kLanes);
    }
    for (int64_t t = tiles.first; t < tiles.last; ++t) {
      const Element* values = static_cast<const Element*>(tiles.tile[t]) + k_elements_ + column * 2;
      for (int64_t pair = 0; pair < kTile / 2; ++pair) {
        Weights loaded[W];
        UNROLL for (int v = 0; v < W; ++v) {
          const Element* from = values + pair * v_dim_ * 2 + v * kLanes * 2;
          loaded[v] = kWhole ? load_pairs(from) : load_columns(from, columns);
          keep(loaded[v]);
        }
        UNROLL for (int r = 0; r < R; ++r) {
          const Pair w = broadcast_pair(weights + r * kStep + t * kTile + pair * 2);
          UNROLL for (int v = 0; v < W; ++v) acc[r][v] = dot_in_place(acc[r][v], loaded[v], w);
        }
        ahead.few();
      }
    }
    UNROLL for (int r = 0; r < R; ++r) {
      UNROLL for (int v = 0; v < W; ++v) store(sums + r * width + column + v * kLanes, acc[r][v]);
    }
  }

  template <typename Element>
  static Weights load_columns(const Element* p, int64_t columns) {
    Element padded[kLanes * 2] = {};
    std::copy(p, p + columns * 2, padded);
    return load_pairs(padded);
  }

  const int64_t pairs_, k_elements_, v_dim_;
};

}  // namespace quire::cpu::QUIRE_ISA
