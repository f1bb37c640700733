#include "cpu/thread_pool.h"

#include <algorithm>
#include <mutex>

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif

namespace quire::cpu {

namespace {

constexpr int kSpins = 20000;  // pauses of about 25 ns: half a millisecond
constexpr int kCallerSpins = 1000;  // 25 us

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

std::vector<int> allowed_cores() {
  std::vector<int> cores;
#if defined(__linux__)
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) == 0) {
    for (int c = 0; c < CPU_SETSIZE; ++c) {
      if (CPU_ISSET(c, &set)) cores.push_back(c);
    }
  }
#endif
  return cores;
}

std::mutex placed_mutex;
std::vector<int> placed;  // empty: allowed_cores

std::vector<int> cores_to_take() {
  std::vector<int> allowed = allowed_cores();
  const std::lock_guard<std::mutex> lock(placed_mutex);
  if (placed.empty()) return allowed;
  std::vector<int> cores;
  for (int core : placed) {
    if (std::find(allowed.begin(), allowed.end(), core) != allowed.end()) cores.push_back(core);
  }
  return cores;
}

void pin_to(int core) {
#if defined(__linux__)
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(core, &set);
  pthread_setaffinity_np(pthread_self(), sizeof(set), &set);
#else
  (void)core;
#endif
}

}  // namespace

void place_threads(const std::vector<int>& cpus) {
  const std::lock_guard<std::mutex> lock(placed_mutex);
  placed = cpus;
}

ThreadPool::ThreadPool(int num_threads, bool pin) : shares_(new Share[num_threads]) {
  const std::vector<int> cores = cores_to_take();
  for (int i = 1; i < num_threads; ++i) {
    // Two threads on one core would wait for each other, so more threads than cores are not pinned.
    const bool fits = pin && num_threads <= static_cast<int>(cores.size());
    workers_.emplace_back([this, i, core = fits ? cores[i] : -1] { work(i, core); });
  }
}

ThreadPool::~ThreadPool() {
  stop_ = true;
  generation_.fetch_add(1, std::memory_order_release);
  generation_.notify_all();
  for (std::thread& t : workers_) t.join();
}

void ThreadPool::run(Body body, void* context) {
  const int n = num_threads();
  if (n == 1) {
    body(context, 0, 1);
    return;
  }
  body_ = body;
  context_ = context;
  pending_.store(n - 1, std::memory_order_relaxed);
  // Sequentially consistent with the worker's parked_ increment and its last look at generation_: either the worker
  // sees the new generation, or this thread sees that it is parked.
  generation_.fetch_add(1, std::memory_order_seq_cst);
  if (parked_.load(std::memory_order_seq_cst) != 0) generation_.notify_all();
  body(context, 0, n);
  for (int spins = 0; pending_.load(std::memory_order_acquire) != 0; ++spins) {
    // On a busy machine the worker may be waiting for this very core, so yield it. With the long spin every region took
    // a millisecond then.
    if (spins > kCallerSpins) std::this_thread::yield();
    pause();
  }
}

void ThreadPool::deal(int64_t n) {
  for (int t = 0; t < num_threads(); ++t) {
    const Range mine = share(n, t, num_threads());
    shares_[t].left.store(static_cast<uint64_t>(mine.begin) << 32 | static_cast<uint64_t>(mine.end),
                          std::memory_order_relaxed);  // `run` publishes it
  }
}

Range ThreadPool::take(int thread, int64_t most) {
  for (int i = 0; i < num_threads(); ++i) {
    std::atomic<uint64_t>& left = shares_[(thread + i) % num_threads()].left;
    uint64_t seen = left.load(std::memory_order_relaxed);
    for (;;) {
      const int64_t begin = static_cast<int64_t>(seen >> 32), end = static_cast<int64_t>(seen & 0xffffffff);
      const int64_t count = std::min(most, end - begin);
      if (count <= 0) break;
      const uint64_t rest = i == 0 ? seen + (static_cast<uint64_t>(count) << 32) : seen - static_cast<uint64_t>(count);
      if (left.compare_exchange_weak(seen, rest, std::memory_order_relaxed)) {
        return i == 0 ? Range{begin, begin + count} : Range{end - count, end};
      }
    }
  }
  return {0, 0};
}

void ThreadPool::work(int index, int core) {
  if (core >= 0) pin_to(core);
  uint32_t seen = 0;
  for (;;) {
    int spins = 0;
    while (generation_.load(std::memory_order_acquire) == seen) {
      if (++spins < kSpins) {
        pause();
        if (spins % 256 == 0) std::this_thread::yield();  // the caller may wait for this core, and bring the work
        continue;
      }
      parked_.fetch_add(1, std::memory_order_seq_cst);
      generation_.wait(seen, std::memory_order_seq_cst);
      parked_.fetch_sub(1, std::memory_order_relaxed);
    }
    ++seen;
    if (stop_) return;
    body_(context_, index, num_threads());
    pending_.fetch_sub(1, std::memory_order_release);
  }
}

}  // namespace quire::cpu
