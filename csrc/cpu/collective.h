// Collectives between the ranks of one machine, through shared memory.
//
// Every rank owns two slots of the segment per channel (a group of ranks). For message m a rank copies its rows into slot
// m mod 2, raises its flag to m, waits until the flags of all members are at m, and combines the slots. Sums are fp32, in
// the order of the members, and rounded once: every rank computes the same bits, and a row's bits do not depend on the
// rows beside it. Two slots suffice without a second barrier: a rank that writes message m + 2 has seen every flag at
// m + 1, and a member raises its flag to m + 1 only after it has read message m.
//
// Bytes per element and rank: one write of the own rows, one read of each member's. The bound is the time that a core
// takes to read what another core has just written.
//
// A sum of contiguous rows is cut into parts, and each member adds up one of them for all. A rank writes the parts of the
// others, waits, adds up its own part from their slots, and leaves the result in the slot of the next member, over the
// lines that it has just read; it waits again, and reads the other results. So with two members a line moves between the
// cores twice per message, once with what is added and once with the result. With more members a rank may still read
// results when another one begins the next message, so that message takes the other slot (`skip`).
//
// A wait spins briefly, then yields its core, then sleeps in the kernel; it ends when the segment's abort word is set or
// the time limit has passed, with an exception.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "cpu/levels.h"
#include "cpu/linear.h"
#include "cpu/thread_pool.h"

namespace quire::cpu {

// One per rank and channel, on a cache line of its own.
struct alignas(64) Flag {
  std::atomic<uint32_t> count;
  std::atomic<uint32_t> waiters;  // processes that sleep until `count` changes
};

struct Lane {  // of one rank in one channel
  Flag sent, taken;
};

class Channel {
 public:
  // Addresses are within this process's mapping of the segment. lanes[i], slots[i]: of member i, which is rank ranks[i].
  Channel(uintptr_t abort_word, std::vector<uintptr_t> lanes, std::vector<uintptr_t> slots, std::vector<int> ranks,
          int index, int64_t slot_bytes, double limit_s);

  int size() const { return static_cast<int>(lanes_.size()); }
  int index() const { return index_; }
  int64_t slot_bytes() const { return slot_bytes_; }

  char* slot(int member, uint32_t message) const { return slots_[member] + (message & 1) * slot_bytes_; }

  int64_t bytes_sent = 0;  // that this rank has written for the others, so far

  // The number of the message that this rank writes next.
  uint32_t next() const { return sent_ + 1; }
  // The own slot of message next() is written: tell the members, and wait for theirs.
  void exchange() { post(), wait_for_all(); }
  void post();
  void wait_for_all() const;  // until all have posted as many messages as this rank

  // A number that no message gets.
  void skip() { ++sent_; }

  // One way, to member index + 1 and from member index - 1. A sender is at most two messages ahead. A channel is used
  // either so or for exchanges, since they count and reuse the slots differently.
  void wait_for_room() const;  // in the slot of next()
  uint32_t receive();  // wait for the next message of member index - 1; returns its number
  void release();      // the slot of the message received last

 private:
  void wait(const Flag& flag, uint32_t count, int member) const;
  static void raise(Flag& flag, uint32_t count);

  std::atomic<uint32_t>* aborted_;
  std::vector<Lane*> lanes_;
  std::vector<char*> slots_;
  std::vector<int> ranks_;
  int index_;
  int64_t slot_bytes_;
  double limit_s_;
  uint32_t sent_ = 0, received_ = 0;
};

enum class Collective : int { reduce, gather, scatter, exchange, send, receive };

// x [rows, in], y [rows, out], rows `x_stride` and `y_stride` elements apart. With n members, and s the columns of a block:
//   reduce    y = sum of x_r                          out = in
//   gather    y[:, begins[r] : begins[r + 1]] = x_r    in is the own width, out = begins[n]
//   scatter   y = sum of x_r[:, i s : i s + s]        s = out = in / n, i the own index
//   exchange  y[:, r s : r s + s] = x_r[:, i s : i s + s]
//   send, receive: x to the next member, y from the previous one
struct CollectiveArgs {
  Channel* channel;
  Collective what;
  const void* x;
  void* y;
  int64_t rows, in, out, x_stride, y_stride;
  Type from, to;          // of x and of y; they differ only for sums
  const int64_t* begins;  // of a gather, else null
};

void collective(const CollectiveArgs& args, ThreadPool& pool);

// Every member's part of y, whatever the sizes: member r has the bytes [begins[r], begins[r + 1]), and its own are there
// already. All members know `begins`, of size() + 1.
void gather_parts(Channel& channel, char* y, const int64_t* begins, ThreadPool& pool);

// Rows of a table that has the ids begin <= id < end: y = id - begin, or `other` for ids of other ranks.
struct LocalIdsArgs {
  const int64_t* ids;
  int64_t* y;
  int64_t rows, begin, end, other;
};

void local_ids(const LocalIdsArgs& args, ThreadPool& pool);

}  // namespace quire::cpu
