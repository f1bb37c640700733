// Plain weights rounded to int8 or int4 with symmetric scales, while a checkpoint is loaded: quant/rtn.py, bit for bit.
#pragma once

#include <cstdint>

#include "cpu/levels.h"
#include "cpu/linear.h"
#include "cpu/thread_pool.h"

namespace quire::cpu {

struct QuantizeWeightsArgs {
  const void* w;  // [rows, k], rows `stride` elements apart
  int8_t* q;      // [rows, k]
  float* scale;   // [rows, groups]; of two levels [rows]
  uint8_t* multiplier;  // of two levels [rows, groups], else not used
  int64_t rows, k, stride;
  int64_t group;  // inputs, the last group of a row may be short; int4: 32, 64 or 128, or 16, which has two levels
  int64_t rotation;  // inputs of a block, or 0
  int bits;          // 8 or 4
  Type type;
};

struct QuantizeWeightsKernels {
  void (*quantize)(const QuantizeWeightsArgs&, ThreadPool&);
};

QUIRE_LEVELS(QuantizeWeightsKernels, kQuantizeWeights)

}  // namespace quire::cpu
