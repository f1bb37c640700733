// Low-rank adapters.
#include "bind.h"
#include "cpu/lora.h"

#include <array>
#include <algorithm>

#include <nanobind/stl/array.h>

namespace nb = nanobind;

namespace quire::cpu {

void bind_lora(nb::module_& m) {
  m.def(
      "add_lora",
      [](int num_threads, const std::string& isa, bool bf16, uintptr_t x, int64_t x_stride, uintptr_t y,
         int64_t y_stride, uintptr_t h, uintptr_t a, uintptr_t b, uintptr_t order, uintptr_t starts, uintptr_t ranks,
         uintptr_t scales, uintptr_t gained, uintptr_t gains, uintptr_t offsets, int64_t rows, int64_t k,
         int64_t num_slots, int64_t num_parts, int64_t max_rank,
         const std::array<int64_t, kMaxLoraParts>& widths) {
        LoraArgs args{at<void>(x),         at<void>(y),         at<void>(h),         at<void>(a),
                      at<void>(b),         at<int64_t>(order),  at<int64_t>(starts), at<int64_t>(ranks),
                      at<float>(scales),   at<int64_t>(gained), at<float>(gains),    at<float>(offsets),
                      rows,                k,                   num_slots,           num_parts,
                      max_rank,            {},                  x_stride,            y_stride,
                      type_of(bf16)};
        std::copy(widths.begin(), widths.end(), args.widths);
        submit(num_threads, args, {&LoraArgs::rows}, kernels_of<LoraKernels>(isa).add);
      },
      "y[order] += B (scale * A x[order]) with the adapter of each group of rows (cpu/lora.h).",
      nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace quire::cpu
