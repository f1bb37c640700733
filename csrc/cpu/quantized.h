// y[m][n] = sum_k x[m][k] * w[n][k] (+ bias[n]) with int8 activations and int8 or int4 weights, w = scale * q + offset
// for every group of inputs of an output feature. The order of arithmetic is that of
// kernels/linear/reference.py, so every level has the same bits.
//
// Packed layout, one linear stream per panel of 32 columns; bytes are unsigned (int8: q + 128, int4: q + 8):
//     one scale per column  [N/32] [K/4][32][4]                                           scales (and offsets) apart, fp32
//     int8 groups           [N/32][K/G] { [G/4][32][4],  32 fp16 scales (, 32 fp16 offsets) }
//     int4 groups           [N/32][K/G] { [G/8][32][4],  32 fp16 scales (, 32 fp16 offsets) }
//                           low nibbles are quad 2i of k, high nibbles quad 2i + 1
//     int4 of two levels    [N/32][K/64] { [4][16], [64/8][32][4] }                       scales apart, fp32
//                           the first are multipliers of groups of 16, low half: column j, high half: column 16 + j;
//                           w = scale * m * (q + m mod 2). A product needs them before the codes, and only a stream
//                           that is read in the order of its addresses is fetched ahead by a core
//     codes of 2, 3, 5 and 6 bits, tables of levels, and scales of two parts: unit_layout.h
// K is padded to whole groups (quads); the activations are zero there.
//
// With groups of weights, activations have a scale per block of inputs. A part, the smaller of group and block, is what
// is summed in integers.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/levels.h"
#include "cpu/linear.h"
#include "cpu/thread_pool.h"

namespace quire::cpu {

constexpr int64_t kTwoLevelGroup = 16;  // inputs of an integer multiplier (quire/weight_format.py)
constexpr int64_t kTwoLevelBlock = 64;  // inputs that lie together: as many as a tile has
constexpr int64_t kTwoLevelHead = kTwoLevelBlock / kTwoLevelGroup * kPanel / 2;  // bytes of a block's multipliers

constexpr int64_t kMinBlock = 32, kMaxBlock = 64;  // inputs of an activation's scale (quire/weight_format.py)

inline int64_t num_groups(int64_t k, int64_t group) { return group == 0 ? 1 : (k + group - 1) / group; }

// How rows are rounded (quire/weight_format.py).
struct RowFormat {
  int64_t group;     // inputs of a group of the weight; 0: the whole row
  int64_t rotation;  // inputs that are rotated together first: 64, 32 or 16, or 0
  int64_t block;     // inputs that share a scale; 0: the whole row

  int64_t part() const { return block == 0 ? group : std::min(group, block); }
  int64_t padded(int64_t k) const { return group == 0 ? k : num_groups(k, group) * group; }
  int64_t blocks(int64_t k) const { return num_groups(padded(k), block); }
  int64_t parts(int64_t k) const { return num_groups(padded(k), part()); }
};

// What a code stands for: an integer, or a number of a table of 16 (unit_layout.h).
enum class Codebook : int { none = 0, iq4 = 1, fp4 = 2 };

// What a group's scale is held as: fp16, an integer of 8 bits times the fp16 of 256 inputs, or a power of two.
enum class Scales : int { half = 0, nested = 1, power = 2 };

struct QuantizedFormat {
  int bits;       // of a code: 8 or 4, or in units 2 ... 6
  int64_t group;  // inputs; 0: one scale per column (8 bits only)
  bool has_offset;
  Codebook codebook = Codebook::none;
  Scales scales = Scales::half;

  // From `form`: bits + 16 * codebook + 64 * scales (kernels/linear/native.py).
  static QuantizedFormat of(int form, int64_t group, bool has_offset) {
    return {form % 16, group, has_offset, static_cast<Codebook>(form / 16 % 4), static_cast<Scales>(form / 64)};
  }

