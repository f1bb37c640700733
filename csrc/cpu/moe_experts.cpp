// The products of the experts: tokens sorted by expert, then for each expert that was chosen a gather of its rows, the
// level's linears, and at the end the weighted sum of each token.
//
// Bytes: the weights of the experts that are chosen, once each; rows stay in cache. Nothing is padded. Bound: memory
// bandwidth for few rows per expert, the dot units for many.
//
// Over several ranks all sort all pairs, by slot, so the results of a rank are consecutive, and every rank knows where
// each result lies. Each multiplies its own pairs, and one gather_parts completes the results: tokens * top_k * hidden
// elements in all ranks together. The weighted sum is then that of one process, in the order of a token's choices.
#include <algorithm>
#include <cstring>
#include <vector>

#include "cpu/bf16.h"
#include "cpu/moe.h"

namespace quire::cpu {

namespace {

constexpr int64_t kLine = 64;
constexpr int64_t kSmallBytes = 1 << 16;  // a copy or sum not worth another thread

float to_float(float x) { return x; }
float to_float(uint16_t x) { return bf16_to_float(x); }
void from_float(float x, float* y) { *y = x; }
void from_float(float x, uint16_t* y) { *y = float_to_bf16(x); }

int64_t element_bytes(Type type) { return type == Type::f32 ? 4 : 2; }
int64_t whole_lines(int64_t bytes) { return (bytes + kLine - 1) / kLine * kLine; }

// Where the parts of a call's scratch memory lie. `rows`: the most that one expert can have, which is every token.
struct Layout {
  explicit Layout(const ExpertsArgs& a) {
    const int64_t pairs = a.tokens * a.top_k, size = element_bytes(a.type), rows = a.tokens;
    starts = take((a.slots + 1) * 8);
    if (a.places.channel != nullptr) slot_of = take(pairs * 8), seen = take(a.places.experts * 8);
    order = take(pairs * 8);
    places = take(pairs * 8);
    if (a.up_format.bits != 0) {
      const int64_t blocks = a.up_format.rows().blocks(a.hidden), parts = a.up_format.rows().parts(a.hidden);
      all_q = take(rows * a.up_stride), all_scale = take(rows * blocks * 4), all_sums = take(rows * parts * 4);
      in_q = take(rows * a.up_stride), in_scale = take(rows * blocks * 4), in_sums = take(rows * parts * 4);
    } else {
      in = take(rows * a.hidden * size);
    }
    gate_up = take(rows * 2 * a.inter * size);
    if (a.down_format.bits != 0) {
      const int64_t blocks = a.down_format.rows().blocks(a.inter), parts = a.down_format.rows().parts(a.inter);
      act_q = take(rows * a.down_stride), act_scale = take(rows * blocks * 4), act_sums = take(rows * parts * 4);
    } else {
      act = take(rows * a.inter * size);
    }
    out = take(pairs * a.hidden * size);
  }

  int64_t take(int64_t bytes) {
    const int64_t start = total;
    total += whole_lines(bytes);
    return start;
  }

  int64_t slot_of = 0, seen = 0, starts = 0, order = 0, places = 0, all_q = 0, all_scale = 0, all_sums = 0, in_q = 0, in_scale = 0, in_sums = 0;
  int64_t in = 0, gate_up = 0, act_q = 0, act_scale = 0, act_sums = 0, act = 0, out = 0, total = 0;
};

template <typename F>
void over_rows(int64_t rows, int64_t row_bytes, ThreadPool& pool, const F& row) {
  auto body = [&](int thread, int num_threads) {
    const Range mine = share(rows, thread, num_threads);
    for (int64_t i = mine.begin; i < mine.end; ++i) row(i);
  };
  if (rows * row_bytes < kSmallBytes) {
    body(0, 1);
  } else {
    pool.run(body);
  }
}

class Experts {
 public:
  Experts(const ExpertsArgs& args, ThreadPool& pool) : a_(args), pool_(pool), at_(args) {}

