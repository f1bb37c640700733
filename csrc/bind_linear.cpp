// Packing and linears.
#include "bind.h"

namespace nb = nanobind;

namespace quire::cpu {

void bind_linear(nb::module_& m) {
  m.def(
      "packed_elements",
      [](const std::string& type, int64_t n, int64_t k) { return packed_elements(type_of(type), n, k); },
      "Elements that an [n, k] weight takes when packed.");
  m.def(
      "pack",
      [](int num_threads, const std::string& type, uintptr_t w, int64_t count, int64_t k, int64_t first,
         uintptr_t packed) {
        const PoolLease pool(num_threads);
        pack(type_of(type), at<void>(w), count, k, first, at<void>(packed), pool.get());
      },
      "Pack rows [first, first + count) of a weight, given as [count, k] at address w.",
      nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "linear",
      [](int num_threads, const std::string& isa, const std::string& type, uintptr_t x, int64_t x_stride,
         uintptr_t packed, uintptr_t bias, uintptr_t y, int64_t y_stride, const std::string& y_type, int64_t rows,
         int64_t n, int64_t k) {
        const auto& kernels = kernels_of<LinearKernels>(isa);
        const LinearArgs args{at<void>(x), at<void>(packed), at<float>(bias), at<void>(y),    rows,
                              n,           k,                x_stride,        y_stride,       type_of(y_type)};
        const auto run = type_of(type) == Type::bf16 ? kernels.bf16 : kernels.f32;
        submit(num_threads, args, {&LinearArgs::rows}, run);
      },
      "y[rows, n] = x[rows, k] @ w.T (+ bias), packed weights; bias 0 for none.",
      nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace quire::cpu
