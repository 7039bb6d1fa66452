#include "comm/transport/transfer.h"

#include <cerrno>

#include <fmt/format.h>

namespace maniple {

std::string Transfer::describe() const {
  return signature != nullptr ? signature->describe() : Signature::of_message(dtype, tag, size).describe();
}

std::string Peer::name() const {
  return rank == global_rank ? fmt::format("rank {}", rank)
                             : fmt::format("rank {} (global rank {})", rank, global_rank);
}

PeerLost Peer::lost(const std::string& progress, const SystemError& error, TransferProgress bytes) const {
  const bool closed = error.code() == ECONNRESET || error.code() == EPIPE;
  ErrorInfo info;
  info.ranks = {global_rank};
  info.origin = global_rank;
  info.bytes_moved = bytes.moved;
  info.bytes_expected = bytes.expected;
  info.loss = error.info().loss == LossKind::unknown && closed ? LossKind::left_or_ended : error.info().loss;
  info.code = error.code();
  info.reason = fmt::format("{} lost{}{}: {}", name(), progress.empty() ? "" : ", ", progress, error.what());
  return PeerLost(std::move(info));
}

TransferProgress progress_of(const std::deque<Transfer*>& transfers) {
  TransferProgress bytes;
  for (const Transfer* transfer : transfers) {
    bytes.moved += transfer->moved;
    bytes.expected += transfer->size;
  }
  return bytes;
}

std::string bytes_of(std::size_t moved, std::size_t expected) {
  constexpr double kKib = 1024;
  const auto value = static_cast<double>(expected);
  if (value < 10 * kKib) return fmt::format("{} of {} B", moved, expected);
  if (value < kKib * kKib) return fmt::format("{:.1f} of {:.1f} KiB", static_cast<double>(moved) / kKib, value / kKib);
  return fmt::format("{:.1f} of {:.1f} MiB", static_cast<double>(moved) / kKib / kKib, value / kKib / kKib);
}

}  // namespace maniple
