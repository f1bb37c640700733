// Who runs a native call: at once on the compute threads, and, while a tape records, again whenever the tape is replayed.
//
// A decode step of a small model is some 300 calls of a few microseconds; from Python each costs as much again in
// checks and argument passing. A step of a shape that was seen before is replayed as one call without the GIL (the
// CPU's answer to CUDA graphs). A call is remembered with its addresses: whoever records keeps the memory where it is.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "cpu/thread_pool.h"

namespace quire::cpu {

// The compute threads of this process, as many pools as there are thread counts in use: threads belong to the machine,
// not to an engine. A lease is exclusive, so that two engines in one process take turns.
class PoolLease {
 public:
  explicit PoolLease(int num_threads) : entry_(find(num_threads)), lock_(entry_.mutex) {}
  ThreadPool& get() const { return entry_.pool; }

 private:
  struct Entry {
    explicit Entry(int num_threads) : pool(num_threads, true) {}
    mutable ThreadPool pool;
    mutable std::mutex mutex;
  };

  static const Entry& find(int num_threads);

  const Entry& entry_;
  std::lock_guard<std::mutex> lock_;
};

class Tape {
 public:
  using Call = std::function<void(ThreadPool&)>;

  // Calls submitted on this thread are recorded between start and stop. Tapes do not nest.
  void start();
  void stop();
  void add(Call call) { calls_.push_back(std::move(call)); }
  void run(int num_threads) const;
  int64_t size() const { return static_cast<int64_t>(calls_.size()); }

  // The tape that records on this thread, or null.
  static Tape* recording();

 private:
  std::vector<Call> calls_;
};

// Every binding ends here: `call(pool)` must be a copyable value (it captures argument structs, never references).
template <typename F>
void submit(int num_threads, F call) {
  {
    const PoolLease pool(num_threads);
    call(pool.get());
  }
  if (Tape* tape = Tape::recording()) tape->add(Tape::Call(std::move(call)));
}

}  // namespace quire::cpu
