// Packing of quantized weights, and the choice of the level's kernels.
#include "cpu/quantized.h"

#include <algorithm>
#include <cstring>

#include "cpu/unit_layout.h"

namespace quire::cpu {

namespace {

// Four codes as they lie in memory, from the quad's four numbers: q + 128, or q + 8 in the low halves of the bytes.
uint32_t int8_quad(const int8_t* q) {
  uint32_t four;
  std::memcpy(&four, q, 4);
  return four ^ 0x80808080u;
}

uint32_t int4_quad(const int8_t* q) {
  uint32_t four;
  std::memcpy(&four, q, 4);
  return (four & 0x0f0f0f0fu) ^ 0x08080808u;
}

// One row of one group to its column of the block. A short last group is padded with the codes of zeros.
void pack_codes(const QuantizedFormat& format, const int8_t* q, int64_t size, int64_t column, uint8_t* block) {
  const int64_t step = format.bits == 8 ? 4 : 8;  // numbers that make four bytes
  uint8_t* target = block + column * 4;
  for (int64_t i = 0; i < size; i += step, target += kPanel * 4) {
    int8_t padded[8] = {};
    const int8_t* from = q + i;
    if (i + step > size) {
      std::copy(from, q + size, padded);
      from = padded;
    }
    const uint32_t codes = format.bits == 8 ? int8_quad(from) : int4_quad(from) | int4_quad(from + 4) << 4;
    std::memcpy(target, &codes, 4);
  }
}

// The multipliers of one row of one block; 0 for groups that do not exist.
void pack_multipliers(const uint8_t* m, int64_t groups, int64_t column, uint8_t* target) {
  const int shift = column < kPanel / 2 ? 0 : 4;
  for (int64_t g = 0; g < kTwoLevelBlock / kTwoLevelGroup; ++g) {
    uint8_t& both = target[g * kPanel / 2 + column % (kPanel / 2)];
    both = static_cast<uint8_t>((both & (0xf0 >> shift)) | ((g < groups ? m[g] : 0) << shift));
  }
}

// `row`: of q, scales and offsets.
void pack_panel_row(const QuantizedFormat& format, const QuantizedSource& from, int64_t row, int64_t k, int64_t column,
                    uint8_t* panel) {
  if (format.in_units()) return pack_unit_row(unit_layout(format), from, row, k, column, panel);
  const int8_t* q = from.q + row * k;
  const int64_t codes = format.code_bytes(k), size = format.group == 0 ? k : format.block_inputs(k);
  const auto* scale = static_cast<const uint16_t*>(from.scale) + row * format.groups(k);
  const auto* offset = static_cast<const uint16_t*>(from.offset) + row * format.groups(k);
  for (int64_t g = 0; g < format.blocks(k); ++g) {
    uint8_t* block = panel + g * format.block_bytes(k);
    pack_codes(format, q + g * size, std::min(size, k - g * size), column, block + format.code_begin());
    if (format.two_level()) {
      const int64_t groups = format.groups(k), first = g * (kTwoLevelBlock / kTwoLevelGroup);
      const auto* m = static_cast<const uint8_t*>(from.scale) + row * groups + first;
      pack_multipliers(m, groups - first, column, block);
      continue;
    }
    if (format.group == 0) continue;
    std::memcpy(block + codes + column * 2, scale + g, 2);
    if (format.has_offset) std::memcpy(block + codes + (kPanel + column) * 2, offset + g, 2);
  }
}

}  // namespace

int64_t QuantizedFormat::panel_bytes(int64_t k) const {
  if (!in_units()) return blocks(k) * block_bytes(k);
  const UnitLayout layout = unit_layout(*this);
  return layout.num_blocks(k) * layout.block_bytes();
}

void pack_quantized(const QuantizedFormat& format, const QuantizedSource& from, int64_t count, int64_t k, int64_t first,
                    uint8_t* packed, ThreadPool& pool) {
  const int64_t first_panel = first / kPanel;
  const int64_t panels = (first + count - 1) / kPanel - first_panel + 1;
  pool.run([&](int thread, int num_threads) {
    const Range mine = share(panels, thread, num_threads);
    for (int64_t p = first_panel + mine.begin; p < first_panel + mine.end; ++p) {
      const int64_t begin = std::max(first, p * kPanel), end = std::min(first + count, (p + 1) * kPanel);
      for (int64_t row = begin; row < end; ++row) {
        pack_panel_row(format, from, row - first, k, row % kPanel, packed + p * format.panel_bytes(k));
      }
    }
  });
}

const QuantizedKernels* quantized_kernels(const char* isa) {
  const bool plain = std::strcmp(isa, "avx2_madd") == 0;
  const QuantizedKernels* kernels = kernels_for<QuantizedKernels>(plain ? "avx2" : isa);
#if defined(QUIRE_HAVE_X86_LEVELS)
  if (kernels == &avx2::kQuantized && !plain && detect().avx_vnni) return &avx2_vnni::kQuantized;
#endif
  return kernels;
}

}  // namespace quire::cpu
