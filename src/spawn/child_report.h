// The report of a spawned process about its end, through a socket to its parent: that it has finished, or what it threw.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include <maniple/comm/error.h>

namespace maniple::launch {

struct SpawnReport {
  bool finished = false;                          ///< the function returned; the rest is empty
  std::int64_t when_ns = 0;                       ///< of the failure, on the clock that all processes share
  std::string type = {};                          ///< "std::runtime_error"
  std::string text = {};                          ///< what()
  std::optional<ErrorInfo> error = std::nullopt;  ///< if it was one of Maniple's
};

/// The exception that is being handled.
SpawnReport report_of_current_exception() noexcept;

std::string encode_report(const SpawnReport& report);
/// nullopt for anything that encode_report would not write, also for half of it.
std::optional<SpawnReport> decode_report(std::string_view bytes);

/// Fits into an empty socket, so that writing one never waits for its reader.
inline constexpr std::size_t kMostReportBytes = 32 * 1024;

}  // namespace maniple::launch
