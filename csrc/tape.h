// What runs a native call: the compute threads, at once; or, while a tape records, the tape, whenever it is replayed.
//
// A step of a small model is some 300 calls of a few microseconds; from Python each costs as much again in checks and
// argument passing. So a step is recorded once, at its largest shape and without running, and every step is then one
// call without the GIL (the CPU's answer to CUDA graphs). A call takes the number of its rows, the step's tokens or the
// rows that give logits, from each replay, and everything else that changes by address: one tape serves every step. The
// recording side keeps the memory where it is, with room for the largest shape.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <typeinfo>
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

// How many tokens a step has, and how many of their rows give logits.
using Counts = std::array<int64_t, 2>;

class Tape {
 public:
  using Call = std::function<void(ThreadPool&, const Counts&)>;

  // Between start and stop the calls that this thread submits are recorded and not run. `limits`: the largest step, two
  // different numbers that tell the counts of a call apart. Tapes do not nest.
  void start(const Counts& limits);
  void stop();
  // `what`: the type of the arguments, which names the op.
  void add(const std::type_info& what, Call call) { calls_.push_back({&what, std::move(call)}); }
  void run(int num_threads, const Counts& counts) const;
  // The same, and the seconds of each call by its op.
  std::vector<std::pair<std::string, double>> run_timed(int num_threads, const Counts& counts) const;
  int64_t size() const { return static_cast<int64_t>(calls_.size()); }

  // Which of the counts a call's number is; throws where it is none of them, since such a call cannot be replayed.
  int kind_of(int64_t count) const;

  // The tape that records on this thread, or null.
  static Tape* recording();

 private:
  struct Entry {
    const std::type_info* what;
    Call call;
  };

  void check(const Counts& counts) const;

  Counts limits_{};
  std::vector<Entry> calls_;
};

// Every op's binding ends here: run(args, pool). `counts` names the fields of args that change with the step.
template <typename Args>
void submit(int num_threads, const Args& args, std::initializer_list<int64_t Args::*> counts,
            void (*run)(const Args&, ThreadPool&)) {
  Tape* tape = Tape::recording();
  if (tape == nullptr) {
    const PoolLease pool(num_threads);
    run(args, pool.get());
    return;
  }
  std::vector<std::pair<int64_t Args::*, int>> fields;
  for (const auto field : counts) fields.emplace_back(field, tape->kind_of(args.*field));
  tape->add(typeid(Args), [args, run, fields](ThreadPool& pool, const Counts& now) {
    Args with_counts = args;
    for (const auto& [field, kind] : fields) with_counts.*field = now[kind];
    run(with_counts, pool);
  });
}

// For calls that do not belong to a step, and for ops that name no counts: they end a recording.
template <typename F>
void submit(int num_threads, F call) {
  if (Tape::recording() != nullptr) throw std::logic_error("a native call that cannot be replayed at other counts");
  const PoolLease pool(num_threads);
  call(pool.get());
}

}  // namespace quire::cpu
