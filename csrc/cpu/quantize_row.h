// One row of activations to int8 (the contract: kernels/quantized_rows.py). An op that has just written a row calls
// this while it is in L1.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <vector>

#include "cpu/int_vec.h"
#include "cpu/quantized.h"
#include "cpu/rotate.h"
#include "cpu/row_loops.h"

namespace quire::cpu::QUIRE_ISA {

constexpr float kSmallest = 0x1p-100f;
// Bits of fp32: of 2^-100, of 2^100, of NaN, and those that the scale of a block may have, 22 of 24.
constexpr uint32_t kSmallestBits = 0x0d800000, kLargestBits = 0x71800000, kNanBits = 0x7fc00000, kScaleBits = ~3u;

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

// q = x times the inverse of its scale, rounded, and zeros up to the stride. inverse_of(i): of input i and its vector.
template <typename T, typename F>
inline void round_row(const T* x, int64_t k, int8_t* q, int64_t stride, const F& inverse_of) {
  const auto scaled = [&](int64_t i) { return mul(load(x + i), broadcast(inverse_of(i))); };
  constexpr int64_t kFour = 4 * kLanes;
  int64_t i = 0;
  for (; i + kFour <= k; i += kFour) {
    store_rounded(q + i, scaled(i), scaled(i + kLanes), scaled(i + 2 * kLanes), scaled(i + 3 * kLanes));
  }
  std::fill(q + i, q + stride, int8_t{0});
  over_vectors(k - i, [&](int64_t j, int n) {
    int8_t padded[kLanes];
    store_rounded(padded, mul(load_some(x + i + j, n), broadcast(inverse_of(i + j))));
    std::copy(padded, padded + n, q + i + j);
  });
}

// Of a whole row, whose padding is zeros and whole vectors.
inline int32_t sum_row(const int8_t* q, int64_t stride) {
  IVec total = broadcast(int32_t{0});
  for (int64_t i = 0; i < stride; i += 4 * kLanes) total = add_quads(total, q + i);
  return sum(total);
}

// sums[p] = the sum of kQuads fours of inputs.
template <int64_t kQuads>
inline void sum_fours(const int32_t* fours, int64_t parts, int32_t* sums) {
  for (int64_t p = 0; p < parts; ++p, fours += kQuads) {
    int32_t total = 0;
    for (int64_t i = 0; i < kQuads; ++i) total += fours[i];
    sums[p] = total;
  }
}

// Of the parts of a row, whose padding is zeros, whole vectors and whole parts.
inline void sum_parts(const int8_t* q, int64_t stride, int64_t part, int64_t parts, int32_t* sums) {
  int32_t* fours = scratch_row<int32_t>(stride / 4);
  for (int64_t i = 0; i < stride; i += 4 * kLanes) store_ints(fours + i / 4, add_quads(broadcast(int32_t{0}), q + i));
  switch (part) {
    case 16: return sum_fours<4>(fours, parts, sums);
    case 32: return sum_fours<8>(fours, parts, sums);
    default: return sum_fours<16>(fours, parts, sums);
  }
}

// A row under one scale, to q. `x` times `factor`, a power of two, which changes no integer and is therefore left to the
// scale.
template <typename T>
inline float quantize_whole(const T* x, int64_t k, float factor, int8_t* q, int64_t stride) {
  const uint32_t top = largest_magnitude(x, k);
  float found;
  std::memcpy(&found, &top, 4);
  const float largest = found * factor;
  if (!(largest >= kSmallest && top < 0x7f800000u)) {
    std::fill(q, q + stride, int8_t{0});
    return top < 0x7f800000u ? 0.0f : NAN;
  }
  const float inverse = 127.0f / found;
  round_row(x, k, q, stride, [&](int64_t) { return inverse; });
  return largest / 127.0f;
}

// A row with a scale for every kBlock inputs. Loops over blocks are plain and without branches: compilers vectorize them.
template <int64_t kBlock, typename T>
inline void quantize_blocks(const T* x, int64_t k, int64_t blocks, float factor, int8_t* q, int64_t stride,
                            float* scale) {
  float* inverse = scratch_row<float, 2>(blocks);
  uint32_t* top = scratch_row<uint32_t, 3>(blocks);
  const int64_t whole = k / kBlock;
  for (int64_t b = 0; b < whole; ++b) top[b] = largest_magnitude(x + b * kBlock, kBlock);
  for (int64_t b = whole; b < blocks; ++b) top[b] = largest_magnitude(x + b * kBlock, std::max<int64_t>(0, k - b * kBlock));
  uint32_t most = 0;
  for (int64_t b = 0; b < blocks; ++b) {
    const float found = std::bit_cast<float>(top[b]), largest = found * factor;
    const uint32_t bits = std::bit_cast<uint32_t>(largest);
    const uint32_t used = bits >= kSmallestBits && bits < kLargestBits ? ~0u : 0u, nan = bits < kLargestBits ? 0u : kNanBits;
    most = std::max(most, bits);
    inverse[b] = std::bit_cast<float>(std::bit_cast<uint32_t>(127.0f / found) & used);
    scale[b] = std::bit_cast<float>((std::bit_cast<uint32_t>(largest / 127.0f) & used & kScaleBits) | nan);
  }
  round_row(x, k, q, stride, [&](int64_t i) { return inverse[i / kBlock]; });
  if (most < kLargestBits) return;
  for (int64_t b = 0; b < blocks; ++b) {
    const int64_t end = std::min((b + 1) * kBlock, stride);
    if (std::isnan(scale[b])) std::fill(q + b * kBlock, q + end, int8_t{0});
  }
}

template <typename T>
inline void quantize_scaled(const T* x, int64_t k, const RowFormat& format, float factor, const QuantizedRows& y,
                            int64_t row) {
  const int64_t blocks = format.blocks(k), parts = format.parts(k);
  int8_t* q = y.q + row * y.stride;
  float* scale = y.scale + row * blocks;
  int32_t* sums = y.sums + row * parts;
  switch (format.block) {
    case 0: *scale = quantize_whole(x, k, factor, q, y.stride); break;
    case 32: quantize_blocks<32>(x, k, blocks, factor, q, y.stride, scale); break;
    default: quantize_blocks<64>(x, k, blocks, factor, q, y.stride, scale);
  }
  if (format.group == 0) {
    *sums = sum_row(q, y.stride);
  } else {
    sum_parts(q, y.stride, format.part(), parts, sums);
  }
}

template <typename T>
inline void quantize_row(const T* x, int64_t k, const RowFormat& format, const QuantizedRows& y, int64_t row) {
  if (format.rotation == 0) return quantize_scaled(x, k, format, 1.0f, y, row);
  float* rotated = scratch_row<float, 1>(k);
  rotate(x, k, format.rotation, rotated);
  quantize_scaled(rotated, k, format, row_factor(format.rotation), y, row);
}

}  // namespace quire::cpu::QUIRE_ISA
