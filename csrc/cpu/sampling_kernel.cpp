// Sampling of one ISA level: per row the largest logit, the cut of truncation, and Gumbel-max.
//
// Bytes: two passes over a row of fp32 logits (three with truncation); it was just written, so they come from cache.
// Bound: the arithmetic of Philox, a quarter of a block per id: ten rounds of two 32 x 32 bit products. Logarithms are
// taken of few ids: a score plus an upper bound of its noise (philox.h) mostly stays below the best exact sum so far,
// and where not even the largest possible noise could lift a group of ids, their words are not made. The maximum does
// not depend on the ids that were skipped, nor on how the vocabulary is cut into ranges, so the tokens are the
// reference's.
#include "cpu/philox.h"
#include "cpu/sampling.h"
#include "cpu/sampling_rows.h"

namespace quire::cpu::QUIRE_ISA {

namespace {

constexpr int64_t kRange = 8192;          // ids per range, which start at absolute multiples
constexpr float kLargestNoise = 22.88f;  // of the word 2^32 - 1
static_assert(kRange % kGroupIds == 0, "a range is whole groups");

struct Best {
  double value;
  int64_t id;
  void offer(double v, int64_t i) {
    if (v > value || (v == value && i < id)) *this = {v, i};
  }
};

// The largest logit of a range; NaN where there is one.
float largest_of(const float* logits, int64_t begin, int64_t end) {
  Vec top = broadcast(-kInfinity);
  uint32_t nan = 0;
  over_logits(logits, begin, end, [&](int64_t, Vec l) {
    top = max(top, l);
    nan |= is_nan(l);
  });
  return nan ? std::numeric_limits<float>::quiet_NaN() : largest(top);
}

int64_t first_equal(const float* logits, int64_t size, float value) {
  int64_t id = 0;
  while (id + kLanes <= size && at_least(load(logits + id), broadcast(value)) == 0) id += kLanes;
  while (logits[id] != value) ++id;
  return id;
}

// A row that is sampled with noise.
struct SampledRow {
  Row row;
  Stream stream;
  int64_t index, likely;  // of the row among the rows; its first largest id
  Cut cut;

