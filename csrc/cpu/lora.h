// y[m] += B (c * A x[m]) with the low-rank adapter of row m (Hu et al. 2021, arXiv:2106.09685), over rows of many
// adapters at once. Rows come grouped by adapter: slot s has the rows order[starts[s]] .. order[starts[s + 1] - 1], and
// a row that is in no group keeps its y as it is.
//
// A linear may be several matrices of a checkpoint in one (q, k, v): its parts. A slot holds for each part
//     A   [ceil(rank/16)][ceil(k/step)][16][step]          from p * max_rank * padded k on
//     B   [ceil(width/16)][ceil(rank/step)][16][step]      from max_rank * (padded widths before p) on
// where step is 2 for bf16 and 1 for fp32: pairs that lie together, as in cpu/linear.h. Elements beyond k, rank or
// width are zero. The rank is the adapter's own, in ranks[s][p]; 0: the part has no adapter.
//
// A part with gained[s][p] != 0 is a DoRA (Liu et al. 2024, arXiv:2402.09353): y[m] = y[m] * gain + offset before the sum,
// with a gain and an offset per column of y.
//
// Exactness: h = c * A x is summed over k in kChains sums, whose number belongs to the level, and rounded to the
// weight's type; B h is one sum over the rank, ascending. Neither depends on the number of rows or on other adapters.
#pragma once

#include <cstdint>

#include "cpu/levels.h"
#include "cpu/linear.h"
#include "cpu/thread_pool.h"

namespace quire::cpu {

constexpr int64_t kLoraColumns = 16;  // columns of A and of B that lie together
constexpr int64_t kMaxLoraParts = 3;

struct LoraArgs {
  const void* x;         // [rows, k], rows x_stride elements apart
  void* y;               // [rows, n], rows y_stride elements apart; parts lie side by side, in order
  void* h;               // [rows, num_parts * max_rank]: scratch
  const void *a, *b;     // [num_slots], laid out as above
  const int64_t* order;  // rows, grouped by slot
  const int64_t* starts;  // [num_slots + 1]
  const int64_t* ranks;   // [num_slots, num_parts]
  const float* scales;    // [num_slots, num_parts]: c
  const int64_t* gained;  // [num_slots, num_parts]
  const float *gains, *offsets;  // [num_slots, n]
  int64_t rows, k, num_slots, num_parts, max_rank;  // max_rank: a multiple of 16
  int64_t widths[kMaxLoraParts];
  int64_t x_stride, y_stride;
  Type type;  // of x, y, h, A and B
};

struct LoraKernels {
  void (*add)(const LoraArgs&, ThreadPool&);
};

QUIRE_LEVELS(LoraKernels, kLora)

}  // namespace quire::cpu
