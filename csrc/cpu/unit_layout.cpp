// Packing of weights in units, and reading single numbers of them.
#include "cpu/unit_layout.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

namespace quire::cpu {

namespace {

struct Plane {
  int bits, first;  // the lowest bit of a code that lies in it
  int64_t begin;    // bytes from the codes' beginning
};

// The planes of a code: the first one has its lowest bits.
struct Planes {
  Plane part[2];
  int count;

  explicit Planes(int bits) {
    const int low = bits >= 4 ? 4 : 2;
    part[0] = {low, 0, 0};
    part[1] = {bits - low, low, kLineBytes * low};
    count = bits == low ? 1 : 2;
  }
};

// Input i of a unit in a plane: the byte, and the place in it.
struct BitPlace {
  int64_t byte;
  int shift;

  BitPlace(const Plane& plane, int64_t column, int64_t i) {
    const int bit = static_cast<int>(i / 4) * plane.bits;  // of the quad, among those of a line and of the lines before
    byte = plane.begin + bit / 8 * kLineBytes + column * 4 + i % 4;
    shift = bit % 8;
  }
};

int code_of_level(const UnitLayout& layout, int level) {
  if (layout.codebook == Codebook::none) return level + layout.zero();
  const int8_t* table = layout.codebook == Codebook::iq4 ? kIq4Levels : kFp4Levels;
  for (int code = 0; code < 16; ++code) {
    if (table[code] == level) return code;
  }
  return 0;  // the caller has checked that there is none of these
}

void put_bits(int code, const Planes& planes, int64_t column, int64_t i, uint8_t* codes) {
  for (int p = 0; p < planes.count; ++p) {
    const Plane& plane = planes.part[p];
    const BitPlace at(plane, column, i);
    const int mask = (1 << plane.bits) - 1;
    uint8_t& byte = codes[at.byte];
    byte = static_cast<uint8_t>((byte & ~(mask << at.shift)) | ((code >> plane.first & mask) << at.shift));
  }
}

float half(const uint8_t* p) {
  uint16_t h;
  std::memcpy(&h, p, 2);
  const int exponent = (h >> 10) & 31, mantissa = h & 1023;
  const float magnitude = exponent == 0 ? std::ldexp(float(mantissa), -24)
                          : exponent == 31
                              ? (mantissa != 0 ? std::numeric_limits<float>::quiet_NaN() : INFINITY)
                              : std::ldexp(float(mantissa + 1024), exponent - 25);
  return (h & 0x8000) != 0 ? -magnitude : magnitude;
}

// Group g of a row's numbers, and its place in the panel's unit.
void put_scale(const UnitLayout& layout, const QuantizedSource& from, int64_t index, int64_t g, int64_t column,
               uint8_t* scales) {
  uint8_t* to = scales + g * layout.number_bytes();
  uint8_t* offsets = scales + (layout.groups() + g) * layout.number_bytes();
  if (layout.scales == Scales::half) {
    std::memcpy(to + column * 2, static_cast<const uint16_t*>(from.scale) + index, 2);
    if (layout.has_offset) std::memcpy(offsets + column * 2, static_cast<const uint16_t*>(from.offset) + index, 2);
    return;
  }
  const uint8_t scale = static_cast<const uint8_t*>(from.scale)[index];
  const uint8_t offset = layout.has_offset ? static_cast<const uint8_t*>(from.offset)[index] : 0;
  if (layout.shares_bytes()) {
    to[column] = static_cast<uint8_t>((scale & 15) | offset << 4);
    return;
  }
  to[column] = scale;
  if (layout.has_offset) offsets[column] = offset;
}

struct Factors {
  float scale, offset;
};

// Of group g of a unit and one column.
Factors factors(const UnitLayout& layout, const uint8_t* panel, const UnitPlace& at, int64_t g, int64_t column) {
  const uint8_t* scales = panel + at.scales + g * layout.number_bytes();
  const uint8_t* offsets = scales + layout.groups() * layout.number_bytes();
  if (layout.scales == Scales::half) {
    return {half(scales + column * 2), layout.has_offset ? half(offsets + column * 2) : 0.0f};
  }
  if (layout.scales == Scales::power) return {std::bit_cast<float>(static_cast<uint32_t>(scales[column]) << 23), 0.0f};
  const bool shared = layout.shares_bytes();
  const int inner = shared ? scales[column] & 15 : static_cast<int8_t>(scales[column]);
  const int of_offset = !layout.has_offset ? 0 : shared ? scales[column] >> 4 : offsets[column];
  const float outer_offset = layout.has_offset ? half(panel + at.head + (kPanel + column) * 2) : 0.0f;
  return {half(panel + at.head + column * 2) * static_cast<float>(inner), outer_offset * static_cast<float>(of_offset)};
}

}  // namespace

void pack_unit_row(const UnitLayout& layout, const QuantizedSource& from, int64_t row, int64_t k, int64_t column,
                   uint8_t* panel) {
  const Planes planes(layout.bits);
  const int8_t* q = from.q + row * k;
  const int64_t groups = num_groups(k, layout.group), outers = num_groups(k, kUnit * kNestedUnits);
  for (int64_t u = 0; u < layout.num_units(k); ++u) {
    const UnitPlace at(layout, u);
    for (int64_t i = 0; i < kUnit; ++i) {
      const int64_t input = u * kUnit + i;
      put_bits(code_of_level(layout, input < k ? q[input] : 0), planes, column, i, panel + at.codes);
    }
    for (int64_t g = 0; g < layout.groups() && u * layout.groups() + g < groups; ++g) {
      put_scale(layout, from, row * groups + u * layout.groups() + g, g, column, panel + at.scales);
    }
    if (layout.scales == Scales::nested && u % kNestedUnits == 0) {
      const int64_t outer = row * outers + u / kNestedUnits;
      std::memcpy(panel + at.head + column * 2, from.outer_scale + outer, 2);
      if (layout.has_offset) std::memcpy(panel + at.head + (kPanel + column) * 2, from.outer_offset + outer, 2);
    }
  }
}

void read_unit_row(const UnitLayout& layout, const uint8_t* panel, int64_t column, int64_t k, float power, float* y) {
  const Planes planes(layout.bits);
  int8_t numbers[64];
  for (int code = 0; code < 64; ++code) {
    numbers[code] = layout.codebook == Codebook::iq4   ? kIq4Levels[code % 16]
                    : layout.codebook == Codebook::fp4 ? kFp4Levels[code % 16]
                                                       : static_cast<int8_t>(code - layout.zero());
  }
  for (int64_t first = 0; first < k; first += layout.group) {
    const UnitPlace at(layout, first / kUnit);
    const Factors of_group = factors(layout, panel, at, first % kUnit / layout.group, column);
    const float scale = of_group.scale * power, offset = of_group.offset * power;
    for (int64_t i = first; i < std::min(k, first + layout.group); ++i) {
      int code = 0;
      for (int p = 0; p < planes.count; ++p) {
        const Plane& plane = planes.part[p];
        const BitPlace bits(plane, column, i % kUnit);
        code |= (panel[at.codes + bits.byte] >> bits.shift & ((1 << plane.bits) - 1)) << plane.first;
      }
      const float w = static_cast<float>(numbers[code]) * scale;
      y[i] = layout.has_offset ? w + offset : w;
    }
  }
}

}  // namespace quire::cpu
