// RMSNorm of one ISA level: the sum of squares of a row, then its product with the factor and the weight. Bytes: each
// row read once from memory (then from L1) and written once. Bound: bandwidth, and at batch 1 the call itself.
#include "cpu/norm.h"

#include <cmath>

#include "cpu/quantize_row.h"
#include "cpu/row_loops.h"

namespace quire::cpu::QUIRE_ISA {

namespace {

// R, S: of the residual and of the sum.
template <typename T, typename R, typename S>
void norm_rows(const NormArgs& a, ThreadPool& pool) {
  over_rows(a.tokens * a.heads, a.size, pool, [&](int64_t i) {
    const int64_t token = i / a.heads, head = i % a.heads;
    const T* x = static_cast<const T*>(a.x) + token * a.token_stride + head * a.head_stride;
    const float* weight = a.weight + head * a.weight_stride;
    T* y = a.rows.q == nullptr ? static_cast<T*>(a.y) + i * a.size : scratch_row<T>(a.size);
    const auto normalize = [&](const auto* values) {
      const float square = sum_of_squares(values, a.size);
      const Vec scale = broadcast(1.0f / std::sqrt(square / static_cast<float>(a.size) + a.eps));
      over_vectors(a.size, [&](int64_t j, int n) {
        store_some(y + j, mul(mul(load_some(values + j, n), scale), load_some(weight + j, n)), n);
      });
      if (a.rows.q != nullptr) quantize_row(y, a.size, a.format, a.rows, i);
    };
    if (a.residual == nullptr) return normalize(x);
    const R* residual = static_cast<const R*>(a.residual) + i * a.residual_stride;
    S* total = static_cast<S*>(a.sum) + i * a.size;
    over_vectors(a.size, [&](int64_t j, int n) {
      store_some(total + j, add(load_some(residual + j, n), load_some(x + j, n)), n);
    });
    normalize(total);
  });
}

template <typename T>
void norm(const NormArgs& a, ThreadPool& pool) {
  if (a.residual != nullptr && a.residual_type == Type::f32) return norm_rows<T, float, float>(a, pool);
  if (a.residual != nullptr && a.sum_type == Type::f32) return norm_rows<T, T, float>(a, pool);
  norm_rows<T, T, T>(a, pool);
}

}  // namespace

extern const NormKernels kNorm;
const NormKernels kNorm = {by_type<NormArgs, norm<float>, norm<uint16_t>>};

}  // namespace quire::cpu::QUIRE_ISA
