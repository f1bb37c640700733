// Linears with int8 and int4 weights of the amx level; few rows by groups are avx512's, which streams them faster.
//
// Integers have no order, and the floats after them keep the order of quantized_kernel.cpp, so results are those of
// avx512, bit for bit.
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

constexpr int64_t kPassRows = 512;
constexpr int64_t kStreamedRows = 6;

// t * s_x (+ bias).
Vec finished(const QuantizedLinearArgs& a, int64_t row, int64_t column, Vec t) {
  const Vec x_scale = broadcast(a.x.scale[row]);
  if (a.bias == nullptr) return mul(t, x_scale);
  const int64_t there = std::clamp<int64_t>(a.n - column, 0, kLanes);
  const __mmask16 valid = static_cast<__mmask16>((1u << there) - 1);
  return fused(t, x_scale, _mm512_maskz_loadu_ps(valid, a.bias + column));
}

// One scale a column: integers over all of K. Weights are unsigned: q + 128.
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

  void write(int64_t row, int64_t column, const int32_t* left, const int32_t* right) const {
    y.put(row, column, result(row, column, left), result(row, column + kLanes, right));
  }

  Vec result(int64_t row, int64_t column, const int32_t* dots) const {
    const int32_t sum = a.x.sums[row];
    const __m512i dot = _mm512_add_epi32(_mm512_load_si512(dots), broadcast(-128 * sum));
    Vec t = mul(to_float(dot), load(a.scale + column));
    if (a.offset != nullptr) t = fused(broadcast(static_cast<float>(sum)), load(a.offset + column), t);
    return finished(a, row, column, t);
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

  void write(int64_t row, int64_t column, const int32_t* left, const int32_t* right) const {
    y.put(row, column, result(row, column, left), result(row, column + kLanes, right));
  }

  Vec result(int64_t row, int64_t column, const int32_t* dots) const {
    return finished(a, row, column, mul(to_float(_mm512_load_si512(dots)), load(a.scale + column)));
  }
};

template <typename Rows>
void whole_rows(const QuantizedLinearArgs& a, ThreadPool& pool) {
  const Gemm g{reinterpret_cast<const uint8_t*>(a.x.q), a.packed, a.rows, a.x.stride, a.k, a.n,
               a.format.panel_bytes(a.k), kPassRows};
  gemm(g, Rows{a, RowWriter(a.y, a.y_type, a.y_stride, a.rows, a.n)}, pool);
}

void linear(const QuantizedLinearArgs& a, ThreadPool& pool) {
  const QuantizedFormat& f = a.format;
  if (f.group == 0) return whole_rows<ChannelRows>(a, pool);
  if (a.rows <= kStreamedRows) return avx512::kQuantized.linear(a, pool);
  if (f.two_level()) return whole_rows<TwoLevelRows>(a, pool);
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
