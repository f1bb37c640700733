// Mixture of experts: routing of a row, and the products of every expert with the rows that chose it.
//
// Both are written once for all levels: routing is scalar, and the products are the level's own linears and
// activations. A row's bits depend on that row alone: the linears are independent of their batch, and a token's results
// are added in the order of its choices.
#pragma once

#include <cstdint>

#include "cpu/collective.h"
#include "cpu/gated.h"
#include "cpu/linear.h"
#include "cpu/quantized.h"
#include "cpu/thread_pool.h"

namespace quire::cpu {

enum class Scoring : int { softmax = 0, sigmoid = 1, softmax_after_topk = 2 };

struct RouteArgs {
  const float* logits;      // [tokens, experts]
  const float* correction;  // [experts], added for the choice alone; or null
  float* weights;           // [tokens, top_k]
  int64_t* ids;             // [tokens, top_k]
  int64_t tokens, experts, top_k, groups, top_groups;
  Scoring scoring;
  bool group_by_two;  // a group is worth its two best experts, else its best
  bool normalize;
  float scale;
  const float* factors;  // [experts], on the weights; or null
};

// Choose the experts of each token: scores, the best groups, the best experts in them, weights. Of equal scores the
// lower index is taken.
void route(const RouteArgs& args, ThreadPool& pool);

// As int64 words from Python: the addresses of one expert's matrix.
struct ExpertMatrix {
  const void* packed;
  const float *bias, *scale, *offset;
};

// The experts of a layer over several ranks. Slots are numbered rank by rank, as many on each; an expert may have several
// slots (replicas), and shares its rows out among them in turn. All ranks have the same rows and the same table.
struct ExpertPlaces {
  Channel* channel = nullptr;  // null: one process, where expert e is slot e
  const int64_t* table;        // [experts, width]: the number of an expert's slots, then their numbers
  int64_t* loads;              // [experts]: rows that chose an expert are added
  int64_t experts, width;
};

struct ExpertsArgs {
  const void* x;         // [tokens, hidden], rows x_stride apart
  const float* weights;  // [tokens, top_k]
  const int64_t* ids;    // [tokens, top_k]
  const ExpertMatrix *gate_up, *down;  // of the slots on this rank
  void* y;                             // [tokens, hidden]
  char* scratch;                       // experts_scratch_bytes(), aligned to 64
  int64_t tokens, hidden, inter, slots, top_k, x_stride;  // slots: of all ranks
  int64_t up_stride, down_stride;          // of int8 rows, where the matrix is quantized
  int64_t up_rotation, down_rotation;      // of their rows
  QuantizedFormat up_format, down_format;  // bits 0: not quantized
  Gate gate;
  Type type;
  const LinearKernels* linear;
  const QuantizedKernels* quantized;
  const GatedKernels* gated;
  ExpertPlaces places;
};

// y = sum_j weights[:, j] * down(act(gate_up(x))) with the expert ids[:, j]. Every expert that was chosen multiplies
// the rows that chose it, and no others. Over several ranks each multiplies with the experts of its own slots, the
// results are exchanged, and every rank has the whole of y.
void experts(const ExpertsArgs& args, ThreadPool& pool);

int64_t experts_scratch_bytes(const ExpertsArgs& args);

}  // namespace quire::cpu
