// Loops of the small ops: over rows, split over threads; over the vectors of a row. Tails go through the same vector
// operations as whole vectors, on padded copies.
#pragma once

#include <algorithm>

#include "cpu/isa.h"
#include "cpu/linear.h"
#include "cpu/thread_pool.h"

namespace quire::cpu::QUIRE_ISA {

constexpr int64_t kSmallElements = 1 << 15;  // a few us: not worth another thread

template <typename F>
void over_rows(int64_t rows, int64_t row_elements, ThreadPool& pool, const F& row) {
  auto body = [&](int thread, int num_threads) {
    const Range mine = share(rows, thread, num_threads);
    for (int64_t i = mine.begin; i < mine.end; ++i) row(i);
  };
  if (rows * row_elements < kSmallElements) {
    body(0, 1);
  } else {
    pool.run(body);
  }
}

// Call f(i, n) for every vector of a row: n lanes of it count.
template <typename F>
inline void over_vectors(int64_t size, const F& f) {
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) f(i, kLanes);
  if (i < size) f(i, static_cast<int>(size - i));
}

template <typename T>
inline Vec load_some(const T* p, int n) {
  if (n == kLanes) return load(p);
  T padded[kLanes] = {};
  std::copy(p, p + n, padded);
  return load(padded);
}

template <typename T>
inline void store_some(T* p, Vec v, int n) {
  if (n == kLanes) {
    store(p, v);
    return;
  }
  T padded[kLanes];
  store(padded, v);
  std::copy(padded, padded + n, p);
}

template <typename Args, void (*wide)(const Args&, ThreadPool&), void (*half)(const Args&, ThreadPool&)>
void by_type(const Args& a, ThreadPool& pool) {
  (a.type == Type::f32 ? wide : half)(a, pool);
}

}  // namespace quire::cpu::QUIRE_ISA