  double noise(int64_t id) const { return gumbel_of_word(word_of(stream, id)); }
};

// The best exact score + noise among ids [begin, end); the row's likeliest id counts too.
Best best_of(const SampledRow& d, int64_t begin, int64_t end) {
  const ScoreBound bound(d.row);
  const Vec cut = broadcast(std::max(d.cut.score, d.row.floor));
  Best best{d.noise(d.likely), d.likely};  // its score is 0
  constexpr float kMargin = 1e-4f;         // roundings of the bounds and of `value` to fp32
  for (int64_t group = begin; group < end; group += kGroupIds) {
    float copy[kGroupIds];
    const float* l = d.row.logits + group;
    if (group + kGroupIds > end) {
      std::fill(copy, copy + kGroupIds, -kInfinity);
      std::memcpy(copy, l, size_t(end - group) * sizeof(float));
      l = copy;
    }
    const Vec reached = broadcast(float(best.value) - kMargin), hopeless = sub(reached, broadcast(kLargestNoise));
    Vec score[4];
    uint32_t may = 0;
    for (int v = 0; v < 4; ++v) {
      score[v] = bound(load(l + v * kLanes));
      may |= at_least(score[v], hopeless) & at_least(score[v], cut);
    }
    if (may == 0) continue;
    uint32_t words[kGroupIds];
    philox_group(d.stream, uint32_t(group / 4), words);
    for (int v = 0; v < 4; ++v) {
      const Vec most = add(score[v], noise_bound(words + v * kLanes));
      for (uint32_t mask = at_least(most, reached) & at_least(score[v], cut); mask != 0; mask &= mask - 1) {
        const int64_t at = v * kLanes + __builtin_ctz(mask), id = group + at;
        const float s = (l[at] - d.row.shift) / d.row.temperature;
        if (s < d.row.floor || !d.cut.keeps(s, id)) continue;
        best.offer(double(s) + gumbel_of_word(words[at]), id);
      }
    }
  }
  return best;
}

// Scores below log(min_p) are out; the comparison is one of doubles.
float floor_of(double min_p) {
  const double exact = std::log(min_p);
  const float rounded = float(exact);
  return double(rounded) < exact ? std::nextafter(rounded, kInfinity) : rounded;
}

std::vector<SampledRow> rows_to_sample(const SampleArgs& a) {
  std::vector<SampledRow> sampled;
  for (int64_t i = 0; i < a.num_rows; ++i) {
    const SampleRow& r = a.rows[i];
    if (!(r.features & kRandomFeature) || !std::isfinite(a.best[i])) continue;
    const float floor = r.features & kMinPFeature ? floor_of(r.min_p) : -kInfinity;
    sampled.push_back({Row{a.logits[i], a.vocab, a.best[i], r.temperature, floor},
                     Stream(r.seed, r.sample_index, r.position, a.purpose), i, a.ids[i], Cut{}});
  }
  return sampled;
}

// ids and best: the first largest logit of every row.
void greedy(const SampleArgs& a, int64_t num_ranges, ThreadPool& pool) {
  std::vector<float> tops(size_t(a.num_rows * num_ranges));
  pool.run([&](int thread, int num_threads) {
    const Range items = share(a.num_rows * num_ranges, thread, num_threads);
    for (int64_t i = items.begin; i < items.end; ++i) {
      const int64_t begin = i % num_ranges * kRange;
      tops[size_t(i)] = largest_of(a.logits[i / num_ranges], begin, std::min(begin + kRange, a.vocab));
    }
  });
  for (int64_t i = 0; i < a.num_rows; ++i) {
    const float* of_row = tops.data() + i * num_ranges;
    const float* top = std::max_element(of_row, of_row + num_ranges);
    const bool nan = std::any_of(of_row, of_row + num_ranges, [](float f) { return f != f; });
    a.best[i] = nan ? std::numeric_limits<float>::quiet_NaN() : *top;
    const int64_t begin = (top - of_row) * kRange;
    a.ids[i] = nan ? -1 : begin + first_equal(a.logits[i] + begin, a.vocab - begin, *top);
  }
}

void sample(const SampleArgs& a, ThreadPool& pool) {
  const int64_t num_ranges = (a.vocab + kRange - 1) / kRange;
  greedy(a, num_ranges, pool);
  std::vector<SampledRow> sampled = rows_to_sample(a);
  if (sampled.empty()) return;
  const auto truncated = [&](const SampledRow& d) { return (a.rows[d.index].features & kTruncatedFeature) != 0; };
  if (std::any_of(sampled.begin(), sampled.end(), truncated)) {
    pool.run([&](int thread, int num_threads) {
      Scratch scratch;
      for (size_t i = size_t(thread); i < sampled.size(); i += size_t(num_threads)) {
        const SampleRow& r = a.rows[sampled[i].index];
        if (truncated(sampled[i])) sampled[i].cut = cut_of_row(sampled[i].row, r.top_k, r.top_p, scratch);
      }
    });
  }
  std::vector<Best> bests(sampled.size() * size_t(num_ranges));
  pool.run([&](int thread, int num_threads) {
    const Range items = share(int64_t(bests.size()), thread, num_threads);
    for (int64_t i = items.begin; i < items.end; ++i) {
      const int64_t begin = i % num_ranges * kRange;
      bests[size_t(i)] = best_of(sampled[size_t(i / num_ranges)], begin, std::min(begin + kRange, a.vocab));
    }
  });
  for (size_t i = 0; i < sampled.size(); ++i) {
    Best best = bests[i * size_t(num_ranges)];
    for (int64_t j = 1; j < num_ranges; ++j) {
      const Best& d = bests[i * size_t(num_ranges) + size_t(j)];
      best.offer(d.value, d.id);
    }
    a.ids[sampled[i].index] = best.id;
  }
}

void logprobs_of_row(const LogprobArgs& a, int64_t i, Scratch& scratch) {
  const float* logits = a.logits[i];
  const float best = largest_of(logits, 0, a.vocab), chosen = logits[a.chosen[i]];
  const double normalizer = double(best) + exact_log(mass_of_row({logits, a.vocab, best}, scratch.values, scratch.sums));
  int64_t ahead = 0;
  const Vec level = broadcast(chosen);
  over_logits(logits, 0, a.vocab, [&](int64_t first, Vec l) {
    const bool wholly_before = first + kLanes <= a.chosen[i];
    ahead += __builtin_popcount(wholly_before ? at_least(l, level) : above(l, level));
    for (int64_t id = first; !wholly_before && id < a.chosen[i]; ++id) ahead += logits[id] == chosen;
  });
  a.logprobs[i] = double(chosen) - normalizer;
  a.ranks[i] = ahead + 1;
  if (a.num_top[i] == 0) return;
  best_of_row({logits, a.vocab}, a.num_top[i], scratch.found);
  for (size_t j = 0; j < scratch.found.size(); ++j) {
    a.top_ids[i * a.width + int64_t(j)] = scratch.found[j].id;
    a.top_logprobs[i * a.width + int64_t(j)] = double(scratch.found[j].score) - normalizer;
  }
}

void logprobs(const LogprobArgs& a, ThreadPool& pool) {
  pool.run([&](int thread, int num_threads) {
    Scratch scratch;
    for (int64_t i = thread; i < a.num_rows; i += num_threads) logprobs_of_row(a, i, scratch);
  });
}

}  // namespace

extern const SamplingKernels kSampling;
const SamplingKernels kSampling = {sample, logprobs};

}  // namespace quire::cpu::QUIRE_ISA
