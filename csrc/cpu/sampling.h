// Sampling of tokens from rows of fp32 logits, and their log-probabilities. kernels/sampling (exact_math.py, noise.py,
// truncate.py, __init__.py) defines the result to the last bit: every level gives the same tokens.
#pragma once

#include <cstdint>

#include "cpu/levels.h"
#include "cpu/thread_pool.h"

namespace quire::cpu {

// A record of COLUMNS of kernels/sampling/__init__.py.
struct SampleRow {
  int64_t features;
  float temperature;
  int64_t top_k;  // the vocabulary's size: off
  double top_p;   // 1: off
  double min_p;   // 0: off
  int64_t seed, sample_index, position, num_logprobs;
};

constexpr int64_t kRandomFeature = 1, kTruncatedFeature = 2, kMinPFeature = 4;

struct SampleArgs {
  const float* const* logits;  // [num_rows] rows of `vocab` logits
  const SampleRow* rows;
  int64_t num_rows, vocab;
  uint32_t purpose;
  int64_t* ids;  // [num_rows]
  float* best;   // [num_rows] the largest logit; not finite: the row has no valid token
};

struct LogprobArgs {
  const float* const* logits;
  const int64_t *chosen, *num_top;  // [num_rows]; num_top at most `width`
  int64_t num_rows, vocab, width;
  double* logprobs;      // [num_rows] of the chosen ids
  int64_t* ranks;        // [num_rows] from 1; equal logits rank by id
  int64_t* top_ids;      // [num_rows, width], the most likely first
  double* top_logprobs;  // [num_rows, width]
};

struct SamplingKernels {
  void (*sample)(const SampleArgs&, ThreadPool&);
  void (*logprobs)(const LogprobArgs&, ThreadPool&);
};

QUIRE_LEVELS(SamplingKernels, kSampling)

}  // namespace quire::cpu
