#include "transport/transfer.h"

#include <fmt/format.h>

namespace maniple {

std::string Transfer::describe() const {
  return signature != nullptr ? signature->describe() : Signature::of_message(dtype, tag, size).describe();
}

std::string Peer::name() const {
  return rank == global_rank ? fmt::format("rank {}", rank)
                             : fmt::format("rank {} (global rank {})", rank, global_rank);
}

PeerLost Peer::lost(const std::string& progress, const std::string& reason) const {
  return {fmt::format("{} lost{}{}: {}", name(), progress.empty() ? "" : ", ", progress, reason), global_rank};
}

std::string bytes_of(std::size_t moved, std::size_t expected) {
  constexpr double kKib = 1024;
  const auto value = static_cast<double>(expected);
  if (value < 10 * kKib) return fmt::format("{} of {} B", moved, expected);
  if (value < kKib * kKib) return fmt::format("{:.1f} of {:.1f} KiB", static_cast<double>(moved) / kKib, value / kKib);
  return fmt::format("{:.1f} of {:.1f} MiB", static_cast<double>(moved) / kKib / kKib, value / kKib / kKib);
}

}  // namespace maniple
