// Drafts of a model, one after another without Python between them: a recorded step, sampling, and the next step's
// inputs, as many times as the longest chain asks for.
#pragma once

#include <cstdint>

#include "cpu/sampling.h"
#include "tape.h"

namespace quire::cpu {

// The memory of a recorded step (runner/input_batch.py), and what becomes of its results. Sequences have one row per
// step, but in the first, which is prepared; row i of the results is of sequence i throughout.
struct DraftChainArgs {
  // int64 of the step: [tokens], [sequences + 1] and [sequences]; block_table [sequences, max_blocks].
  int64_t *input_ids, *positions, *slot_blocks, *slot_offsets, *cu_seqlens, *seq_lens, *logits_indices, *num_seqs;
  const int64_t* block_table;
  int64_t max_blocks, block_size;

  const float* logits;  // [sequences, draft_vocab]
  int64_t vocab, draft_vocab;
  const int64_t* ids;  // [draft_vocab] the model's id of each of the draft's; null: they are the same

  // Heads: what a row says of its own token goes where the next row reads its hidden state. Null for a model.
  int64_t* slots;  // [tokens]
  const char* found;
  char* hidden;
  int64_t row_bytes;
};

class DraftChain {
 public:
  DraftChain(const Tape& tape, const SamplingKernels& sampling, const DraftChainArgs& args)
      : tape_(tape), sampling_(sampling), args_(args) {}

  // Drafts of `num_seqs` sequences of a prepared step of `num_tokens` tokens, which all sample: counts[i] of sequence
  // i, in descending order, at drafts[i * counts[0] …]. Changes `columns`. `spread`: [sequences, vocab], -inf where
  // `ids` has none; null without `ids`.
  void run(int num_threads, int64_t num_tokens, int64_t num_seqs, const int64_t* counts, SampleRow* columns,
           float* spread, int64_t* drafts) const;

 private:
  void step_on(int64_t num_seqs, const int64_t* drafts, int64_t stride, const int64_t* last) const;

  const Tape& tape_;
  const SamplingKernels& sampling_;
  DraftChainArgs args_;
};

}  // namespace quire::cpu
