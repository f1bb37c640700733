// One row of activations to int8 (the contract: kernels/quantized_rows.py). An op that has just written a row calls
// this while it is in L1.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "cpu/int_vec.h"
#include "cpu/quantized.h"
#include "cpu/rotate.h"
#include "cpu/row_loops.h"

namespace quire::cpu::QUIRE_ISA {

constexpr float kSmallest = 0x1p-100f;

// Memory of a row that is written only to be quantized; `use` tells rows apart that are needed together.
template <typename T, int use = 0>
inline T* scratch_row(int64_t size) {
  thread_local std::vector<T> row;
  if (static_cast<int64_t>(row.size()) < size) row.resize(size);
  return row.data();
}

// The bits of the largest |x| as fp32; as integers they order infinity and NaN last. Plain loops: compilers vectorize
// them.
inline uint32_t largest_magnitude(const uint16_t* x, int64_t k) {
  uint16_t most = 0;
  for (int64_t i = 0; i < k; ++i) most = std::max<uint16_t>(most, x[i] & 0x7fff);
  return static_cast<uint32_t>(most) << 16;
}
inline uint32_t largest_magnitude(const float* x, int64_t k) {
  uint32_t most = 0;
  for (int64_t i = 0; i < k; ++i) most = std::max(most, float_bits(x[i]) & 0x7fffffffu);
  return most;
}

// Of a whole row, whose padding is zeros and whole vectors.
inline int32_t sum_row(const int8_t* q, int64_t stride) {
  IVec total = broadcast(int32_t{0});
  for (int64_t i = 0; i < stride; i += 4 * kLanes) total = add_quads(total, q + i);
  return sum(total);
}

// sums[g] = the sum of kQuads (or `quads`) fours of inputs.
template <int64_t kQuads>
inline void sum_fours(const int32_t* fours, int64_t groups, int64_t quads, int32_t* sums) {
  const int64_t count = kQuads > 0 ? kQuads : quads;
  for (int64_t g = 0; g < groups; ++g, fours += count) {
    int32_t total = 0;
    for (int64_t i = 0; i < count; ++i) total += fours[i];
    sums[g] = total;
  }
}

// Of the groups of a row, whose padding is zeros, whole vectors and whole groups.
inline void sum_groups(const int8_t* q, int64_t stride, int64_t group, int64_t groups, int32_t* sums) {
  int32_t* fours = scratch_row<int32_t>(stride / 4);
  for (int64_t i = 0; i < stride; i += 4 * kLanes) store_ints(fours + i / 4, add_quads(broadcast(int32_t{0}), q + i));
  if (group == kTwoLevelGroup) {
    sum_fours<kTwoLevelGroup / 4>(fours, groups, 0, sums);
  } else {
    sum_fours<0>(fours, groups, group / 4, sums);
  }
}

// `x` times `factor`, a power of two, which changes no integer and is therefore left to the scale.
template <typename T>
inline void quantize_scaled(const T* x, int64_t k, int64_t group, float factor, const QuantizedRows& y, int64_t row) {
  const int64_t groups = num_groups(k, group);
  int8_t* q = y.q + row * y.stride;
  int32_t* sums = y.sums + row * groups;
  const uint32_t top = largest_magnitude(x, k);
  float found;
  std::memcpy(&found, &top, 4);
  const float largest = found * factor;
  if (!(largest >= kSmallest && top < 0x7f800000u)) {
    std::fill(q, q + y.stride, int8_t{0});
    std::fill(sums, sums + groups, 0);
    y.scale[row] = top < 0x7f800000u ? 0.0f : NAN;
    return;
  }
  y.scale[row] = largest / 127.0f;
  const Vec inverse = broadcast(127.0f / found);
  const auto scaled = [&](int64_t i) { return mul(load(x + i), inverse); };
  constexpr int64_t kFour = 4 * kLanes;
  int64_t i = 0;
  for (; i + kFour <= k; i += kFour) {
    store_rounded(q + i, scaled(i), scaled(i + kLanes), scaled(i + 2 * kLanes), scaled(i + 3 * kLanes));
  }
  std::fill(q + i, q + y.stride, int8_t{0});
  over_vectors(k - i, [&](int64_t j, int n) {
    int8_t padded[kLanes];
    store_rounded(padded, mul(load_some(x + i + j, n), inverse));
    std::copy(padded, padded + n, q + i + j);
  });
  if (group == 0) {
    *sums = sum_row(q, y.stride);
  } else {
    sum_groups(q, y.stride, group, groups, sums);
  }
}

template <typename T>
inline void quantize_row(const T* x, int64_t k, const RowFormat& format, const QuantizedRows& y, int64_t row) {
  if (format.rotation == 0) return quantize_scaled(x, k, format.group, 1.0f, y, row);
  float* rotated = scratch_row<float, 1>(k);
  rotate(x, k, format.rotation, rotated);
  quantize_scaled(rotated, k, format.group, row_factor(format.rotation), y, row);
}

}  // namespace quire::cpu::QUIRE_ISA
