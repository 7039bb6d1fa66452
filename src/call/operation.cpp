#include "call/operation.h"

#include <algorithm>

namespace maniple {

Parts::Parts(std::span<const std::size_t> counts) : ranks_(static_cast<int>(counts.size())), offsets_(counts.size() + 1) {
  for (std::size_t i = 0; i < counts.size(); ++i) offsets_[i + 1] = offsets_[i] + counts[i];
}

std::size_t Parts::largest_of() const noexcept {
  std::size_t most = each_;
  for (std::size_t i = 1; i < offsets_.size(); ++i) most = std::max(most, offsets_[i] - offsets_[i - 1]);
  return most;
}

std::uint64_t Parts::hash() const noexcept {
  if (offsets_.empty()) return 0;
  std::uint64_t value = 0xcbf29ce484222325ULL;  // FNV-1a over words: order matters, cheap, good enough to tell lists apart
  for (const std::size_t offset : offsets_) {
    value = (value ^ offset) * 0x100000001b3ULL;
    value ^= value >> 29;
  }
  return value | 1;
}

}  // namespace maniple
