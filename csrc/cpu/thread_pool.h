// A persistent pool: one thread per core, pinned, that spins briefly and then parks.
//
// A decode step has about 150 parallel regions of 10-500 us. Waking a parked thread costs 25-40 us, joining a spinning
// one 0.1 us (measured, benchmarks/results), so a worker spins about half a millisecond after its last region before
// it parks: it stays awake within a step and leaves the core to the API process between steps.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

namespace quire::cpu {

// The half-open range [begin, end) of n items that thread t of num_threads takes, in order and even to within one.
struct Range {
  int64_t begin, end;
  bool empty() const { return begin >= end; }
};
inline Range share(int64_t n, int thread, int num_threads) {
  return {n * thread / num_threads, n * (thread + 1) / num_threads};
}

// The CPUs that worker 1, 2, ... of pools made from now on are pinned to, from the second on (the caller's is the first);
// those that the process may not use are left out. Until it is called: all that it may use, ascending.
void place_threads(const std::vector<int>& cpus);

class ThreadPool {
 public:
  using Body = void (*)(void* context, int thread, int num_threads);

  // num_threads counts the caller. With `pin`, worker i runs on the i-th CPU of `place_threads`; the caller
  // is not pinned, since it belongs to Python.
  ThreadPool(int num_threads, bool pin);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const { return static_cast<int>(workers_.size()) + 1; }

  // Run body(context, t, n) on every thread t of n, the caller being thread 0; return when all are done.
  void run(Body body, void* context);

  // The same for a callable f(thread, num_threads).
  template <typename F>
  void run(const F& f) {
    run([](void* context, int thread, int n) { (*static_cast<const F*>(context))(thread, n); },
        const_cast<void*>(static_cast<const void*>(&f)));
  }

  // Lay out items [0, n), n < 2^32, for the next run: one share per thread.
  void deal(int64_t n);

  // The next items of `thread`, at most `most`: of its own share in order, then from the back of others' shares; empty
  // when none are left. Cores differ: a neighbour on the sibling hyperthread or another process takes half of one, and
  // a fixed split waits for it.
  Range take(int thread, int64_t most);

  // Call f(items) until none are left.
  template <typename F>
  void take_all(int thread, int64_t most, const F& f) {
    for (Range items = take(thread, most); !items.empty(); items = take(thread, most)) f(items);
  }

 private:
  void work(int index, int core);

  struct alignas(64) Share {
    std::atomic<uint64_t> left{0};  // begin << 32 | end
  };

  std::vector<std::thread> workers_;
  std::unique_ptr<Share[]> shares_;
  alignas(64) std::atomic<uint32_t> generation_{0};
  alignas(64) std::atomic<uint32_t> parked_{0};
  alignas(64) std::atomic<int> pending_{0};
  Body body_ = nullptr;
  void* context_ = nullptr;
  bool stop_ = false;
};

}  // namespace quire::cpu
