// Rows of a table by index. Bytes: each row read and written once; a row of a packed weight lies in pieces of 4 bytes,
// 128 bytes apart. Bound: memory latency, a few us per step.
#include "cpu/gather.h"

#include <algorithm>

#include "cpu/row_loops.h"

namespace quire::cpu::QUIRE_ISA {

namespace {

template <typename T, int kStep>
void gather_as(const GatherArgs& a, ThreadPool& pool) {
  const int64_t panel_elements = (a.size + kStep - 1) / kStep * kStep * kPanel;
  over_rows(a.rows, a.size, pool, [&](int64_t i) {
    const int64_t id = a.ids[i];
    T* y = static_cast<T*>(a.y) + i * a.size;
    const T* table = static_cast<const T*>(a.table);
    if (a.stride != 0) {
      std::copy(table + id * a.stride, table + id * a.stride + a.size, y);
      return;
    }
    const T* row = table + id / kPanel * panel_elements + id % kPanel * kStep;
    for (int64_t j = 0; j < a.size; ++j) y[j] = row[j / kStep * kStep * kPanel + j % kStep];
  });
}

}  // namespace

extern const GatherKernels kGather;
const GatherKernels kGather = {by_type<GatherArgs, gather_as<float, 1>, gather_as<uint16_t, 2>>};

}  // namespace quire::cpu::QUIRE_ISA
