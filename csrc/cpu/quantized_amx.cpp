// Linears with int8 and int4 weights of the amx level; one row by groups is avx512's, which streams them as fast.
//
// Integers have no order, and the floats after them keep the order of quantized_kernel.cpp, so results are those of
// avx512, bit for bit.
#include "cpu/gemm_amx.h"
#include "cpu/int_vec.h"
#include "cpu/quantized.h"
#include "cpu/quantized_groups_amx.h"

namespace quire::cpu::avx512 {
extern const QuantizedKernels kQuantized;
}

namespace quire::cpu::amx {

namespace {

constexpr int64_t kPassRows = 512;

// One scale a column: integers over all of K. Weights are unsigned: q + 128.
struct ChannelRows {
  using Sum = int32_t;
  const QuantizedLinearArgs& a;
  RowWriter y;

  template <int kC, int kA, int kB>
  static void dot() {
    tile_dot_su8<kC, kA, kB>();
  }

  void write(int64_t row, int64_t column, const int32_t* left, const int32_t* right) const {
    y.put(row, column, result(row, column, left), result(row, column + kLanes, right));
  }

  Vec result(int64_t row, int64_t column, const int32_t* dots) const {
    const int32_t sum = a.x.sums[row];
    const __m512i dot = _mm512_add_epi32(_mm512_load_si512(dots), broadcast(-128 * sum));
    Vec t = mul(to_float(dot), load(a.scale + column));
    if (a.offset != nullptr) t = fused(broadcast(static_cast<float>(sum)), load(a.offset + column), t);
    const Vec x_scale = broadcast(a.x.scale[row]);
    if (a.bias == nullptr) return mul(t, x_scale);
    const int64_t there = std::clamp<int64_t>(a.n - column, 0, kLanes);
    const __mmask16 valid = static_cast<__mmask16>((1u << there) - 1);
    return fused(t, x_scale, _mm512_maskz_loadu_ps(valid, a.bias + column));
  }
};

void channel(const QuantizedLinearArgs& a, ThreadPool& pool) {
  const Gemm g{reinterpret_cast<const uint8_t*>(a.x.q), a.packed, a.rows, a.x.stride, a.k, a.n,
               a.format.panel_bytes(a.k), kPassRows};
  gemm(g, ChannelRows{a, RowWriter(a.y, a.y_type, a.y_stride, a.rows, a.n)}, pool);
}

void linear(const QuantizedLinearArgs& a, ThreadPool& pool) {
  const QuantizedFormat& f = a.format;
  if (f.group == 0) return channel(a, pool);
  if (a.rows == 1) return avx512::kQuantized.linear(a, pool);
  if (f.bits == 8) return (f.has_offset ? linear_of_groups<8, true> : linear_of_groups<8, false>)(a, pool);
  return (f.has_offset ? linear_of_groups<4, true> : linear_of_groups<4, false>)(a, pool);
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
