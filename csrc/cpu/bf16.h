// bf16 is the upper half of a float. Of internal linkage: each level has its own copy, compiled with its own flags.
#pragma once

#include <cstdint>
#include <cstring>

namespace quire::cpu {

static inline float bf16_to_float(uint16_t h) {
  const uint32_t u = uint32_t(h) << 16;
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}

// Round to nearest even, NaN kept quiet: the bits of torch and of vcvtneps2bf16 (for normal numbers).
static inline uint16_t float_to_bf16(float f) {
  uint32_t u;
  std::memcpy(&u, &f, 4);
  if ((u & 0x7fffffffu) > 0x7f800000u) return uint16_t((u >> 16) | 0x40);
  return uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

}  // namespace quire::cpu
