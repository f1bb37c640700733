#include "tape.h"

#include <chrono>
#include <stdexcept>
#include <string>

namespace quire::cpu {

namespace {
thread_local Tape* current = nullptr;
}  // namespace

const PoolLease::Entry& PoolLease::find(int num_threads) {
  static std::mutex mutex;
  // Never destroyed: at exit the threads may still be parked while the process is torn down.
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

void Tape::check(const Counts& counts) const {
  for (size_t kind = 0; kind < limits_.size(); ++kind) {
    if (counts[kind] < 0 || counts[kind] > limits_[kind]) {
      throw std::out_of_range("a replay is larger than the step that was recorded");
    }
  }
}

void Tape::run(int num_threads, const Counts& counts) const {
  check(counts);
  const PoolLease pool(num_threads);
  for (const Entry& entry : calls_) entry.call(pool.get(), counts);
}

std::vector<std::pair<std::string, double>> Tape::run_timed(int num_threads, const Counts& counts) const {
  using Clock = std::chrono::steady_clock;
  check(counts);
  std::vector<std::pair<std::string, double>> taken;
  taken.reserve(calls_.size());
  const PoolLease pool(num_threads);
  for (const Entry& entry : calls_) {
    const Clock::time_point start = Clock::now();
    entry.call(pool.get(), counts);
    taken.emplace_back(entry.what->name(), std::chrono::duration<double>(Clock::now() - start).count());
  }
  return taken;
}

}  // namespace quire::cpu
