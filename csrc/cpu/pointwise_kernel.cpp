// Pointwise ops of one ISA level: one pass over the rows, one rounding at the end. Bytes: each row read and written
// once. Bound: cache or memory bandwidth.
#include "cpu/pointwise.h"

#include "cpu/row_loops.h"
#include "cpu/vec_math.h"

namespace quire::cpu::QUIRE_ISA {

namespace {

template <typename X, typename T>
void add_rows_of(const PointwiseArgs& a, ThreadPool& pool) {
  over_rows(a.rows, a.size, pool, [&](int64_t i) {
    const X* x = static_cast<const X*>(a.x) + i * a.stride;
    const T* other = static_cast<const T*>(a.other) + i * a.other_stride;
    T* y = static_cast<T*>(a.y) + i * a.size;
    over_vectors(a.size, [&](int64_t j, int n) {
      store_some(y + j, add(load_some(x + j, n), load_some(other + j, n)), n);
    });
  });
}

template <typename T>
void add_rows(const PointwiseArgs& a, ThreadPool& pool) {
  a.x_type == a.type ? add_rows_of<T, T>(a, pool) : add_rows_of<float, T>(a, pool);
}

template <typename T>
void scale_rows(const PointwiseArgs& a, ThreadPool& pool) {
  const Vec scale = broadcast(a.scale), cap = broadcast(a.cap);
  over_rows(a.rows, a.size * 8, pool, [&](int64_t i) {
    const T* x = static_cast<const T*>(a.x) + i * a.stride;
    T* y = static_cast<T*>(a.y) + i * a.size;
    over_vectors(a.size, [&](int64_t j, int n) {
      const Vec scaled = mul(load_some(x + j, n), scale);
      store_some(y + j, a.cap == 0.0f ? scaled : mul(tanh(div(scaled, cap)), cap), n);
    });
  });
}

template <typename T>
void copy_heads(const CopyArgs& a, ThreadPool& pool) {
  over_rows(a.tokens, a.heads * a.size, pool, [&](int64_t i) {
    const T* x = static_cast<const T*>(a.x) + i * a.x_token_stride;
    T* y = static_cast<T*>(a.y) + i * a.y_token_stride;
    for (int64_t h = 0; h < a.heads; ++h) {
      std::copy_n(x + h * a.x_head_stride, a.size, y + h * a.y_head_stride);
    }
  });
}

template <typename T>
void widen_rows(const WidenArgs& a, ThreadPool& pool) {
  over_rows(a.rows, a.size, pool, [&](int64_t i) {
    const T* x = static_cast<const T*>(a.x) + i * a.stride;
    over_vectors(a.size, [&](int64_t j, int n) { store_some(a.y + i * a.size + j, load_some(x + j, n), n); });
  });
}

template <typename T>
void add_gated_rows(const AddGatedArgs& a, ThreadPool& pool) {
  over_rows(a.rows, a.size, pool, [&](int64_t i) {
    const T* x = static_cast<const T*>(a.x) + i * a.stride;
    const T* other = static_cast<const T*>(a.other) + i * a.other_stride;
    T gate[kLanes];
    std::fill_n(gate, kLanes, static_cast<const T*>(a.gate)[i * a.gate_stride]);
    const Vec factor = sigmoid(load(gate));
    T* y = static_cast<T*>(a.y) + i * a.size;
    over_vectors(a.size, [&](int64_t j, int n) {
      T rounded[kLanes];  // the shared expert's rows are of the type, behind its gate too
      store(rounded, mul(load_some(other + j, n), factor));
      store_some(y + j, add(load_some(x + j, n), load(rounded)), n);
    });
  });
}

template <typename T>
void gate_rows(const GateRowsArgs& a, ThreadPool& pool) {
  const auto factor = [&](Vec gate) { return a.plain ? gate : sigmoid(gate); };
  over_rows(a.rows, a.size * 8, pool, [&](int64_t i) {
    const T* x = static_cast<const T*>(a.x) + i * a.stride;
    const T* gate = static_cast<const T*>(a.gate) + i * a.gate_stride;
    T* y = static_cast<T*>(a.y) + i * a.size;
    if (a.per == 1) {
      over_vectors(a.size, [&](int64_t j, int n) {
        store_some(y + j, mul(load_some(x + j, n), factor(load_some(gate + j, n))), n);
      });
      return;
    }
    for (int64_t head = 0; head * a.per < a.size; ++head) {
      T same[kLanes];
      std::fill_n(same, kLanes, gate[head]);
      const Vec of_head = factor(load(same));
      const int64_t first = head * a.per;
      over_vectors(a.per, [&](int64_t j, int n) {
        store_some(y + first + j, mul(load_some(x + first + j, n), of_head), n);
      });
    }
  });
}

}  // namespace

extern const PointwiseKernels kPointwise;
const PointwiseKernels kPointwise = {by_type<PointwiseArgs, add_rows<float>, add_rows<uint16_t>>,
                                     by_type<PointwiseArgs, scale_rows<float>, scale_rows<uint16_t>>,
                                     by_type<CopyArgs, copy_heads<float>, copy_heads<uint16_t>>,
                                     by_type<WidenArgs, widen_rows<float>, widen_rows<uint16_t>>,
                                     by_type<AddGatedArgs, add_gated_rows<float>, add_gated_rows<uint16_t>>,
                                     by_type<GateRowsArgs, gate_rows<float>, gate_rows<uint16_t>>};

}  // namespace quire::cpu::QUIRE_ISA
