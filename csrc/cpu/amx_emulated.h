// Tile registers in memory, for tests of the amx level on CPUs that have AVX-512 with BF16 and VNNI but no AMX. amx.h
// includes this file in place of its instructions where the build has QUIRE_EMULATED_TILES (`make test-amx`).
//
// Each function does what the page of its instruction in the Intel SDM, vol. 2, has under "Operation". tdpbf16ps keeps
// two sums per element, of the even and of the odd k. Both begin at 0 in each instruction and take one fma per k, in
// ascending order; then one is added to the other, and their sum to the accumulator. Each operation rounds to nearest
// even, takes denormals as 0 and flushes those that result, whatever MXCSR says. These bits have not been compared with
// those of a CPU. The tests hold either way: they compare integers, which are exact, or results of tiles with each
// other.
//
// Where the CPU would fault (#GP of ldtilecfg, #UD of the others) the process says why and aborts.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace quire::cpu::QUIRE_ISA {

constexpr int kTileRegisters = 8;

struct TileRegisters {
  alignas(64) uint8_t bytes[kTileRegisters][kTileRows][kTileBytes] = {};
  TileShapes shapes = {};
  bool configured = false;
};

inline constinit thread_local TileRegisters tile_registers;

// What one instruction sees of a register.
struct TileView {
  int rows, row_bytes;
  uint8_t (*row)[kTileBytes];

  // Of the 32-bit elements of a row, those that exist.
  __mmask16 elements() const { return static_cast<__mmask16>((1u << row_bytes / 4) - 1); }
};

[[noreturn]] inline void tile_fault(const char* instruction, int tile, const char* what) {
  const TileShapes& shapes = tile_registers.shapes;
  std::fprintf(stderr, "emulated tiles: %s of tile %d (%d rows of %d bytes): %s\n", instruction, tile,
               shapes.rows[tile], shapes.row_bytes[tile], what);
  std::abort();
}

inline TileView tile_view(const char* instruction, int tile) {
  TileRegisters& all = tile_registers;
  if (!all.configured) tile_fault(instruction, tile, "this thread has set no shapes, or released them");
  const int rows = all.shapes.rows[tile], row_bytes = all.shapes.row_bytes[tile];
  if (rows == 0) tile_fault(instruction, tile, "this tile has no shape");
  if (row_bytes % 4 != 0) tile_fault(instruction, tile, "its rows are not whole elements of 4 bytes");
  return {rows, row_bytes, all.bytes[tile]};
}

inline void tile_release() { tile_registers = TileRegisters(); }

inline void tile_shapes(const TileShapes& shapes) {
  tile_release();
  tile_registers.shapes = shapes;
  tile_registers.configured = true;
  if (shapes.palette != 1 || shapes.start_row != 0) tile_fault("ldtilecfg", 0, "not palette 1 from row 0 on");
  for (const uint8_t byte : shapes.reserved) {
    if (byte != 0) tile_fault("ldtilecfg", 0, "reserved bytes are not 0");
  }
  for (int tile = 0; tile < 16; ++tile) {
    const int rows = shapes.rows[tile], row_bytes = shapes.row_bytes[tile];
    if (rows > kTileRows || row_bytes > kTileBytes) tile_fault("ldtilecfg", tile, "larger than a tile");
    if ((rows == 0) != (row_bytes == 0)) tile_fault("ldtilecfg", tile, "only one of rows and bytes is 0");
    if (tile >= kTileRegisters && rows != 0) tile_fault("ldtilecfg", tile, "there are eight tiles");
  }
}

template <int kTile>
inline void tile_zero() {
  std::memset(tile_view("tilezero", kTile).row, 0, kTileRows * kTileBytes);
}

template <int kTile>
inline void tile_load(const void* p, int64_t stride) {
  const TileView tile = tile_view("tileloadd", kTile);
  const char* from = static_cast<const char*>(p);
  std::memset(tile.row, 0, kTileRows * kTileBytes);
  for (int r = 0; r < tile.rows; ++r, from += stride) std::memcpy(tile.row[r], from, tile.row_bytes);
}

template <int kTile>
inline void tile_load_past_l1(const void* p, int64_t stride) {
  tile_load<kTile>(p, stride);
}

template <int kTile>
inline void tile_store(void* p, int64_t stride) {
  const TileView tile = tile_view("tilestored", kTile);
  char* to = static_cast<char*>(p);
  for (int r = 0; r < tile.rows; ++r, to += stride) std::memcpy(to, tile.row[r], tile.row_bytes);
}

