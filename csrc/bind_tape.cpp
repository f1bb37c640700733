// Recording and replaying native calls, and chains of replays.
#include <nanobind/stl/array.h>

#include "bind.h"
#include "draft_chain.h"

namespace nb = nanobind;

namespace quire::cpu {

void bind_tape(nb::module_& m) {
  nb::class_<Tape>(m, "Tape", "The native calls of a step, recorded once and replayed for every step.")
      .def(nb::init<>())
      .def(
          "start",
          [](Tape& tape, int64_t tokens, int64_t logits) { tape.start({tokens, logits}); },
          "Record the native calls that this thread makes from now on, and do not run them. The numbers are those of the "
          "largest step, different.",
          nb::arg("tokens"), nb::arg("logits"))
      .def("stop", &Tape::stop, "End the recording.")
      .def(
          "run",
          [](const Tape& tape, int num_threads, int64_t tokens, int64_t logits) {
            tape.run(num_threads, {tokens, logits});
          },
          "Run the recorded calls, in order, with the memory that they were made with.", nb::arg("num_threads"),
          nb::arg("tokens"), nb::arg("logits"), nb::call_guard<nb::gil_scoped_release>())
      .def(
          "run_timed",
          [](const Tape& tape, int num_threads, int64_t tokens, int64_t logits) {
            nb::list calls;
            for (const auto& [what, seconds] : tape.run_timed(num_threads, {tokens, logits})) {
              calls.append(nb::make_tuple(what, seconds));
            }
            return calls;
          },
          "Run them and return (mangled name of the op's arguments, seconds) of each, for benchmarks.",
          nb::arg("num_threads"), nb::arg("tokens"), nb::arg("logits"))
      .def("__len__", &Tape::size);
  nb::class_<DraftChain>(m, "DraftChain", "Drafts one after another: recorded steps with sampling between them.")
      .def(
          "__init__",
          [](DraftChain* chain, const Tape& tape, const std::string& isa, std::array<uintptr_t, 9> step,
             int64_t max_tokens, int64_t max_blocks, int64_t block_size, int64_t lag, uintptr_t logits, int64_t vocab,
             int64_t draft_vocab, uintptr_t ids, uintptr_t slots, uintptr_t found, uintptr_t hidden,
             int64_t row_bytes) {
            std::array<int64_t*, 9> of{};
            for (size_t i = 0; i < of.size(); ++i) of[i] = at<int64_t>(step[i]);
            const DraftChainArgs args{of[0],      of[1], of[2], of[3], of[4], of[5], of[6], of[7], of[8], max_tokens,
                                      max_blocks, block_size, lag, at<const float>(logits), vocab, draft_vocab,
                                      at<const int64_t>(ids), at<int64_t>(slots), at<const char>(found),
                                      at<char>(hidden), row_bytes};
            new (chain) DraftChain(tape, kernels_of<SamplingKernels>(isa), args);
          },
          "step: addresses of input_ids, positions, slot_blocks, slot_offsets, cu_seqlens, seq_lens, logits_indices, "
          "the number of sequences and the block table.",
          nb::keep_alive<1, 2>())
      .def(
          "run",
          [](const DraftChain& chain, int num_threads, uintptr_t token_ids, int64_t max_tokens, uintptr_t block_table,
             int64_t max_blocks, uintptr_t columns, uintptr_t chains, int64_t num, uintptr_t spread,
             uintptr_t drafts) {
            const SeqTables seqs{at<const int32_t>(token_ids), max_tokens, at<const int32_t>(block_table), max_blocks,
                                 at<const SampleRow>(columns)};
            chain.run(num_threads, seqs, at<const Chain>(chains), num, at<float>(spread), at<int64_t>(drafts));
          },
          "chains: int64 (row, start, end, count) of each, counts descending; drafts: as many for each as the first "
          "wants.",
          nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace quire::cpu
