// Packing: a transpose of 32 rows at a time. It runs once at load and is bound by page faults of the target, not by
// this loop.
#include "cpu/linear.h"

#include <algorithm>

namespace quire::cpu {

namespace {

template <typename Element, int kStep>
void pack_rows(const Element* w, int64_t count, int64_t k, int64_t first, Element* packed, ThreadPool& pool) {
  const int64_t steps = (k + kStep - 1) / kStep;
  const int64_t first_panel = first / kPanel;
  const int64_t panels = (first + count - 1) / kPanel - first_panel + 1;
  auto body = [&](int thread, int num_threads) {
    const Range mine = share(panels, thread, num_threads);
    for (int64_t p = first_panel + mine.begin; p < first_panel + mine.end; ++p) {
      Element* panel = packed + p * steps * kStep * kPanel;
      const int64_t begin = std::max(first, p * kPanel), end = std::min(first + count, (p + 1) * kPanel);
      // 64 k at a time: the source rows are then read a cache line or two each.
      for (int64_t k0 = 0; k0 < k; k0 += 64) {
        const int64_t k1 = std::min(k, k0 + 64);
        for (int64_t row = begin; row < end; ++row) {
          const Element* source = w + (row - first) * k;
          for (int64_t i = k0; i < k1; ++i) {
            panel[(i / kStep * kPanel + row % kPanel) * kStep + i % kStep] = source[i];
          }
        }
      }
    }
  };
  pool.run(body);
}

}  // namespace

int64_t packed_elements(Type type, int64_t n, int64_t k) {
  const int64_t step = type == Type::bf16 ? 2 : 1;
  return (n + kPanel - 1) / kPanel * kPanel * ((k + step - 1) / step * step);
}

void pack(Type type, const void* w, int64_t count, int64_t k, int64_t first, void* packed, ThreadPool& pool) {
  if (type == Type::bf16) {
    pack_rows<uint16_t, 2>(static_cast<const uint16_t*>(w), count, k, first, static_cast<uint16_t*>(packed), pool);
  } else {
    pack_rows<float, 1>(static_cast<const float*>(w), count, k, first, static_cast<float*>(packed), pool);
  }
}

}  // namespace quire::cpu
