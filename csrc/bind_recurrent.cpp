// Recurrent layers.
#include "bind.h"
#include "cpu/recurrent.h"

namespace nb = nanobind;

namespace quire::cpu {

namespace {

StateBatch batch_at(uintptr_t cu_seqlens, uintptr_t slots, uintptr_t fresh, uintptr_t saves, uintptr_t extents) {
  return {at<int64_t>(cu_seqlens), at<int64_t>(slots), at<int64_t>(fresh), at<int64_t>(saves), at<int64_t>(extents)};
}

}  // namespace

void bind_recurrent(nb::module_& m) {
  m.def(
      "causal_conv",
      [](int num_threads, const std::string& isa, bool bf16, uintptr_t x, int64_t stride, uintptr_t before,
         uintptr_t after, uintptr_t weight, uintptr_t bias, uintptr_t past, int64_t slot_stride, uintptr_t y, uintptr_t cu_seqlens, uintptr_t slots, uintptr_t fresh, uintptr_t saves,
         uintptr_t extents, int64_t tokens, int64_t channels, int64_t kernel) {
        const ConvArgs args{at<void>(x), at<void>(before), at<void>(after), at<float>(weight), at<float>(bias),
                            at<float>(past), at<void>(y),
                            batch_at(cu_seqlens, slots, fresh, saves, extents), tokens, channels, kernel, stride,
                            slot_stride, type_of(bf16)};
        submit(num_threads, args, {&ConvArgs::tokens}, kernels_of<RecurrentKernels>(isa).conv);
      },
      "A short convolution over the tokens of each sequence: its silu, or (before, after not 0) between two gates.", nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "delta_inputs",
      [](int num_threads, const std::string& isa, bool bf16, uintptr_t qkv, int64_t stride, uintptr_t a, int64_t a_stride,
         uintptr_t b, int64_t b_stride, uintptr_t rate, uintptr_t dt_bias, uintptr_t qk, uintptr_t gates, int64_t tokens,
         int64_t k_heads, int64_t v_heads, int64_t k_dim, float eps) {
        const DeltaInputsArgs args{at<void>(qkv), at<void>(a), at<void>(b), at<float>(rate), at<float>(dt_bias),
                                   at<float>(qk), at<float>(gates), tokens, k_heads, v_heads, k_dim, stride, a_stride,
                                   b_stride, eps, type_of(bf16)};
        submit(num_threads, args, {&DeltaInputsArgs::tokens}, kernels_of<RecurrentKernels>(isa).delta_inputs);
      },
      "Unit q and k, decay and beta.", nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "channel_inputs",
      [](int num_threads, const std::string& isa, bool bf16, uintptr_t qkv, int64_t stride, uintptr_t f, int64_t f_stride,
         uintptr_t b, int64_t b_stride, uintptr_t rate, uintptr_t dt_bias, uintptr_t qkd, uintptr_t beta, int64_t tokens,
         int64_t heads, int64_t k_dim, float eps, bool bounded, float floor) {
        const ChannelInputsArgs args{at<void>(qkv), at<void>(f), at<void>(b), at<float>(rate), at<float>(dt_bias),
                                     at<float>(qkd), at<float>(beta), tokens, heads, k_dim, stride, f_stride, b_stride,
                                     eps, floor, bounded, type_of(bf16)};
        submit(num_threads, args, {&ChannelInputsArgs::tokens}, kernels_of<RecurrentKernels>(isa).channel_inputs);
      },
      "Unit q and k, a decay per channel, and beta.", nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "mamba_inputs",
      [](int num_threads, const std::string& isa, bool bf16, uintptr_t xbc, int64_t stride, uintptr_t dt,
         int64_t dt_stride, uintptr_t rate, uintptr_t dt_bias, uintptr_t qk, uintptr_t gates, int64_t tokens,
         int64_t groups, int64_t heads, int64_t k_dim, int64_t width, float scale, float least, float most) {
        const MambaInputsArgs args{at<void>(xbc), at<void>(dt), at<float>(rate), at<float>(dt_bias), at<float>(qk),
                                   at<float>(gates), tokens, groups, heads, k_dim, width, stride, dt_stride, scale,
                                   least, most, type_of(bf16)};
        submit(num_threads, args, {&MambaInputsArgs::tokens}, kernels_of<RecurrentKernels>(isa).mamba_inputs);
      },
      "C and B in fp32, decay and step size.", nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "gated_delta_rule",
      [](int num_threads, const std::string& isa, bool bf16, uintptr_t qk, uintptr_t gates, uintptr_t skip, uintptr_t v,
         int64_t stride, uintptr_t state, int64_t slot_stride, uintptr_t y, uintptr_t cu_seqlens, uintptr_t slots, uintptr_t fresh,
         uintptr_t saves, uintptr_t extents, int64_t tokens, int64_t k_heads, int64_t v_heads, int64_t k_dim,
         int64_t v_dim, int64_t parts) {
        const DeltaRuleArgs args{at<float>(qk), at<float>(gates), at<float>(skip), at<void>(v), at<float>(state), at<void>(y),
                                 batch_at(cu_seqlens, slots, fresh, saves, extents), tokens, k_heads, v_heads, k_dim,
                                 v_dim, stride, slot_stride, parts, type_of(bf16)};
        submit(num_threads, args, {&DeltaRuleArgs::tokens}, kernels_of<RecurrentKernels>(isa).delta_rule);
      },
      "The recurrence, token by token: with skip (not 0) Mamba-2's scan, else the delta rule.", nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "gated_norm",
      [](int num_threads, const std::string& isa, bool bf16, uintptr_t x, int64_t x_stride, uintptr_t z, int64_t z_stride,
         uintptr_t weight, uintptr_t y, int64_t tokens, int64_t heads, int64_t size, float eps, bool plain) {
        const GatedNormArgs args{at<void>(x), at<void>(z), at<float>(weight), at<void>(y), tokens, heads, size,
                                 x_stride, z_stride, eps, plain, type_of(bf16)};
        submit(num_threads, args, {&GatedNormArgs::tokens}, kernels_of<RecurrentKernels>(isa).gated_norm);
      },
      "RMSNorm of each head times silu(z), or sigmoid(z).", nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "group_norm",
      [](int num_threads, const std::string& isa, bool bf16, uintptr_t x, int64_t x_stride, uintptr_t z, int64_t z_stride,
         uintptr_t weight, uintptr_t y, int64_t tokens, int64_t groups, int64_t size, float eps, float scale,
         bool gate_first) {
        const GroupNormArgs args{at<void>(x), at<void>(z), at<float>(weight), at<void>(y), tokens, groups, size,
                                 x_stride, z_stride, eps, scale, gate_first, type_of(bf16)};
        submit(num_threads, args, {&GroupNormArgs::tokens}, kernels_of<RecurrentKernels>(isa).group_norm);
      },
      "RMSNorm of each group (weight 0: none) and silu(scale * z).", nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace quire::cpu
