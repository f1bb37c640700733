// Gathers of rows, and pointwise ops.
#include "bind.h"
#include "cpu/gather.h"
#include "cpu/pointwise.h"

namespace nb = nanobind;

namespace quire::cpu {

void bind_pointwise(nb::module_& m) {
  m.def(
      "gather",
      [](int num_threads, const std::string& isa, bool bf16, uintptr_t table, int64_t stride, uintptr_t ids,
         uintptr_t y, int64_t rows, int64_t size) {
        const GatherArgs args{at<void>(table), at<int64_t>(ids), at<void>(y), rows, size, stride, type_of(bf16)};
        submit(num_threads, args, {&GatherArgs::rows}, kernels_of<GatherKernels>(isa).gather);
      },
      "Rows `ids` of a table [.., size] with rows `stride` elements apart; stride 0: of a packed weight.",
      nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "add_rows",
      [](int num_threads, const std::string& isa, bool bf16, bool x_bf16, uintptr_t x, int64_t stride, uintptr_t other,
         int64_t other_stride, uintptr_t y, int64_t rows, int64_t size) {
        const PointwiseArgs args{at<void>(x), at<void>(other), at<void>(y), rows, size,
                                 stride,      other_stride,    1.0f,        0.0f, type_of(bf16), type_of(x_bf16)};
        submit(num_threads, args, {&PointwiseArgs::rows}, kernels_of<PointwiseKernels>(isa).add);
      },
      "y = x + other; x may be fp32.", nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "scale_rows",
      [](int num_threads, const std::string& isa, bool bf16, uintptr_t x, int64_t stride, float scale, float cap,
         uintptr_t y, int64_t rows, int64_t size) {
        const PointwiseArgs args{at<void>(x), nullptr, at<void>(y), rows, size,
                                 stride,      0,       scale,       cap,  type_of(bf16), type_of(bf16)};
        submit(num_threads, args, {&PointwiseArgs::rows}, kernels_of<PointwiseKernels>(isa).scale);
      },
      "y = x * scale, then cap * tanh(y / cap) where cap is not 0.", nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "copy_heads",
      [](int num_threads, const std::string& isa, bool bf16, uintptr_t x, int64_t x_token_stride, int64_t x_head_stride,
         uintptr_t y, int64_t y_token_stride, int64_t y_head_stride, int64_t tokens, int64_t heads, int64_t size) {
        const CopyArgs args{at<void>(x),    at<void>(y),    tokens,        heads,         size, x_token_stride,
                            x_head_stride, y_token_stride, y_head_stride, type_of(bf16)};
        submit(num_threads, args, {&CopyArgs::tokens}, kernels_of<PointwiseKernels>(isa).copy);
      },
      "y[tokens, heads, size] = x, both strided.", nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "widen_rows",
      [](int num_threads, const std::string& isa, bool bf16, uintptr_t x, int64_t stride, uintptr_t y, int64_t rows,
         int64_t size) {
        const WidenArgs args{at<void>(x), at<float>(y), rows, size, stride, type_of(bf16)};
        submit(num_threads, args, {&WidenArgs::rows}, kernels_of<PointwiseKernels>(isa).widen);
      },
      "y = x as fp32.", nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "add_gated_rows",
      [](int num_threads, const std::string& isa, bool bf16, uintptr_t x, int64_t stride, uintptr_t other,
         int64_t other_stride, uintptr_t gate, int64_t gate_stride, uintptr_t y, int64_t rows, int64_t size) {
        const AddGatedArgs args{at<void>(x), at<void>(other), at<void>(gate), at<void>(y),  rows,
                                size,        stride,          other_stride,   gate_stride, type_of(bf16)};
        submit(num_threads, args, {&AddGatedArgs::rows}, kernels_of<PointwiseKernels>(isa).add_gated);
      },
      "y = x + other * sigmoid(gate), gate one number a row.", nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "gate_rows",
      [](int num_threads, const std::string& isa, bool bf16, uintptr_t x, int64_t stride, uintptr_t gate,
         int64_t gate_stride, uintptr_t y, int64_t rows, int64_t size, int64_t per, bool plain) {
        const GateRowsArgs args{at<void>(x), at<void>(gate), at<void>(y), rows, size, per, stride, gate_stride, plain,
                                type_of(bf16)};
        submit(num_threads, args, {&GateRowsArgs::rows}, kernels_of<PointwiseKernels>(isa).gate);
      },
      "y = x * sigmoid(gate), or (plain) x * gate; a gate for each `per` elements.", nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace quire::cpu
