// One row of activations to int8 (the contract: kernels/quantized_rows.py). An op that has just written a row calls this
// while it is in L1.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "cpu/int_vec.h"
#include "cpu/quantized.h"
#include "cpu/row_loops.h"

namespace quire::cpu::QUIRE_ISA {

constexpr float kSmallest = 0x1p-100f;

// Where a row lies that is only written to be quantized.
template <typename T>
inline T* scratch_row(int64_t size) {
  thread_local std::vector<T> row;
  if (static_cast<int64_t>(row.size()) < size) row.resize(size);
  return row.data();
}

inline void sum_groups(const int8_t* q, int64_t k, int64_t group, int32_t* sums) {
  const int64_t size = group == 0 ? k : group;
  for (int64_t first = 0; first < k; first += size) {
    const int64_t last = std::min(k, first + size);
    int32_t total = 0;
    for (int64_t i = first; i < last; ++i) total += q[i];
    *sums++ = total;
  }
}

template <typename T>
inline void quantize_row(const T* x, int64_t k, int64_t group, const QuantizedRows& y, int64_t row) {
  const int64_t groups = num_groups(k, group);
  int8_t* q = y.q + row * y.stride;
  int32_t* sums = y.sums + row * groups;
  IVec most = broadcast(int32_t{0});
  over_vectors(k, [&](int64_t i, int n) { most = max_bits(most, bits(load_some(x + i, n))); });
  const uint32_t top = largest_bits(most);
  float largest;
  std::memcpy(&largest, &top, 4);
  if (!(largest >= kSmallest && top < 0x7f800000u)) {
    std::fill(q, q + y.stride, int8_t{0});
    std::fill(sums, sums + groups, 0);
    y.scale[row] = top < 0x7f800000u ? 0.0f : NAN;
    return;
  }
  y.scale[row] = largest / 127.0f;
  const Vec inverse = broadcast(127.0f / largest);
  over_vectors(k, [&](int64_t i, int n) {
    const Vec v = mul(load_some(x + i, n), inverse);
    if (n == kLanes) {
      store_rounded(q + i, v);
    } else {
      int8_t padded[kLanes];
      store_rounded(padded, v);
      std::copy(padded, padded + n, q + i);
    }
  });
  std::fill(q + k, q + y.stride, int8_t{0});
  sum_groups(q, k, group, sums);
}

}  // namespace quire::cpu::QUIRE_ISA
