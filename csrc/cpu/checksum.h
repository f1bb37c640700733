// XXH64 (Yann Collet, github.com/Cyan4973/xxHash, doc/xxhash_spec.md), little-endian. Each step is a bijection of its
// accumulator, so that bytes which differ in one word alone never have equal sums. It runs at 8 bytes a cycle or so,
// which is faster than memory is copied: a file of packed weights is checked while it lies in the cache.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>

namespace quire::cpu {

namespace xxh64 {

constexpr uint64_t kP1 = 0x9E3779B185EBCA87u, kP2 = 0xC2B2AE3D27D4EB4Fu, kP3 = 0x165667B19E3779F9u,
                   kP4 = 0x85EBCA77C2B2AE63u, kP5 = 0x27D4EB2F165667C5u;

template <typename T>
uint64_t load(const uint8_t* p) {
  T value;
  std::memcpy(&value, p, sizeof(T));
  return value;
}

inline uint64_t round(uint64_t lane, uint64_t word) { return std::rotl(lane + word * kP2, 31) * kP1; }
inline uint64_t merge(uint64_t sum, uint64_t lane) { return (sum ^ round(0, lane)) * kP1 + kP4; }

}  // namespace xxh64

inline uint64_t checksum(const uint8_t* p, uint64_t size, uint64_t seed = 0) {
  using namespace xxh64;
  const uint8_t* const end = p + size;
  uint64_t sum = seed + kP5;
  if (size >= 32) {
    uint64_t lanes[4] = {seed + kP1 + kP2, seed + kP2, seed, seed - kP1};
    for (; end - p >= 32; p += 32) {
      for (int i = 0; i < 4; ++i) lanes[i] = round(lanes[i], load<uint64_t>(p + 8 * i));
    }
    sum = std::rotl(lanes[0], 1) + std::rotl(lanes[1], 7) + std::rotl(lanes[2], 12) + std::rotl(lanes[3], 18);
    for (const uint64_t lane : lanes) sum = merge(sum, lane);
  }
  sum += size;
  for (; end - p >= 8; p += 8) sum = std::rotl(sum ^ round(0, load<uint64_t>(p)), 27) * kP1 + kP4;
  if (end - p >= 4) {
    sum = std::rotl(sum ^ load<uint32_t>(p) * kP1, 23) * kP2 + kP3;
    p += 4;
  }
  for (; p < end; ++p) sum = std::rotl(sum ^ *p * kP5, 11) * kP1;
  sum = (sum ^ sum >> 33) * kP2;
  sum = (sum ^ sum >> 29) * kP3;
  return sum ^ sum >> 32;
}

}  // namespace quire::cpu
