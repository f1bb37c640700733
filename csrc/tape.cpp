#include "tape.h"

#include <stdexcept>
#include <string>

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

void Tape::start(const Counts& limits) {
  if (current != nullptr) throw std::logic_error("a tape is recording on this thread already");
  if (limits[0] == limits[1]) throw std::invalid_argument("the limits of a tape must be different numbers");
  limits_ = limits;
  calls_.clear();
  current = this;
}

void Tape::stop() {
  if (current != this) throw std::logic_error("this tape is not recording on this thread");
  current = nullptr;
}

int Tape::kind_of(int64_t count) const {
  for (size_t kind = 0; kind < limits_.size(); ++kind) {
    if (count == limits_[kind]) return static_cast<int>(kind);
  }
  throw std::logic_error("a native call over " + std::to_string(count) + " rows cannot be replayed at other counts");
}

void Tape::run(int num_threads, const Counts& counts) const {
  for (size_t kind = 0; kind < limits_.size(); ++kind) {
    if (counts[kind] < 0 || counts[kind] > limits_[kind]) {
      throw std::out_of_range("a replay is larger than the step that was recorded");
    }
  }
  const PoolLease pool(num_threads);
  for (const Call& call : calls_) call(pool.get(), counts);
}

}  // namespace quire::cpu
