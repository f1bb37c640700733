// The Python face of the native extension: raw pointers and plain values, no torch headers.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <map>
#include <memory>
#include <mutex>

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

// The compute threads of this process, as many pools as there are thread counts in use: threads belong to the machine,
// not to an engine. A lease is exclusive, so that two engines in one process take turns.
class PoolLease {
 public:
  explicit PoolLease(int num_threads) : entry_(find(num_threads)), lock_(entry_.mutex) {}
  ThreadPool& get() const { return entry_.pool; }

 private:
  struct Entry {
    explicit Entry(int num_threads) : pool(num_threads, true) {}
    mutable ThreadPool pool;
    mutable std::mutex mutex;
  };

  static const Entry& find(int num_threads) {
    static std::mutex mutex;
    // Never destroyed: at exit the threads may be parked in a process that is already half gone.
    static auto* pools = new std::map<int, std::unique_ptr<Entry>>;
    const std::lock_guard<std::mutex> lock(mutex);
    std::unique_ptr<Entry>& entry = (*pools)[num_threads];
    if (entry == nullptr) entry = std::make_unique<Entry>(num_threads);
    return *entry;
  }

  const Entry& entry_;
  std::lock_guard<std::mutex> lock_;
};

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

  m.def(
      "has_isa", [](const std::string& isa) { return linear_kernels(isa.c_str()) != nullptr; },
      "Whether this build and CPU can run a level.");
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
        const LinearKernels& kernels = kernels_of(isa);
        const LinearArgs args{at<void>(x), at<void>(packed), at<float>(bias), at<void>(y),    rows,
                              n,           k,                x_stride,        y_stride,       type_of(y_type)};
        const PoolLease pool(num_threads);
        (type_of(type) == Type::bf16 ? kernels.bf16 : kernels.f32)(args, pool.get());
      },
      "y[rows, n] = x[rows, k] @ w.T (+ bias), packed weights; bias 0 for none.",
      nb::call_guard<nb::gil_scoped_release>());
}
