// Norms of one ISA level: the sum of squares of a row, then its product with the factor and the weight. Bytes: each
// row read once from memory (then from L1) and written once. Bound: bandwidth, and at batch 1 the call itself.
#include "cpu/norm.h"

#include <cmath>

#include "cpu/quantize_row.h"
#include "cpu/row_loops.h"

namespace quire::cpu::QUIRE_ISA {

namespace {

// LayerNorm without a bias. The sum is fp64, number i in chain i % 8, so that all levels have one mean.
template <typename V, typename T>
void center_and_scale(const V* values, const float* weight, T* y, int64_t size, float eps) {
  float* row = scratch_row<float, 4>(size);
  double sums[8] = {};
  over_vectors(size, [&](int64_t j, int n) { store_some(row + j, load_some(values + j, n), n); });
  for (int64_t j = 0; j + 8 <= size; j += 8) {
    for (int c = 0; c < 8; ++c) sums[c] += row[j + c];
  }
  for (int64_t j = size / 8 * 8; j < size; ++j) sums[j % 8] += row[j];
  const double sum = ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
  const Vec mean = broadcast(static_cast<float>(sum / static_cast<double>(size)));
  over_vectors(size, [&](int64_t j, int n) { store_some(row + j, sub(load_some(row + j, n), mean), n); });
  const Vec scale = broadcast(1.0f / std::sqrt(sum_of_squares(row, size) / static_cast<float>(size) + eps));
  over_vectors(size, [&](int64_t j, int n) {
    store_some(y + j, mul(mul(load_some(row + j, n), scale), load_some(weight + j, n)), n);
  });
}

// R, S: of the residual and of the sum.
template <typename T, typename R, typename S>
void norm_rows(const NormArgs& a, ThreadPool& pool) {
  over_rows(a.tokens * a.heads, a.size, pool, [&](int64_t i) {
    const int64_t token = i / a.heads, head = i % a.heads;
    const T* x = static_cast<const T*>(a.x) + token * a.token_stride + head * a.head_stride;
    const float* weight = a.weight + head * a.weight_stride;
    T* y = a.rows.q == nullptr ? static_cast<T*>(a.y) + i * a.size : scratch_row<T>(a.size);
    const auto normalize = [&](const auto* values) {
      if (a.centered) {
        center_and_scale(values, weight, y, a.size, a.eps);
      } else {
        const float square = sum_of_squares(values, a.size);
        const Vec scale = broadcast(1.0f / std::sqrt(square / static_cast<float>(a.size) + a.eps));
        over_vectors(a.size, [&](int64_t j, int n) {
          store_some(y + j, mul(mul(load_some(values + j, n), scale), load_some(weight + j, n)), n);
        });
      }
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
