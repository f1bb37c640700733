// Rounding on load, the algorithm of quant/rtn.py. It reads 2 or 4 bytes a weight and writes 1; int8 is bound by memory,
// int4 by arithmetic: eight vector operations a weight for each of the seven places that a group's largest may take.
//
// int4 takes as many groups as a vector has lanes, one a lane, so that sums, quotients and choices of a group need
// nothing across lanes; the levels are then rounded in the weights' own order.
#include "cpu/quantize_weights.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "cpu/int_vec.h"
#include "cpu/row_loops.h"

namespace quire::cpu::QUIRE_ISA {

namespace {

constexpr float kDivisors[] = {8.0f, 7.0f, 7.4f, 7.7f, 8.3f, 8.6f, 9.0f};
constexpr float kSmallest = 0x1p-100f;
constexpr int kMaxGroup = 128, kPartials = 4;

// q[i] = x[i] * inverse rounded to even, within low ... high.
template <typename T>
void round_group(const T* x, int64_t size, float inverse, float low, float high, int8_t* q) {
  const Vec factor = broadcast(inverse), least = broadcast(low), most = broadcast(high);
  over_vectors(size, [&](int64_t i, int n) {
    const Vec v = max(least, min(most, mul(load_some(x + i, n), factor)));
    if (n == kLanes) {
      store_rounded(q + i, v);
    } else {
      int8_t padded[kLanes];
      store_rounded(padded, v);
      std::copy(padded, padded + n, q + i);
    }
  });
}

template <typename T>
void int8_group(const T* x, int64_t size, int8_t* q, float* scale) {
  IVec most = broadcast(int32_t{0});
  over_vectors(size, [&](int64_t i, int n) { most = max_bits(most, bits(load_some(x + i, n))); });
  const uint32_t top = largest_bits(most);
  float largest;
  std::memcpy(&largest, &top, 4);
  const bool finite = top < 0x7f800000u;
  if (!(finite && largest > kSmallest)) {
    std::fill(q, q + size, int8_t{0});
    *scale = finite ? 0.0f : NAN;
    return;
  }
  *scale = largest / 127.0f;
  round_group(x, size, 127.0f / largest, -127.0f, 127.0f, q);
}

// kLanes groups of one row: `plain` as they lie there, `across` with one group a lane.
struct Int4Block {
  alignas(64) float plain[kLanes * kMaxGroup];
  alignas(64) float across[kLanes * kMaxGroup];
  alignas(64) float inverse[kLanes];
  alignas(64) float scale[kLanes];
};

template <typename T>
void fill_block(const T* x, int64_t size, int64_t group, Int4Block& b) {
  over_vectors(size, [&](int64_t i, int n) { store(b.plain + i, load_some(x + i, n)); });
  std::fill(b.plain + size, b.plain + kLanes * group, 0.0f);
  const auto* plain = reinterpret_cast<const uint32_t*>(b.plain);
  auto* across = reinterpret_cast<uint32_t*>(b.across);
  if constexpr (kLanes % 8 == 0) {
    for (int lane = 0; lane < kLanes; lane += 8) {
      for (int64_t i = 0; i < group; i += 8) {
        const uint32_t* rows[8];
        for (int j = 0; j < 8; ++j) rows[j] = plain + (lane + j) * group + i;
        transpose8(rows, across + i * kLanes + lane, kLanes);
      }
    }
  } else {
    for (int lane = 0; lane < kLanes; ++lane) {
      for (int64_t i = 0; i < group; ++i) across[i * kLanes + lane] = plain[lane * group + i];
    }
  }
}

// Sums of w * q and q * q for the levels that `inverse` gives, each as the reference adds them.
void sum_products(const float* across, int64_t group, Vec inverse, Vec& along, Vec& size) {
  const Vec magic = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const Vec least = broadcast(-8.0f), most = broadcast(7.0f);
  Vec partial[kPartials], squares[kPartials];
  UNROLL
  for (int j = 0; j < kPartials; ++j) partial[j] = squares[j] = zero();
  for (int64_t i = 0; i < group; i += kPartials) {
    UNROLL
    for (int j = 0; j < kPartials; ++j) {
      const Vec w = load(across + (i + j) * kLanes);
      const Vec q = max(least, min(most, sub(add(mul(w, inverse), magic), magic)));
      partial[j] = add(partial[j], mul(w, q));
      squares[j] = fma(q, q, squares[j]);
    }
  }
  along = add(add(partial[0], partial[2]), add(partial[1], partial[3]));
  size = add(add(squares[0], squares[2]), add(squares[1], squares[3]));
}

// The inverse and the scale of every lane's group. An inverse of 0: all its levels are 0.
void choose(int64_t group, Int4Block& b) {
  Vec low = zero(), high = zero(), poison = zero();
  for (int64_t i = 0; i < group; ++i) {
    const Vec w = load(b.across + i * kLanes);
    low = min(w, low);
    high = max(w, high);
    poison = add(poison, mul(w, zero()));  // NaN where a weight is not finite
  }
  const Vec below = sub(zero(), low);
  const Vec extreme = where_less(below, high, high, low);
  const Vec largest = add(max(below, high), poison);
  const Vec reciprocal = where_less(broadcast(kSmallest), largest, div(broadcast(1.0f), extreme), zero());
  Vec best = broadcast(-1.0f), scale = zero(), inverse = zero();
  for (const float divisor : kDivisors) {
    const Vec each = mul(reciprocal, broadcast(-divisor));
    Vec along, size;
    sum_products(b.across, group, each, along, size);
    const Vec gain = div(mul(along, along), size);  // NaN, of a group without levels, is not better
    scale = where_less(best, gain, div(along, size), scale);
    inverse = where_less(best, gain, each, inverse);
    best = where_less(best, gain, gain, best);
  }
  store(b.inverse, inverse);
  store(b.scale, add(scale, poison));
}

template <typename T>
void int4_row(const T* x, int64_t k, int64_t group, int8_t* q, float* scale) {
  thread_local Int4Block block;
  for (int64_t first = 0; first < k; first += kLanes * group) {
    const int64_t size = std::min(kLanes * group, k - first);
    fill_block(x + first, size, group, block);
    choose(group, block);
    for (int64_t lane = 0; lane * group < size; ++lane) {
      const int64_t begin = lane * group, count = std::min(group, size - begin);
      int8_t* target = q + first + begin;
      *scale++ = block.scale[lane];
      if (block.inverse[lane] == 0.0f) {
        std::fill(target, target + count, int8_t{0});
      } else {
        round_group(block.plain + begin, count, block.inverse[lane], -8.0f, 7.0f, target);
      }
    }
  }
}

template <typename T>
void quantize(const QuantizeWeightsArgs& a, ThreadPool& pool) {
  const int64_t groups = (a.k + a.group - 1) / a.group;
  over_rows(a.rows, a.k * (a.bits == 4 ? 16 : 1), pool, [&](int64_t row) {
    const T* x = static_cast<const T*>(a.w) + row * a.stride;
    int8_t* q = a.q + row * a.k;
    float* scale = a.scale + row * groups;
    if (a.bits == 4) {
      int4_row(x, a.k, a.group, q, scale);
      return;
    }
    for (int64_t first = 0; first < a.k; first += a.group) {
      int8_group(x + first, std::min(a.group, a.k - first), q + first, scale++);
    }
  });
}

}  // namespace

extern const QuantizeWeightsKernels kQuantizeWeights;
const QuantizeWeightsKernels kQuantizeWeights = {by_type<QuantizeWeightsArgs, quantize<float>, quantize<uint16_t>>};

}  // namespace quire::cpu::QUIRE_ISA
