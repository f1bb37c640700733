// RoPE, the store into the cache.
#include "bind.h"
#include "cpu/rope_store.h"
#include "cpu/rows.h"

namespace nb = nanobind;

namespace quire::cpu {

void bind_rows(nb::module_& m) {
  m.def(
      "rope",
      [](int num_threads, const std::string& isa, bool bf16, bool interleaved, uintptr_t x, int64_t token_stride,
         int64_t head_stride, uintptr_t cos, uintptr_t sin, uintptr_t y, int64_t tokens, int64_t heads,
         int64_t head_dim, int64_t half) {
        const RopeArgs args{at<void>(x), at<float>(cos), at<float>(sin), at<void>(y), tokens,      heads,
                            head_dim,    half,           token_stride,   head_stride, interleaved, type_of(bf16)};
        submit(num_threads, args, {&RopeArgs::tokens}, kernels_of<RowKernels>(isa).rope);
      },
      "Rotate the first 2 * half elements of every head.", nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "store_kv",
      [](int num_threads, const std::string& isa, bool bf16, bool pieces_bf16, bool tiles, int64_t k_bits,
         int64_t v_bits, uintptr_t k_factors, uintptr_t k,
         int64_t k_token_stride, int64_t k_head_stride, uintptr_t v, int64_t v_token_stride, int64_t v_head_stride, uintptr_t pieces,
         int64_t block_stride, int64_t piece_stride, uintptr_t block_ids, uintptr_t offsets, int64_t tokens,
         int64_t heads, int64_t head_dim, int64_t v_head_dim, int64_t block_size) {
        const StoreArgs args{at<void>(k),    at<void>(v),    at<void>(pieces), at<int64_t>(block_ids),
                             at<int64_t>(offsets), tokens,   heads,            head_dim,
                             v_head_dim,     block_size,     k_token_stride,   k_head_stride,
                             v_token_stride, v_head_stride,  block_stride,     piece_stride,
                             type_of(bf16),  type_of(pieces_bf16), tiles, k_bits < 16,
                             k_bits,         v_bits,         at<float>(k_factors)};
        submit(num_threads, args, {&StoreArgs::tokens}, kernels_of<RowKernels>(isa).store);
      },
      "Write rows of K and V (0 where it is in K) into the cache.", nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "rope_store",
      [](int num_threads, const std::string& isa, bool bf16, bool pieces_bf16, bool tiles, int64_t k_bits,
         int64_t v_bits, uintptr_t k_factors, bool interleaved,
         uintptr_t qkv, int64_t stride, uintptr_t cos, uintptr_t sin, int64_t half, uintptr_t q_weight,
         uintptr_t k_weight, bool norm_all, float eps, uintptr_t q, uintptr_t pieces, int64_t block_stride,
         int64_t piece_stride, uintptr_t block_ids, uintptr_t offsets, int64_t tokens, int64_t num_heads,
         int64_t num_kv_heads, int64_t head_dim, int64_t v_head_dim, int64_t block_size) {
        const RopeStoreArgs args{at<void>(qkv),      at<float>(cos),       at<float>(sin),         at<float>(q_weight),
                                 at<float>(k_weight), at<void>(q),         at<void>(pieces),       at<int64_t>(block_ids),
                                 at<int64_t>(offsets), tokens,             num_heads,              num_kv_heads,
                                 head_dim,           v_head_dim,           half,                   block_size,
                                 stride,             block_stride,         piece_stride,           eps,
                                 norm_all,           interleaved,          tiles,                k_bits < 16,
                                 k_bits,             v_bits,               at<float>(k_factors), type_of(bf16),
                                 type_of(pieces_bf16)};
        submit(num_threads, args, {&RopeStoreArgs::tokens}, kernels_of<RopeStoreKernels>(isa).rope_store);
      },
      "q/k norm (weights 0: none), RoPE (cos 0: none) and the store of k and v.",
      nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace quire::cpu
