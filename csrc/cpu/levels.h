// Which table of kernels a level has: one choice for every op.
#pragma once

#include <cstring>

#include "cpu/cpuid.h"

namespace quire::cpu {

template <typename Kernels>
struct Levels {
  const Kernels *avx512, *avx512_vnni, *avx512_bw, *avx2, *neon_i8mm, *neon, *scalar;
};

// The table of the amx level: that of avx512, with kernels on tiles where they are faster. A family that has such
// kernels overloads this for its table (QUIRE_AMX_LEVEL below); the others run avx512's.
template <typename Kernels>
Kernels with_amx(const Kernels& avx512) {
  return avx512;
}

// isa: "amx", "avx512", "avx512_vnni", "avx512_bw", "avx2", "neon_i8mm", "neon" or "scalar". Returns null for a level that
// this CPU does not have.
template <typename Kernels>
const Kernels* pick_level(const char* isa, const Levels<Kernels>& levels) {
  const Features& f = detect();
#if defined(QUIRE_HAVE_AMX)
  if (std::strcmp(isa, "amx") == 0) {
    if (!has_amx(f)) return nullptr;
    static const Kernels table = with_amx(*levels.avx512);
    return &table;
  }
#endif
  if (std::strcmp(isa, "avx512") == 0) return has_avx512(f) ? levels.avx512 : nullptr;
  if (std::strcmp(isa, "avx512_vnni") == 0) return has_avx512_vnni(f) ? levels.avx512_vnni : nullptr;
  if (std::strcmp(isa, "avx512_bw") == 0) return has_avx512_bw(f) ? levels.avx512_bw : nullptr;
  if (std::strcmp(isa, "avx2") == 0) return f.avx2 ? levels.avx2 : nullptr;
  if (std::strcmp(isa, "neon_i8mm") == 0) return has_neon_i8mm(f) ? levels.neon_i8mm : nullptr;
  if (std::strcmp(isa, "neon") == 0) return f.neon_dotprod ? levels.neon : nullptr;
  return std::strcmp(isa, "scalar") == 0 ? levels.scalar : nullptr;
}

}  // namespace quire::cpu

// Declares the table `name` of every level that is built; elsewhere the level's pointer is null. Kernel sources do not
// depend on it.
//
// QUIRE_LEVELS_VNNI is for a family whose kernels multiply bytes or words with VNNI. Of the others avx512_vnni runs those of
// avx512_bw: only VNNI tells the two apart, and their bits are equal.
#if defined(QUIRE_ISA)
#define QUIRE_LEVELS(Kernels, name)
#define QUIRE_LEVELS_VNNI(Kernels, name)
#elif defined(QUIRE_HAVE_X86_LEVELS)
#define QUIRE_X86_LEVELS(Kernels, name, vnni)             \
  namespace avx512 { extern const Kernels name; }         \
  namespace vnni { extern const Kernels name; }           \
  namespace avx512_bw { extern const Kernels name; }      \
  namespace avx2 { extern const Kernels name; }           \
  namespace scalar { extern const Kernels name; }         \
  inline Levels<Kernels> levels_of(const Kernels*) {      \
    return {&avx512::name, &vnni::name, &avx512_bw::name, &avx2::name, nullptr, nullptr, &scalar::name}; \
  }
#define QUIRE_LEVELS(Kernels, name) QUIRE_X86_LEVELS(Kernels, name, avx512_bw)
#define QUIRE_LEVELS_VNNI(Kernels, name) QUIRE_X86_LEVELS(Kernels, name, avx512_vnni)
#elif defined(QUIRE_HAVE_ARM_LEVELS)
#define QUIRE_LEVELS(Kernels, name)                       \
  namespace neon_i8mm { extern const Kernels name; }      \
  namespace neon { extern const Kernels name; }           \
  namespace scalar { extern const Kernels name; }         \
  inline Levels<Kernels> levels_of(const Kernels*) {      \
    return {nullptr, nullptr, nullptr, nullptr, &neon_i8mm::name, &neon::name, &scalar::name}; \
  }
#define QUIRE_LEVELS_VNNI QUIRE_LEVELS
#else
#define QUIRE_LEVELS(Kernels, name)                 \
  namespace scalar { extern const Kernels name; }   \
  inline Levels<Kernels> levels_of(const Kernels*) {                                          \
    return {nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, &scalar::name};             \
  }
#define QUIRE_LEVELS_VNNI QUIRE_LEVELS
#endif

// Declares that the family whose table is `Kernels` has kernels of the amx level, where the build has that level.
#if defined(QUIRE_HAVE_AMX)
#define QUIRE_AMX_LEVEL(Kernels) Kernels with_amx(const Kernels& avx512);
#else
#define QUIRE_AMX_LEVEL(Kernels)
#endif

namespace quire::cpu {

// The table of type Kernels of a level, or null.
template <typename Kernels>
const Kernels* kernels_for(const char* isa) {
  return pick_level<Kernels>(isa, levels_of(static_cast<const Kernels*>(nullptr)));
}

}  // namespace quire::cpu
