// Norms and gated activations.
#include "bind.h"
#include "cpu/gated.h"
#include "cpu/norm.h"

namespace nb = nanobind;

namespace quire::cpu {

void bind_norm(nb::module_& m) {
  m.def(
      "rms_norm",
      [](int num_threads, const std::string& isa, bool bf16, uintptr_t x, int64_t token_stride, int64_t head_stride,
         uintptr_t residual, int64_t residual_stride, bool residual_bf16, bool sum_bf16, uintptr_t weight, int64_t weight_stride, float eps, uintptr_t y,
         uintptr_t sum, int64_t tokens, int64_t heads, int64_t size, uintptr_t q, int64_t q_stride, uintptr_t scale,
         uintptr_t sums, int64_t group, int64_t rotation, int64_t block) {
        const NormArgs args{at<void>(x),  at<void>(residual), at<float>(weight), at<void>(y),   at<void>(sum),
                            tokens,       heads,              size,              token_stride,  head_stride,
                            residual_stride, weight_stride,   eps,               type_of(bf16),
                            {at<int8_t>(q), at<float>(scale), at<int32_t>(sums), q_stride}, {group, rotation, block},
                            type_of(residual_bf16), type_of(sum_bf16), false};
        submit(num_threads, args, {&NormArgs::tokens}, kernels_of<NormKernels>(isa).norm);
      },
      "RMSNorm of rows (token, head); with residual (else 0) of x + residual, which goes to sum; as int8 to q, or (0) to y.",
      nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "layer_norm",
      [](int num_threads, const std::string& isa, bool bf16, uintptr_t x, int64_t stride, uintptr_t residual,
         int64_t residual_stride, bool residual_bf16, bool sum_bf16, uintptr_t weight, float eps, uintptr_t y,
         uintptr_t sum, int64_t tokens, int64_t size) {
        const NormArgs args{at<void>(x), at<void>(residual), at<float>(weight), at<void>(y), at<void>(sum), tokens, 1, size,
                            stride, 0, residual_stride, 0, eps, type_of(bf16), {}, {}, type_of(residual_bf16),
                            type_of(sum_bf16), true};
        submit(num_threads, args, {&NormArgs::tokens}, kernels_of<NormKernels>(isa).norm);
      },
      "LayerNorm without a bias of rows; with residual (else 0) of x + residual, which goes to sum.",
      nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "gated",
      [](int num_threads, const std::string& isa, bool bf16, int gate, uintptr_t gate_up, int64_t stride, uintptr_t y,
         int64_t tokens, int64_t size, float gate_scale, float alpha_p, float alpha_n, uintptr_t q, int64_t q_stride,
         uintptr_t scale, uintptr_t sums, int64_t group, int64_t rotation, int64_t block) {
        if (gate < 0 || gate > 5) throw std::invalid_argument("gate must be 0 ... 5");
        const GatedArgs args{at<void>(gate_up), at<void>(y), tokens, size, stride, Gate(gate), type_of(bf16),
                             {at<int8_t>(q), at<float>(scale), at<int32_t>(sums), q_stride}, {group, rotation, block},
                             gate_scale, alpha_p, alpha_n};
        submit(num_threads, args, {&GatedArgs::tokens}, kernels_of<GatedKernels>(isa).gated);
      },
      "act(gate) * up: 0 silu, 1 gelu_tanh, 2 gelu, 3 swiglu_oai; act(up): 4 relu2, 5 xielu; as int8 to q, or (0) to y.", nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace quire::cpu
