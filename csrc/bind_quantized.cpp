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

bool is_form_in_units(const QuantizedFormat& f) {
  const bool table = f.codebook != Codebook::none, nested = f.scales == Scales::nested;
  if (f.codebook > Codebook::fp4 || f.scales > Scales::power || f.bits < 2 || f.bits > 6) return false;
  if (table) return f.bits == 4 && f.group == 32 && !f.has_offset && (f.codebook == Codebook::fp4) == (f.scales == Scales::power);
  return f.scales != Scales::power && f.group == (f.bits == 4 || f.bits == 5 ? 32 : 16) && (nested || f.bits == 5) &&
         (!nested || f.has_offset == (f.bits == 2 || f.bits == 4 || f.bits == 5));
}

QuantizedFormat format_of(int form, int64_t group, bool has_offset) {
  const QuantizedFormat f = QuantizedFormat::of(form, group, has_offset);
  if (f.in_units()) {
    if (!is_form_in_units(f)) throw std::invalid_argument("no kernel has this form of weights");
    return f;
  }
  const bool fits = group == 0 ? f.bits == 8 : group > 0 && (group % (f.bits == 8 ? 16 : 32) == 0 || group == kTwoLevelGroup);
  if (!fits) throw std::invalid_argument("group must be a multiple of 16 (8 bits; 0: none) or 32 (4 bits; 16: two levels)");
  if (f.two_level() && has_offset) throw std::invalid_argument("two levels have no offset");
  return f;
}

}  // namespace

void bind_quantized(nb::module_& m) {
  m.def(
      "quantized_panel_bytes",
      [](int form, int64_t group, bool has_offset, int64_t k) {
        return format_of(form, group, has_offset).panel_bytes(k);
      },
      "Bytes of a panel of 32 columns.");
  m.def(
      "pack_quantized",
      [](int num_threads, int form, int64_t group, bool has_offset, uintptr_t q, uintptr_t scale, uintptr_t offset,
         uintptr_t outer_scale, uintptr_t outer_offset, int64_t count, int64_t k, int64_t first, uintptr_t packed) {
        const PoolLease pool(num_threads);
        const QuantizedSource from{at<int8_t>(q), at<void>(scale), at<void>(offset), at<uint16_t>(outer_scale),
                                   at<uint16_t>(outer_offset)};
        pack_quantized(format_of(form, group, has_offset), from, count, k, first, at<uint8_t>(packed), pool.get());
      },
      "Pack rows [first, first + count) of a quantized weight: int8 [count, k], and what `QuantizedSource` has (0 for none).",
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
      [](int num_threads, const std::string& isa, int form, int64_t group, bool has_offset, uintptr_t q, int64_t stride,
         uintptr_t x_scale, uintptr_t sums, uintptr_t packed, uintptr_t scale, uintptr_t offset, uintptr_t bias,
         bool bf16, uintptr_t y, int64_t y_stride, int64_t rows, int64_t n, int64_t k) {
        const QuantizedLinearArgs args{{at<int8_t>(q), at<float>(x_scale), at<int32_t>(sums), stride},
                                       at<uint8_t>(packed), at<float>(scale), at<float>(offset), at<float>(bias),
                                       at<void>(y), rows, n, k, y_stride, format_of(form, group, has_offset),
                                       type_of(bf16)};
        submit(num_threads, args, {&QuantizedLinearArgs::rows}, kernels_named(isa).linear);
      },
      "y[rows, n] = x[rows, k] @ w.T (+ bias) from quantized rows and packed weights; offset and bias 0 for none.",
      nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "take_quantized_rows",
      [](int num_threads, const std::string& isa, int form, int64_t group, bool has_offset, int64_t rotation,
         uintptr_t packed, uintptr_t scale, uintptr_t offset, uintptr_t ids, bool bf16, uintptr_t y, int64_t rows, int64_t k) {
        const TakeArgs args{at<uint8_t>(packed), at<float>(scale), at<float>(offset), at<int64_t>(ids), at<void>(y),
                            rows, k, format_of(form, group, has_offset), rotation, type_of(bf16)};
        submit(num_threads, args, {&TakeArgs::rows}, kernels_named(isa).take);
      },
      "Rows `ids` of a packed weight, dequantized and rotated back.", nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace quire::cpu
