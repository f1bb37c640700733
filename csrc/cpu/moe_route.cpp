// Routing: scores, the best groups, the best experts. A few hundred scores per token, which lie in cache, so plain
// scalar code, in double where float is not exact.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "cpu/moe.h"

namespace quire::cpu {

namespace {

constexpr float kTiny = 1e-20f;  // DeepSeek-V3 keeps the division of a sum of sigmoids safe with it
constexpr int64_t kSmallScores = 1 << 12;

float sigmoid(float x) { return static_cast<float>(1.0 / (1.0 + std::exp(-static_cast<double>(x)))); }

void softmax(const float* x, int64_t n, float* y) {
  const float largest = *std::max_element(x, x + n);
  double total = 0.0;
  for (int64_t i = 0; i < n; ++i) total += std::exp(static_cast<double>(x[i]) - largest);
  for (int64_t i = 0; i < n; ++i) {
    y[i] = static_cast<float>(std::exp(static_cast<double>(x[i]) - largest) / total);
  }
}

// The indices of the `count` largest values, the largest first; `values` is left with -inf in their place.
void take_largest(float* values, int64_t n, int64_t count, int64_t* indices) {
  for (int64_t j = 0; j < count; ++j) {
    const int64_t best = std::max_element(values, values + n) - values;
    indices[j] = best;
    values[best] = -std::numeric_limits<float>::infinity();
  }
}

// Exclude the experts outside the best groups.
void keep_best_groups(const RouteArgs& a, std::vector<float>& choice, std::vector<float>& worth) {
  const int64_t size = a.experts / a.groups;
  for (int64_t g = 0; g < a.groups; ++g) {
    float first = -std::numeric_limits<float>::infinity(), second = first;
    for (int64_t i = g * size; i < (g + 1) * size; ++i) {
      if (choice[i] > first) {
        second = first;
        first = choice[i];
      } else if (choice[i] > second) {
        second = choice[i];
      }
    }
    worth[g] = a.group_by_two ? first + second : first;
  }
  std::vector<int64_t> kept(a.top_groups);
  take_largest(worth.data(), a.groups, a.top_groups, kept.data());
  for (int64_t g = 0; g < a.groups; ++g) {
    if (std::find(kept.begin(), kept.end(), g) == kept.end()) {
      std::fill_n(choice.begin() + g * size, size, -std::numeric_limits<float>::infinity());
    }
  }
}

class Router {
 public:
  explicit Router(const RouteArgs& args)
      : a_(args), scores_(args.experts), choice_(args.experts), worth_(args.groups) {}

  void route(int64_t token) {
    const float* logits = a_.logits + token * a_.experts;
    float* weights = a_.weights + token * a_.top_k;
    int64_t* ids = a_.ids + token * a_.top_k;
    if (a_.scoring == Scoring::softmax_after_topk) {
      std::copy_n(logits, a_.experts, choice_.begin());
      take_largest(choice_.data(), a_.experts, a_.top_k, ids);
      for (int64_t j = 0; j < a_.top_k; ++j) scores_[j] = logits[ids[j]];
      softmax(scores_.data(), a_.top_k, weights);
    } else {
      score(logits);
      choose(ids);
      for (int64_t j = 0; j < a_.top_k; ++j) weights[j] = scores_[ids[j]];
      if (a_.normalize) normalize(weights);
    }
    for (int64_t j = 0; j < a_.top_k; ++j) weights[j] *= a_.scale;
    for (int64_t j = 0; a_.factors != nullptr && j < a_.top_k; ++j) weights[j] *= a_.factors[ids[j]];
  }

 private:
  void score(const float* logits) {
    if (a_.scoring == Scoring::softmax) {
      softmax(logits, a_.experts, scores_.data());
    } else {
      for (int64_t i = 0; i < a_.experts; ++i) scores_[i] = sigmoid(logits[i]);
    }
  }

  void choose(int64_t* ids) {
    for (int64_t i = 0; i < a_.experts; ++i) {
      choice_[i] = a_.correction == nullptr ? scores_[i] : scores_[i] + a_.correction[i];
    }
    if (a_.groups > 1) keep_best_groups(a_, choice_, worth_);
    take_largest(choice_.data(), a_.experts, a_.top_k, ids);
  }

  void normalize(float* weights) const {
    float total = weights[0];
    for (int64_t j = 1; j < a_.top_k; ++j) total += weights[j];
    for (int64_t j = 0; j < a_.top_k; ++j) weights[j] /= total + kTiny;
  }

  const RouteArgs& a_;
  std::vector<float> scores_, choice_, worth_;
};

}  // namespace

void route(const RouteArgs& args, ThreadPool& pool) {
  auto body = [&](int thread, int num_threads) {
    Router router(args);
    const Range mine = share(args.tokens, thread, num_threads);
    for (int64_t token = mine.begin; token < mine.end; ++token) router.route(token);
  };
  if (args.tokens * args.experts < kSmallScores) {
    body(0, 1);
  } else {
    pool.run(body);
  }
}

}  // namespace quire::cpu
