// The two products of attention on AMX tiles (cpu/amx.h): a tile of the cache is a B tile as it lies.
//
//   scores   A: 16 rows x 32 of the dim, query as it lies    B: K, 16 pairs of the dim x 16 positions, 64 bytes per row
//   values   A: 16 rows x 16 positions, weights as they lie  B: V, 8 pairs of positions x 16 columns
//
// Every element is one sequence of tdpbf16ps, in order of the dim or of the positions, whatever the number of rows: a
// row of a tile does not affect the others. Query rows are padded with zeros to whole 32: beyond the keys the
// last K tile then reads V of the same positions, times 0.
#pragma once

#include "cpu/amx.h"
#include "cpu/attention_products.h"

namespace quire::cpu::QUIRE_ISA {

class TileProducts {
 public:
  TileProducts(const AttentionArgs& a, int64_t rows)
      : steps_(padded_dim(a.head_dim) / kStepDim), k_elements_(kTile * a.head_dim), v_dim_(a.v_head_dim) {
    // Few rows take small, fast tiles; buffers have room for whole ones.
    const int height = rows < kTileRows ? static_cast<int>(rows) : kTileRows;
    TileShapes shapes;
    for (const int t : {0, 1, 2, 3, static_cast<int>(kQuery)}) shapes.set(t, height, kTileBytes);
    shapes.set(kKeys, kTileRows, kTileBytes);
    shapes.set(kWeights, height, static_cast<int>(kTile) * 2);
    shapes.set(kValues, static_cast<int>(kTile) / 2, kTileBytes);
    tiles_.shape(shapes);
  }

  // Whether a layer's shape fits tiles, and reads beyond the keys stay within V. A constant of the layer, so that all
  // its rows are computed alike.
  static bool can(const AttentionArgs& a) {
    return a.v_head_dim % 16 == 0 && padded_dim(a.head_dim) - a.head_dim <= a.v_head_dim;
  }

  static constexpr int64_t kByteRows = 0;  // tiles of the unit are bf16

  static int64_t padded_dim(int64_t head_dim) { return (head_dim + kStepDim - 1) / kStepDim * kStepDim; }

  static constexpr bool kWords = false;  // tiles take bf16

  static Vec number(const float* score) { return load(score); }

  void scores(int64_t, const uint16_t* query, int64_t dim, const StepTiles& tiles, float* scores, Ahead& ahead) const {
    if (tiles.first == 0 && tiles.last == 4) {
      score_tiles<4>(query, dim, tiles.tile, scores, ahead);
    } else {
      for (int64_t t = tiles.first; t < tiles.last; ++t) {
        score_tiles<1>(query, dim, tiles.tile + t, scores + t * kTile, ahead);
      }
    }
  }

  void values(int64_t, const uint16_t* weights, const float*, const StepTiles& tiles, float* sums, int64_t width,
              Ahead& ahead) const {
    int64_t column = 0;
    for (; column + 64 <= v_dim_; column += 64) value_columns<4>(weights, tiles, column, sums, width, ahead);
    for (; column < v_dim_; column += 16) value_columns<1>(weights, tiles, column, sums, width, ahead);
  }

 private:
  static constexpr int64_t kStepDim = 32;
  enum { kQuery = 4, kKeys, kWeights, kValues };  // 0 ... 3 are results

  template <int T, typename F>
  static void each(const F& f) {
    f.template operator()<0>();
    if constexpr (T > 1) {
      f.template operator()<1>();
      f.template operator()<2>();
      f.template operator()<3>();
    }
  }

  template <int T>
  void score_tiles(const uint16_t* query, int64_t dim, const void* const* tiles, float* scores, Ahead& ahead) const {
    each<T>([&]<int t>() { tile_zero<t>(); });
    for (int64_t i = 0; i < steps_; ++i) {
      tile_load<kQuery>(query + i * kStepDim, dim * 2);
      each<T>([&]<int t>() {
        tile_load<kKeys>(static_cast<const uint16_t*>(tiles[t]) + i * kStepDim * kTile, kTileBytes);
        tile_dot_bf16<t, kQuery, kKeys>();
        ahead.few();
      });
    }
    each<T>([&]<int t>() { tile_store<t>(scores + t * kTile, kStep * 4); });
  }

  template <int W>
  void value_columns(const uint16_t* weights, const StepTiles& tiles, int64_t column, float* sums, int64_t width,
                     Ahead& ahead) const {
    each<W>([&]<int v>() { tile_load<v>(sums + column + v * 16, width * 4); });
    for (int64_t t = tiles.first; t < tiles.last; ++t) {
      const uint16_t* values = static_cast<const uint16_t*>(tiles.tile[t]) + k_elements_ + column * 2;
      tile_load<kWeights>(weights + t * kTile, kStep * 2);
      each<W>([&]<int v>() {
        tile_load<kValues>(values + v * 32, v_dim_ * 4);
        tile_dot_bf16<v, kWeights, kValues>();
        ahead.few();
      });
    }
    each<W>([&]<int v>() { tile_store<v>(sums + column + v * 16, width * 4); });
  }

  const int64_t steps_, k_elements_, v_dim_;
  Tiles tiles_;
};

}  // namespace quire::cpu::QUIRE_ISA
