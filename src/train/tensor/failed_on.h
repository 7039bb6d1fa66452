// Errors that this rank throws because another rank of the group failed.
#pragma once

#include <string>

#include "comm/base/error_codec.h"
#include <maniple/comm/process_group.h>

namespace maniple {

/// Throws an E with that reason and with rank `rank` of the group as its origin. Other ranks report it to the launcher,
/// so that the launcher names the rank where the failure began, not the one whose process ended first.
template <class E>
[[noreturn]] void throw_failed_on(const ProcessGroup& group, int rank, const std::string& reason) {
  ErrorInfo info = E(reason).info();
  info.origin = group.topology().members[rank].global_rank;
  if (group.rank() != rank) report_failure(info);
  throw E(std::move(info));
}

}  // namespace maniple
