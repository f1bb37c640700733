// Gated activations of one ISA level.
//
// Algorithm: one pass over the rows, the gate's function from vec_math.h. Bytes: gate and up read, the result written,
// mostly in cache. Bound: bandwidth.
#include "cpu/gated.h"

#include "cpu/quantize_row.h"
#include "cpu/row_loops.h"
#include "cpu/vec_math.h"

namespace quire::cpu::QUIRE_ISA {

namespace {

// e^x - 1 for x <= 0: a series near 0, where the difference would lose its digits.
inline Vec exp_minus_one(Vec x) {
  Vec p = broadcast(1.0f / 720.0f);
  for (const float c : {1.0f / 120.0f, 1.0f / 24.0f, 1.0f / 6.0f, 0.5f, 1.0f}) p = fma(p, x, broadcast(c));
  return where_less(x, broadcast(-0.25f), sub(QUIRE_ISA::exp(x), broadcast(1.0f)), mul(p, x));
}

inline Vec activate(const GatedArgs& a, Gate gate, Vec g, Vec u) {
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
    case Gate::relu2: {
      const Vec positive = max(zero(), g);
      return mul(positive, positive);
    }
    case Gate::xielu: {
      const Vec low = min(broadcast(-1e-6f), g), linear = mul(g, broadcast(0.5f));
      const Vec negative = mul(sub(exp_minus_one(low), g), broadcast(a.alpha_n));
      const Vec curve = where_less(zero(), g, mul(mul(g, g), broadcast(a.alpha_p)), negative);
      return add(curve, linear);
    }
  }
  return g;
}

template <typename T, Gate gate>
void gated_as(const GatedArgs& a, ThreadPool& pool) {
  const Vec scale = broadcast(a.scale);
  over_rows(a.tokens, a.size * 8, pool, [&](int64_t i) {
    const T* g = static_cast<const T*>(a.gate_up) + i * a.stride;
    const T* u = g + (parts_of(gate) - 1) * a.size;
    T* y = a.rows.q == nullptr ? static_cast<T*>(a.y) + i * a.size : scratch_row<T>(a.size);
    over_vectors(a.size, [&](int64_t j, int n) {
      // Of the next row: another core wrote half of it.
      __builtin_prefetch(g + a.stride + j, 0, 3);
      __builtin_prefetch(u + a.stride + j, 0, 3);
      store_some(y + j, activate(a, gate, mul(load_some(g + j, n), scale), load_some(u + j, n)), n);
    });
    if (a.rows.q != nullptr) quantize_row(y, a.size, a.format, a.rows, i);
  });
}

template <typename T>
void gated(const GatedArgs& a, ThreadPool& pool) {
  switch (a.gate) {
    case Gate::silu: return gated_as<T, Gate::silu>(a, pool);
    case Gate::gelu_tanh: return gated_as<T, Gate::gelu_tanh>(a, pool);
    case Gate::gelu: return gated_as<T, Gate::gelu>(a, pool);
    case Gate::swiglu_oai: return gated_as<T, Gate::swiglu_oai>(a, pool);
    case Gate::relu2: return gated_as<T, Gate::relu2>(a, pool);
    case Gate::xielu: return gated_as<T, Gate::xielu>(a, pool);
  }
}

}  // namespace

extern const GatedKernels kGated;
const GatedKernels kGated = {by_type<GatedArgs, gated<float>, gated<uint16_t>>};

}  // namespace quire::cpu::QUIRE_ISA
