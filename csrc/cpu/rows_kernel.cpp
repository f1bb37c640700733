// The small ops of one ISA level. Each reads its rows once and writes once: bound by cache or memory bandwidth, and at
// batch 1 by the call itself. Tails go through the same vector operations as whole vectors, on padded copies.
#include "cpu/rows.h"

#include <algorithm>
#include <cmath>

#include "cpu/vec_math.h"

namespace quire::cpu::QUIRE_ISA {

namespace {

constexpr int64_t kSmallElements = 1 << 15;  // a few us: not worth another thread

template <typename F>
void over_rows(int64_t rows, int64_t row_elements, ThreadPool& pool, const F& row) {
  auto body = [&](int thread, int num_threads) {
    const Range mine = share(rows, thread, num_threads);
    for (int64_t i = mine.begin; i < mine.end; ++i) row(i);
  };
  if (rows * row_elements < kSmallElements) {
    body(0, 1);
  } else {
    pool.run(body);
  }
}

// Call f(i, n) for every vector of a row: n lanes of it count.
template <typename F>
inline void over_vectors(int64_t size, const F& f) {
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) f(i, kLanes);
  if (i < size) f(i, static_cast<int>(size - i));
}

template <typename T>
inline Vec load_some(const T* p, int n) {
  if (n == kLanes) return load(p);
  T padded[kLanes] = {};
  std::copy(p, p + n, padded);
  return load(padded);
}

template <typename T>
inline void store_some(T* p, Vec v, int n) {
  if (n == kLanes) {
    store(p, v);
    return;
  }
  T padded[kLanes];
  store(padded, v);
  std::copy(padded, padded + n, p);
}

template <typename T>
void norm(const NormArgs& a, ThreadPool& pool) {
  over_rows(a.tokens * a.heads, a.size, pool, [&](int64_t i) {
    const int64_t token = i / a.heads, head = i % a.heads;
    const T* x = static_cast<const T*>(a.x) + token * a.token_stride + head * a.head_stride;
    const float* weight = a.weight + head * a.weight_stride;
    T* y = static_cast<T*>(a.y) + i * a.size;
    if (a.residual != nullptr) {
      const T* residual = static_cast<const T*>(a.residual) + i * a.residual_stride;
      T* total = static_cast<T*>(a.sum) + i * a.size;
      over_vectors(a.size, [&](int64_t j, int n) {
        store_some(total + j, add(load_some(residual + j, n), load_some(x + j, n)), n);
      });
      x = total;
    }
    Vec squares[4] = {zero(), zero(), zero(), zero()};  // four chains; element j belongs to chain j / kLanes % 4
    over_vectors(a.size, [&](int64_t j, int n) {
      const Vec v = load_some(x + j, n);
      Vec& chain = squares[j / kLanes % 4];
      chain = fma(v, v, chain);
    });
    const float square = QUIRE_ISA::sum(add(add(squares[0], squares[1]), add(squares[2], squares[3])));
    const Vec scale = broadcast(1.0f / std::sqrt(square / static_cast<float>(a.size) + a.eps));
    over_vectors(a.size, [&](int64_t j, int n) {
      store_some(y + j, mul(mul(load_some(x + j, n), scale), load_some(weight + j, n)), n);
    });
  });
}

inline Vec activate(Gate gate, Vec g, Vec u) {
  switch (gate) {
    case Gate::silu:
      return mul(mul(sigmoid(g), g), u);
    case Gate::gelu_tanh: {
      // x/2 (1 + tanh t) = x * sigmoid(2t)
      const Vec cubed = mul(mul(g, g), g);
      const Vec t = mul(fma(cubed, broadcast(0.044715f), g), broadcast(1.5957691216f));
      return mul(mul(g, sigmoid(t)), u);
    }
    case Gate::gelu:
      return mul(mul(mul(g, broadcast(0.5f)), one_plus_erf(mul(g, broadcast(0.70710678f)))), u);
    case Gate::swiglu_oai: {
      const Vec limit = broadcast(7.0f);
      const Vec low = min(limit, g), up = max(broadcast(-7.0f), min(limit, u));
      return mul(mul(sigmoid(mul(low, broadcast(1.702f))), low), add(up, broadcast(1.0f)));
    }
  }
  return g;
}

template <typename T, Gate gate>
void gated_as(const GatedArgs& a, ThreadPool& pool) {
  over_rows(a.tokens, a.size * 8, pool, [&](int64_t i) {
    const T* g = static_cast<const T*>(a.gate_up) + i * a.stride;
    const T* u = g + a.size;
    T* y = static_cast<T*>(a.y) + i * a.size;
    over_vectors(a.size, [&](int64_t j, int n) {
      store_some(y + j, activate(gate, load_some(g + j, n), load_some(u + j, n)), n);
    });
  });
}

template <typename T>
void gated(const GatedArgs& a, ThreadPool& pool) {
  switch (a.gate) {
    case Gate::silu: return gated_as<T, Gate::silu>(a, pool);
    case Gate::gelu_tanh: return gated_as<T, Gate::gelu_tanh>(a, pool);
    case Gate::gelu: return gated_as<T, Gate::gelu>(a, pool);
    case Gate::swiglu_oai: return gated_as<T, Gate::swiglu_oai>(a, pool);
  }
}

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

void store_rows(const StoreArgs& a, ThreadPool& pool) {
  const bool wide = a.type == Type::f32, pieces_wide = a.pieces_type == Type::f32;
  (wide ? (pieces_wide ? store_as<float, float> : store_as<float, uint16_t>)
        : (pieces_wide ? store_as<uint16_t, float> : store_as<uint16_t, uint16_t>))(a, pool);
}

template <typename Args, void (*wide)(const Args&, ThreadPool&), void (*half)(const Args&, ThreadPool&)>
void by_type(const Args& a, ThreadPool& pool) {
  (a.type == Type::f32 ? wide : half)(a, pool);
}

}  // namespace

extern const RowKernels kRowOps;
const RowKernels kRowOps = {by_type<NormArgs, norm<float>, norm<uint16_t>>,
                            by_type<GatedArgs, gated<float>, gated<uint16_t>>,
                            by_type<RopeArgs, rope<float>, rope<uint16_t>>, store_rows};

}  // namespace quire::cpu::QUIRE_ISA
