// Drafts of a model, one after another without Python between them: the inputs of a recorded step, its replay, sampling,
// and the step of what was sampled, as many times as the longest chain asks for.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/sampling.h"
#include "tape.h"

namespace quire::cpu {

// The memory of a recorded step (runner/input_batch.py), and what becomes of its results.
struct DraftChainArgs {
  // [tokens], [sequences + 1] and [sequences]; block_table [sequences, max_blocks].
  int64_t *input_ids, *positions, *slot_blocks, *slot_offsets, *cu_seqlens, *seq_lens, *logits_indices, *num_seqs,
      *block_table;
  int64_t max_tokens, max_blocks, block_size;
  int64_t lag;  // positions by which a row lies before its token

  const float* logits;  // [sequences, draft_vocab]
  int64_t vocab, draft_vocab;
  const int64_t* ids;  // [draft_vocab] the model's id of each of the draft's; null: they are the same

  // Heads: what a row says of its own token goes where the next row reads its hidden state. Null for a model.
  int64_t* slots;  // [tokens]
  const char* found;
  char* hidden;
  int64_t row_bytes;
};

// What is known of all sequences of a worker (runner/sequences.py), by row.
struct SeqTables {
  const int32_t* token_ids;  // [rows, max_tokens]
  int64_t max_tokens;
  const int32_t* block_table;  // [rows, max_blocks]
  int64_t max_blocks;
  const SampleRow* columns;  // [rows]
};

// Compute the tokens start … end - 1 of the sequence in `row`, and then `count` >= 1 drafts.
struct Chain {
  int64_t row, start, end, count;
};

class DraftChain {
 public:
  DraftChain(const Tape& tape, const SamplingKernels& sampling, const DraftChainArgs& args)
      : tape_(tape), sampling_(sampling), args_(args) {}

  // `chains` have descending counts; the drafts of chain i are drafts[i * chains[0].count …]. `spread`: [num, vocab],
  // -inf where `ids` has none; null without `ids`.
  void run(int num_threads, const SeqTables& seqs, const Chain* chains, int64_t num, float* spread,
           int64_t* drafts) const;

 private:
  // Both write a step: the first return its number of tokens.
  int64_t begin(const SeqTables& seqs, const Chain* chains, int64_t num, std::vector<SampleRow>& columns) const;
  void step_on(int64_t num, const int64_t* drafts, int64_t stride, const std::vector<SampleRow>& columns) const;
  void put(int64_t token, int64_t id, int64_t place, int64_t block) const;

  const Tape& tape_;
  const SamplingKernels& sampling_;
  DraftChainArgs args_;
};

}  // namespace quire::cpu
