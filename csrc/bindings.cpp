// The Python face of the native extension: raw pointers and plain values, no torch headers.
#include <nanobind/stl/vector.h>

#include "bind.h"
#include "cpu/checksum.h"
#include "cpu/cpuid.h"
#include "cpu/crc32.h"

namespace nb = nanobind;
using namespace quire::cpu;

NB_MODULE(_native, m) {
  m.doc() = "Quire's native kernels.";
  m.def(
      "cpu_features",
      [] {
        const Features f = detect();
        nb::dict d;
        d["avx2"] = f.avx2;
        d["avx_vnni"] = f.avx_vnni;
        d["avx512"] = f.avx512;
        d["avx512_vnni"] = f.avx512_vnni;
        d["avx512_bf16"] = f.avx512_bf16;
        d["amx_tile"] = f.amx_tile;
        d["amx_int8"] = f.amx_int8;
        d["amx_bf16"] = f.amx_bf16;
        d["pclmul"] = crc::has_products();
        d["vpclmulqdq"] = crc::has_wide_products();
        d["amx_emulated"] = f.amx_emulated;
        d["neon"] = f.neon;
        d["neon_dotprod"] = f.neon_dotprod;
        d["neon_i8mm"] = f.neon_i8mm;
        d["neon_bf16"] = f.neon_bf16;
        return d;
      },
      "Instruction sets that the CPU has and the operating system supports: dict[str, bool].");
  m.def(
      "best_isa", [] { return std::string(best_isa(detect())); },
      "The best level the kernels are built for: amx | avx512 | avx512_vnni | avx512_bw | avx2 | neon_i8mm | neon | "
      "scalar.");

  m.def(
      "has_isa", [](const std::string& isa) { return kernels_for<LinearKernels>(isa.c_str()) != nullptr; },
      "Whether this build and CPU can run a level.");

  m.def("place_threads", &place_threads,
        "The CPUs that the threads of pools made from now on are pinned to, the caller's first.");

  m.def(
      "checksum", [](uintptr_t address, uint64_t size) { return checksum(at<uint8_t>(address), size); },
      "XXH64 of memory, with seed 0.", nb::call_guard<nb::gil_scoped_release>());

  m.def(
      "crc32",
      [](nb::handle data, uint32_t value, int bits) {
        Py_buffer view;
        if (PyObject_GetBuffer(data.ptr(), &view, PyBUF_SIMPLE) != 0) nb::raise_python_error();
        {
          nb::gil_scoped_release released;
          value = crc32(static_cast<const uint8_t*>(view.buf), uint64_t(view.len), value, bits);
        }
        PyBuffer_Release(&view);
        return value;
      },
      "CRC-32 of bytes, as zlib's, with registers of up to `bits`: quick with the feature `pclmul`.", nb::arg(),
      nb::arg() = 0, nb::arg() = 512);

  bind_linear(m);
  bind_quantized(m);
  bind_norm(m);
  bind_rows(m);
  bind_attention(m);
  bind_pointwise(m);
  bind_sampling(m);
  bind_moe(m);
  bind_tape(m);
  bind_lora(m);
  bind_recurrent(m);
  bind_probe(m);
  bind_collective(m);
}