  // Whether it lies in units of 32 inputs (unit_layout.h).
  bool in_units() const { return (bits != 8 && bits != 4) || codebook != Codebook::none || scales != Scales::half; }
  bool two_level() const { return bits == 4 && group == kTwoLevelGroup && !in_units(); }
  int64_t groups(int64_t k) const { return num_groups(k, group); }
  RowFormat rows(int64_t rotation = 0) const {
    return {group, rotation, group == 0 || two_level() ? 0 : std::clamp(group, kMinBlock, kMaxBlock)};
  }
  // A block is a group's codes, scales and offsets of one panel; without groups it is the panel, of two levels four
  // groups.
  int64_t block_inputs(int64_t k) const {
    return group == 0 ? (k + 3) / 4 * 4 : two_level() ? kTwoLevelBlock : group;
  }
  int64_t blocks(int64_t k) const { return group == 0 ? 1 : num_groups(k, block_inputs(k)); }
  int64_t code_begin() const { return two_level() ? kTwoLevelHead : 0; }  // within a block
  int64_t code_bytes(int64_t k) const { return block_inputs(k) * kPanel * bits / 8; }
  int64_t block_bytes(int64_t k) const {
    const int64_t scales = two_level() ? kTwoLevelBlock / kTwoLevelGroup / 2 : group == 0 ? 0 : has_offset ? 4 : 2;
    return code_bytes(k) + scales * kPanel;
  }
  int64_t panel_bytes(int64_t k) const;
};

// Rows of kernels/quantized_rows.py.
struct QuantizedRows {
  int8_t* q;      // [rows, stride]
  float* scale;   // [rows, blocks]
  int32_t* sums;  // [rows, parts]
  int64_t stride;
};

struct QuantizedLinearArgs {
  QuantizedRows x;
  const uint8_t* packed;
  const float* scale;   // [panels * 32]: of the column, or the power of two that its fp16 scales are multiplied with
  const float* offset;  // [panels * 32] where there is one scale per column, with offsets
  const float* bias;    // [n] or null
  void* y;              // [rows, n] of y_type, rows y_stride elements apart
  int64_t rows, n, k, y_stride;
  QuantizedFormat format;
  Type y_type;
};

struct QuantizeArgs {
  const void* x;  // [rows, k], rows x_stride elements apart
  QuantizedRows y;
  int64_t rows, k, x_stride;
  RowFormat format;
  Type type;
};

// y[i] = row ids[i] of the weight, scale * q + offset in fp32, two roundings, rotated back, and one to the type: tied
// embeddings.
struct TakeArgs {
  const uint8_t* packed;
  const float *scale, *offset;  // as in QuantizedLinearArgs
  const int64_t* ids;
  void* y;  // [rows, k], contiguous
  int64_t rows, k;
  QuantizedFormat format;
  int64_t rotation;
  Type type;
};

// A matrix to be packed: q [count, k]; scales and offsets [count, groups], fp16 (null for one scale per column; uint8
// multipliers for two levels; uint8 exponents of powers of two). Of nested scales these are int8, offsets uint8, and each is
// multiplied with an fp16 of 256 inputs, [count, k / 256].
struct QuantizedSource {
  const int8_t* q;
  const void *scale, *offset;
  const uint16_t *outer_scale, *outer_offset;
};

// Write rows [first, first + count) of a matrix into its packed form.
void pack_quantized(const QuantizedFormat& format, const QuantizedSource& from, int64_t count, int64_t k, int64_t first,
                    uint8_t* packed, ThreadPool& pool);

struct QuantizedKernels {
  void (*linear)(const QuantizedLinearArgs&, ThreadPool&);
  void (*quantize)(const QuantizeArgs&, ThreadPool&);
  void (*take)(const TakeArgs&, ThreadPool&);
};

#if defined(QUIRE_HAVE_X86_LEVELS) && !defined(QUIRE_ISA)
namespace avx2_vnni { extern const QuantizedKernels kQuantized; }
#endif
QUIRE_LEVELS_VNNI(QuantizedKernels, kQuantized)
QUIRE_AMX_LEVEL(QuantizedKernels)

// The level's kernels; for "avx2" those with AVX-VNNI where the CPU has it ("avx2_madd": without, for tests).
const QuantizedKernels* quantized_kernels(const char* isa);

}  // namespace quire::cpu
