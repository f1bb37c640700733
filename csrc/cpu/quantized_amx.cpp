// Linears with int8 and int4 weights of the amx level; few rows by groups are avx512's, which streams them faster.
//
// Sums of integers do not depend on their order, and the floats after them keep the order of quantized_kernel.cpp, so
// results are those of avx512, bit for bit.
#include "cpu/gemm_amx.h"
#include "cpu/int_vec.h"
#include "cpu/quantized.h"
#include "cpu/quantized_groups_amx.h"
#include "cpu/two_level.h"

namespace quire::cpu::avx512 {
extern const QuantizedKernels kQuantized;
}

namespace quire::cpu::amx {

namespace {

constexpr int64_t kStreamedRows = 6;

// Sums of whole rows as results: t * s_x + bias, t = `scaled(r, dots, scale, column)`.
template <typename F>
void write_rows(const QuantizedLinearArgs& a, const RowWriter& y, int64_t row, int64_t rows, int64_t column,
                const int32_t* sums, const F& scaled) {
  const Halves scale{load(a.scale + column), load(a.scale + column + kLanes)}, bias = y.bias(a.bias, column);
  y.put(row, rows, column, [&](int64_t r) {
    const Vec x_scale = broadcast(a.x.scale[row + r]);
    const int32_t* dots = sums + r * kTileRows;
    return Halves{fused(scaled(r, _mm512_load_si512(dots), scale.left, column), x_scale, bias.left),
                  fused(scaled(r, _mm512_load_si512(dots + kTileSums), scale.right, column + kLanes), x_scale, bias.right)};
  });
}

// One scale per column: integers over all of K. Weights are unsigned: q + 128.
struct ChannelRows {
  using Sum = int32_t;
  static constexpr bool kUnpacks = false;
  static constexpr int64_t kStepBytes = kPanelStep;
  const QuantizedLinearArgs& a;
  RowWriter y;

  template <int kC, int kA, int kB>
  static void dot() {
    tile_dot_su8<kC, kA, kB>();
  }

  void write(int64_t row, int64_t rows, int64_t column, const int32_t* sums) const {
    write_rows(a, y, row, rows, column, sums, [&](int64_t r, __m512i dots, Vec scale, int64_t first) {
      const int32_t sum = a.x.sums[row + r];
      const Vec t = mul(to_float(_mm512_add_epi32(dots, broadcast(-128 * sum))), scale);
      return a.offset == nullptr ? t : fused(broadcast(static_cast<float>(sum)), load(a.offset + first), t);
    });
  }
};

// int4 of two levels: the same of signed weights, which are unpacked.
struct TwoLevelRows {
  using Sum = int32_t;
  static constexpr bool kUnpacks = true;
  static constexpr int64_t kStepBytes = kTwoLevelBytes;
  static_assert(kUnpackedBytes == kPanelStep);
  const QuantizedLinearArgs& a;
  RowWriter y;

  template <int kC, int kA, int kB>
  static void dot() {
    tile_dot_ss8<kC, kA, kB>();
  }

  void unpack(const uint8_t* step, uint8_t* to) const { unpack_block(step, 0, to); }

  void write(int64_t row, int64_t rows, int64_t column, const int32_t* sums) const {
    write_rows(a, y, row, rows, column, sums,
               [](int64_t, __m512i dots, Vec scale, int64_t) { return mul(to_float(dots), scale); });
  }
};

template <typename Rows>
void whole_rows(const QuantizedLinearArgs& a, ThreadPool& pool) {
  const Gemm g{reinterpret_cast<const uint8_t*>(a.x.q), a.packed, a.rows, a.x.stride, a.k, a.n,
               a.format.panel_bytes(a.k)};
  gemm(g, Rows{a, RowWriter(a.y, a.y_type, a.y_stride, a.rows, a.n)}, pool);
}

void linear(const QuantizedLinearArgs& a, ThreadPool& pool) {
  const QuantizedFormat& f = a.format;
  if (f.group == 0) return whole_rows<ChannelRows>(a, pool);
  if (a.rows <= kStreamedRows) return avx512::kQuantized.linear(a, pool);
  if (f.two_level()) return whole_rows<TwoLevelRows>(a, pool);
  if (f.in_units()) return with_form(f, [&]<typename F>() { linear_of_groups<UnitSource<F>>(a, pool); });
  if (f.bits == 8) {
    return (f.has_offset ? linear_of_groups<StoredCodes<8, true>> : linear_of_groups<StoredCodes<8, false>>)(a, pool);
  }
  return (f.has_offset ? linear_of_groups<StoredCodes<4, true>> : linear_of_groups<StoredCodes<4, false>>)(a, pool);
}

}  // namespace

}  // namespace quire::cpu::amx

namespace quire::cpu {

QuantizedKernels with_amx(const QuantizedKernels& avx512) {
  QuantizedKernels kernels = avx512;
  kernels.linear = amx::linear;
  return kernels;
}

}  // namespace quire::cpu