  void run() {
    sort_pairs();
    if (a_.up_format.bits != 0) {
      a_.quantized->quantize({a_.x, rows_at(at_.all_q, at_.all_scale, at_.all_sums, a_.up_stride), a_.tokens, a_.hidden,
                              a_.x_stride, a_.up_format.rows(a_.up_rotation), a_.type},
                             pool_);
    }
    const int64_t* starts = at<int64_t>(at_.starts);
    Channel* channel = a_.places.channel;
    const int64_t each = channel == nullptr ? a_.slots : a_.slots / channel->size();  // slots of a rank
    const int64_t first = channel == nullptr ? 0 : each * channel->index();
    for (int64_t e = 0; e < each; ++e) {
      const int64_t start = starts[first + e], count = starts[first + e + 1] - start;
      if (count == 0) continue;
      gather(start, count);
      multiply(a_.gate_up[e], a_.up_format, at_.in, {at_.in_q, at_.in_scale, at_.in_sums}, a_.up_stride, count,
               parts_of(a_.gate) * a_.inter, a_.hidden, at<char>(at_.gate_up));
      activate(count);
      multiply(a_.down[e], a_.down_format, at_.act, {at_.act_q, at_.act_scale, at_.act_sums}, a_.down_stride, count,
               a_.hidden, a_.inter, at<char>(at_.out) + start * a_.hidden * element_bytes(a_.type));
    }
    if (channel != nullptr) {
      std::vector<int64_t> begins(channel->size() + 1);
      for (int r = 0; r <= channel->size(); ++r) begins[r] = starts[r * each] * a_.hidden * element_bytes(a_.type);
      gather_parts(*channel, at<char>(at_.out), begins.data(), pool_);
    }
    if (a_.type == Type::f32) {
      combine<float>();
    } else {
      combine<uint16_t>();
    }
  }

 private:
  struct Int8At {
    int64_t q, scale, sums;
  };

  template <typename T>
  T* at(int64_t offset) const {
    return reinterpret_cast<T*>(a_.scratch + offset);
  }

  QuantizedRows rows_at(int64_t q, int64_t scale, int64_t sums, int64_t stride) const {
    return {at<int8_t>(q), at<float>(scale), at<int32_t>(sums), stride};
  }

  // The slot of each pair. The c-th row of an expert goes to its slot c modulo their number.
  const int64_t* place_pairs(int64_t pairs) {
    const ExpertPlaces& places = a_.places;
    if (places.channel == nullptr) return a_.ids;
    int64_t *slot_of = at<int64_t>(at_.slot_of), *seen = at<int64_t>(at_.seen);
    std::fill_n(seen, places.experts, 0);
    for (int64_t p = 0; p < pairs; ++p) {
      const int64_t* row = places.table + a_.ids[p] * places.width;
      slot_of[p] = row[1 + seen[a_.ids[p]]++ % row[0]];
    }
    for (int64_t e = 0; e < places.experts; ++e) places.loads[e] += seen[e];
    return slot_of;
  }

  // Counting sort: order[i] is the i-th (token, choice) pair, slot by slot; places is its inverse.
  void sort_pairs() {
    int64_t *starts = at<int64_t>(at_.starts), *order = at<int64_t>(at_.order), *places = at<int64_t>(at_.places);
    const int64_t pairs = a_.tokens * a_.top_k;
    const int64_t* slot_of = place_pairs(pairs);
    std::fill_n(starts, a_.slots + 1, 0);
    for (int64_t p = 0; p < pairs; ++p) ++starts[slot_of[p] + 1];
    for (int64_t e = 0; e < a_.slots; ++e) starts[e + 1] += starts[e];
    for (int64_t p = 0; p < pairs; ++p) {
      const int64_t place = starts[slot_of[p]]++;
      order[place] = p;
      places[p] = place;
    }
    std::copy_backward(starts, starts + a_.slots, starts + a_.slots + 1);  // each start has become the next one
    starts[0] = 0;
  }

