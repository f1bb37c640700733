// Memory of one thread that a kernel writes before it reads: kept from call to call, grown when a call needs more.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <new>

namespace quire::cpu {

class Scratch {
 public:
  // Room for `count` elements, aligned to pages; its contents are lost where it has to grow.
  template <typename T>
  T* get(std::size_t count) {
    const std::size_t needed = count * sizeof(T);
    if (needed > bytes_) {
      bytes_ = (needed + kPage - 1) / kPage * kPage;
      memory_.reset(std::aligned_alloc(kPage, bytes_));
      if (memory_ == nullptr) {
        bytes_ = 0;
        throw std::bad_alloc();
      }
    }
    return static_cast<T*>(memory_.get());
  }

 private:
  static constexpr std::size_t kPage = 4096;
  struct Free {
    void operator()(void* p) const { std::free(p); }
  };
  std::unique_ptr<void, Free> memory_;
  std::size_t bytes_ = 0;
};

}  // namespace quire::cpu
