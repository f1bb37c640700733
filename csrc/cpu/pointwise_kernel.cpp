// One pass over the rows, one rounding at the end: bound by cache or memory bandwidth.
#include "cpu/pointwise.h"

#include "cpu/row_loops.h"
#include "cpu/vec_math.h"

namespace quire::cpu::QUIRE_ISA {

namespace {

template <typename T>
void add_rows(const PointwiseArgs& a, ThreadPool& pool) {
  over_rows(a.rows, a.size, pool, [&](int64_t i) {
    const T* x = static_cast<const T*>(a.x) + i * a.stride;
    const T* other = static_cast<const T*>(a.other) + i * a.other_stride;
    T* y = static_cast<T*>(a.y) + i * a.size;
    over_vectors(a.size, [&](int64_t j, int n) {
      store_some(y + j, add(load_some(x + j, n), load_some(other + j, n)), n);
    });
  });
}

template <typename T>
void scale_rows(const PointwiseArgs& a, ThreadPool& pool) {
  const Vec scale = broadcast(a.scale), cap = broadcast(a.cap);
  over_rows(a.rows, a.size * 4, pool, [&](int64_t i) {
    const T* x = static_cast<const T*>(a.x) + i * a.stride;
    T* y = static_cast<T*>(a.y) + i * a.size;
    over_vectors(a.size, [&](int64_t j, int n) {
      const Vec scaled = mul(load_some(x + j, n), scale);
      store_some(y + j, a.cap == 0.0f ? scaled : mul(tanh(div(scaled, cap)), cap), n);
    });
  });
}

}  // namespace

extern const PointwiseKernels kPointwise;
const PointwiseKernels kPointwise = {by_type<PointwiseArgs, add_rows<float>, add_rows<uint16_t>>,
                                     by_type<PointwiseArgs, scale_rows<float>, scale_rows<uint16_t>>};

}  // namespace quire::cpu::QUIRE_ISA
