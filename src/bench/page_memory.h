// Ordinary memory as programs have it: page-aligned, no advice about page sizes, grown when needed. All systems get the
// same.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <new>

namespace maniple::bench {

class PageMemory {
 public:
  std::byte* at_least(std::size_t bytes) {
    if (bytes > size_) {
      memory_.reset();
      const std::size_t rounded = (bytes + kPage - 1) / kPage * kPage;
      memory_.reset(static_cast<std::byte*>(std::aligned_alloc(kPage, rounded)));
      if (memory_ == nullptr) throw std::bad_alloc();
      size_ = rounded;
    }
    return memory_.get();
  }

 private:
  static constexpr std::size_t kPage = 4096;
  struct Free {
    void operator()(std::byte* memory) const noexcept { std::free(memory); }
  };
  std::unique_ptr<std::byte, Free> memory_;
  std::size_t size_ = 0;
};

}  // namespace maniple::bench
