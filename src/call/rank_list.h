// One value for each rank, without an allocation for groups of usual size.
#pragma once

#include <array>
#include <memory>
#include <span>

namespace maniple {

template <class T>
class RankList {
 public:
  explicit RankList(int size) : size_(static_cast<std::size_t>(size)) {
    if (size_ > kFew) many_ = std::make_unique<T[]>(size_);
  }
  T& operator[](int rank) noexcept { return data()[rank]; }
  std::span<T> span() noexcept { return {data(), size_}; }

 private:
  static constexpr std::size_t kFew = 32;
  T* data() noexcept { return many_ ? many_.get() : few_.data(); }
  std::size_t size_;
  std::array<T, kFew> few_;
  std::unique_ptr<T[]> many_;
};

}  // namespace maniple
