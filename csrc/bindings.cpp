// The Python face of the native extension: raw pointers and plain values, no torch headers.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <map>
#include <memory>
#include <mutex>

#include "cpu/attention.h"
#include "cpu/cpuid.h"
#include "cpu/linear.h"
#include "cpu/rows.h"
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

template <typename Kernels>
const Kernels& kernels_of(const std::string& isa) {
  const Kernels* kernels = kernels_for<Kernels>(isa.c_str());
  if (kernels == nullptr) throw std::invalid_argument("this CPU or build has no kernels for " + isa);
  return *kernels;
}

Type type_of(bool bf16) { return bf16 ? Type::bf16 : Type::f32; }

void bind_rows(nb::module_& m) {
  m.def(
      "rms_norm",
      [](int num_threads, const std::string& isa, bool bf16, uintptr_t x, int64_t token_stride, int64_t head_stride,
         uintptr_t residual, int64_t residual_stride, uintptr_t weight, int64_t weight_stride, float eps, uintptr_t y,
         uintptr_t sum, int64_t tokens, int64_t heads, int64_t size) {
        const NormArgs args{at<void>(x),  at<void>(residual), at<float>(weight), at<void>(y),   at<void>(sum),
                            tokens,       heads,              size,              token_stride,  head_stride,
                            residual_stride, weight_stride,   eps,               type_of(bf16)};
        const PoolLease pool(num_threads);
        kernels_of<RowKernels>(isa).norm(args, pool.get());
      },
      "RMSNorm of rows (token, head); with residual (else 0) of x + residual, which goes to sum.",
      nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "gated",
      [](int num_threads, const std::string& isa, bool bf16, int gate, uintptr_t gate_up, int64_t stride, uintptr_t y,
         int64_t tokens, int64_t size) {
        if (gate < 0 || gate > 3) throw std::invalid_argument("gate must be 0 ... 3");
        const GatedArgs args{at<void>(gate_up), at<void>(y), tokens, size, stride, Gate(gate), type_of(bf16)};
        const PoolLease pool(num_threads);
        kernels_of<RowKernels>(isa).gated(args, pool.get());
      },
      "act(gate) * up; gate: 0 silu, 1 gelu_tanh, 2 gelu, 3 swiglu_oai.", nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "rope",
      [](int num_threads, const std::string& isa, bool bf16, bool interleaved, uintptr_t x, int64_t token_stride,
         int64_t head_stride, uintptr_t cos, uintptr_t sin, uintptr_t y, int64_t tokens, int64_t heads,
         int64_t head_dim, int64_t half) {
        const RopeArgs args{at<void>(x), at<float>(cos), at<float>(sin), at<void>(y), tokens,      heads,
                            head_dim,    half,           token_stride,   head_stride, interleaved, type_of(bf16)};
        const PoolLease pool(num_threads);
        kernels_of<RowKernels>(isa).rope(args, pool.get());
      },
      "Rotate the first 2 * half elements of every head.", nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "store_kv",
      [](int num_threads, const std::string& isa, bool bf16, bool pieces_bf16, uintptr_t k, int64_t k_token_stride,
         int64_t k_head_stride, uintptr_t v, int64_t v_token_stride, int64_t v_head_stride, uintptr_t pieces,
         int64_t block_stride, int64_t piece_stride, uintptr_t block_ids, uintptr_t offsets, int64_t tokens,
         int64_t heads, int64_t head_dim, int64_t v_head_dim, int64_t block_size) {
        const StoreArgs args{at<void>(k),    at<void>(v),    at<void>(pieces), at<int64_t>(block_ids),
                             at<int64_t>(offsets), tokens,   heads,            head_dim,
                             v_head_dim,     block_size,     k_token_stride,   k_head_stride,
                             v_token_stride, v_head_stride,  block_stride,     piece_stride,
                             type_of(bf16),  type_of(pieces_bf16)};
        const PoolLease pool(num_threads);
        kernels_of<RowKernels>(isa).store(args, pool.get());
      },
      "Write rows of K and V (0 where it is in K) into the pages.", nb::call_guard<nb::gil_scoped_release>());
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
      "has_isa", [](const std::string& isa) { return kernels_for<LinearKernels>(isa.c_str()) != nullptr; },
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
        const auto& kernels = kernels_of<LinearKernels>(isa);
        const LinearArgs args{at<void>(x), at<void>(packed), at<float>(bias), at<void>(y),    rows,
                              n,           k,                x_stride,        y_stride,       type_of(y_type)};
        const PoolLease pool(num_threads);
        (type_of(type) == Type::bf16 ? kernels.bf16 : kernels.f32)(args, pool.get());
      },
      "y[rows, n] = x[rows, k] @ w.T (+ bias), packed weights; bias 0 for none.",
      nb::call_guard<nb::gil_scoped_release>());

  bind_rows(m);
  m.def(
      "attention",
      [](int num_threads, const std::string& isa, bool q_bf16, bool kv_bf16, uintptr_t q, int64_t q_stride,
         uintptr_t pieces, int64_t block_stride, int64_t piece_stride, uintptr_t sinks, uintptr_t y,
         uintptr_t cu_seqlens_q, uintptr_t seq_lens, uintptr_t block_table, int64_t num_seqs, int64_t table_width,
         int64_t num_heads, int64_t num_kv_heads, int64_t head_dim, int64_t v_head_dim, int64_t block_size,
         int64_t window, float scale, float cap, bool v_in_k) {
        const AttentionArgs args{
            at<void>(q),      at<void>(pieces),         at<float>(sinks), at<void>(y),  at<int64_t>(cu_seqlens_q),
            at<int64_t>(seq_lens), at<int64_t>(block_table), num_seqs,    table_width,  num_heads,
            num_kv_heads,     head_dim,                 v_head_dim,       block_size,   q_stride,
            block_stride,     piece_stride,             window,           scale,        cap,
            v_in_k,           type_of(q_bf16),          type_of(kv_bf16)};
        const PoolLease pool(num_threads);
        kernels_of<AttentionKernels>(isa).attention(args, pool.get());
      },
      "Attention over pages, see kernels/attention; window, cap and sinks 0 for none.",
      nb::call_guard<nb::gil_scoped_release>());
}
