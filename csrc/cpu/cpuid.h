// What this CPU can do, read once. No torch, no Python.
#pragma once

#include <cstdint>

namespace quire::cpu {

struct Features {
  bool avx2 = false;         // with FMA and F16C: the AVX2 level
  bool avx_vnni = false;     // 256-bit vpdpbusd without AVX-512
  bool avx512 = false;       // F, BW, DQ, VL
  bool avx512_vnni = false;  // vpdpbusd
  bool avx512_bf16 = false;  // vdpbf16ps
  bool amx_tile = false;     // tile registers, allowed by the operating system
  bool amx_int8 = false;     // tdpb..d
  bool amx_bf16 = false;     // tdpbf16ps
  bool amx_emulated = false;  // a build for tests, whose tiles are memory (amx_emulated.h)
  bool neon = false;          // any 64-bit Arm
  bool neon_dotprod = false;  // sdot: the neon level
  bool neon_i8mm = false;     // smmla, usdot
  bool neon_bf16 = false;     // bfdot, bfmmla
};

// The features that the CPU has *and* that the operating system saves on a context switch. Read once: under a
// hypervisor every cpuid is an exit of microseconds.
const Features& detect();

// The levels of vector and of matrix instructions that the CPU has whole.
inline bool has_avx512_bw(const Features& f) { return f.avx512; }
inline bool has_avx512_vnni(const Features& f) { return f.avx512 && f.avx512_vnni; }
inline bool has_avx512(const Features& f) { return has_avx512_vnni(f) && f.avx512_bf16; }
inline bool has_amx(const Features& f) { return has_avx512(f) && f.amx_tile && f.amx_int8 && f.amx_bf16; }
inline bool has_neon_i8mm(const Features& f) { return f.neon_dotprod && f.neon_i8mm && f.neon_bf16; }

// How many bytes ahead a core wants a stream of reads to be fetched that does little work for each byte (row_loops.h).
int64_t bytes_ahead();

// The best level that kernels are built for: "amx", "avx512" (with VNNI and BF16), "avx512_vnni" (without
// BF16), "avx512_bw" (without both), "avx2", "neon_i8mm" (with BF16), "neon" (with byte dot products) or "scalar".
const char* best_isa(const Features& features);

}  // namespace quire::cpu
