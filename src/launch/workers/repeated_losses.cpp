#include "launch/workers/repeated_losses.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "process/failure_report.h"

namespace maniple::launch {

bool RepeatedLosses::take(int by, std::string_view line) {
  const int lost = blamed_rank(line);
  if (lost < 0) return false;
  const auto [entry, first] = losses_.try_emplace(lost, Loss{.first = by, .others = {}});
  if (first) return false;
  if (by != entry->second.first) entry->second.others.insert(by);
  return true;
}

std::string RepeatedLosses::summary() {
  std::string text;
  for (auto& [lost, loss] : losses_) {
    if (loss.others.empty()) continue;
    text += fmt::format("{}maniple: rank{} {} said the same of rank {}", text.empty() ? "" : "\n",
                        loss.others.size() == 1 ? "" : "s", fmt::join(loss.others, ", "), lost);
    loss.others.clear();
  }
  return text;
}

}  // namespace maniple::launch
