#include "draft_chain.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace quire::cpu {

void DraftChain::run(int num_threads, const SeqTables& seqs, const Chain* chains, int64_t num, float* spread,
                     int64_t* drafts) const {
  const DraftChainArgs& a = args_;
  const int64_t longest = chains[0].count;
  std::vector<SampleRow> columns;
  std::vector<const float*> rows;
  for (int64_t i = 0; i < num; ++i) rows.push_back(a.ids ? spread + i * a.vocab : a.logits + i * a.draft_vocab);
  std::vector<int64_t> sampled(size_t(num), 0);
  std::vector<float> best(size_t(num), 0.0f);
  int64_t num_tokens = begin(seqs, chains, num, columns);
  for (int64_t step = 0;; ++step) {
    tape_.run(num_threads, {num_tokens, num});
    for (int64_t i = 0; a.ids != nullptr && i < num; ++i) {
      const float* from = a.logits + i * a.draft_vocab;
      float* to = spread + i * a.vocab;
      for (int64_t j = 0; j < a.draft_vocab; ++j) to[a.ids[j]] = from[j];
    }
    {
      const PoolLease pool(num_threads);
      sampling_.sample({rows.data(), columns.data(), num, a.vocab, 0, sampled.data(), best.data()}, pool.get());
    }
    // A row without a finite logit has no valid id; any is as good.
    for (int64_t i = 0; i < num; ++i) drafts[i * longest + step] = std::max<int64_t>(sampled[size_t(i)], 0);
    if (step + 1 == longest) return;
    while (chains[num - 1].count <= step + 1) --num;
    step_on(num, drafts + step, longest, columns);
    for (int64_t i = 0; i < num; ++i) ++columns[size_t(i)].position;
    num_tokens = num;
  }
}

int64_t DraftChain::begin(const SeqTables& seqs, const Chain* chains, int64_t num,
                          std::vector<SampleRow>& columns) const {
  const DraftChainArgs& a = args_;
  *a.num_seqs = num;
  int64_t token = 0;
  for (int64_t i = 0; i < num; ++i) {
    const Chain& c = chains[i];
    if (token + c.end - c.start > a.max_tokens) throw std::out_of_range("more tokens than the recorded step has");
    const int32_t* blocks = seqs.block_table + c.row * seqs.max_blocks;
    const int64_t last = c.end - a.lag + c.count - 1;  // positions up to it are computed
    std::copy(blocks, blocks + (last + a.block_size - 1) / a.block_size, a.block_table + i * a.max_blocks);
    for (int64_t at = c.start; at < c.end; ++at, ++token) {
      const int64_t place = at - a.lag;
      put(token, seqs.token_ids[c.row * seqs.max_tokens + at], place, blocks[place / a.block_size]);
    }
    a.cu_seqlens[i + 1] = token;
    a.seq_lens[i] = c.end - a.lag;
    a.logits_indices[i] = token - 1;
    columns.push_back(seqs.columns[c.row]);
    columns.back().position = c.end;
  }
  return token;
}

// `columns`: of what was just sampled, whose position is that of the new row.
void DraftChain::step_on(int64_t num, const int64_t* drafts, int64_t stride,
                         const std::vector<SampleRow>& columns) const {
  const DraftChainArgs& a = args_;
  *a.num_seqs = num;
  for (int64_t i = 0; i < num; ++i) {
    const int64_t place = columns[size_t(i)].position - a.lag;
    put(i, drafts[i * stride], place, a.block_table[i * a.max_blocks + place / a.block_size]);
    a.cu_seqlens[i + 1] = i + 1;
    a.seq_lens[i] = place + 1;
    a.logits_indices[i] = i;
    if (a.hidden != nullptr) std::memcpy(a.hidden + a.slots[i] * a.row_bytes, a.found + i * a.row_bytes, size_t(a.row_bytes));
  }
}

void DraftChain::put(int64_t token, int64_t id, int64_t place, int64_t block) const {
  const DraftChainArgs& a = args_;
  a.input_ids[token] = id;
  a.positions[token] = place;
  a.slot_blocks[token] = block;
  a.slot_offsets[token] = place % a.block_size;
  if (a.slots != nullptr) a.slots[token] = block * a.block_size + place % a.block_size;
}

}  // namespace quire::cpu
