// Runs the cases that write_cases.py has written, at the best level that this CPU has: each case is a list of calls of the
// native functions on buffers, and the checks of what they leave there. A case runs with 1, 2 … 7 threads, which must
// give the same bits.
//
//   usage: program CASES.txt CASES.bin BEST_LEVEL
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iostream>
#include <iterator>
#include <memory>
#include <sstream>

#include "bind.h"
#include "cpu/bf16.h"
#include "cpu/cpuid.h"

using namespace quire::cpu;
using nanobind::Value;

namespace {

constexpr int kMostThreads = 7;

struct Buffer {
  int64_t bytes;
  std::unique_ptr<char, decltype(&std::free)> data;
};

// A case, as lines of words.
struct Case {
  std::string title;
  std::vector<std::vector<std::string>> lines;
};

std::vector<Case> read_cases(const char* path) {
  std::ifstream in(path);
  std::vector<Case> cases;
  for (std::string line; std::getline(in, line);) {
    if (line.starts_with("case ")) {
      cases.push_back({line.substr(5), {}});
      continue;
    }
    std::istringstream words(line);
    cases.back().lines.push_back({std::istream_iterator<std::string>(words), {}});
  }
  return cases;
}

float element(const char* p, int64_t i, const std::string& type) {
  if (type == "int8") return static_cast<float>(reinterpret_cast<const int8_t*>(p)[i]);
  if (type == "bfloat16") return bf16_to_float(reinterpret_cast<const uint16_t*>(p)[i]);
  return reinterpret_cast<const float*>(p)[i];
}

class Run {
 public:
  Run(const Case& what, const std::string& expected, std::string level, int threads)
      : case_(what), expected_(expected), level_(std::move(level)), threads_(threads) {}

  // What the case's checked buffers hold; throws where a check fails.
  std::string run(const nanobind::module_& module) {
    std::string results;
    for (const auto& words : case_.lines) {
      const std::string& what = words[0];
      if (what == "buffer") {  // name, bytes, place in the file of values or -1
        const int64_t size = std::stoll(words[2]), from = std::stoll(words[3]), room = (size + 8192) / 64 * 64;
        auto* memory = static_cast<char*>(std::aligned_alloc(64, room));
        std::memset(memory, 0, room);
        if (from >= 0) std::memcpy(memory, expected_.data() + from, size);
        buffers_.emplace(words[1], Buffer{size, {memory, std::free}});
      } else if (what == "pointer") {  // buffer, byte in it, target, byte in that
        const char* target = memory(words[3]) + std::stoll(words[4]);
        std::memcpy(memory(words[1]) + std::stoll(words[2]), &target, sizeof(target));
      } else if (what == "call") {
        size_t at = 2;
        const std::vector<Value> values = arguments(words, at);
        module.functions.at(words[1])(values);
      } else {
        const Buffer& buffer = buffers_.at(words[1]);
        results.append(buffer.data.get(), buffer.bytes);
        check(words);
      }
    }
    return results;
  }

 private:
  char* memory(const std::string& name) { return buffers_.at(name).data.get(); }

  std::vector<Value> arguments(const std::vector<std::string>& words, size_t& at) {
    std::vector<Value> values;
    for (; at < words.size() && words[at] != ")"; ++at) {
      const std::string& word = words[at];
      Value v;
      if (word == "(") {
        v.items = arguments(words, ++at);
      } else if (word == "threads") {
        v.integer = threads_;
      } else if (word == "level") {
        v.text = level_;
      } else if (word == "none") {
        v.none = true;
      } else if (word[0] == '@') {
        const size_t plus = word.find('+');
        v.integer = static_cast<int64_t>(reinterpret_cast<uintptr_t>(memory(word.substr(1, plus - 1)))) +
                    std::stoll(word.substr(plus + 1));
      } else if (word[0] == 's') {
        v.text = word.substr(1);
      } else {
        v.integer = word[0] == 'i' ? std::stoll(word.substr(1)) : 0;
        v.real = std::strtod(word.c_str() + 1, nullptr);
      }
      values.push_back(v);
    }
    return values;
  }

  void check(const std::vector<std::string>& words) {
    const char* found = memory(words[1]);
    if (words[0] == "same") {  // two buffers
      const Buffer &a = buffers_.at(words[1]), &b = buffers_.at(words[2]);
      if (a.bytes != b.bytes) fail(words[1] + " and " + words[2] + " differ in size");
      compare(a.data.get(), b.data.get(), a.bytes, words[1] + " and " + words[2]);
    } else if (words[0] == "bits") {  // buffer, bytes, place of the expected ones, level or all
      if (words[4] != "all" && words[4] != level_) return;
      compare(found, expected_.data() + std::stoll(words[3]), std::stoll(words[2]), words[1]);
    } else {  // close: buffer, count, place of the expected ones, type, absolute and relative tolerance
      const char* wanted = expected_.data() + std::stoll(words[3]);
      const float absolute = std::stof(words[5]), relative = std::stof(words[6]);
      for (int64_t i = 0; i < std::stoll(words[2]); ++i) {
        const float a = element(found, i, words[4]), b = element(wanted, i, words[4]);
        if (std::fabs(a - b) <= absolute + relative * std::fabs(b) || (std::isnan(a) && std::isnan(b))) continue;
        fail(words[1] + "[" + std::to_string(i) + "] is " + std::to_string(a) + ", expected " + std::to_string(b));
      }
    }
  }

  void compare(const char* a, const char* b, int64_t bytes, const std::string& what) {
    for (int64_t i = 0; i < bytes; ++i) {
      if (a[i] != b[i]) fail(what + ": other bits at byte " + std::to_string(i) + " of " + std::to_string(bytes));
    }
  }

  [[noreturn]] void fail(const std::string& why) {
    throw std::runtime_error(case_.title + ", level " + level_ + ", " + std::to_string(threads_) + " threads: " + why);
  }

  const Case& case_;
  const std::string& expected_;
  const std::string level_;
  const int threads_;
  std::map<std::string, Buffer> buffers_;
};

}  // namespace

int main(int argc, char** argv) {
  if (argc < 4) return 2;
  nanobind::module_ module;
  bind_linear(module), bind_quantized(module), bind_norm(module), bind_rows(module), bind_attention(module);
  bind_pointwise(module), bind_sampling(module), bind_moe(module), bind_lora(module), bind_recurrent(module);
  if (std::strcmp(best_isa(detect()), argv[3]) != 0) {
    std::printf("the best level is %s, expected %s\n", best_isa(detect()), argv[3]);
    return 1;
  }
  const std::vector<Case> cases = read_cases(argv[1]);
  std::ifstream file(argv[2], std::ios::binary);
  const std::string values{std::istreambuf_iterator<char>(file), {}};
  const std::string level = best_isa(detect());
  size_t passed = 0;
  for (const Case& each : cases) {
    try {
      const std::string alone = Run(each, values, level, 1).run(module);
      for (int threads = 2; threads <= kMostThreads; ++threads) {
        if (Run(each, values, level, threads).run(module) == alone) continue;
        throw std::runtime_error(each.title + ": other bits with " + std::to_string(threads) + " threads than with 1");
      }
      ++passed;
    } catch (const std::exception& error) {
      std::printf("FAILED %s\n", error.what());
    }
  }
  std::printf("%s: %zu of %zu cases passed with 1 to %d threads\n", level.c_str(), passed, cases.size(), kMostThreads);
  std::fflush(stdout);
  std::_Exit(passed == cases.size() && passed > 0 ? 0 : 1);  // the threads are parked
}