// The operands of a product, whose shapes fit together.
struct TileOperands {
  TileView acc, a, b;

  TileOperands(const char* instruction, int acc_tile, int a_tile, int b_tile)
      : acc(tile_view(instruction, acc_tile)), a(tile_view(instruction, a_tile)), b(tile_view(instruction, b_tile)) {
    if (acc.rows != a.rows) tile_fault(instruction, a_tile, "it does not have the rows of the sums");
    if (acc.row_bytes != b.row_bytes) tile_fault(instruction, b_tile, "it does not have the columns of the sums");
    if (a.row_bytes / 4 != b.rows) tile_fault(instruction, b_tile, "it does not have the k of the first factor");
  }
};

// Both halves of pairs of bf16 as fp32.
struct TilePairs {
  __m512 even, odd;

  explicit TilePairs(const uint8_t* row) {
    const __m512i pairs = _mm512_load_si512(row);
    even = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
    odd = _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000))));
  }
};

// Not inlined: the compiler does not know that these operations depend on MXCSR, and could move them across its change.
template <typename Operands>
[[gnu::noinline]] void tile_sums_bf16(const Operands& of) {
  __m512 even[kTileRows], odd[kTileRows];
  for (int k = 0; k < of.b.rows; ++k) {
    const TilePairs b(of.b.row[k]);
    even[k] = b.even, odd[k] = b.odd;
  }
  for (int m = 0; m < of.acc.rows; ++m) {
    const TilePairs a(of.a.row[m]);
    alignas(64) float a_even[kTileRows], a_odd[kTileRows];
    _mm512_store_ps(a_even, a.even);
    _mm512_store_ps(a_odd, a.odd);
    __m512 even_sum = _mm512_setzero_ps(), odd_sum = _mm512_setzero_ps();
    for (int k = 0; k < of.b.rows; ++k) {
      even_sum = _mm512_fmadd_ps(_mm512_set1_ps(a_even[k]), even[k], even_sum);
      odd_sum = _mm512_fmadd_ps(_mm512_set1_ps(a_odd[k]), odd[k], odd_sum);
    }
    const __m512 sum = _mm512_add_ps(_mm512_load_ps(of.acc.row[m]), _mm512_add_ps(even_sum, odd_sum));
    _mm512_mask_store_ps(of.acc.row[m], of.acc.elements(), sum);
  }
}

template <int kAcc, int kA, int kB>
inline void tile_dot_bf16() {
  static_assert(kAcc != kA && kAcc != kB && kA != kB);
  constexpr unsigned kMasked = 0x1f80, kFlushed = 0x8000, kDenormalsAreZero = 0x40;
  const unsigned before = _mm_getcsr();
  _mm_setcsr(kMasked | kFlushed | kDenormalsAreZero);
  tile_sums_bf16(TileOperands("tdpbf16ps", kAcc, kA, kB));
  _mm_setcsr(before);
}

// vpdpbusd multiplies unsigned bytes by signed ones. So 128 is added to signed bytes of b, and 128 times the sum of a
// is subtracted from the result.
template <bool kSignedB>
inline void tile_dot_bytes(const TileOperands& of) {
  const __m512i signs = _mm512_set1_epi8(kSignedB ? -128 : 0);
  for (int m = 0; m < of.acc.rows; ++m) {
    __m512i sum = _mm512_load_si512(of.acc.row[m]), excess = __m512i{};
    for (int k = 0; k < of.b.rows; ++k) {
      int32_t quad;
      std::memcpy(&quad, of.a.row[m] + 4 * k, 4);
      const __m512i a = _mm512_set1_epi32(quad), b = _mm512_xor_si512(_mm512_load_si512(of.b.row[k]), signs);
      sum = _mm512_dpbusd_epi32(sum, b, a);
      excess = _mm512_dpbusd_epi32(excess, signs, a);
    }
    _mm512_mask_store_epi32(of.acc.row[m], of.acc.elements(), _mm512_sub_epi32(sum, excess));
  }
}

template <int kAcc, int kA, int kB>
inline void tile_dot_su8() {
  static_assert(kAcc != kA && kAcc != kB && kA != kB);
  tile_dot_bytes<false>(TileOperands("tdpbsud", kAcc, kA, kB));
}

template <int kAcc, int kA, int kB>
inline void tile_dot_ss8() {
  static_assert(kAcc != kA && kAcc != kB && kA != kB);
  tile_dot_bytes<true>(TileOperands("tdpbssd", kAcc, kA, kB));
}

}  // namespace quire::cpu::QUIRE_ISA
