// q/k norm, RoPE and the store into the KV cache of one ISA level: q to its buffer, k and v straight into the cache.
//
// A head is converted to fp32, normalised, rotated and rounded once. Bytes: the projection's rows, which are still in
// cache, and as many written. Bound: cache bandwidth, and the latency of the cache blocks. A token's bits depend on
// that token alone.
#include "cpu/rope_store.h"

#include <cmath>
#include <type_traits>
#include <vector>

#include "cpu/kv_tile.h"
#include "cpu/row_loops.h"

namespace quire::cpu::QUIRE_ISA {

namespace {

inline void put(float f, float* p) { *p = f; }
inline void put(float f, uint16_t* p) { *p = float_to_bf16(f); }
template <typename T, typename To>
void convert(const T* from, To* to, int64_t size) {
  over_vectors(size, [&](int64_t i, int n) { store_some(to + i, load_some(from + i, n), n); });
}
template <typename T>
void convert(const T* from, T* to, int64_t size) {
  std::copy(from, from + size, to);
}

template <typename T, typename Kv>
class TokenKernel {
 public:
  explicit TokenKernel(const RopeStoreArgs& args)
      : a(args), head_(static_cast<size_t>(a.head_dim)), key_(static_cast<size_t>(a.head_dim)),
        tiles_({a.head_dim, a.v_head_dim, a.k_bits, a.v_bits}, a.k_factors) {}

  void run(int64_t token) {
    const T* x = static_cast<const T*>(a.qkv) + token * a.stride;
    T* q = static_cast<T*>(a.q) + token * a.num_heads * a.head_dim;
    heads(token, x, a.num_heads, a.q_weight, [&](int64_t head) { return q + head * a.head_dim; }, [](int64_t) {});
    const T* k = x + a.num_heads * a.head_dim;
    const T* v = k + a.num_kv_heads * a.head_dim;
    const int64_t offset = a.offsets[token];
    if (a.block_ids[token] < 0) return;  // its position lies in another rank's cache
    Kv* block = static_cast<Kv*>(a.pieces) + a.block_ids[token] * a.block_stride;
    heads(token, k, a.num_kv_heads, a.k_weight, [&](int64_t) { return key_.data(); }, [&](int64_t head) {
      Kv* piece = block + head * a.piece_stride;
      const T* value = v + head * a.v_head_dim;
      if constexpr (sizeof(T) == 2 && sizeof(Kv) <= 2) {
        if (a.tiles) {
          tiles_.put(piece, offset, head, key_.data(), value);
          return;
        }
      }
      if constexpr (sizeof(Kv) >= 2) {
        convert(key_.data(), piece + offset * a.head_dim, a.head_dim);
        convert(value, piece + a.block_size * a.head_dim + offset * a.v_head_dim, a.v_head_dim);
      }
    });
  }

  // Fetch the lines that a token is stored to, unless the one before was stored there too.
  void prefetch(int64_t token) const {
    if constexpr (sizeof(Kv) <= 2) {
      const int64_t block = a.block_ids[token], offset = a.offsets[token];
      if (!a.tiles || block < 0 || (block == a.block_ids[token - 1] && offset % kTilePositions != 0)) return;
      const Kv* pieces = static_cast<const Kv*>(a.pieces) + block * a.block_stride;
      for (int64_t head = 0; head < a.num_kv_heads; ++head) tiles_.prefetch(pieces + head * a.piece_stride, offset);
    }
  }

 private:
  // Each of `count` heads is written to `target(head)`; then done(head) is called.
  template <typename Target, typename Done>
  void heads(int64_t token, const T* x, int64_t count, const float* weight, const Target& target, const Done& done) {
    const int64_t dim = a.head_dim;
    float scale = 1.0f;
    if (weight != nullptr && a.norm_all) scale = norm_scale(x, count * dim);
    for (int64_t head = 0; head < count; ++head) {
      const T* from = x + head * dim;
      if (weight != nullptr && !a.norm_all) scale = norm_scale(from, dim);
      const float* w = weight == nullptr ? nullptr : weight + (a.norm_all ? head * dim : 0);
      over_vectors(dim, [&](int64_t i, int n) {
        Vec value = load_some(from + i, n);
        if (w != nullptr) value = mul(mul(value, broadcast(scale)), load_some(w + i, n));
        store_some(head_.data() + i, value, n);
      });
      rotate(token, target(head));
      done(head);
    }
  }

  float norm_scale(const T* x, int64_t size) const {
    return 1.0f / std::sqrt(sum_of_squares(x, size) / static_cast<float>(size) + a.eps);
  }

  // head_ -> y
  void rotate(int64_t token, T* y) const {
    const float *x = head_.data(), *cos = a.cos + token * a.half, *sin = a.sin + token * a.half;
    const int64_t half = a.cos == nullptr ? 0 : a.half;
    if (a.interleaved) {
      for (int64_t i = 0; i < half; ++i) {
        put(x[2 * i] * cos[i] - x[2 * i + 1] * sin[i], y + 2 * i);
        put(x[2 * i + 1] * cos[i] + x[2 * i] * sin[i], y + 2 * i + 1);
      }
    } else {
      over_vectors(half, [&](int64_t i, int n) {
        const Vec first = load_some(x + i, n), second = load_some(x + half + i, n);
        const Vec c = load_some(cos + i, n), s = load_some(sin + i, n);
        store_some(y + i, sub(mul(first, c), mul(second, s)), n);
        store_some(y + half + i, add(mul(second, c), mul(first, s)), n);
      });
    }
    convert(x + 2 * half, y + 2 * half, a.head_dim - 2 * half);
  }

  const RopeStoreArgs& a;
  std::vector<float> head_;
  std::vector<T> key_;
  TileWriter<std::conditional_t<sizeof(Kv) == 1, int8_t, uint16_t>> tiles_;
};

template <typename T, typename Kv>
void rope_store_as(const RopeStoreArgs& a, ThreadPool& pool) {
  auto body = [&](int thread, int num_threads) {
    const Range mine = whole_tiles(a.block_ids, a.offsets, a.tokens, thread, num_threads);
    TokenKernel<T, Kv> kernel(a);
    for (int64_t token = mine.begin; token < mine.end; ++token) {
      if (token + 1 < mine.end) kernel.prefetch(token + 1);
      kernel.run(token);
    }
  };
  // Each token's cache lies elsewhere, so an element takes longer than in other small ops.
  if (a.tokens * a.stride < kSmallElements / 2) {
    body(0, 1);
  } else {
    pool.run(body);
  }
}

void rope_store(const RopeStoreArgs& a, ThreadPool& pool) {
  if (a.int8) return rope_store_as<uint16_t, int8_t>(a, pool);
  const bool wide = a.type == Type::f32, pieces_wide = a.pieces_type == Type::f32;
  (wide ? (pieces_wide ? rope_store_as<float, float> : rope_store_as<float, uint16_t>)
        : (pieces_wide ? rope_store_as<uint16_t, float> : rope_store_as<uint16_t, uint16_t>))(a, pool);
}

}  // namespace

extern const RopeStoreKernels kRopeStore;
const RopeStoreKernels kRopeStore = {rope_store};

}  // namespace quire::cpu::QUIRE_ISA
