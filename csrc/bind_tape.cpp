// Recording and replaying native calls.
#include "bind.h"

namespace nb = nanobind;

namespace quire::cpu {

void bind_tape(nb::module_& m) {
  nb::class_<Tape>(m, "Tape", "Native calls of one thread, recorded between start and stop.")
      .def(nb::init<>())
      .def("start", &Tape::start, "Record the native calls that this thread makes from now on, beside running them.")
      .def("stop", &Tape::stop, "End the recording.")
      .def("run", &Tape::run, "Run the recorded calls again, in order, with the memory that they were made with.",
           nb::arg("num_threads"), nb::call_guard<nb::gil_scoped_release>())
      .def("__len__", &Tape::size);
}

}  // namespace quire::cpu
