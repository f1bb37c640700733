// What the machine delivers right now: the two bounds that every kernel's rate is printed beside.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cpu/thread_pool.h"

namespace quire::cpu {

// Seconds that reading `num_bytes` of fresh memory once takes, one stream per thread: the median of `passes`.
// The memory is mapped, written and unmapped inside.
double probe_read(ThreadPool& pool, int64_t num_bytes, int passes);

// Instructions whose peak `probe_dot` can measure on this CPU: "fma_avx2", "vpdpbusd_avx2", "fma_avx512",
// "vdpbf16ps", "vpdpbusd", "tdpbf16ps", "tdpbssd".
std::vector<std::string> dot_probes();

// Operations per second (a multiply and an add are two) of a loop of that instruction on registers alone, all threads:
// the best of `passes` of about 30 ms. Throws std::invalid_argument for a name that is not in dot_probes().
double probe_dot(ThreadPool& pool, const std::string& instruction, int passes);

}  // namespace quire::cpu
