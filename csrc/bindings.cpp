// The Python face of the native extension: raw pointers and plain values, no torch headers.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "cpu/cpuid.h"
#include "cpu/linear.h"
#include "cpu/thread_pool.h"

namespace nb = nanobind;
using namespace quire::cpu;

namespace {

// Tensors come as addresses (torch's data_ptr()): the Python side has checked shapes, types and strides.
template <typename T>
T* at(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

Type type_of(const std::string& name) {
  if (name == "bfloat16") return Type::bf16;
  if (name == "float32") return Type::f32;
  throw std::invalid_argument("type must be bfloat16 or float32, not " + name);
}

const LinearKernels& kernels_of(const std::string& isa) {
  const LinearKernels* kernels = linear_kernels(isa.c_str());
  if (kernels == nullptr) throw std::invalid_argument("this CPU or build has no kernels for " + isa);
  return *kernels;
}

}  // namespace

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
        d["neon"] = f.neon;
        return d;
      },
      "Instruction sets that the CPU has and the operating system supports: dict[str, bool].");
  m.def(
      "best_isa", [] { return std::string(best_isa(detect())); },
      "The best level the kernels are written for: avx512 | avx2 | neon | scalar.");

  nb::class_<ThreadPool>(m, "ThreadPool", "Persistent compute threads; one caller at a time.")
      .def(nb::init<int, bool>(), nb::arg("num_threads"), nb::arg("pin") = true)
      .def_prop_ro("num_threads", &ThreadPool::num_threads);

  m.def(
      "has_isa", [](const std::string& isa) { return linear_kernels(isa.c_str()) != nullptr; },
      "Whether this build and CPU can run a level.");
  m.def(
      "packed_elements",
      [](const std::string& type, int64_t n, int64_t k) { return packed_elements(type_of(type), n, k); },
      "Elements that an [n, k] weight takes when packed.");
  m.def(
      "pack",
      [](ThreadPool& pool, const std::string& type, uintptr_t w, int64_t count, int64_t k, int64_t first,
         uintptr_t packed) { pack(type_of(type), at<void>(w), count, k, first, at<void>(packed), pool); },
      "Pack rows [first, first + count) of a weight, given as [count, k] at address w.",
      nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "linear",
      [](ThreadPool& pool, const std::string& isa, const std::string& type, uintptr_t x, int64_t x_stride,
         uintptr_t packed, uintptr_t bias, uintptr_t y, int64_t y_stride, const std::string& y_type, int64_t rows,
         int64_t n, int64_t k) {
        const LinearKernels& kernels = kernels_of(isa);
        const LinearArgs args{at<void>(x), at<void>(packed), at<float>(bias), at<void>(y),    rows,
                              n,           k,                x_stride,        y_stride,       type_of(y_type)};
        (type_of(type) == Type::bf16 ? kernels.bf16 : kernels.f32)(args, pool);
      },
      "y[rows, n] = x[rows, k] @ w.T (+ bias), packed weights; bias 0 for none.",
      nb::call_guard<nb::gil_scoped_release>());
}
