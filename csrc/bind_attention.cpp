// Attention over the blocks of the KV cache.
#include "bind.h"
#include "cpu/attention.h"

namespace nb = nanobind;

namespace quire::cpu {

void bind_attention(nb::module_& m) {
  m.def(
      "attention",
      [](int num_threads, const std::string& isa, bool q_bf16, bool kv_bf16, bool tiles, int64_t k_bits,
         int64_t v_bits, uintptr_t q_factors, uintptr_t q, int64_t q_stride,
         uintptr_t pieces, int64_t block_stride, int64_t piece_stride, uintptr_t sinks, uintptr_t y,
         uintptr_t cu_seqlens_q, uintptr_t seq_lens, uintptr_t block_table, uintptr_t extents, int64_t num_heads,
         int64_t num_kv_heads, int64_t head_dim, int64_t v_head_dim, int64_t block_size,
         int64_t window, float scale, float cap, bool v_in_k, int64_t stripe_index, int64_t stripe_count, bool partial) {
        const AttentionArgs args{
            at<void>(q),      at<void>(pieces),         at<float>(sinks), at<void>(y),  at<int64_t>(cu_seqlens_q),
            at<int64_t>(seq_lens), at<int64_t>(block_table), at<int64_t>(extents), num_heads,
            num_kv_heads,     head_dim,                 v_head_dim,       block_size,   q_stride,
            block_stride,     piece_stride,             window,           scale,        cap,
            v_in_k,           type_of(q_bf16),          type_of(kv_bf16), k_bits < 16,  k_bits,
            v_bits,           at<float>(q_factors),     stripe_index,     stripe_count, partial};
        const auto run = tiles ? kernels_of<AttentionTilesKernels>(isa).tiles : kernels_of<AttentionKernels>(isa).rows;
        submit(num_threads, args, {}, run);
      },
      "Attention over KV blocks, see kernels/attention; window, cap and sinks 0 for none.",
      nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "merge_attention",
      [](int num_threads, const std::string& isa, bool bf16, uintptr_t parts, uintptr_t sinks, uintptr_t y,
         int64_t tokens, int64_t ranks, int64_t num_heads, int64_t v_head_dim) {
        const MergeArgs args{at<float>(parts), at<float>(sinks), at<void>(y), tokens, ranks, num_heads, v_head_dim, type_of(bf16)};
        submit(num_threads, args, {&MergeArgs::tokens}, kernels_of<AttentionKernels>(isa).merge);
      },
      "Attention from the partial results of the ranks that share a sequence's cache.",
      nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace quire::cpu
