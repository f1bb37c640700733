// Sampling of tokens, log-probabilities.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include "bind.h"
#include "cpu/sampling.h"

namespace nb = nanobind;

namespace quire::cpu {

void bind_sampling(nb::module_& m) {
  m.attr("sample_row_bytes") = sizeof(SampleRow);
  m.def(
      "sample",
      [](int num_threads, const std::string& isa, uintptr_t logits, int64_t stride,
         const std::vector<std::pair<int64_t, uintptr_t>>& edited, uintptr_t columns, int64_t rows, int64_t vocab,
         uint32_t purpose, uintptr_t ids, uintptr_t best) {
        std::vector<const float*> from(static_cast<std::size_t>(rows));
        for (int64_t row = 0; row < rows; ++row) from[std::size_t(row)] = at<const float>(logits) + row * stride;
        for (const auto& [row, changed] : edited) from.at(std::size_t(row)) = at<const float>(changed);
        const SampleArgs args{from.data(), at<SampleRow>(columns), rows, vocab, purpose, at<int64_t>(ids), at<float>(best)};
        const PoolLease pool(num_threads);
        kernels_of<SamplingKernels>(isa).sample(args, pool.get());
      },
      "One token per row; edited: (row, address of what stands in for it), columns: records of "
      "kernels/sampling/__init__.py.",
      nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "logprobs",
      [](int num_threads, const std::string& isa, uintptr_t logits, uintptr_t chosen, uintptr_t num_top, int64_t rows,
         int64_t vocab, int64_t width, uintptr_t logprobs, uintptr_t ranks, uintptr_t top_ids,
         uintptr_t top_logprobs) {
        const LogprobArgs args{at<const float*>(logits), at<int64_t>(chosen), at<int64_t>(num_top), rows, vocab, width,
                               at<double>(logprobs),     at<int64_t>(ranks),  at<int64_t>(top_ids),
                               at<double>(top_logprobs)};
        const PoolLease pool(num_threads);
        kernels_of<SamplingKernels>(isa).logprobs(args, pool.get());
      },
      "Logprob and rank of the chosen id of each row, and its most likely ids.",
      nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace quire::cpu
