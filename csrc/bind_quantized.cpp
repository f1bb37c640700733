// Quantized linears: rounding and packing of weights, activations to int8, the product.
#include "bind.h"
#include "cpu/quantize_weights.h"
#include "cpu/quantized.h"

namespace nb = nanobind;

namespace quire::cpu {

namespace {

const QuantizedKernels& kernels_named(const std::string& isa) {
  const QuantizedKernels* kernels = quantized_kernels(isa.c_str());
  if (kernels == nullptr) throw std::invalid_argument("this CPU or build has no kernels for " + isa);
  return *kernels;
}

QuantizedFormat format_of(int bits, int64_t group, bool has_offset) {
  if (bits != 8 && bits != 4) throw std::invalid_argument("bits must be 8 or 4");
  const bool fits = group == 0 ? bits == 8 : group > 0 && (group % (bits == 8 ? 16 : 32) == 0 || group == kTwoLevelGroup);
  if (!fits) throw std::invalid_argument("group must be a multiple of 16 (8 bits; 0: none) or 32 (4 bits; 16: two levels)");
  if (bits == 4 && group == kTwoLevelGroup && has_offset) throw std::invalid_argument("two levels have no offset");
  return {bits, group, has_offset};
}

}  // namespace

void bind_quantized(nb::module_& m) {
  m.def(
      "quantized_block_bytes",
      [](int bits, int64_t group, bool has_offset, int64_t k) {
        return format_of(bits, group, has_offset).block_bytes(k);
      },
      "Bytes of one group (of two levels four, or all of K) of a panel of 32 columns; scales and offsets come last.");
  m.def(
      "pack_quantized",
      [](int num_threads, int bits, int64_t group, bool has_offset, uintptr_t q, uintptr_t scale, uintptr_t offset,
         int64_t count, int64_t k, int64_t first, uintptr_t packed) {
        const PoolLease pool(num_threads);
        pack_quantized(format_of(bits, group, has_offset), at<int8_t>(q), at<void>(scale), at<uint16_t>(offset),
                       count, k, first, at<uint8_t>(packed), pool.get());
      },
      "Pack rows [first, first + count) of a quantized weight: int8 [count, k], fp16 [count, groups] (0 without groups), or "
      "uint8 multipliers of two levels.",
      nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "quantize_weights",
      [](int num_threads, const std::string& isa, int bits, int64_t group, bool bf16, uintptr_t w, int64_t stride,
         int64_t rows, int64_t k, int64_t rotation, uintptr_t q, uintptr_t scale, uintptr_t multiplier) {
        const QuantizeWeightsArgs args{at<void>(w), at<int8_t>(q), at<float>(scale), at<uint8_t>(multiplier), rows, k,
                                       stride,      group,         rotation,         bits, type_of(bf16)};
        const bool two_level = group == kTwoLevelGroup && multiplier != 0;
        const bool fits = two_level || (group > 0 && group % 32 == 0 && group <= 128);
        if (bits == 4 && !fits) throw std::invalid_argument("int4 group");
        const auto& kernels = kernels_of<QuantizeWeightsKernels>(isa);
        submit(num_threads, [&](ThreadPool& pool) { kernels.quantize(args, pool); });
      },
      "Weights [rows, k] rounded to int8 q [rows, k] (8 or 4 bits) and fp32 scales [rows, groups] (quant/rtn.py); int4 in "
      "groups of 16: scales [rows], uint8 multipliers [rows, groups].",
      nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "quantize_rows",
      [](int num_threads, const std::string& isa, bool bf16, uintptr_t x, int64_t x_stride, int64_t rows, int64_t k,
         uintptr_t q, int64_t stride, uintptr_t scale, uintptr_t sums, int64_t group, int64_t rotation,
         int64_t block) {
        const QuantizeArgs args{at<void>(x), {at<int8_t>(q), at<float>(scale), at<int32_t>(sums), stride},
                                rows,        k, x_stride, {group, rotation, block}, type_of(bf16)};
        submit(num_threads, args, {&QuantizeArgs::rows}, kernels_named(isa).quantize);
      },
      "Rows, rotated or not, to int8 with the scales of their blocks and the sums of their parts.", nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "quantized_linear",
      [](int num_threads, const std::string& isa, int bits, int64_t group, bool has_offset, uintptr_t q, int64_t stride,
         uintptr_t x_scale, uintptr_t sums, uintptr_t packed, uintptr_t scale, uintptr_t offset, uintptr_t bias,
         bool bf16, uintptr_t y, int64_t y_stride, int64_t rows, int64_t n, int64_t k) {
        const QuantizedLinearArgs args{{at<int8_t>(q), at<float>(x_scale), at<int32_t>(sums), stride},
                                       at<uint8_t>(packed), at<float>(scale), at<float>(offset), at<float>(bias),
                                       at<void>(y), rows, n, k, y_stride, format_of(bits, group, has_offset),
                                       type_of(bf16)};
        submit(num_threads, args, {&QuantizedLinearArgs::rows}, kernels_named(isa).linear);
      },
      "y[rows, n] = x[rows, k] @ w.T (+ bias) from quantized rows and packed weights; offset and bias 0 for none.",
      nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "take_quantized_rows",
      [](int num_threads, const std::string& isa, int bits, int64_t group, bool has_offset, int64_t rotation,
         uintptr_t packed, uintptr_t scale, uintptr_t offset, uintptr_t ids, bool bf16, uintptr_t y, int64_t rows, int64_t k) {
        const TakeArgs args{at<uint8_t>(packed), at<float>(scale), at<float>(offset), at<int64_t>(ids), at<void>(y),
                            rows, k, format_of(bits, group, has_offset), rotation, type_of(bf16)};
        submit(num_threads, args, {&TakeArgs::rows}, kernels_named(isa).take);
      },
      "Rows `ids` of a packed weight, dequantized and rotated back.", nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace quire::cpu
