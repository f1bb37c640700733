// Recurrent layers of one ISA level.
//
// Delta rule: a thread takes a head's state in slices of a few value columns and goes through all tokens of the sequence
// with one slice, which stays in L1 (128 channels x 16 or 32 columns: 8 or 16 KiB). Two passes over the slice per token:
// decay and the product with k; the update and the product with q. Bytes: a state is read once and written once per step
// and sequence, 64 KiB each way for a head of 128 x 128; a checkpoint is one more write. Bound: memory bandwidth where
// sequences decode; with more than some 4 tokens per state, 7 operations per number of the state and token. Products and
// sums are rounded one by one, in the order that kernels/recurrent states, so all levels and the reference have equal bits.
//
// Mamba-2's scan goes over the same slices in one pass per token: decay, update, the product with C. Bytes and bound are
// those of the delta rule, with 5 operations per number of the state and token.
//
// Convolution: a block of channels, token by token. Bytes: rows read and written once, mostly in cache; 3 rows of past
// per sequence. Bound: cache bandwidth.
#include "cpu/recurrent.h"

#include <cmath>

#include "cpu/exact_math.h"
#include "cpu/row_loops.h"
#include "cpu/scratch.h"
#include "cpu/vec_math.h"

namespace quire::cpu::QUIRE_ISA {

namespace {

constexpr int kChains = 4;                               // key channel i is added in chain i % 4
constexpr int kSlice = kLanes >= 16 ? 2 : 16 / kLanes;   // vectors of a slice of a state
constexpr int64_t kColumns = kSlice * kLanes;
constexpr int64_t kConvBlock = 256;                      // channels

// Call f(count, slot) for each save of a sequence.
template <typename F>
void over_saves(const StateBatch& batch, int64_t sequence, const F& f) {
  for (int64_t i = 0; i < batch.extents[1]; ++i) {
    const int64_t* save = batch.saves + 3 * i;
    if (save[0] == sequence) f(save[1], save[2]);
  }
}

// Items of a step: all at once, or dealt to the threads where there is enough work.
template <typename F>
void over_items(int64_t items, bool small, ThreadPool& pool, const F& f) {
  const auto some = [&](const Range& mine) {
    for (int64_t i = mine.begin; i < mine.end; ++i) f(i);
  };
  if (small) return some(Range{0, items});
  pool.deal(items);
  pool.run([&](int thread, int) { pool.take_all(thread, 1, some); });
}

struct Slice {
  float* at;
  int64_t stride;  // from one key channel to the next
};

// One token: from -> to, y. `local` is a slice in L1 that may be either. `decays`: one per key channel, or one for all.
template <int kVectors, bool kChannels, typename T>
void step(const Slice& from, const Slice& local, const Slice& to, const float* q, const float* k, const float* decays,
          float beta, const T* v, T* y, int64_t k_dim, int columns) {
  const Vec forget = broadcast(decays[0]);
  const auto lanes = [columns](int i) { return std::min(kLanes, columns - i * kLanes); };
  Vec sums[kChains][kVectors];
  UNROLL for (int c = 0; c < kChains; ++c) {
    UNROLL for (int i = 0; i < kVectors; ++i) sums[c][i] = zero();
  }
  for (int64_t row = 0; row < k_dim; row += kChains) {
    UNROLL for (int c = 0; c < kChains; ++c) {
      const float* source = from.at + (row + c) * from.stride;
      float* target = local.at + (row + c) * local.stride;
      const Vec key = broadcast(k[row + c]);
      const Vec decay = kChannels ? broadcast(decays[row + c]) : forget;
      UNROLL for (int i = 0; i < kVectors; ++i) {
        const Vec kept = mul(kVectors == 1 ? load_some(source, lanes(0)) : load(source + i * kLanes), decay);
        store(target + i * kLanes, kept);
        sums[c][i] = add(sums[c][i], mul(kept, key));
      }
    }
  }
  Vec delta[kVectors];
  const Vec rate = broadcast(beta);
  UNROLL for (int i = 0; i < kVectors; ++i) {
    const Vec known = add(add(sums[0][i], sums[1][i]), add(sums[2][i], sums[3][i]));
    delta[i] = mul(sub(kVectors == 1 ? load_some(v, lanes(0)) : load(v + i * kLanes), known), rate);
    UNROLL for (int c = 0; c < kChains; ++c) sums[c][i] = zero();
  }
  for (int64_t row = 0; row < k_dim; row += kChains) {
    UNROLL for (int c = 0; c < kChains; ++c) {
      const float* source = local.at + (row + c) * local.stride;
      float* target = to.at + (row + c) * to.stride;
      const Vec key = broadcast(k[row + c]), query = broadcast(q[row + c]);
      UNROLL for (int i = 0; i < kVectors; ++i) {
        const Vec now = add(load(source + i * kLanes), mul(key, delta[i]));
        if (kVectors == 1) {
          store_some(target, now, lanes(0));
        } else {
          store(target + i * kLanes, now);
        }
        sums[c][i] = add(sums[c][i], mul(now, query));
      }
    }
  }
  UNROLL for (int i = 0; i < kVectors; ++i) {
    const Vec out = add(add(sums[0][i], sums[1][i]), add(sums[2][i], sums[3][i]));
    if (kVectors == 1) {
      store_some(y, out, lanes(0));
    } else {
      store(y + i * kLanes, out);
    }
  }
}

// One token of Mamba-2: S <- decay S + B (dt x), y = C S + skip x.
template <int kVectors, typename T>
void mamba_step(const Slice& from, const Slice& to, const float* q, const float* k, float decay, float rate, float skip,
                const T* x, T* y, int64_t k_dim, int columns) {
  const Vec forget = broadcast(decay), factor = broadcast(rate), direct = broadcast(skip);
  const auto lanes = [columns](int i) { return std::min(kLanes, columns - i * kLanes); };
  Vec sums[kChains][kVectors], in[kVectors], added[kVectors];
  UNROLL for (int i = 0; i < kVectors; ++i) {
    in[i] = kVectors == 1 ? load_some(x, lanes(0)) : load(x + i * kLanes);
    added[i] = mul(in[i], factor);
    UNROLL for (int c = 0; c < kChains; ++c) sums[c][i] = zero();
  }
  for (int64_t row = 0; row < k_dim; row += kChains) {
    UNROLL for (int c = 0; c < kChains; ++c) {
      const float* source = from.at + (row + c) * from.stride;
      float* target = to.at + (row + c) * to.stride;
      const Vec key = broadcast(k[row + c]), query = broadcast(q[row + c]);
      UNROLL for (int i = 0; i < kVectors; ++i) {
        const Vec old = kVectors == 1 ? load_some(source, lanes(0)) : load(source + i * kLanes);
        const Vec now = add(mul(old, forget), mul(key, added[i]));
        if (kVectors == 1) {
          store_some(target, now, lanes(0));
        } else {
          store(target + i * kLanes, now);
        }
        sums[c][i] = add(sums[c][i], mul(now, query));
      }
    }
  }
  UNROLL for (int i = 0; i < kVectors; ++i) {
    const Vec out = add(add(sums[0][i], sums[1][i]), add(sums[2][i], sums[3][i]));
    const Vec whole = add(out, mul(in[i], direct));
    if (kVectors == 1) {
      store_some(y, whole, lanes(0));
    } else {
      store(y + i * kLanes, whole);
    }
  }
}

// All tokens of a sequence for some value columns of one head.
template <int kVectors, typename T>
void scan(const DeltaRuleArgs& a, int64_t sequence, int64_t head, int64_t column, int columns) {
  const StateBatch& batch = a.batch;
  const int64_t begin = batch.cu_seqlens[sequence], end = batch.cu_seqlens[sequence + 1], width = a.v_heads * a.v_dim;
  const int64_t key_head = head / (a.v_heads / a.k_heads);
  static thread_local Scratch scratch;
  constexpr int64_t kWidth = kVectors * kLanes;
  const Slice local{scratch.get<float>(static_cast<size_t>(a.k_dim * kWidth)), kWidth};
  const auto slot = [&](int64_t index) {
    return Slice{a.state + index * a.slot_stride + head * a.k_dim * a.v_dim + column, a.v_dim};
  };
  const Slice live = slot(batch.slots[sequence]);
  const bool fresh = batch.fresh[sequence] != 0;
  if (fresh) std::fill_n(local.at, a.k_dim * kWidth, 0.0f);
  for (int64_t token = begin; token < end; ++token) {
    const float* q = a.qk + (token * a.parts * a.k_heads + key_head) * a.k_dim;
    const float* gates = a.gates + token * (4 - a.parts) * a.v_heads + head;
    const Slice& from = token == begin && !fresh ? live : local;
    const Slice& to = token + 1 == end ? live : local;
    const float* k = q + a.k_heads * a.k_dim;
    const T* v = static_cast<const T*>(a.v) + token * a.stride + head * a.v_dim + column;
    T* y = static_cast<T*>(a.y) + token * width + head * a.v_dim + column;
    // A tail is padded in the local slice, and written to the pool by itself.
    if (a.parts == 3) {
      step<kVectors, true>(from, local, to, q, k, k + a.k_heads * a.k_dim, gates[0], v, y, a.k_dim, columns);
    } else if (a.skip == nullptr) {
      step<kVectors, false>(from, local, to, q, k, gates, gates[a.v_heads], v, y, a.k_dim, columns);
    } else {
      mamba_step<kVectors>(from, to, q, k, gates[0], gates[a.v_heads], a.skip[head], v, y, a.k_dim, columns);
    }
    over_saves(batch, sequence, [&](int64_t count, int64_t index) {
      if (begin + count != token + 1) return;
      const Slice copy = slot(index);
      for (int64_t row = 0; row < a.k_dim; ++row) {
        std::copy_n(to.at + row * to.stride, columns, copy.at + row * copy.stride);
      }
    });
  }
}

template <typename T>
void delta_rule(const DeltaRuleArgs& a, ThreadPool& pool) {
  const int64_t slices = (a.v_dim + kColumns - 1) / kColumns, per_sequence = a.v_heads * slices;
  const bool small = a.tokens * a.v_heads * a.k_dim * a.v_dim < 2 * kSmallElements;
  over_items(a.batch.extents[0] * per_sequence, small, pool, [&](int64_t item) {
    const int64_t sequence = item / per_sequence, head = item % per_sequence / slices;
    const int64_t column = item % slices * kColumns, columns = std::min(kColumns, a.v_dim - column);
    if (columns == kColumns) return scan<kSlice, T>(a, sequence, head, column, static_cast<int>(kColumns));
    for (int64_t i = 0; i < columns; i += kLanes) {
      scan<1, T>(a, sequence, head, column + i, static_cast<int>(std::min<int64_t>(kLanes, columns - i)));
    }
  });
}

// The rows that a convolution reads: the past of a sequence, then its tokens of the step, times a gate where it has one.
template <typename T, bool kGates>
struct ConvRows {
  const T *x, *before;  // of the first token
  const float* past;    // null: zeros
  int64_t stride, channels, num_past;

