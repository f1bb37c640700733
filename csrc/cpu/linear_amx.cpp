// The bf16 linear of the amx level (gemm_amx.h); fp32 is avx512's.
//
// Every element is one sequence of tdpbf16ps over k, 32 at a time, whatever the number of rows. Its bits are not those
// of avx512, whose vdpbf16ps adds pairs of k in another order.
#include "cpu/gemm_amx.h"

namespace quire::cpu::amx {

namespace {

struct Bf16Rows {
  using Sum = float;
  static constexpr bool kUnpacks = false;
  static constexpr int64_t kStepBytes = kPanelStep;
  const float* bias;  // or null
  RowWriter y;

  template <int kC, int kA, int kB>
  static void dot() {
    tile_dot_bf16<kC, kA, kB>();
  }

  void write(int64_t row, int64_t rows, int64_t column, const float* sums) const {
    const Halves b = y.bias(bias, column);
    y.put(row, rows, column, [&](int64_t r) {
      const float* sum = sums + r * kTileRows;
      return Halves{add(load(sum), b.left), add(load(sum + kTileSums), b.right)};
    });
  }
};

void linear(const LinearArgs& a, ThreadPool& pool) {
  const Gemm g{static_cast<const uint8_t*>(a.x), static_cast<const uint8_t*>(a.packed), a.rows, a.x_stride * 2, a.k * 2,
               a.n, (a.k + 1) / 2 * 2 * kPanel * 2};
  gemm(g, Bf16Rows{a.bias, RowWriter(a.y, a.y_type, a.y_stride, a.rows, a.n)}, pool);
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
