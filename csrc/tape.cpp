#include "tape.h"

#include <stdexcept>

namespace quire::cpu {

namespace {
thread_local Tape* current = nullptr;
}  // namespace

const PoolLease::Entry& PoolLease::find(int num_threads) {
  static std::mutex mutex;
  // Never destroyed: at exit the threads may be parked in a process that is already half gone.
  static auto* pools = new std::map<int, std::unique_ptr<Entry>>;
  const std::lock_guard<std::mutex> lock(mutex);
  std::unique_ptr<Entry>& entry = (*pools)[num_threads];
  if (entry == nullptr) entry = std::make_unique<Entry>(num_threads);
  return *entry;
}

Tape* Tape::recording() { return current; }

void Tape::start() {
  if (current != nullptr) throw std::logic_error("a tape is recording on this thread already");
  current = this;
}

void Tape::stop() {
  if (current != this) throw std::logic_error("this tape is not recording on this thread");
  current = nullptr;
}

void Tape::run(int num_threads) const {
  const PoolLease pool(num_threads);
  for (const Call& call : calls_) call(pool.get());
}

}  // namespace quire::cpu
