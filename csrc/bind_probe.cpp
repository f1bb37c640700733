// The bounds of the machine, for `quire plan --cpu`, `quire serve --slo` and benchmarks.
#include <nanobind/stl/vector.h>

#include "bind.h"
#include "cpu/probe.h"

namespace nb = nanobind;

namespace quire::cpu {

void bind_probe(nb::module_& m) {
  m.def("dot_probes", &dot_probes, "Dot instructions that this CPU has: list[str], see probe.h.");
  m.def(
      "probe_dot",
      [](int num_threads, const std::string& instruction, int passes) {
        const PoolLease pool(num_threads);
        return probe_dot(pool.get(), instruction, passes);
      },
      "Operations per second of a register-resident loop of the instruction on all threads.",
      nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "probe_read",
      [](int num_threads, int64_t num_bytes, int passes) {
        const PoolLease pool(num_threads);
        return probe_read(pool.get(), num_bytes, passes);
      },
      "Median seconds of reading num_bytes of memory once, one stream per thread.",
      nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace quire::cpu
