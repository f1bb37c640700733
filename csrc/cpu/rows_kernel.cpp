// RoPE and the store into the KV cache, of one ISA level, element by element. Bytes: each row read once and written
// once. Bound: cache or memory bandwidth, and at batch 1 the call itself.
#include "cpu/rows.h"

#include <algorithm>

#include "cpu/kv_tile.h"
#include "cpu/row_loops.h"

namespace quire::cpu::QUIRE_ISA {

namespace {

inline float widen(float f) { return f; }
inline float widen(uint16_t h) { return bf16_to_float(h); }
inline void narrow(float f, float* p) { *p = f; }
inline void narrow(float f, uint16_t* p) { *p = float_to_bf16(f); }

template <typename T>
void rope(const RopeArgs& a, ThreadPool& pool) {
  over_rows(a.tokens, a.heads * a.head_dim, pool, [&](int64_t token) {
    const float *cos = a.cos + token * a.half, *sin = a.sin + token * a.half;
    for (int64_t head = 0; head < a.heads; ++head) {
      const T* x = static_cast<const T*>(a.x) + token * a.token_stride + head * a.head_stride;
      T* y = static_cast<T*>(a.y) + (token * a.heads + head) * a.head_dim;
      if (a.interleaved) {
        for (int64_t i = 0; i < a.half; ++i) {
          const float first = widen(x[2 * i]), second = widen(x[2 * i + 1]);
          narrow(first * cos[i] - second * sin[i], y + 2 * i);
          narrow(second * cos[i] + first * sin[i], y + 2 * i + 1);
        }
      } else {
        over_vectors(a.half, [&](int64_t i, int n) {
          const Vec first = load_some(x + i, n), second = load_some(x + a.half + i, n);
          const Vec c = load_some(cos + i, n), s = load_some(sin + i, n);
          store_some(y + i, sub(mul(first, c), mul(second, s)), n);
          store_some(y + a.half + i, add(mul(second, c), mul(first, s)), n);
        });
      }
      std::copy(x + 2 * a.half, x + a.head_dim, y + 2 * a.half);
    }
  });
}

template <typename From, typename To>
inline void copy_row(const From* from, To* to, int64_t size) {
  for (int64_t i = 0; i < size; ++i) narrow(widen(from[i]), to + i);
}
template <typename T>
inline void copy_row(const T* from, T* to, int64_t size) {
  std::copy(from, from + size, to);
}

template <typename From, typename To>
void store_as(const StoreArgs& a, ThreadPool& pool) {
  over_rows(a.tokens, a.heads * (a.head_dim + a.v_head_dim), pool, [&](int64_t token) {
    if (a.block_ids[token] < 0) return;  // its position lies in another rank's cache
    To* block = static_cast<To*>(a.pieces) + a.block_ids[token] * a.block_stride;
    const int64_t offset = a.offsets[token];
    for (int64_t head = 0; head < a.heads; ++head) {
      To* piece = block + head * a.piece_stride;
      const From* k = static_cast<const From*>(a.k) + token * a.k_token_stride + head * a.k_head_stride;
      copy_row(k, piece + offset * a.head_dim, a.head_dim);
      if (a.v != nullptr) {
        const From* v = static_cast<const From*>(a.v) + token * a.v_token_stride + head * a.v_head_stride;
        copy_row(v, piece + a.block_size * a.head_dim + offset * a.v_head_dim, a.v_head_dim);
      }
    }
  });
}

template <typename Element>
void store_tiles(const StoreArgs& a, ThreadPool& pool) {
  auto body = [&](int thread, int num_threads) {
    TileWriter<Element> writer({a.head_dim, a.v_head_dim, a.k_bits, a.v_bits}, a.k_factors);
    const Range mine = whole_tiles(a.block_ids, a.offsets, a.tokens, thread, num_threads);
    for (int64_t head = 0; head < a.heads; ++head) {
      for (int64_t token = mine.begin; token < mine.end; ++token) {
        if (a.block_ids[token] < 0) continue;
        Element* piece = static_cast<Element*>(a.pieces) + a.block_ids[token] * a.block_stride + head * a.piece_stride;
        writer.put(piece, a.offsets[token], head,
                   static_cast<const uint16_t*>(a.k) + token * a.k_token_stride + head * a.k_head_stride,
                   static_cast<const uint16_t*>(a.v) + token * a.v_token_stride + head * a.v_head_stride);
      }
    }
  };
  if (a.tokens * a.heads * (a.head_dim + a.v_head_dim) < kSmallElements) {
    body(0, 1);
  } else {
    pool.run(body);
  }
}

void store_rows(const StoreArgs& a, ThreadPool& pool) {
  if (a.tiles) {
    (a.int8 ? store_tiles<int8_t> : store_tiles<uint16_t>)(a, pool);
    return;
  }
  const bool wide = a.type == Type::f32, pieces_wide = a.pieces_type == Type::f32;
  (wide ? (pieces_wide ? store_as<float, float> : store_as<float, uint16_t>)
        : (pieces_wide ? store_as<uint16_t, float> : store_as<uint16_t, uint16_t>))(a, pool);
}

}  // namespace

extern const RowKernels kRowOps;
const RowKernels kRowOps = {by_type<RopeArgs, rope<float>, rope<uint16_t>>, store_rows};

}  // namespace quire::cpu::QUIRE_ISA
