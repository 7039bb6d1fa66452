#include "train/ddp/unused_parameters.h"

#include <algorithm>

#include "base/format.h"

namespace maniple {
namespace {

constexpr std::size_t kNamed = 10;

}  // namespace

std::vector<bool> used_anywhere(ProcessGroup& group, const std::vector<bool>& used_here) {
  std::vector<std::uint8_t> marks(used_here.begin(), used_here.end());
  group.all_reduce(buffer_of(marks), ReduceOp::max);
  return std::vector<bool>(marks.begin(), marks.end());
}

std::string names_of(std::span<const std::size_t> parameters, std::span<const NamedTensor> all) {
  std::string text;
  for (std::size_t i = 0; i < std::min(kNamed, parameters.size()); ++i) {
    text += format_text("{}{}", i == 0 ? "" : ", ", all[parameters[i]].name);
  }
  if (parameters.size() > kNamed) text += format_text(" and {} more", parameters.size() - kNamed);
  return text;
}

}  // namespace maniple
