// Bounds of the machine: one-stream reads of memory, and loops of one dot instruction that touch registers alone.
//
// The loops are assembly, so that no compiler option changes what is measured. Twelve
// accumulators hide the latency of the vector instructions (4-10 cycles at 1-2 per cycle); four tiles of the eight hide
// that of AMX, whose instruction takes 16 cycles of its unit. Tiles hold random numbers: on zeros a core uses less
// power and runs a quarter faster than on real data.
#include "cpu/probe.h"

#include <algorithm>
#include <chrono>
#include <stdexcept>

#include "cpu/cpuid.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace quire::cpu {

namespace {

double seconds_of(ThreadPool& pool, const auto& body) {
  const auto begin = std::chrono::steady_clock::now();
  pool.run(body);
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// Memory in huge pages where the operating system has them, as for weights.
class Mapping {
 public:
  explicit Mapping(int64_t num_bytes) : num_bytes_(num_bytes) {
#if defined(__linux__)
    data_ = mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data_ == MAP_FAILED) throw std::bad_alloc();
    madvise(data_, num_bytes, MADV_HUGEPAGE);
#else
    data_ = ::operator new(num_bytes);
#endif
  }
  ~Mapping() {
#if defined(__linux__)
    munmap(data_, num_bytes_);
#else
    ::operator delete(data_);
#endif
  }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  int64_t* words() const { return static_cast<int64_t*>(data_); }

 private:
  void* data_;
  int64_t num_bytes_;
};

// One load of every cache line moves all of it; eight lines per turn make the loop's own cost small. Lines are fetched
// ahead as the kernels do (row_loops.h): without that the loop reads a third less than they.
int64_t read_lines(const int64_t* words, int64_t begin, int64_t end) {
  const int64_t ahead = bytes_ahead() / 8;
  int64_t sum[8] = {};
  for (int64_t i = begin; i + 64 <= end; i += 64) {
    for (int j = 0; j < 8; ++j) {
      __builtin_prefetch(words + i + ahead + 8 * j, 0, 2);
      sum[j] += words[i + 8 * j];
    }
  }
  return sum[0] + sum[1] + sum[2] + sum[3] + sum[4] + sum[5] + sum[6] + sum[7];
}

}  // namespace

double probe_read(ThreadPool& pool, int64_t num_bytes, int passes) {
  const Mapping memory(num_bytes);
  const int64_t num_words = num_bytes / 8;
  pool.run([&](int t, int n) {
    const Range part = share(num_words, t, n);
    std::fill(memory.words() + part.begin, memory.words() + part.end, 1);
  });
  std::vector<int64_t> sums(64 * pool.num_threads());  // a thread's sum on a cache line of its own
  std::vector<double> taken;
  for (int pass = 0; pass < passes; ++pass) {
    taken.push_back(seconds_of(pool, [&](int t, int n) {
      const Range part = share(num_words, t, n);
      sums[64 * t] = read_lines(memory.words(), part.begin, part.end);
    }));
  }
  int64_t total = 0;
  for (const int64_t sum : sums) total += sum;
  if (total == 0) throw std::logic_error("the probe read nothing");
  std::sort(taken.begin(), taken.end());
  return taken[taken.size() / 2];
}

#if defined(__x86_64__)

