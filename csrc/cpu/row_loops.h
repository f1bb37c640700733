// Loops of the small ops: over rows, split over threads; over the vectors of a row. Tails go through the same vector
// operations as whole vectors, on padded copies.
#pragma once

#include <algorithm>

#include "cpu/cpuid.h"
#include "cpu/isa.h"
#include "cpu/linear.h"
#include "cpu/thread_pool.h"

namespace quire::cpu::QUIRE_ISA {

constexpr int64_t kSmallElements = 1 << 14;  // about 2 us: too little for another thread
constexpr int64_t kTakenElements = 1 << 13;  // taken at a time: about 1 us
constexpr int64_t kTakenBytes = 64 << 10;    // of weights: about 4 us

// How far ahead a stream of weights is fetched. Cores of AMD fetch a stream themselves, across pages too. On Zen 4 lines
// that are asked for far ahead of it disturb them: one row of bf16 then reads 41 GB/s instead of 56, so the near distance
// is 512 bytes. Zen 5 wants 4 KiB: one row of int4 with groups of 32 then reads 62 GB/s instead of 48. Other cores stop
// at the end of a 4 KiB page, which costs a third of one thread's bandwidth; both distances are the far one there. Loops
// with much work for each byte, such as several rows by nibbles, gain from it everywhere
// (benchmarks/results/cpu-kernels-2026-11-22.md and -23.md, ahead-zen5-2026-11-23.md).
constexpr int64_t kFarAhead = 8 << 10;
static const int64_t kNearAhead = bytes_ahead();

// How many tiles of at most `most` rows share a pass. A single one streams through the weights. More than kStreamRows rows
// compute so much for each byte that it pays to fetch the next panel meanwhile, of which each of two tiles fetches half:
// 12 rows of int8 take 0.7 to 1.0 of the time on Zen 4 (benchmarks/results/cpu-kernels-2026-11-26.md). Higher tiles take
// the weights apart once each (word_groups.h), so they are not divided.
constexpr int64_t kStreamRows = 8;
inline int64_t num_tiles(int64_t rows, int64_t most) {
  return std::max<int64_t>((rows + most - 1) / most, rows > kStreamRows && most <= 12 ? 2 : 1);
}

// Fetch kBytes that are read `ahead` bytes later in a stream of weights.
template <int64_t kBytes>
inline void fetch_ahead(const void* p, int64_t ahead) {
  for (int64_t i = 0; i < kBytes; i += 64) __builtin_prefetch(static_cast<const char*>(p) + ahead + i, 0, 2);
}

template <typename F>
void over_rows(int64_t rows, int64_t row_elements, ThreadPool& pool, const F& row) {
  const auto some = [&](const Range& mine) {
    for (int64_t i = mine.begin; i < mine.end; ++i) row(i);
  };
  if (rows * row_elements < kSmallElements) return some(Range{0, rows});
  pool.deal(rows);
  const int64_t most = kTakenElements / row_elements + 1;
  pool.run([&](int thread, int) { pool.take_all(thread, most, some); });
}

// Call f(range of panels) on all of them. `small`: for less than about 5 us of work the other threads are not woken.
// Which thread computes a panel changes no bit.
template <typename F>
void over_panels(int64_t panels, int64_t panel_bytes, bool small, ThreadPool& pool, const F& f) {
  if (small) return f(Range{0, panels});
  const int64_t most = std::clamp<int64_t>(kTakenBytes / panel_bytes, 1, 8);
  pool.deal(panels);
  pool.run([&](int thread, int) { pool.take_all(thread, most, f); });
}

// Call f(i, n) for every vector of a row, of which n lanes are in use.
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

// The sum of squares of a row, in a fixed order: element j is in chain j / kLanes % 4.
template <typename T>
inline float sum_of_squares(const T* x, int64_t size) {
  Vec squares[4] = {zero(), zero(), zero(), zero()};
  for (int64_t first = 0; first < size; first += 4 * kLanes) {
    UNROLL for (int c = 0; c < 4; ++c) {
      const int64_t j = first + c * kLanes;
      if (j >= size) break;
      const Vec v = load_some(x + j, static_cast<int>(std::min<int64_t>(kLanes, size - j)));
      squares[c] = fma(v, v, squares[c]);
    }
  }
  return QUIRE_ISA::sum(add(add(squares[0], squares[1]), add(squares[2], squares[3])));
}

template <typename Args, void (*wide)(const Args&, ThreadPool&), void (*half)(const Args&, ThreadPool&)>
void by_type(const Args& a, ThreadPool& pool) {
  (a.type == Type::f32 ? wide : half)(a, pool);
}

}  // namespace quire::cpu::QUIRE_ISA
