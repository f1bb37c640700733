// What attention over tiled blocks prefetches into L2 while it computes.
//
// A thread's groups (attention_plan.h) read their steps one after the other. A group of one unit has the next step
// prefetched. Several units pass each split on to the next one before they read another, and meanwhile the lines of the
// next split are fetched, evenly over all their steps: memory has as long as all of them compute.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "cpu/attention_plan.h"

namespace quire::cpu::QUIRE_ISA {

// Lines that are prefetched at a time: a step of a head has about 24 places for them with AMX, and three without.
#if defined(QUIRE_HAVE_AMX)
constexpr int64_t kAheadLines = 12;
#else
constexpr int64_t kAheadLines = 4;
#endif
constexpr int64_t kPacedLines = 1;  // the same where a whole split's time is left
constexpr int64_t kAheadSteps = 1;  // steps between a prefetch into L2 and its use

// A hardware prefetcher does not follow a block table, and prefetching into L1 is slower than none: L1 has few miss
// buffers. Lines are counted from the thread's first step on, as if each step had all of its tiles.
class Ahead {
 public:
  Ahead(const AttentionArgs& args, const Plan& plan, const std::vector<Group>& groups)
      : a(args), plan_(plan), groups_(groups), lines_(tile_bytes(args) / 64) {
    if (!groups.empty()) enter(0);
    until_ = groups.empty() ? 0 : kAheadSteps * step_lines(groups[0]);
    finish_step();
  }

  // Group `index` begins; groups come in order.
  void start_group(int64_t index) {
    here_ = index;
    if (index > 0) here_base_ += group_lines(groups_[index - 1]);
  }

  // The units of the group go through `split`, `turns` steps in all.
  void start_split(int64_t split, int64_t turns) {
    const Group& group = groups_[here_];
    turns_ = turns;
    limit_ = 0;
    if (group.units() == 1) return;
    if (split < group.last_split()) {
      limit_ = here_base_ + lines_before(group, (split + 2) * kSplitSteps);
    } else if (here_ + 1 < static_cast<int64_t>(groups_.size())) {
      const Group& next = groups_[here_ + 1];
      limit_ = here_base_ + group_lines(group) + lines_before(next, (next.first_split() + 1) * kSplitSteps);
    }
  }

  void start_step(int64_t step) {
    const Group& group = groups_[here_];
    const int64_t urgent = here_base_ + lines_before(group, step + 1 + kAheadSteps) +
                           (step + kAheadSteps > group.last_step ? kAheadSteps * step_lines(group) : 0);
    paced_ = fetched_ >= urgent;
    until_ = paced_ ? fetched_ + std::max<int64_t>(0, limit_ - fetched_ + turns_ - 1) / turns_ : urgent;
    --turns_;
  }

  // The next few lines, in order of memory. A burst of many would fill the queue of misses, and the computation beside
  // it would wait.
  void few() {
    __asm__ volatile("");  // else gcc drops calls of a function that only prefetches, as if it had no effect
    if (fetched_ >= until_) return;
    if (left_ < kAheadLines) {
      rest();
    } else if (paced_) {
      fetch<kPacedLines>();
    } else {
      fetch<kAheadLines>();
    }
  }

  // Fetch what the step still lacks.
  void finish_step() {
    while (fetched_ < until_) few();
  }

 private:
  int64_t step_lines(const Group& group) const { return kStep / kTile * group.heads * lines_; }
  // Lines of the group's steps before `step`.
  int64_t lines_before(const Group& group, int64_t step) const {
    return std::max<int64_t>(0, std::min(step, group.last_step + 1) - group.first_step) * step_lines(group);
  }
  int64_t group_lines(const Group& group) const { return lines_before(group, group.last_step + 1); }

  template <int64_t kLines>
  void fetch() {
    UNROLL for (int64_t i = 0; i < kLines; ++i) __builtin_prefetch(at_ + i * 64, 0, 2);
    at_ += kLines * 64;
    left_ -= kLines;
    fetched_ += kLines;
  }

  // The last lines of a tile.
  __attribute__((noinline)) void rest() {
    while (left_ == 0) {
      if (group_ == static_cast<int64_t>(groups_.size())) {
        fetched_ = until_;
        return;
      }
      next_tile();
    }
    const int64_t count = std::min(left_, kAheadLines);
    for (int64_t i = 0; i < count; ++i) __builtin_prefetch(at_ + i * 64, 0, 2);
    at_ += count * 64;
    left_ -= count;
    fetched_ += count;
  }

  // Go on to group `index` or, where that has no steps, to one behind it.
  void enter(int64_t index) {
    for (group_ = index; group_ < static_cast<int64_t>(groups_.size()); ++group_) {
      step_ = groups_[group_].first_step;
      if (step_ <= groups_[group_].last_step) return;
    }
  }

  void next_tile() {
    const Group& group = groups_[group_];
    const Unit &unit = plan_.units[group.begin], &last = plan_.units[group.end - 1];
    const int64_t position = step_ * kStep + tile_ / group.heads * kTile;
    if (position >= std::min(last.high, (step_ + 1) * kStep)) {  // the step has no more
      step_end_ += step_lines(group);
      fetched_ = step_end_;
      tile_ = 0;
      if (++step_ > group.last_step) enter(group_ + 1);
      return;
    }
    const int64_t head = unit.kv_head + tile_++ % group.heads;
    if (position + kTile <= unit.low) return;
    at_ = tile_at(a, unit.seq, head, position);
    left_ = lines_;
  }

  const AttentionArgs& a;
  const Plan& plan_;
  const std::vector<Group>& groups_;
  const int64_t lines_;  // of a tile
  // What is fetched next: a step of a group, its tiles from `tile_` on, and `left_` lines of the one before them.
  int64_t group_ = 0, step_ = 0, tile_ = 0, left_ = 0;
  const char* at_ = nullptr;
  int64_t fetched_ = 0, until_ = 0;  // lines; `until_`: to be fetched during this step
  int64_t step_end_ = 0;             // lines up to the step that is fetched
  bool paced_ = false;
  int64_t here_ = 0, here_base_ = 0;  // the group that computes; lines before it
  int64_t limit_ = 0, turns_ = 1;     // lines up to the end of the next split; steps until they are wanted
};

}  // namespace quire::cpu::QUIRE_ISA
