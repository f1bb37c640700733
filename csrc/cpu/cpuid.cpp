// CPUID leaves 1 and 7, and XGETBV: an instruction set counts only when the operating system saves its registers
// (Intel SDM vol. 1, 13.3 and 14.3). On Arm the operating system says what a process may use.
#include "cpu/cpuid.h"

#if defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>

#include <string>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>

#include <cstring>
#endif

#if defined(__x86_64__)
#include <cpuid.h>

#include <cstdint>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

namespace quire::cpu {

#if defined(__x86_64__)

namespace {

struct Registers {
  uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;
};

Registers leaf(uint32_t number, uint32_t sub = 0) {
  Registers r;
  if (__get_cpuid_count(number, sub, &r.eax, &r.ebx, &r.ecx, &r.edx) == 0) return {};
  return r;
}

uint64_t saved_states() {
  uint32_t low = 0, high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (uint64_t(high) << 32) | low;
}

bool bit(uint32_t value, int index) { return (value >> index) & 1u; }

// Linux gives a process tile registers only on request, for all its threads, since every switch may then save 8 KiB
// more (Documentation/arch/x86/xstate.rst).
bool tiles_granted() {
#if defined(__linux__) && defined(SYS_arch_prctl)
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

}  // namespace

namespace {

Features read_features() {
  Features f;
  const Registers one = leaf(1);
  if (!bit(one.ecx, 27)) return f;  // OSXSAVE: without it XGETBV does not exist
  const uint64_t saved = saved_states();
  const bool ymm = (saved & 0x6) == 0x6;
  const bool zmm = (saved & 0xe6) == 0xe6;
  const Registers seven = leaf(7);
  const Registers seven_one = leaf(7, 1);
  f.avx2 = ymm && bit(seven.ebx, 5) && bit(one.ecx, 12) && bit(one.ecx, 29);
  f.avx_vnni = ymm && bit(seven_one.eax, 4);
  f.avx512 = zmm && bit(seven.ebx, 16) && bit(seven.ebx, 17) && bit(seven.ebx, 30) && bit(seven.ebx, 31);
  f.avx512_vnni = f.avx512 && bit(seven.ecx, 11);
  f.avx512_bf16 = f.avx512 && bit(seven_one.eax, 5);
  const bool tiles = (saved & 0x60000) == 0x60000;
  f.amx_tile = tiles && bit(seven.edx, 24) && tiles_granted();
  f.amx_int8 = f.amx_tile && bit(seven.edx, 25);
  f.amx_bf16 = f.amx_tile && bit(seven.edx, 22);
#if defined(QUIRE_EMULATED_TILES)
  f.amx_tile = f.amx_int8 = f.amx_bf16 = f.amx_emulated = has_avx512(f);
#endif
  return f;
}

}  // namespace

#elif defined(__aarch64__)

namespace {

#if defined(__APPLE__)
bool has(const char* feature) {
  const std::string name = std::string("hw.optional.arm.FEAT_") + feature;
  int value = 0;
  size_t size = sizeof(value);
  return sysctlbyname(name.c_str(), &value, &size, nullptr, 0) == 0 && value != 0;
}
#elif defined(__linux__)
// The bits of the kernel's interface (Documentation/arch/arm64/elf_hwcaps.rst), which older headers do not name.
bool has(const char* feature) {
  const unsigned long first = getauxval(AT_HWCAP), second = getauxval(AT_HWCAP2);
  if (std::strcmp(feature, "DotProd") == 0) return (first >> 20) & 1;
  if (std::strcmp(feature, "I8MM") == 0) return (second >> 13) & 1;
  return std::strcmp(feature, "BF16") == 0 && ((second >> 14) & 1);
}
#else
bool has(const char*) { return false; }
#endif

Features read_features() {
  Features f;
  f.neon = true;  // part of the base architecture
  f.neon_dotprod = has("DotProd");
  f.neon_i8mm = has("I8MM");
  f.neon_bf16 = has("BF16");
  return f;
}

}  // namespace

#else

static Features read_features() { return {}; }

#endif

namespace {

int64_t read_bytes_ahead() {
#if defined(__x86_64__)
  constexpr uint32_t kAuthenticAMD = 0x68747541, kHygonGenuine = 0x6f677948;  // EBX of leaf 0
  constexpr uint32_t kZen5 = 26;
  const uint32_t vendor = leaf(0).ebx, version = leaf(1).eax;
  const uint32_t family = (version >> 8 & 15) + (version >> 20 & 255);
  if (vendor == kAuthenticAMD || vendor == kHygonGenuine) return family < kZen5 ? 512 : 4 << 10;
#endif
  return 8 << 10;
}

}  // namespace

int64_t bytes_ahead() {
  static const int64_t bytes = read_bytes_ahead();
  return bytes;
}

const Features& detect() {
  static const Features features = read_features();
  return features;
}

const char* best_isa(const Features& f) {
#if defined(QUIRE_HAVE_AMX)
  if (has_amx(f)) return "amx";
#endif
  if (has_avx512(f)) return "avx512";
  if (has_avx512_vnni(f)) return "avx512_vnni";
  if (has_avx512_bw(f)) return "avx512_bw";
  if (f.avx2) return "avx2";
#if defined(QUIRE_HAVE_ARM_LEVELS)
  if (has_neon_i8mm(f)) return "neon_i8mm";
  if (f.neon_dotprod) return "neon";
#endif
  return "scalar";
}

}  // namespace quire::cpu
