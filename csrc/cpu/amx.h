// AMX tiles for kernel sources of the amx level (Intel SDM vol. 1, ch. 18): eight registers of up to 16 rows of 64
// bytes, and products of them.
//
// The instructions are written as asm: gcc 12's intrinsics tell the compiler too little about memory. Its
// _tile_loadconfig names 8 of the 64 bytes, so the stores of the others are dropped, and its _tile_loadd names none, so
// a row written just before may not be in memory yet. The compiler does not know tile registers: a kernel that uses
// them keeps them between its own calls, and calls nothing in between that may use them too.
//
// Each thread has its own shapes and contents of tiles. A region that uses them holds a `Tiles` on each of its threads;
// at its end the registers are released, or the kernel would save 8 KiB at every switch of the thread.
#pragma once

#include <cstdint>

namespace quire::cpu::QUIRE_ISA {

constexpr int kTileRows = 16;   // rows of a full tile
constexpr int kTileBytes = 64;  // bytes of a full row: 32 bf16 or 64 int8 of k, or 16 fp32 or int32 of results

// What ldtilecfg reads. Tiles that are not set have no rows, and must not be used.
struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  void set(int tile, int num_rows, int num_row_bytes) {
    rows[tile] = static_cast<uint8_t>(num_rows);
    row_bytes[tile] = static_cast<uint16_t>(num_row_bytes);
  }
};

}  // namespace quire::cpu::QUIRE_ISA

#if defined(QUIRE_EMULATED_TILES)

#include "cpu/amx_emulated.h"

#else

namespace quire::cpu::QUIRE_ISA {

inline void tile_shapes(const TileShapes& shapes) { __asm__ volatile("ldtilecfg %0" ::"m"(shapes) : "memory"); }

inline void tile_release() { __asm__ volatile("tilerelease" ::: "memory"); }

template <int kTile>
inline void tile_zero() {
  __asm__ volatile("tilezero %%tmm%c0" ::"i"(kTile));
}

// Rows are `stride` bytes apart.
template <int kTile>
inline void tile_load(const void* p, int64_t stride) {
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(stride), "i"(kTile) : "memory");
}

// The same, with the hint not to keep the lines in L1.
template <int kTile>
inline void tile_load_past_l1(const void* p, int64_t stride) {
  __asm__ volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(stride), "i"(kTile) : "memory");
}

template <int kTile>
inline void tile_store(void* p, int64_t stride) {
  __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(stride), "i"(kTile) : "memory");
}

// acc[m][n] += sum of a[m][k] * b[k][n] over 32 k: bf16 in, fp32 sums. b holds pairs of k: [16][n][2].
template <int kAcc, int kA, int kB>
inline void tile_dot_bf16() {
  __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kAcc), "i"(kA), "i"(kB));
}

// The same over 64 k: a is signed int8, b unsigned, sums are exact int32. b holds quads of k: [16][n][4].
template <int kAcc, int kA, int kB>
inline void tile_dot_su8() {
  __asm__ volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kAcc), "i"(kA), "i"(kB));
}

// The same of two signed int8.
template <int kAcc, int kA, int kB>
inline void tile_dot_ss8() {
  __asm__ volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kAcc), "i"(kA), "i"(kB));
}

}  // namespace quire::cpu::QUIRE_ISA

#endif

namespace quire::cpu::QUIRE_ISA {

class Tiles {
 public:
  Tiles() = default;
  ~Tiles() { tile_release(); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;

  // Set new shapes for the tiles of this thread; their contents become zero.
  void shape(const TileShapes& shapes) { tile_shapes(shapes); }
};

}  // namespace quire::cpu::QUIRE_ISA
