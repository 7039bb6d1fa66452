// A buffer cut into one slice per rank, on cache-line boundaries, so that ranks do not write into each other's lines.
#pragma once

#include <algorithm>
#include <cstddef>

namespace maniple {

class Slices {
 public:
  Slices(std::size_t count, std::size_t element, int ranks) noexcept : count_(count) {
    const std::size_t line = std::max<std::size_t>(1, 64 / element);
    const auto n = static_cast<std::size_t>(ranks);
    each_ = ((count + n - 1) / n + line - 1) / line * line;
  }
  std::size_t begin(int rank) const noexcept { return std::min(count_, each_ * static_cast<std::size_t>(rank)); }
  std::size_t end(int rank) const noexcept { return std::min(count_, each_ * static_cast<std::size_t>(rank + 1)); }
  std::size_t size(int rank) const noexcept { return end(rank) - begin(rank); }

 private:
  std::size_t count_;
  std::size_t each_;
};

}  // namespace maniple
