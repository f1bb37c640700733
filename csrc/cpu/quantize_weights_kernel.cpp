// Rounding on load, the algorithm of quant/rtn.py. Bytes: 2 or 4 per weight read and 1 written. Bound: memory for int8,
// arithmetic for int4: eight vector operations per weight for each of the seven places that a group's largest may take.
//
// int4 takes as many groups as a vector has lanes, one per lane, so that sums, quotients and choices of a group need
// nothing across lanes; the levels are then rounded in the weights' own order.
#include "cpu/quantize_weights.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "cpu/int_vec.h"
#include "cpu/quantize_row.h"
#include "cpu/quantized.h"
#include "cpu/rotate.h"
#include "cpu/row_loops.h"

namespace quire::cpu::QUIRE_ISA {

namespace {

constexpr float kDivisors[] = {8.0f, 7.0f, 7.4f, 7.7f, 8.3f, 8.6f, 9.0f};
constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
constexpr float kTop = 116.0f;         // of two levels: the place of a row's largest
constexpr int kNeighbours[] = {-1, 0, 1, 2, 3};
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

// The largest magnitude: infinity or NaN where there is one.
template <typename T>
float largest_of(const T* x, int64_t k) {
  const uint32_t top = largest_magnitude(x, k);
  float largest;
  std::memcpy(&largest, &top, 4);
  return largest;
}

template <typename T>
void int8_group(const T* x, int64_t size, int8_t* q, float* scale) {
  const float largest = largest_of(x, size);
  const bool finite = std::isfinite(largest);
  if (!(finite && largest > kSmallest)) {
    std::fill(q, q + size, int8_t{0});
    *scale = finite ? 0.0f : NAN;
    return;
  }
  *scale = largest / 127.0f;
  round_group(x, size, 127.0f / largest, -127.0f, 127.0f, q);
}

// kLanes groups of one row: `plain` as they lie there, `across` with one group per lane.
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
inline __attribute__((always_inline)) void sum_products(const float* across, int64_t group, Vec inverse, Vec least, Vec most, Vec& along, Vec& size) {
  const Vec magic = broadcast(kMagic);
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
    sum_products(b.across, group, each, broadcast(-8.0f), broadcast(7.0f), along, size);
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

// The largest integer that is not above v, for 0 <= v < 2^22.
inline Vec whole(Vec v) {
  const Vec nearest = sub(add(v, broadcast(kMagic)), broadcast(kMagic));
  return where_less(v, nearest, sub(nearest, broadcast(1.0f)), nearest);
}

// 1 for odd multipliers, 0 for even ones.
inline Vec side_of(Vec m) {
  const Vec half = whole(mul(m, broadcast(0.5f)));
  return sub(m, add(half, half));
}

// Multipliers of the groups of one block, one per lane, what rounds with them, and the sums that a row's scale is made of.
struct Multipliers {
  alignas(64) float m[kLanes], odd[kLanes], inverse[kLanes], along[kLanes], size[kLanes];

  void choose(float step, float of_row, const Int4Block& b) {
    constexpr int64_t group = kTwoLevelGroup;
    Vec largest = zero();
    for (int64_t i = 0; i < group; ++i) {
      const Vec w = load(b.across + i * kLanes);
      largest = max(largest, max(w, sub(zero(), w)));
    }
    const Vec first = whole(mul(mul(largest, broadcast(of_row)), broadcast(0.125f)));
    Vec best = broadcast(-INFINITY), kept[3] = {zero(), zero(), zero()};
    for (const int neighbour : kNeighbours) {
      const Vec next = add(first, broadcast(static_cast<float>(neighbour)));
      const Vec many = min(max(next, broadcast(1.0f)), broadcast(15.0f)), side = side_of(many);
      Vec found[3] = {many, zero(), zero()};
      sum_products(b.across, group, div(broadcast(of_row), many), sub(side, broadcast(8.0f)), add(side, broadcast(7.0f)),
                   found[1], found[2]);
      const Vec cost = mul(mul(broadcast(step), many), found[2]);
      const Vec gain = mul(sub(add(found[1], found[1]), cost), many);
      for (int i = 0; i < 3; ++i) kept[i] = where_less(best, gain, found[i], kept[i]);
      best = where_less(best, gain, gain, best);
    }
    store(m, kept[0]);
    store(odd, side_of(kept[0]));
    store(inverse, div(broadcast(of_row), kept[0]));
    store(along, kept[1]);
    store(size, kept[2]);
  }
};

// Levels of the group of one lane less the side of odd multipliers: -8 ... 7, of a whole group.
void round_levels(const float* x, const Multipliers& found, int64_t lane, int8_t* q) {
  const Vec magic = broadcast(kMagic), factor = broadcast(found.inverse[lane]), odd = broadcast(found.odd[lane]);
  const Vec least = sub(odd, broadcast(8.0f)), most = add(odd, broadcast(7.0f));
  for (int64_t i = 0; i < kTwoLevelGroup; i += kLanes) {
    const Vec v = max(least, min(most, sub(add(mul(load(x + i), factor), magic), magic)));
    store_rounded(q + i, sub(v, odd));
  }
}

template <typename T>
void two_level_row(const T* x, int64_t k, int8_t* q, uint8_t* multiplier, float* scale) {
  thread_local Int4Block block;
  constexpr int64_t kGroup = kTwoLevelGroup;
  const float largest = largest_of(x, k);
  if (!(std::isfinite(largest) && largest > kSmallest)) {
    std::fill(q, q + k, int8_t{0});
    std::fill(multiplier, multiplier + num_groups(k, kGroup), uint8_t{0});
    *scale = std::isfinite(largest) ? 0.0f : NAN;
    return;
  }
  const float step = largest / kTop, inverse = kTop / largest;
  double total = 0.0, squares = 0.0;
  for (int64_t first = 0; first < k; first += kLanes * kGroup) {
    const int64_t size = std::min(kLanes * kGroup, k - first);
    fill_block(x + first, size, kGroup, block);
    Multipliers found;
    found.choose(step, inverse, block);
    for (int64_t lane = 0; lane * kGroup < size; ++lane) {
      const int64_t begin = lane * kGroup;
      const double m = found.m[lane];
      total += m * found.along[lane];
      squares += m * m * found.size[lane];
      *multiplier++ = static_cast<uint8_t>(found.m[lane]);
      if (begin + kGroup <= size) {
        round_levels(block.plain + begin, found, lane, q + first + begin);
        continue;
      }
      int8_t levels[kGroup];
      round_levels(block.plain + begin, found, lane, levels);
      std::copy(levels, levels + size - begin, q + first + begin);
    }
  }
  *scale = static_cast<float>(total / squares);
}

template <typename T>
void round_row(const QuantizeWeightsArgs& a, const T* x, int64_t row) {
  const int64_t groups = (a.k + a.group - 1) / a.group;
  int8_t* q = a.q + row * a.k;
  float* scale = a.scale + row * groups;
  if (a.bits == 4 && a.group == kTwoLevelGroup) {
    two_level_row(x, a.k, q, a.multiplier + row * groups, a.scale + row);
    return;
  }
  if (a.bits == 4) {
    int4_row(x, a.k, a.group, q, scale);
    return;
  }
  for (int64_t first = 0; first < a.k; first += a.group) {
    int8_group(x + first, std::min(a.group, a.k - first), q + first, scale++);
  }
}

template <typename T>
void quantize(const QuantizeWeightsArgs& a, ThreadPool& pool) {
  over_rows(a.rows, a.k * (a.bits == 4 ? 16 : 1), pool, [&](int64_t row) {
    const T* x = static_cast<const T*>(a.w) + row * a.stride;
    if (a.rotation == 0) return round_row(a, x, row);
    float* rotated = scratch_row<float>(a.k);
    rotate(x, a.k, a.rotation, rotated);
    const float factor = weight_factor(a.rotation);
    for (int64_t i = 0; i < a.k; ++i) rotated[i] *= factor;
    round_row(a, rotated, row);
  });
}

}  // namespace

extern const QuantizeWeightsKernels kQuantizeWeights;
const QuantizeWeightsKernels kQuantizeWeights = {by_type<QuantizeWeightsArgs, quantize<float>, quantize<uint16_t>>};

}  // namespace quire::cpu::QUIRE_ISA
