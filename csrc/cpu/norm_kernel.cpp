// RMSNorm of one ISA level. Reads its rows once from memory (then from L1) and writes once: bound by bandwidth, and at
// batch 1 by the call itself.
#include "cpu/norm.h"

#include <cmath>

#include "cpu/quantize_row.h"
#include "cpu/row_loops.h"

namespace quire::cpu::QUIRE_ISA {

namespace {

template <typename T>
void norm(const NormArgs& a, ThreadPool& pool) {
  over_rows(a.tokens * a.heads, a.size, pool, [&](int64_t i) {
    const int64_t token = i / a.heads, head = i % a.heads;
    const T* x = static_cast<const T*>(a.x) + token * a.token_stride + head * a.head_stride;
    const float* weight = a.weight + head * a.weight_stride;
    T* y = a.rows.q == nullptr ? static_cast<T*>(a.y) + i * a.size : scratch_row<T>(a.size);
    if (a.residual != nullptr) {
      const T* residual = static_cast<const T*>(a.residual) + i * a.residual_stride;
      T* total = static_cast<T*>(a.sum) + i * a.size;
      over_vectors(a.size, [&](int64_t j, int n) {
        store_some(total + j, add(load_some(residual + j, n), load_some(x + j, n)), n);
      });
      x = total;
    }
    Vec squares[4] = {zero(), zero(), zero(), zero()};  // element j is in chain j / kLanes % 4
    for (int64_t first = 0; first < a.size; first += 4 * kLanes) {
      UNROLL for (int c = 0; c < 4; ++c) {
        const int64_t j = first + c * kLanes;
        if (j >= a.size) break;
        const Vec v = load_some(x + j, static_cast<int>(std::min<int64_t>(kLanes, a.size - j)));
        squares[c] = fma(v, v, squares[c]);
      }
    }
    const float square = QUIRE_ISA::sum(add(add(squares[0], squares[1]), add(squares[2], squares[3])));
    const Vec scale = broadcast(1.0f / std::sqrt(square / static_cast<float>(a.size) + a.eps));
    over_vectors(a.size, [&](int64_t j, int n) {
      store_some(y + j, mul(mul(load_some(x + j, n), scale), load_some(weight + j, n)), n);
    });
    if (a.rows.q != nullptr) quantize_row(y, a.size, a.group, a.rows, i);
  });
}

}  // namespace

extern const NormKernels kNorm;
const NormKernels kNorm = {by_type<NormArgs, norm<float>, norm<uint16_t>>};

}  // namespace quire::cpu::QUIRE_ISA
