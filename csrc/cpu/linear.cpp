// Packing: a transpose of 32 rows at a time, in units of 32 bits (a float, or two bf16 of one row).
//
// It runs once at load, straight from the mapped checkpoint: a weight is read once and written once, past the caches
// (a line that is only written does not have to be fetched first). The first write to a page of the target maps it, on
// the thread that packs it.
#include "cpu/linear.h"

#include <algorithm>

#if defined(QUIRE_HAVE_X86_LEVELS)
#include <immintrin.h>
#endif

namespace quire::cpu {

namespace {

#if defined(QUIRE_HAVE_X86_LEVELS)

#define QUIRE_AVX512 __attribute__((target("avx512f")))

// target[j * 32 + i] = source[i * stride + j], i and j below 16; target on a multiple of 64 bytes.
QUIRE_AVX512 void transpose16(const uint32_t* source, int64_t stride, uint32_t* target) {
  __m512i r[16], t[16];
  for (int i = 0; i < 16; ++i) r[i] = _mm512_loadu_si512(source + i * stride);
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {  // r[i + c]: column c of each 128 bits, of rows i to i + 3
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int c = 0; c < 4; ++c) {  // then a transpose of 4 x 4 pieces of 128 bits
    const __m512i a = _mm512_shuffle_i32x4(r[c], r[4 + c], 0x88), b = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0x88);
    const __m512i d = _mm512_shuffle_i32x4(r[c], r[4 + c], 0xdd), e = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0xdd);
    const __m512i columns[4] = {_mm512_shuffle_i32x4(a, b, 0x88), _mm512_shuffle_i32x4(d, e, 0x88),
                                _mm512_shuffle_i32x4(a, b, 0xdd), _mm512_shuffle_i32x4(d, e, 0xdd)};
    for (int q = 0; q < 4; ++q) {
      _mm512_stream_si512(reinterpret_cast<__m512i*>(target + (4 * q + c) * kPanel), columns[q]);
    }
  }
}

QUIRE_AVX512 void transpose_panel(const uint32_t* source, int64_t units, uint32_t* panel) {
  for (int64_t u = 0; u < units; u += 16) {
    for (int64_t half = 0; half < kPanel; half += 16) {
      const uint32_t* rows = source + half * units + u;
      for (int64_t i = 0; i < 16; ++i) _mm_prefetch(reinterpret_cast<const char*>(rows + i * units + 128), _MM_HINT_T0);
      transpose16(rows, units, panel + u * kPanel + half);
    }
  }
  _mm_sfence();
}

bool transposes_panels(const uint32_t* panel, int64_t units) {
  return detect().avx512 && units % 16 == 0 && reinterpret_cast<uintptr_t>(panel) % 64 == 0;
}

#else

void transpose_panel(const uint32_t*, int64_t, uint32_t*) {}
bool transposes_panels(const uint32_t*, int64_t) { return false; }

#endif

template <typename Element, int kStep>
void pack_rows(const Element* w, int64_t count, int64_t k, int64_t first, Element* packed, ThreadPool& pool) {
  const int64_t steps = (k + kStep - 1) / kStep;
  const int64_t first_panel = first / kPanel;
  const int64_t panels = (first + count - 1) / kPanel - first_panel + 1;
  auto body = [&](int thread, int num_threads) {
    const Range mine = share(panels, thread, num_threads);
    for (int64_t p = first_panel + mine.begin; p < first_panel + mine.end; ++p) {
      Element* panel = packed + p * steps * kStep * kPanel;
      const int64_t begin = std::max(first, p * kPanel), end = std::min(first + count, (p + 1) * kPanel);
      auto* units = reinterpret_cast<uint32_t*>(panel);
      if (end - begin == kPanel && k % kStep == 0 && transposes_panels(units, steps)) {
        transpose_panel(reinterpret_cast<const uint32_t*>(w + (begin - first) * k), steps, units);
        continue;
      }
      // 64 k at a time: each source row is then read one or two cache lines at a time.
      for (int64_t k0 = 0; k0 < k; k0 += 64) {
        const int64_t k1 = std::min(k, k0 + 64);
        for (int64_t row = begin; row < end; ++row) {
          const Element* source = w + (row - first) * k;
          for (int64_t i = k0; i < k1; ++i) {
            panel[(i / kStep * kPanel + row % kPanel) * kStep + i % kStep] = source[i];
          }
        }
      }
    }
  };
  pool.run(body);
}

}  // namespace

int64_t packed_elements(Type type, int64_t n, int64_t k) {
  const int64_t step = type == Type::bf16 ? 2 : 1;
  return (n + kPanel - 1) / kPanel * kPanel * ((k + step - 1) / step * step);
}

void pack(Type type, const void* w, int64_t count, int64_t k, int64_t first, void* packed, ThreadPool& pool) {
  if (type == Type::bf16) {
    pack_rows<uint16_t, 2>(static_cast<const uint16_t*>(w), count, k, first, static_cast<uint16_t*>(packed), pool);
  } else {
    pack_rows<float, 1>(static_cast<const float*>(w), count, k, first, static_cast<float*>(packed), pool);
  }
}

}  // namespace quire::cpu