  void gather(int64_t start, int64_t count) {
    const int64_t* order = at<int64_t>(at_.order) + start;
    if (a_.up_format.bits == 0) {
      const int64_t bytes = a_.hidden * element_bytes(a_.type);
      over_rows(count, bytes, pool_, [&](int64_t i) {
        const char* row = static_cast<const char*>(a_.x) + order[i] / a_.top_k * a_.x_stride * element_bytes(a_.type);
        std::memcpy(at<char>(at_.in) + i * bytes, row, bytes);
      });
      return;
    }
    const int64_t blocks = a_.up_format.rows().blocks(a_.hidden), parts = a_.up_format.rows().parts(a_.hidden);
    over_rows(count, a_.up_stride, pool_, [&](int64_t i) {
      const int64_t token = order[i] / a_.top_k;
      std::memcpy(at<char>(at_.in_q) + i * a_.up_stride, at<char>(at_.all_q) + token * a_.up_stride, a_.up_stride);
      std::memcpy(at<float>(at_.in_scale) + i * blocks, at<float>(at_.all_scale) + token * blocks, blocks * 4);
      std::memcpy(at<int32_t>(at_.in_sums) + i * parts, at<int32_t>(at_.all_sums) + token * parts, parts * 4);
    });
  }

  void multiply(const ExpertMatrix& w, const QuantizedFormat& format, int64_t plain, Int8At int8, int64_t stride,
                int64_t rows, int64_t n, int64_t k, char* y) {
    if (format.bits == 0) {
      const LinearArgs args{at<char>(plain), w.packed, w.bias, y, rows, n, k, k, n, a_.type};
      (a_.type == Type::bf16 ? a_.linear->bf16 : a_.linear->f32)(args, pool_);
      return;
    }
    a_.quantized->linear({rows_at(int8.q, int8.scale, int8.sums, stride), static_cast<const uint8_t*>(w.packed), w.scale,
                          w.offset, w.bias, y, rows, n, k, n, format, a_.type},
                         pool_);
  }

  void activate(int64_t rows) {
    GatedArgs args{at<char>(at_.gate_up), nullptr, rows, a_.inter, parts_of(a_.gate) * a_.inter, a_.gate, a_.type, {}, {}};
    if (a_.down_format.bits == 0) {
      args.y = at<char>(at_.act);
    } else {
      args.rows = rows_at(at_.act_q, at_.act_scale, at_.act_sums, a_.down_stride);
      args.format = a_.down_format.rows(a_.down_rotation);
    }
    a_.gated->gated(args, pool_);
  }

  // y[t] = sum_j weights[t][j] * out[place of (t, j)], j ascending, in fp32: a product and a sum each, rounded once to
  // y.
  template <typename T>
  void combine() {
    constexpr int64_t kChunk = 256;
    const int64_t* places = at<int64_t>(at_.places);
    const T* out = at<T>(at_.out);
    over_rows(a_.tokens, a_.hidden * a_.top_k * int64_t{sizeof(T)}, pool_, [&](int64_t t) {
      T* y = static_cast<T*>(a_.y) + t * a_.hidden;
      float sums[kChunk];
      for (int64_t begin = 0; begin < a_.hidden; begin += kChunk) {
        const int64_t n = std::min(kChunk, a_.hidden - begin);
        for (int64_t j = 0; j < a_.top_k; ++j) {
          const T* part = out + places[t * a_.top_k + j] * a_.hidden + begin;
          const float weight = a_.weights[t * a_.top_k + j];
          for (int64_t i = 0; i < n; ++i) {
            const float product = to_float(part[i]) * weight;
            sums[i] = j == 0 ? product : sums[i] + product;
          }
        }
        for (int64_t i = 0; i < n; ++i) from_float(sums[i], y + begin + i);
      }
    });
  }

  const ExpertsArgs& a_;
  ThreadPool& pool_;
  const Layout at_;
};

}  // namespace

int64_t experts_scratch_bytes(const ExpertsArgs& args) { return Layout(args).total; }

void experts(const ExpertsArgs& args, ThreadPool& pool) {
  if (args.tokens > 0) Experts(args, pool).run();
}

}  // namespace quire::cpu
