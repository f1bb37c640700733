// One row of logits as a sampler sees it: scores, their order, the best k of them, and where truncation cuts.
//
//   score(id) = (logit - shift) / temperature in fp32     order: score descending, id ascending
//
// min_p, top_k and top_p each keep a prefix of that order (kernels/sampling/truncate.py), so a row's truncation is one
// Cut.
#pragma once

#include <algorithm>
#include <limits>
#include <vector>

#include "cpu/exact_math.h"
#include "cpu/lane_masks.h"
#include "cpu/sampling.h"

namespace quire::cpu::QUIRE_ISA {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Candidate {
  float score;
  int32_t id;
};

inline bool before(const Candidate& a, const Candidate& b) {
  return a.score > b.score || (a.score == b.score && a.id < b.id);
}

struct Row {
  const float* logits;
  int64_t vocab;
  float shift = 0, temperature = 1;
  float floor = -kInfinity;  // of min_p: lower scores are out

  float score(int64_t id) const { return (logits[id] - shift) / temperature; }
  Vec scores(Vec l) const { return div(sub(l, broadcast(shift)), broadcast(temperature)); }
};

// Never below the scores, without a division: for finding out cheaply that an id cannot matter.
struct ScoreBound {
  Vec shift, scale;
  explicit ScoreBound(const Row& row)
      : shift(broadcast(row.shift)), scale(broadcast(1.0f / row.temperature * (1.0f - 1e-6f))) {}
  // For logits of at most `shift`: a negative score is shrunk by more than the rounding errors.
  Vec operator()(Vec l) const { return fma(sub(l, shift), scale, broadcast(1e-6f)); }
};

// Call f(first id, vector of logits, number of them in use) over a row; lanes not in use hold -inf.
template <typename F>
inline void over_logits(const float* logits, int64_t begin, int64_t end, const F& f) {
  int64_t i = begin;
  for (; i + kLanes <= end; i += kLanes) f(i, load(logits + i));
  if (i < end) {
    float tail[kLanes];
    std::fill(tail, tail + kLanes, -kInfinity);
    std::memcpy(tail, logits + i, size_t(end - i) * sizeof(float));
    f(i, load(tail));
  }
}

// The best k of a row, in order. One pass that compares with the k-th best so far: scores rise with logits, so an id
// that beats its score has a larger logit, and ids ascend, so an equal one ranks behind it.
inline void best_of_row(const Row& row, int64_t k, std::vector<Candidate>& found) {
  const size_t wanted = size_t(std::min(k, row.vocab)), room = 2 * wanted + 1024;
  found.clear();
  found.reserve(room);
  float kth = -kInfinity;  // score
  Vec least = broadcast(-kInfinity);  // its logit
  bool full = false;
  const auto keep_best = [&] {
    std::nth_element(found.begin(), found.begin() + int64_t(wanted) - 1, found.end(), before);
    found.resize(wanted);
    kth = found.back().score;
    least = broadcast(row.logits[found.back().id]);
    full = true;
  };
  over_logits(row.logits, 0, row.vocab, [&](int64_t first, Vec l) {
    for (uint32_t mask = full ? above(l, least) : (1u << kLanes) - 1; mask != 0; mask &= mask - 1) {
      const int64_t id = first + __builtin_ctz(mask);
      if (id >= row.vocab) break;
      const float score = row.score(id);
      if (full && !(score > kth)) continue;
      found.push_back({score, int32_t(id)});
      if (found.size() == room) keep_best();
    }
  });
  if (found.size() > wanted) keep_best();
  std::sort(found.begin(), found.end(), before);
}

// Write exp(score) of every id (0 below the floor) to `values`; return the sum.
inline double mass_of_row(const Row& row, std::vector<float>& values, std::vector<double>& scratch) {
  values.resize(size_t(row.vocab + kLanes));
  scratch.resize(size_t(row.vocab / 2 + 1));
  const Vec floor = broadcast(row.floor);
  over_logits(row.logits, 0, row.vocab, [&](int64_t first, Vec l) {
    const Vec s = row.scores(l);
    store(values.data() + first, where_less(s, floor, zero(), exact_exp(s)));
  });
  return tree_sum(values.data(), row.vocab, scratch.data());
}

// What truncation keeps: ids at or before (score, id) in the order.
struct Cut {
  float score = -kInfinity;
  int64_t id = std::numeric_limits<int64_t>::max();
  bool keeps(float s, int64_t i) const { return s > score || (s == score && i <= id); }
};

struct Scratch {
  std::vector<Candidate> found;
  std::vector<float> values, scores;
  std::vector<double> sums;
};

// Length of the shortest prefix of `found` whose mass reaches `share` of the total; 0 where none does. A total below
// zero stands for the mass of all of `found`. Sums run along the order, so they do not depend on what follows.
inline size_t nucleus_of(const std::vector<Candidate>& found, double share, double total, std::vector<double>& sums) {
  sums.resize(found.size());
  double mass = 0;
  for (size_t i = 0; i < found.size(); ++i) {
    float e[kLanes];
    store(e, exact_exp(broadcast(found[i].score)));
    sums[i] = mass += double(e[0]);
  }
  const double enough = share * (total < 0 ? mass : total);
  for (size_t i = 0; i < sums.size(); ++i) {
    if (sums[i] >= enough) return i + 1;
  }
  return 0;
}

// The score of an id as a number that rises where scores (none above 0) fall: a float's bits rise with its magnitude.
inline uint32_t depth_of(float score) {
  uint32_t bits;
  std::memcpy(&bits, &score, 4);
  return bits & 0x7fffffffu;
}

// Where a wide nucleus ends, without sorting it: masses are added by classes of near scores (an eighth of an octave,
// then a 4096th of that), and only the class where the share is reached is put in order. These sums differ from those
// along the order by less than 2^18 roundings of 2^-53, so where no id comes nearer to the share than that, the answer
// is the same; else false.
inline bool wide_cut(const Row& row, double share, double total, Scratch& scratch, Cut& cut) {
  const double enough = share * total, slack = 1e-10 * total;
  if (row.vocab > (1 << 18)) return false;
  scratch.scores.resize(size_t(row.vocab + kLanes));
  over_logits(row.logits, 0, row.vocab,
              [&](int64_t first, Vec l) { store(&scratch.scores[size_t(first)], row.scores(l)); });
  double mass = 0;
  uint32_t here = 0;  // the class, as the upper bits of its depths
  int shift = 31;
  for (const int finer : {20, 8}) {
    std::vector<double>& classes = scratch.sums;
    classes.assign(size_t(1) << (shift - finer), 0.0);
    for (int64_t id = 0; id < row.vocab; ++id) {
      const uint32_t depth = depth_of(scratch.scores[size_t(id)]);
      const uint32_t fine = (depth >> finer) - (here << (shift - finer));
      if (depth >> shift == here) classes[fine] += double(scratch.values[size_t(id)]);
    }
    size_t i = 0;
    while (i < classes.size() && mass + classes[i] < enough + slack) mass += classes[i++];
    if (i == classes.size() || enough - mass < slack) return false;
    here = (here << (shift - finer)) + uint32_t(i);
    shift = finer;
  }
  scratch.found.clear();
  for (int64_t id = 0; id < row.vocab; ++id) {
    const float score = scratch.scores[size_t(id)];
    if (depth_of(score) >> shift == here && !(score < row.floor)) scratch.found.push_back({score, int32_t(id)});
  }
  std::sort(scratch.found.begin(), scratch.found.end(), before);
  for (const Candidate& c : scratch.found) {
    mass += double(scratch.values[size_t(c.id)]);
    if (mass >= enough + slack) {
      cut = {c.score, c.id};
      return true;
    }
    if (mass > enough - slack) return false;
  }
  return false;
}

inline Cut cut_of_row(const Row& row, int64_t top_k, double top_p, Scratch& scratch) {
  constexpr int64_t kFirst = 256;  // most nuclei are not larger
  const bool limited = top_k < row.vocab;
  double total = -1;
  if (!limited) total = mass_of_row(row, scratch.values, scratch.sums);
  for (int64_t num = limited ? top_k : std::min(kFirst, row.vocab);; num = row.vocab) {
    std::vector<Candidate>& found = scratch.found;
    best_of_row(row, num, found);
    while (!found.empty() && found.back().score < row.floor) found.pop_back();
    const size_t kept = top_p < 1 ? nucleus_of(found, top_p, total, scratch.sums) : found.size();
    if (kept > 0) return {found[kept - 1].score, found[kept - 1].id};
    if (num == row.vocab || int64_t(found.size()) < num) return {};
    Cut cut;
    if (wide_cut(row, top_p, total, scratch, cut)) return cut;
  }
}

}  // namespace quire::cpu::QUIRE_ISA