namespace {

struct DotLoop {
  const char* name;
  bool (*here)(const Features&);
  void (*run)(int64_t turns);
  double operations;  // of one turn
};

#define QUIRE_TWELVE(op, r, x, y)                                                                                   \
  op " " x "," y ",%%" r "0\n" op " " x "," y ",%%" r "1\n" op " " x "," y ",%%" r "2\n" op " " x "," y ",%%" r     \
  "3\n" op " " x "," y ",%%" r "4\n" op " " x "," y ",%%" r "5\n" op " " x "," y ",%%" r "6\n" op " " x "," y       \
  ",%%" r "7\n" op " " x "," y ",%%" r "8\n" op " " x "," y ",%%" r "9\n" op " " x "," y ",%%" r "10\n" op " " x    \
  "," y ",%%" r "11\n"

// A function that runs `turns` turns of twelve independent `op` on registers `r` (ymm or zmm), all of them zero.
#define QUIRE_VECTOR_LOOP(function, op, r)                                                                          \
  void function(int64_t turns) {                                                                                    \
    __asm__ volatile("vzeroall\n1:\n" QUIRE_TWELVE(op, r, "%%" r "14", "%%" r "15") "dec %0\njnz 1b\nvzeroupper\n"   \
                     : "+r"(turns)                                                                                  \
                     :                                                                                              \
                     : "cc", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9",        \
                       "xmm10", "xmm11", "xmm12", "xmm13", "xmm14", "xmm15");                                       \
  }

QUIRE_VECTOR_LOOP(fma_avx2, "vfmadd231ps", "ymm")
QUIRE_VECTOR_LOOP(vpdpbusd_avx2, "%{vex%} vpdpbusd", "ymm")
QUIRE_VECTOR_LOOP(fma_avx512, "vfmadd231ps", "zmm")
QUIRE_VECTOR_LOOP(vdpbf16ps, "vdpbf16ps", "zmm")
QUIRE_VECTOR_LOOP(vpdpbusd, "vpdpbusd", "zmm")

// Eight tiles of 16 rows of 64 bytes (Intel SDM vol. 1, ch. 18).
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes_per_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// Four tiles of bf16 numbers of either sign within 2^-7 ... 2, whose bytes do for int8.
struct alignas(64) TileNumbers {
  uint16_t words[4 * 512];

  TileNumbers() {
    uint32_t state = 1;
    for (uint16_t& word : words) {
      state = state * 1664525u + 1013904223u;  // Numerical Recipes, 7.1
      const uint32_t bits = state >> 16;
      word = static_cast<uint16_t>((bits & 0x8000u) | (0x3c00u + (bits & 0x3ffu)));
    }
  }
};

// Two tiles by two tiles into four accumulators, as a kernel does.
#define QUIRE_TILE_LOOP(function, op)                                                                               \
  void function(int64_t turns) {                                                                                    \
    const TileConfig config;                                                                                        \
    static const TileNumbers numbers;                                                                               \
    __asm__ volatile(                                                                                               \
        "ldtilecfg %1\ntilezero %%tmm0\ntilezero %%tmm1\ntilezero %%tmm2\ntilezero %%tmm3\n"                        \
        "tileloadd (%2,%3),%%tmm4\ntileloadd 1024(%2,%3),%%tmm5\ntileloadd 2048(%2,%3),%%tmm6\n"                    \
        "tileloadd 3072(%2,%3),%%tmm7\n1:\n" op " %%tmm6,%%tmm4,%%tmm0\n" op                                        \
        " %%tmm7,%%tmm4,%%tmm1\n" op " %%tmm6,%%tmm5,%%tmm2\n" op " %%tmm7,%%tmm5,%%tmm3\ndec %0\njnz 1b\n"         \
        "tilerelease\n"                                                                                             \
        : "+r"(turns)                                                                                               \
        : "m"(config), "r"(numbers.words), "r"(int64_t{64})                                                         \
        : "cc", "memory");                                                                                          \
  }

QUIRE_TILE_LOOP(tdpbf16ps, "tdpbf16ps")
QUIRE_TILE_LOOP(tdpbssd, "tdpbssd")

const DotLoop kLoops[] = {
    {"fma_avx2", [](const Features& f) { return f.avx2; }, fma_avx2, 12 * 8 * 2},
    {"vpdpbusd_avx2", [](const Features& f) { return f.avx_vnni; }, vpdpbusd_avx2, 12 * 8 * 4 * 2},
    {"fma_avx512", [](const Features& f) { return f.avx512; }, fma_avx512, 12 * 16 * 2},
    {"vdpbf16ps", [](const Features& f) { return f.avx512_bf16; }, vdpbf16ps, 12 * 16 * 2 * 2},
    {"vpdpbusd", [](const Features& f) { return f.avx512_vnni; }, vpdpbusd, 12 * 16 * 4 * 2},
    {"tdpbf16ps", [](const Features& f) { return f.amx_bf16 && !f.amx_emulated; }, tdpbf16ps, 4 * 16 * 16 * 32 * 2},
    {"tdpbssd", [](const Features& f) { return f.amx_int8 && !f.amx_emulated; }, tdpbssd, 4 * 16 * 16 * 64 * 2},
};

}  // namespace

std::vector<std::string> dot_probes() {
  std::vector<std::string> names;
  for (const DotLoop& loop : kLoops) {
    if (loop.here(detect())) names.emplace_back(loop.name);
  }
  return names;
}

double probe_dot(ThreadPool& pool, const std::string& instruction, int passes) {
  for (const DotLoop& loop : kLoops) {
    if (instruction != loop.name || !loop.here(detect())) continue;
    const auto time = [&](int64_t turns) { return seconds_of(pool, [&](int, int) { loop.run(turns); }); };
    int64_t turns = 20000;
    time(turns);  // wakes the pool and the vector units
    turns = std::max<int64_t>(turns, static_cast<int64_t>(turns * 0.03 / time(turns)));
    double best = time(turns);
    for (int pass = 1; pass < passes; ++pass) best = std::min(best, time(turns));
    return loop.operations * static_cast<double>(turns) * pool.num_threads() / best;
  }
  throw std::invalid_argument("this CPU or build has no probe of " + instruction);
}

#else

std::vector<std::string> dot_probes() { return {}; }

double probe_dot(ThreadPool&, const std::string& instruction, int) {
  throw std::invalid_argument("this CPU or build has no probe of " + instruction);
}

#endif

}  // namespace quire::cpu
