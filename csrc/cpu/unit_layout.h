// The layout of weights whose codes are not whole bytes or nibbles, whose levels are a table, or whose scales have two
// parts: most types of GGUF, at the size that they have in the file.
//
// A panel of 32 columns is blocks of one or more units; a unit is 32 inputs, in one group of 32 or two of 16:
//
//     block    [head] [scales of its units] [codes of its units]
//     codes    planes of a unit, each as [lines][32 columns][4 inputs]; a code is put together from one or two of them:
//              4 bits   4 lines, low halves of bytes are quad 2i of k, high halves quad 2i + 1       bits 4, 5, 6
//              2 bits   2 lines, bits 2j of bytes are quad 4i + j                                    bits 2, 3, and 6 above
//              1 bit    1 line, bit i of bytes is quad i                                             bits 3, 5 above
//     half     [groups][32] fp16 scales (, [groups][32] fp16 offsets); one unit per block
//     power    [32] exponents e: 2^(e - 127), e = 0: 0; two units per block, so that lines stay whole
//     nested   eight units per block, whose head is [32] fp16 (, [32] fp16), times
//              [groups][32] int8 (, [groups][32] uint8 of offsets); bits 2: [groups][32], low half the scale, high half the
//              offset
//
// Integers of formats with offsets are unsigned; the others count from the middle, and levels from -128 (iq4) or -12 (fp4).
#pragma once

#include "cpu/quantized.h"

namespace quire::cpu {

constexpr int64_t kUnit = 32;         // inputs
constexpr int64_t kNestedUnits = 8;   // that share the outer scale: 256 inputs
constexpr int64_t kLineBytes = kPanel * 4;

// llama.cpp's table of IQ4_NL and IQ4_XS, and FP4 (E2M1) doubled, by code.
constexpr int8_t kIq4Levels[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
constexpr int8_t kFp4Levels[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

struct UnitLayout {
  int bits;
  int64_t group;
  bool has_offset;
  Codebook codebook;
  Scales scales;

  constexpr int64_t groups() const { return kUnit / group; }  // of a unit
  constexpr bool shares_bytes() const { return scales == Scales::nested && bits == 2; }
  constexpr int64_t units() const { return scales == Scales::nested ? kNestedUnits : scales == Scales::power ? 2 : 1; }
  constexpr int64_t head_bytes() const { return scales == Scales::nested ? kPanel * (has_offset ? 4 : 2) : 0; }
  // Of a group's scales, and of its offsets after those of all groups of the unit.
  constexpr int64_t number_bytes() const { return kPanel * (scales == Scales::half ? 2 : 1); }
  constexpr int64_t scale_bytes() const { return groups() * number_bytes() * (has_offset && !shares_bytes() ? 2 : 1); }
  constexpr int64_t code_bytes() const { return kLineBytes * bits; }
  constexpr int64_t codes_begin() const { return head_bytes() + units() * scale_bytes(); }
  constexpr int64_t block_bytes() const { return codes_begin() + units() * code_bytes(); }
  // What is taken from a stored number: the integer, or the level, is the number less this.
  constexpr int zero() const {
    return codebook == Codebook::iq4 ? 128 : codebook == Codebook::fp4 ? 12 : has_offset ? 0 : 1 << (bits - 1);
  }

  int64_t num_units(int64_t k) const { return (k + kUnit - 1) / kUnit; }
  int64_t num_blocks(int64_t k) const { return (num_units(k) + units() - 1) / units(); }
};

inline UnitLayout unit_layout(const QuantizedFormat& f) { return {f.bits, f.group, f.has_offset, f.codebook, f.scales}; }

// Where a unit of a panel lies.
struct UnitPlace {
  int64_t head, scales, codes;  // bytes from the panel's beginning

  constexpr UnitPlace(const UnitLayout& layout, int64_t unit)
      : head(unit / layout.units() * layout.block_bytes()),
        scales(head + layout.head_bytes() + unit % layout.units() * layout.scale_bytes()),
        codes(head + layout.codes_begin() + unit % layout.units() * layout.code_bytes()) {}
};

// One column's row of a matrix into a panel of zeros. `row`: of `from`.
void pack_unit_row(const UnitLayout& layout, const QuantizedSource& from, int64_t row, int64_t k, int64_t column,
                   uint8_t* panel);

// The row that is one column of a panel: y[i] = number * (scale * power) (+ offset * power), i < k.
void read_unit_row(const UnitLayout& layout, const uint8_t* panel, int64_t column, int64_t k, float power, float* y);

}  // namespace quire::cpu
