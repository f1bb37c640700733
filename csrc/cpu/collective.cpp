#include "cpu/collective.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <string>
#include <thread>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#endif

#include "cpu/bf16.h"

namespace quire::cpu {

namespace {

constexpr int kSpins = 2000;  // pauses of about 25 ns: 50 us, longer than ranks in step are apart
constexpr int kYields = 200;
constexpr long kSleep_ns = 20'000'000;  // an abort without a wake-up is seen after that long

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define QUIRE_WIDE __attribute__((target_clones("arch=x86-64-v4", "avx2", "default")))
#else
#define QUIRE_WIDE
#endif

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

void sleep_while(const std::atomic<uint32_t>& word, uint32_t seen) {
#if defined(__linux__)
  const timespec limit{0, kSleep_ns};
  syscall(SYS_futex, &word, FUTEX_WAIT, seen, &limit, nullptr, 0);
#else
  (void)word, (void)seen;
  std::this_thread::sleep_for(std::chrono::milliseconds(1));
#endif
}

void wake(const std::atomic<uint32_t>& word) {
#if defined(__linux__)
  syscall(SYS_futex, &word, FUTEX_WAKE, 1 << 30, nullptr, nullptr, 0);
#else
  (void)word;
#endif
}

inline bool reached(uint32_t count, uint32_t wanted) { return static_cast<int32_t>(count - wanted) >= 0; }

inline float load(float v) { return v; }
inline float load(uint16_t v) { return bf16_to_float(v); }
inline void store(float v, float* y) { *y = v; }
inline void store(float v, uint16_t* y) { *y = float_to_bf16(v); }

// The libraries' copy takes `rep movsb` for large sizes, which does not leave the lines in this core's cache.
inline __attribute__((always_inline)) void copy_lines(const char* __restrict from, char* __restrict to, int64_t bytes) {
  int64_t i = 0;
  for (; i + 64 <= bytes; i += 64) __builtin_memcpy(to + i, from + i, 64);
  for (; i < bytes; ++i) to[i] = from[i];
}

QUIRE_WIDE void copy(const char* from, char* to, int64_t bytes) { copy_lines(from, to, bytes); }

// y = x_0 + x_1 + … in this order, in fp32, rounded once; z = y where it is not null, which may lie over what has been
// added up. `offset`: elements from the start of each slot.
template <typename In, typename Out>
inline __attribute__((always_inline)) void sum_into(const char* const* parts, int count, int64_t offset,
                                                    Out* __restrict y, Out* z, int64_t n) {
  constexpr int64_t kAtOnce = 256;
  alignas(64) float total[kAtOnce];
  for (int64_t start = 0; start < n; start += kAtOnce) {
    const int64_t m = std::min(kAtOnce, n - start);
    const In* a = reinterpret_cast<const In*>(parts[0]) + offset + start;
    const In* b = reinterpret_cast<const In*>(parts[1]) + offset + start;
    if constexpr (std::is_same_v<Out, float>) {
      if (count == 2 && z != nullptr) {
#pragma GCC ivdep
        for (int64_t i = 0; i < m; ++i) y[start + i] = z[start + i] = load(a[i]) + load(b[i]);
        continue;
      }
    }
    for (int64_t i = 0; i < m; ++i) total[i] = load(a[i]) + load(b[i]);
    for (int r = 2; r < count; ++r) {
      const In* c = reinterpret_cast<const In*>(parts[r]) + offset + start;
      for (int64_t i = 0; i < m; ++i) total[i] += load(c[i]);
    }
    for (int64_t i = 0; i < m; ++i) store(total[i], y + start + i);
    if (z != nullptr) {
      copy_lines(reinterpret_cast<const char*>(y + start), reinterpret_cast<char*>(z + start), m * int64_t(sizeof(Out)));
    }
  }
}

QUIRE_WIDE void sum_ff(const char* const* p, int c, int64_t o, float* y, float* z, int64_t n) {
  sum_into<float>(p, c, o, y, z, n);
}
QUIRE_WIDE void sum_fb(const char* const* p, int c, int64_t o, uint16_t* y, uint16_t* z, int64_t n) {
  sum_into<float>(p, c, o, y, z, n);
}
QUIRE_WIDE void sum_bb(const char* const* p, int c, int64_t o, uint16_t* y, uint16_t* z, int64_t n) {
  sum_into<uint16_t>(p, c, o, y, z, n);
}
QUIRE_WIDE void sum_bf(const char* const* p, int c, int64_t o, float* y, float* z, int64_t n) {
  sum_into<uint16_t>(p, c, o, y, z, n);
}

// `y` and `z` are of the type `a.to`.
void sum(const CollectiveArgs& a, const char* const* parts, int count, int64_t offset, char* y, char* z, int64_t n) {
  if (a.to == Type::f32) {
    float *to = reinterpret_cast<float*>(y), *also = reinterpret_cast<float*>(z);
    if (a.from == Type::f32) sum_ff(parts, count, offset, to, also, n);
    else sum_bf(parts, count, offset, to, also, n);
  } else {
    uint16_t *to = reinterpret_cast<uint16_t*>(y), *also = reinterpret_cast<uint16_t*>(z);
    if (a.from == Type::f32) sum_fb(parts, count, offset, to, also, n);
    else sum_bb(parts, count, offset, to, also, n);
  }
}

inline int64_t width(Type type) { return type == Type::f32 ? 4 : 2; }

// The rows [begin, end) of x, into a slot without gaps between rows.
void fill(const CollectiveArgs& a, char* slot, int64_t begin, int64_t end, ThreadPool& pool) {
  const int64_t size = width(a.from), bytes = a.in * size;
  const char* x = static_cast<const char*>(a.x) + begin * a.x_stride * size;
  a.channel->bytes_sent += (end - begin) * bytes;
  pool.run([&](int thread, int n) {
    const Range mine = share(end - begin, thread, n);
    if (a.x_stride == a.in) {
      std::memcpy(slot + mine.begin * bytes, x + mine.begin * bytes, (mine.end - mine.begin) * bytes);
    } else {
      for (int64_t i = mine.begin; i < mine.end; ++i) std::memcpy(slot + i * bytes, x + i * a.x_stride * size, bytes);
    }
  });
}

// What the members' slots make of the rows [begin, end) of y.
void combine(const CollectiveArgs& a, const char* const* parts, int64_t begin, int64_t end, ThreadPool& pool) {
  const int members = a.channel->size(), me = a.channel->index();
  const int64_t size = width(a.from), to = width(a.to);
  pool.run([&](int thread, int n) {
    const Range mine = share(end - begin, thread, n);
    char* y = static_cast<char*>(a.y) + begin * a.y_stride * to;
    if (a.what == Collective::reduce && a.y_stride == a.out) {
      sum(a, parts, members, mine.begin * a.in, y + mine.begin * a.out * to, nullptr, (mine.end - mine.begin) * a.in);
      return;
    }
    for (int64_t i = mine.begin; i < mine.end; ++i) {
      char* row = y + i * a.y_stride * to;
      switch (a.what) {
        case Collective::reduce:
          sum(a, parts, members, i * a.in, row, nullptr, a.in);
          break;
        case Collective::scatter:
          sum(a, parts, members, i * a.in + me * a.out, row, nullptr, a.out);
          break;
        default: {  // exchange
          const int64_t block = a.in / members;
          for (int r = 0; r < members; ++r) {
            std::memcpy(row + r * block * size, parts[r] + (i * a.in + me * block) * size, block * size);
          }
        }
      }
    }
  });
}

// `count` rows of `bytes` each, `from_stride` and `to_stride` bytes apart.
void copy_rows(const char* from, int64_t from_stride, char* to, int64_t to_stride, int64_t bytes, int64_t count,
               ThreadPool& pool) {
  pool.run([&](int thread, int n) {
    const Range mine = share(count, thread, n);
    if (from_stride == bytes && to_stride == bytes) {
      copy(from + mine.begin * bytes, to + mine.begin * bytes, (mine.end - mine.begin) * bytes);
    } else {
      for (int64_t i = mine.begin; i < mine.end; ++i) copy(from + i * from_stride, to + i * to_stride, bytes);
    }
  });
}

// A rank copies its own columns to their place while it would wait for the others.
void gather(const CollectiveArgs& a, ThreadPool& pool) {
  Channel& channel = *a.channel;
  const int members = channel.size(), me = channel.index();
  const int64_t size = width(a.from), x_stride = a.x_stride * size, y_stride = a.y_stride * size;
  int64_t widest = 1;
  for (int r = 0; r < members; ++r) widest = std::max(widest, a.begins[r + 1] - a.begins[r]);
  const int64_t at_once = channel.slot_bytes() / (widest * size);
  for (int64_t begin = 0; begin < a.rows; begin += at_once) {
    const int64_t count = std::min(at_once, a.rows - begin), bytes = a.in * size;
    const char* x = static_cast<const char*>(a.x) + begin * x_stride;
    char* y = static_cast<char*>(a.y) + begin * y_stride;
    const uint32_t message = channel.next();
    channel.bytes_sent += count * bytes;
    copy_rows(x, x_stride, channel.slot(me, message), bytes, bytes, count, pool);
    channel.post();
    copy_rows(x, x_stride, y + a.begins[me] * size, y_stride, bytes, count, pool);
    channel.wait_for_all();
    for (int r = 0; r < members; ++r) {
      const int64_t part = (a.begins[r + 1] - a.begins[r]) * size;
      if (r != me) copy_rows(channel.slot(r, message), part, y + a.begins[r] * size, y_stride, part, count, pool);
    }
  }
}

constexpr int64_t kBlock = 256;  // elements; a block's result lies at the start of the block

// Call work(first, count) for the blocks of elements [begin, end).
template <typename F>
void over_blocks(int64_t begin, int64_t end, const F& work) {
  for (int64_t at = begin; at < end; at += kBlock) work(at, std::min(kBlock, end - at));
}

// The elements that `member` sums: whole blocks.
Range part_of(int64_t n, int member, int members) {
  const Range blocks = share((n + kBlock - 1) / kBlock, member, members);
  return {std::min(n, blocks.begin * kBlock), std::min(n, blocks.end * kBlock)};
}

// The sum of x [n] into y [n], whose elements are no wider, each member summing a part of it: see the header.
void reduce_in_parts(const CollectiveArgs& a, const char* x, char* y, int64_t n, ThreadPool& pool) {
  Channel& channel = *a.channel;
  const int members = channel.size(), me = channel.index(), next = (me + 1) % members;
  const int64_t from = width(a.from), to = width(a.to);
  const uint32_t message = channel.next();
  const Range mine = part_of(n, me, members);
  const int64_t num_mine = mine.end - mine.begin;
  channel.bytes_sent += (n - num_mine) * from + num_mine * to;
  pool.run([&](int thread, int threads) {
    char* slot = channel.slot(me, message);
    for (int r = 0; r < members; ++r) {
      if (r == me) continue;
      const Range part = part_of(n, r, members);
      const Range own = part_of(part.end - part.begin, thread, threads);
      const int64_t at = (part.begin + own.begin) * from;
      copy(x + at, slot + at, (own.end - own.begin) * from);
    }
  });
  channel.exchange();
  std::vector<const char*> parts(members);
  for (int r = 0; r < members; ++r) parts[r] = r == me ? x : channel.slot(r, message);
  pool.run([&](int thread, int threads) {
    const Range own = part_of(mine.end - mine.begin, thread, threads);
    char* slot = channel.slot(next, message);
    over_blocks(mine.begin + own.begin, mine.begin + own.end, [&](int64_t at, int64_t count) {
      sum(a, parts.data(), members, at, y + at * to, slot + at * from, count);
    });
  });
  channel.exchange();
  pool.run([&](int thread, int threads) {
    for (int r = 0; r < members; ++r) {
      if (r == me) continue;
      const Range part = part_of(n, r, members), own = part_of(part.end - part.begin, thread, threads);
      const char* slot = channel.slot((r + 1) % members, message);
      over_blocks(part.begin + own.begin, part.begin + own.end, [&](int64_t at, int64_t count) {
        copy(slot + at * from, y + at * to, count * to);
      });
    }
  });
  if (members > 2) channel.skip();
}

}  // namespace

Channel::Channel(uintptr_t abort_word, std::vector<uintptr_t> lanes, std::vector<uintptr_t> slots,
                 std::vector<int> ranks, int index, int64_t slot_bytes, double limit_s)
    : aborted_(reinterpret_cast<std::atomic<uint32_t>*>(abort_word)),
      ranks_(std::move(ranks)),
      index_(index),
      slot_bytes_(slot_bytes),
      limit_s_(limit_s) {
  for (const uintptr_t at : lanes) lanes_.push_back(reinterpret_cast<Lane*>(at));
  for (const uintptr_t at : slots) slots_.push_back(reinterpret_cast<char*>(at));
}

void Channel::raise(Flag& flag, uint32_t count) {
  // Sequentially consistent with a waiter's registration and its last look at `count` (see ThreadPool::run).
  flag.count.store(count, std::memory_order_seq_cst);
  if (flag.waiters.load(std::memory_order_seq_cst) != 0) wake(flag.count);
}

void Channel::wait(const Flag& flag, uint32_t wanted, int member) const {
  using Clock = std::chrono::steady_clock;
  for (int i = 0; i < kSpins; ++i) {
    if (reached(flag.count.load(std::memory_order_acquire), wanted)) return;
    pause();
  }
  Flag& shared = const_cast<Flag&>(flag);
  const Clock::time_point start = Clock::now();
  for (int turn = 0;; ++turn) {
    if (reached(flag.count.load(std::memory_order_acquire), wanted)) return;
    if (aborted_->load(std::memory_order_acquire) != 0) {
      throw std::runtime_error("the group of ranks was aborted while a collective waited for rank " +
                               std::to_string(ranks_[member]));
    }
    if (turn < kYields) {
      std::this_thread::yield();
      continue;
    }
    if (std::chrono::duration<double>(Clock::now() - start).count() > limit_s_) {
      aborted_->store(1, std::memory_order_seq_cst);
      throw std::runtime_error("rank " + std::to_string(ranks_[member]) + " did not reach a collective within " +
                               std::to_string(limit_s_) + " s");
    }
    shared.waiters.fetch_add(1, std::memory_order_seq_cst);
    const uint32_t seen = flag.count.load(std::memory_order_seq_cst);
    if (!reached(seen, wanted)) sleep_while(flag.count, seen);
    shared.waiters.fetch_sub(1, std::memory_order_relaxed);
  }
}

void Channel::wait_for_all() const {
  for (int r = 0; r < size(); ++r) {
    if (r != index_) wait(lanes_[r]->sent, sent_, r);
  }
}

void Channel::wait_for_room() const { wait(lanes_[index_ + 1]->taken, sent_ - 1, index_ + 1); }

void Channel::post() { raise(lanes_[index_]->sent, ++sent_); }

uint32_t Channel::receive() {
  wait(lanes_[index_ - 1]->sent, received_ + 1, index_ - 1);
  return received_ + 1;
}

void Channel::release() { raise(lanes_[index_]->taken, ++received_); }

void collective(const CollectiveArgs& a, ThreadPool& pool) {
  if (a.what == Collective::gather) return gather(a, pool);
  Channel& channel = *a.channel;
  const bool one_way = a.what == Collective::send || a.what == Collective::receive;
  const int64_t row_bytes = (a.what == Collective::receive ? a.out : a.in) * width(a.from);
  const int64_t at_once = channel.slot_bytes() / row_bytes;
  std::vector<const char*> parts(channel.size());
  for (int64_t begin = 0; begin < a.rows; begin += at_once) {
    const int64_t end = std::min(a.rows, begin + at_once);
    if (a.what == Collective::receive) {
      const char* slot = channel.slot(channel.index() - 1, channel.receive());
      char* y = static_cast<char*>(a.y) + begin * row_bytes;
      pool.run([&](int thread, int n) {
        const Range mine = share((end - begin) * row_bytes, thread, n);
        std::memcpy(y + mine.begin, slot + mine.begin, mine.end - mine.begin);
      });
      channel.release();
      continue;
    }
    if (a.what == Collective::reduce && a.x_stride == a.in && a.y_stride == a.out && width(a.to) <= width(a.from) &&
        (end - begin) * a.in >= channel.size() * kBlock) {
      reduce_in_parts(a, static_cast<const char*>(a.x) + begin * row_bytes,
                      static_cast<char*>(a.y) + begin * a.out * width(a.to), (end - begin) * a.in, pool);
      continue;
    }
    if (one_way) channel.wait_for_room();
    fill(a, channel.slot(channel.index(), channel.next()), begin, end, pool);
    if (one_way) {
      channel.post();
      continue;
    }
    channel.exchange();
    const uint32_t message = channel.next() - 1;
    for (int r = 0; r < channel.size(); ++r) parts[r] = channel.slot(r, message);
    combine(a, parts.data(), begin, end, pool);
  }
}

void gather_parts(Channel& channel, char* y, const int64_t* begins, ThreadPool& pool) {
  const int members = channel.size(), me = channel.index();
  int64_t longest = 0;
  for (int r = 0; r < members; ++r) longest = std::max(longest, begins[r + 1] - begins[r]);
  channel.bytes_sent += begins[me + 1] - begins[me];
  const int64_t at_once = channel.slot_bytes();
  for (int64_t done = 0; done < longest; done += at_once) {
    auto piece = [&](int r) { return std::clamp<int64_t>(begins[r + 1] - begins[r] - done, 0, at_once); };
    char* own = channel.slot(me, channel.next());
    pool.run([&](int thread, int n) {
      const Range mine = share(piece(me), thread, n);
      std::memcpy(own + mine.begin, y + begins[me] + done + mine.begin, mine.end - mine.begin);
    });
    channel.exchange();
    const uint32_t message = channel.next() - 1;
    pool.run([&](int thread, int n) {
      for (int r = 0; r < members; ++r) {
        if (r == me) continue;
        const Range mine = share(piece(r), thread, n);
        std::memcpy(y + begins[r] + done + mine.begin, channel.slot(r, message) + mine.begin, mine.end - mine.begin);
      }
    });
  }
}

void local_ids(const LocalIdsArgs& a, ThreadPool&) {
  for (int64_t i = 0; i < a.rows; ++i) {
    const int64_t id = a.ids[i];
    a.y[i] = id >= a.begin && id < a.end ? id - a.begin : a.other;
  }
}

}  // namespace quire::cpu
