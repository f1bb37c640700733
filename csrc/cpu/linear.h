// y[m][n] = sum_k x[m][k] * w[n][k] (+ bias[n]) over weights packed once at load.
//
// Packed layout, one linear stream per panel of 32 columns, the same for one row and for many:
//     bf16   [ceil(N/32)][ceil(K/2)][32][2]        fp32   [ceil(N/32)][K][32]
// Columns beyond N and the odd last k are zero. Every output element is accumulated in fp32, k ascending, in one
// register, whatever the number of rows and threads: a row's bits are the same alone or among others.
#pragma once

#include <cstdint>

#include "cpu/levels.h"
#include "cpu/thread_pool.h"

namespace quire::cpu {

enum class Type : int { f32 = 0, bf16 = 1 };

constexpr int64_t kPanel = 32;  // columns of a panel: two zmm or four ymm

struct LinearArgs {
  const void* x;       // [rows, k], rows x_stride elements apart, of the weight's type
  const void* packed;  // see above
  const float* bias;   // [n] or null
  void* y;             // [rows, n], rows y_stride elements apart, of y_type
  int64_t rows, n, k;
  int64_t x_stride, y_stride;
  Type y_type;
};

// Elements (of the weight's type) that n x k weights take when packed.
int64_t packed_elements(Type type, int64_t n, int64_t k);

// Write rows [first, first + count) of an n x k matrix, given as w [count, k], into its packed form. Rows may come in
// any order and number (fused matrices are packed tensor by tensor); parts that are never written must be zero before.
void pack(Type type, const void* w, int64_t count, int64_t k, int64_t first, void* packed, ThreadPool& pool);

// One table per level; the caller picks by cpuid (kernels_for in levels.h).
struct LinearKernels {
  void (*bf16)(const LinearArgs&, ThreadPool&);
  void (*f32)(const LinearArgs&, ThreadPool&);
};

QUIRE_LEVELS(LinearKernels, kLinear)
QUIRE_AMX_LEVEL(LinearKernels)

}  // namespace quire::cpu
