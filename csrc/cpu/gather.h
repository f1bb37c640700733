// Rows of a table by their indices: token embeddings, the tokens that give logits, the angles of positions. Copies: any
// level gives the same bits.
#pragma once

#include <cstdint>

#include "cpu/levels.h"
#include "cpu/linear.h"
#include "cpu/thread_pool.h"

namespace quire::cpu {

struct GatherArgs {
  const void* table;
  const int64_t* ids;  // each is a row of the table
  void* y;             // [rows, size], contiguous
  int64_t rows, size;
  int64_t stride;  // elements between the table's rows; 0: the table is a packed weight (cpu/linear.h)
  Type type;
};

struct GatherKernels {
  void (*gather)(const GatherArgs&, ThreadPool&);
};

QUIRE_LEVELS(GatherKernels, kGather)

}  // namespace quire::cpu
