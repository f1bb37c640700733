// The bf16 linear of the amx level; fp32 is avx512's.
//
// Algorithm: the packed panels [K/2][32][2] are B tiles as they lie (16 pairs of k x 16 columns, rows 128 bytes apart),
// rows of x are A tiles as they lie (16 rows x 32 k). 2 x 2 tiles of results, 32 rows x 32 columns, live in registers.
// Every element is accumulated by one sequence of tdpbf16ps, 32 k at a time, whatever the number of rows (a row of a
// tile knows nothing of the others); a last step of less than 32 k is filled up with zeros, always.
#include <algorithm>
#include <cstring>

#include "cpu/amx.h"
#include "cpu/isa.h"
#include "cpu/linear.h"

namespace quire::cpu::amx {

namespace {

constexpr int64_t kPassRows = 256;
constexpr int kBlockRows = 2 * kTileRows;
constexpr int kStepK = 32;                     // k of a tile
constexpr int64_t kSmallWork = 1 << 16;        // multiply-adds: of one row, 128 KiB of weights

enum { kC00, kC01, kC10, kC11, kA0, kA1, kB0, kB1 };

TileShapes shapes_of(int rows) {
  TileShapes shapes;
  const int upper = std::min(rows, kTileRows), lower = rows - upper;
  for (const int t : {kC00, kC01, kA0}) shapes.set(t, upper, kTileBytes);
  if (lower > 0) {
    for (const int t : {kC10, kC11, kA1}) shapes.set(t, lower, kTileBytes);
  }
  for (const int t : {kB0, kB1}) shapes.set(t, kTileRows, kTileBytes);
  return shapes;
}

// The last k of x and of the panel, filled up with zeros to a whole step.
struct Tail {
  alignas(64) uint16_t x[kBlockRows][kStepK];
  alignas(64) uint16_t w[kTileRows][kPanel][2];
};

template <bool kLower>
inline void step(const uint16_t* x, int64_t stride, const uint16_t* w) {
  tile_load<kA0>(x, stride);
  tile_load<kB0>(w, 2 * kTileBytes);
  tile_load<kB1>(w + kStepK, 2 * kTileBytes);
  tile_dot_bf16<kC00, kA0, kB0>();
  tile_dot_bf16<kC01, kA0, kB1>();
  if constexpr (kLower) {
    tile_load<kA1>(x + kTileRows * stride / 2, stride);
    tile_dot_bf16<kC10, kA1, kB0>();
    tile_dot_bf16<kC11, kA1, kB1>();
  }
}

template <bool kLower>
void block(const LinearArgs& a, const uint16_t* panel, int64_t row, int rows, const Tail& tail, float* sums) {
  const uint16_t* x = static_cast<const uint16_t*>(a.x) + row * a.x_stride;
  tile_zero<kC00>();
  tile_zero<kC01>();
  if constexpr (kLower) {
    tile_zero<kC10>();
    tile_zero<kC11>();
  }
  const int64_t steps = a.k / kStepK;
  for (int64_t s = 0; s < steps; ++s) step<kLower>(x + s * kStepK, a.x_stride * 2, panel + s * kStepK * kPanel);
  if (a.k % kStepK != 0) step<kLower>(&tail.x[0][0], kTileBytes, &tail.w[0][0][0]);
  tile_store<kC00>(sums, kPanel * 4);
  tile_store<kC01>(sums + kPanel / 2, kPanel * 4);
  if constexpr (kLower) {
    tile_store<kC10>(sums + kTileRows * kPanel, kPanel * 4);
    tile_store<kC11>(sums + kTileRows * kPanel + kPanel / 2, kPanel * 4);
  }
  (void)rows;
}

void write_rows(const LinearArgs& a, int64_t row, int rows, int64_t column, const float* sums) {
  const int64_t width = std::min<int64_t>(kPanel, a.n - column);
  alignas(64) float bias[kPanel] = {};
  if (a.bias != nullptr) std::copy(a.bias + column, a.bias + column + width, bias);
  const Vec b0 = load(bias), b1 = load(bias + kLanes);
  for (int r = 0; r < rows; ++r) {
    const Vec v0 = add(load(sums + r * kPanel), b0), v1 = add(load(sums + r * kPanel + kLanes), b1);
    if (a.y_type == Type::f32) {
      alignas(64) float values[kPanel];
      store(values, v0);
      store(values + kLanes, v1);
      std::memcpy(static_cast<float*>(a.y) + (row + r) * a.y_stride + column, values, width * 4);
    } else {
      alignas(64) uint16_t values[kPanel];
      store(values, v0);
      store(values + kLanes, v1);
      std::memcpy(static_cast<uint16_t*>(a.y) + (row + r) * a.y_stride + column, values, width * 2);
    }
  }
}

void linear(const LinearArgs& args, ThreadPool& pool) {
  const int64_t panels = (args.n + kPanel - 1) / kPanel;
  const int64_t panel_elements = (args.k + 1) / 2 * 2 * kPanel;
  const int64_t tail_k = args.k % kStepK, tail_start = args.k - tail_k;
  auto body = [&](int thread, int num_threads) {
    const Range mine = share(panels, thread, num_threads);
    Tiles tiles;
    Tail tail;
    alignas(64) float sums[kBlockRows * kPanel];
    int shaped = 0;
    for (int64_t p = mine.begin; p < mine.end; ++p) {
      const uint16_t* panel = static_cast<const uint16_t*>(args.packed) + p * panel_elements;
      if (tail_k != 0) {
        std::memset(tail.w, 0, sizeof(tail.w));
        std::memcpy(tail.w, panel + tail_start * kPanel, (tail_k + 1) / 2 * 2 * kPanel * 2);
      }
      for (int64_t row = 0; row < args.rows; row += kBlockRows) {
        const int rows = static_cast<int>(std::min<int64_t>(kBlockRows, args.rows - row));
        if (tail_k != 0) {
          std::memset(tail.x, 0, sizeof(tail.x));
          for (int r = 0; r < rows; ++r) {
            std::memcpy(tail.x[r], static_cast<const uint16_t*>(args.x) + (row + r) * args.x_stride + tail_start,
                        tail_k * 2);
          }
        }
        if (rows != shaped) {
          tiles.shape(shapes_of(rows));
          shaped = rows;
        }
        if (rows > kTileRows) {
          block<true>(args, panel, row, rows, tail, sums);
        } else {
          block<false>(args, panel, row, rows, tail, sums);
        }
        write_rows(args, row, rows, p * kPanel, sums);
      }
    }
  };
  if (args.rows * args.n * args.k < kSmallWork) {
    body(0, 1);
  } else {
    pool.run(body);
  }
}

}  // namespace

}  // namespace quire::cpu::amx

namespace quire::cpu {

LinearKernels with_amx(const LinearKernels& avx512) {
  LinearKernels kernels = avx512;
  kernels.bf16 = amx::linear;
  return kernels;
}

}  // namespace quire::cpu
