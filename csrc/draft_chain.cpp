#include "draft_chain.h"

#include <algorithm>
#include <cstring>
#include <vector>

namespace quire::cpu {

void DraftChain::run(int num_threads, int64_t num_tokens, int64_t num_seqs, const int64_t* counts, SampleRow* columns,
                     float* spread, int64_t* drafts) const {
  const DraftChainArgs& a = args_;
  const int64_t longest = counts[0];
  std::vector<const float*> rows;
  for (int64_t i = 0; i < num_seqs; ++i) rows.push_back(a.ids ? spread + i * a.vocab : a.logits + i * a.draft_vocab);
  std::vector<int64_t> sampled(static_cast<size_t>(num_seqs)), last(static_cast<size_t>(num_seqs));
  std::vector<float> best(static_cast<size_t>(num_seqs));
  for (int64_t i = 0; i < num_seqs; ++i) last[size_t(i)] = a.positions[a.logits_indices[i]];
  for (int64_t step = 0;; ++step) {
    tape_.run(num_threads, {num_tokens, num_seqs});
    for (int64_t i = 0; a.ids != nullptr && i < num_seqs; ++i) {
      const float* from = a.logits + i * a.draft_vocab;
      float* to = spread + i * a.vocab;
      for (int64_t j = 0; j < a.draft_vocab; ++j) to[a.ids[j]] = from[j];
    }
    {
      const PoolLease pool(num_threads);
      sampling_.sample({rows.data(), columns, num_seqs, a.vocab, 0, sampled.data(), best.data()}, pool.get());
    }
    // A row without a finite logit has no valid id; any is as good.
    for (int64_t i = 0; i < num_seqs; ++i) drafts[i * longest + step] = std::max<int64_t>(sampled[size_t(i)], 0);
    if (step + 1 == longest) return;
    while (counts[num_seqs - 1] <= step + 1) --num_seqs;
    num_tokens = num_seqs;
    step_on(num_seqs, drafts + step, longest, last.data());
    for (int64_t i = 0; i < num_seqs; ++i) ++last[size_t(i)], ++columns[i].position;
  }
}

// Write the step of the tokens just sampled, one per sequence behind its row at `last`.
void DraftChain::step_on(int64_t num_seqs, const int64_t* drafts, int64_t stride, const int64_t* last) const {
  const DraftChainArgs& a = args_;
  *a.num_seqs = num_seqs;
  for (int64_t i = 0; i < num_seqs; ++i) {
    const int64_t position = last[i] + 1;
    a.input_ids[i] = drafts[i * stride];
    a.positions[i] = position;
    a.slot_blocks[i] = a.block_table[i * a.max_blocks + position / a.block_size];
    a.slot_offsets[i] = position % a.block_size;
    a.seq_lens[i] = position + 1;
    a.cu_seqlens[i + 1] = i + 1;
    a.logits_indices[i] = i;
    if (a.hidden == nullptr) continue;
    a.slots[i] = a.slot_blocks[i] * a.block_size + a.slot_offsets[i];
    std::memcpy(a.hidden + a.slots[i] * a.row_bytes, a.found + i * a.row_bytes, size_t(a.row_bytes));
  }
}

}  // namespace quire::cpu