  Vec load_at(int64_t row, int64_t channel, int n) const {
    if (row >= num_past) {
      const int64_t at = (row - num_past) * stride + channel;
      const Vec v = load_some(x + at, n);
      return kGates ? mul(load_some(before + at, n), v) : v;
    }
    return past == nullptr ? zero() : load_some(past + row * channels + channel, n);
  }
};

template <typename T, bool kGates>
void conv_as(const ConvArgs& a, ThreadPool& pool) {
  const int64_t blocks = (a.channels + kConvBlock - 1) / kConvBlock, num_past = a.kernel - 1;
  const bool small = a.tokens * a.channels * 8 < kSmallElements;
  over_items(a.batch.extents[0] * blocks, small, pool, [&](int64_t item) {
    const int64_t sequence = item / blocks, first = item % blocks * kConvBlock;
    const int64_t size = std::min(kConvBlock, a.channels - first);
    const int64_t begin = a.batch.cu_seqlens[sequence], tokens = a.batch.cu_seqlens[sequence + 1] - begin;
    float* live = a.past + a.batch.slots[sequence] * a.slot_stride + first;
    const float* past = a.batch.fresh[sequence] != 0 ? nullptr : live;
    const int64_t start = begin * a.stride + first;
    const T* before = kGates ? static_cast<const T*>(a.before) + start : nullptr;
    const ConvRows<T, kGates> rows{static_cast<const T*>(a.x) + start, before, past, a.stride, a.channels, num_past};
    for (int64_t token = 0; token < tokens; ++token) {
      T* y = static_cast<T*>(a.y) + (begin + token) * a.channels + first;
      over_vectors(size, [&](int64_t j, int n) {
        Vec total = mul(load_some(a.weight + first + j, n), rows.load_at(token, j, n));
        for (int64_t tap = 1; tap < a.kernel; ++tap) {
          total = add(total, mul(load_some(a.weight + tap * a.channels + first + j, n), rows.load_at(token + tap, j, n)));
        }
        if (a.bias != nullptr) total = add(total, load_some(a.bias + first + j, n));
        const Vec factor = kGates ? load_some(static_cast<const T*>(a.after) + start + token * a.stride + j, n) : sigmoid(total);
        store_some(y + j, mul(factor, total), n);
      });
    }
    // Rows go towards the front, so that a past may be made from itself in ascending order.
    const auto keep = [&](int64_t count, float* to) {
      for (int64_t row = 0; row < num_past; ++row) {
        over_vectors(size, [&](int64_t j, int n) {
          store_some(to + row * a.channels + j, rows.load_at(count + row, j, n), n);
        });
      }
    };
    over_saves(a.batch, sequence, [&](int64_t count, int64_t slot) { keep(count, a.past + slot * a.slot_stride + first); });
    keep(tokens, live);
  });
}

template <typename T>
void conv(const ConvArgs& a, ThreadPool& pool) {
  (a.before == nullptr ? conv_as<T, false> : conv_as<T, true>)(a, pool);
}

// log(1 + e^x), the sum in fp64.
inline Vec softplus(Vec x) {
  float inputs[kLanes], powers[kLanes];
  store(inputs, x);
  store(powers, QUIRE_ISA::exp(min(broadcast(20.0f), x)));
  for (int lane = 0; lane < kLanes; ++lane) {
    if (inputs[lane] <= 20.0f) inputs[lane] = static_cast<float>(exact_log(1.0 + static_cast<double>(powers[lane])));
  }
  return load(inputs);
}

// Unit q and k of one token, q / sqrt(k_dim).
template <typename T>
void unit_heads(const T* x, float* qk, int64_t k_heads, int64_t k_dim, float eps) {
  const float root = 1.0f / std::sqrt(static_cast<float>(k_dim));
  for (int64_t head = 0; head < 2 * k_heads; ++head) {
    const T* from = x + head * k_dim;
    float* to = qk + head * k_dim;
    const Vec scale = broadcast(1.0f / std::sqrt(sum_of_squares(from, k_dim) + eps));
    const Vec more = broadcast(head < k_heads ? root : 1.0f);
    over_vectors(k_dim, [&](int64_t j, int n) {
      store_some(to + j, mul(mul(load_some(from + j, n), scale), more), n);
    });
  }
}

template <typename T>
void delta_inputs(const DeltaInputsArgs& a, ThreadPool& pool) {
  over_rows(a.tokens, 4 * a.k_heads * a.k_dim + 64 * a.v_heads, pool, [&](int64_t token) {
    const T* x = static_cast<const T*>(a.qkv) + token * a.stride;
    unit_heads(x, a.qk + token * 2 * a.k_heads * a.k_dim, a.k_heads, a.k_dim, a.eps);
    const T* of_decay = static_cast<const T*>(a.a) + token * a.a_stride;
    const T* of_beta = static_cast<const T*>(a.b) + token * a.b_stride;
    float* gates = a.gates + token * 2 * a.v_heads;
    over_vectors(a.v_heads, [&](int64_t j, int n) {
      const Vec rate = softplus(add(load_some(of_decay + j, n), load_some(a.dt_bias + j, n)));
      store_some(gates + j, QUIRE_ISA::exp(mul(rate, load_some(a.rate + j, n))), n);
      store_some(gates + a.v_heads + j, sigmoid(load_some(of_beta + j, n)), n);
    });
  });
}

template <typename T>
void channel_inputs(const ChannelInputsArgs& a, ThreadPool& pool) {
  const int64_t width = a.heads * a.k_dim;
  over_rows(a.tokens, 64 * width, pool, [&](int64_t token) {
    float* qkd = a.qkd + token * 3 * width;
    unit_heads(static_cast<const T*>(a.qkv) + token * a.stride, qkd, a.heads, a.k_dim, a.eps);
    const T* f = static_cast<const T*>(a.f) + token * a.f_stride;
    for (int64_t head = 0; head < a.heads; ++head) {
      const int64_t start = head * a.k_dim;
      const Vec rate = broadcast(a.rate[head]), opposite = broadcast(-a.rate[head]), floor = broadcast(a.floor);
      over_vectors(a.k_dim, [&](int64_t j, int n) {
        const Vec inner = add(load_some(f + start + j, n), load_some(a.dt_bias + start + j, n));
        const Vec log = a.bounded ? mul(floor, sigmoid(mul(opposite, inner))) : mul(rate, softplus(inner));
        store_some(qkd + 2 * width + start + j, QUIRE_ISA::exp(log), n);
      });
    }
    const T* b = static_cast<const T*>(a.b) + token * a.b_stride;
    over_vectors(a.heads, [&](int64_t j, int n) {
      store_some(a.beta + token * a.heads + j, sigmoid(load_some(b + j, n)), n);
    });
  });
}

template <typename T>
void mamba_inputs(const MambaInputsArgs& a, ThreadPool& pool) {
  const int64_t size = a.groups * a.k_dim;
  over_rows(a.tokens, 2 * size + 64 * a.heads, pool, [&](int64_t token) {
    const T* b = static_cast<const T*>(a.xbc) + token * a.stride + a.width;
    float* q = a.qk + token * 2 * size;
    over_vectors(size, [&](int64_t j, int n) {
      store_some(q + j, load_some(b + size + j, n), n);
      store_some(q + size + j, load_some(b + j, n), n);
    });
    const T* dt = static_cast<const T*>(a.dt) + token * a.dt_stride;
    float* gates = a.gates + token * 2 * a.heads;
    over_vectors(a.heads, [&](int64_t j, int n) {
      const Vec scaled = mul(load_some(dt + j, n), broadcast(a.scale));
      const Vec free = softplus(add(scaled, load_some(a.dt_bias + j, n)));
      const Vec step_size = min(broadcast(a.most), max(broadcast(a.least), free));
      store_some(gates + j, QUIRE_ISA::exp(mul(step_size, load_some(a.rate + j, n))), n);
      store_some(gates + a.heads + j, step_size, n);
    });
  });
}

template <typename T>
void gated_norm(const GatedNormArgs& a, ThreadPool& pool) {
  over_rows(a.tokens, a.heads * a.size * 8, pool, [&](int64_t token) {
    for (int64_t head = 0; head < a.heads; ++head) {
      const T* x = static_cast<const T*>(a.x) + token * a.x_stride + head * a.size;
      const T* z = static_cast<const T*>(a.z) + token * a.z_stride + head * a.size;
      T* y = static_cast<T*>(a.y) + (token * a.heads + head) * a.size;
      const Vec scale = broadcast(1.0f / std::sqrt(sum_of_squares(x, a.size) / static_cast<float>(a.size) + a.eps));
      over_vectors(a.size, [&](int64_t j, int n) {
        const Vec gate = load_some(z + j, n);
        const Vec normed = mul(mul(load_some(x + j, n), scale), load_some(a.weight + j, n));
        store_some(y + j, mul(normed, a.plain ? sigmoid(gate) : mul(sigmoid(gate), gate)), n);
      });
    }
  });
}

template <typename T>
void group_norm(const GroupNormArgs& a, ThreadPool& pool) {
  const Vec factor = broadcast(a.scale);
  over_rows(a.tokens, a.groups * a.size * 8, pool, [&](int64_t token) {
    static thread_local Scratch scratch;
    float* row = scratch.get<float>(static_cast<size_t>(a.size));
    for (int64_t group = 0; group < a.groups; ++group) {
      const T* x = static_cast<const T*>(a.x) + token * a.x_stride + group * a.size;
      const T* z = static_cast<const T*>(a.z) + token * a.z_stride + group * a.size;
      T* y = static_cast<T*>(a.y) + (token * a.groups + group) * a.size;
      const auto gate = [&](int64_t j, int n) {
        const Vec v = mul(load_some(z + j, n), factor);
        return mul(sigmoid(v), v);
      };
      over_vectors(a.size, [&](int64_t j, int n) {
        const Vec v = load_some(x + j, n);
        store_some(row + j, a.gate_first || a.weight == nullptr ? mul(v, gate(j, n)) : v, n);
      });
      if (a.weight == nullptr) {
        over_vectors(a.size, [&](int64_t j, int n) { store_some(y + j, load_some(row + j, n), n); });
        continue;
      }
      const float* weight = a.weight + group * a.size;
      const Vec scale = broadcast(1.0f / std::sqrt(sum_of_squares(row, a.size) / static_cast<float>(a.size) + a.eps));
      over_vectors(a.size, [&](int64_t j, int n) {
        const Vec normed = mul(mul(load_some(row + j, n), scale), load_some(weight + j, n));
        store_some(y + j, a.gate_first ? normed : mul(normed, gate(j, n)), n);
      });
    }
  });
}

}  // namespace

extern const RecurrentKernels kRecurrent;
const RecurrentKernels kRecurrent = {by_type<ConvArgs, conv<float>, conv<uint16_t>>,
                                     by_type<DeltaInputsArgs, delta_inputs<float>, delta_inputs<uint16_t>>,
                                     by_type<ChannelInputsArgs, channel_inputs<float>, channel_inputs<uint16_t>>,
                                     by_type<MambaInputsArgs, mamba_inputs<float>, mamba_inputs<uint16_t>>,
                                     by_type<DeltaRuleArgs, delta_rule<float>, delta_rule<uint16_t>>,
                                     by_type<GatedNormArgs, gated_norm<float>, gated_norm<uint16_t>>,
                                     by_type<GroupNormArgs, group_norm<float>, group_norm<uint16_t>>};

}  // namespace quire::cpu::QUIRE_ISA
