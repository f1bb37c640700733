// Recording and replaying native calls.
#include "bind.h"

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
}

}  // namespace quire::cpu
