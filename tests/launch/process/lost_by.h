// An error that both the launcher and src/launch/process get when a rank is lost.
#pragma once

#include <fmt/format.h>

#include <maniple/comm/error.h>

namespace maniple {

/// What rank `by` of 8 reports when `rank` is lost.
inline ErrorInfo lost_by(int by, int rank) {
  return PeerLost({.operation = "barrier",
                   .sequence = 3,
                   .group = "world",
                   .rank = by,
                   .size = 8,
                   .ranks = {rank},
                   .reason = fmt::format("rank {} (pid 7 on vm) is lost: it ended", rank)})
      .info();
}

}  // namespace maniple
