// Several children that do one thing together: all run to a clean end, or all are ended.
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "bench/child.h"
#include "bench/interrupt.h"
#include <maniple/comm/deadline.h>
#include <maniple/comm/error.h>

namespace maniple::bench {

/// A child ended badly or the time was up; the text names it and holds the last lines it wrote.
struct ProcessSetFailed : Error {
  explicit ProcessSetFailed(const std::string& text) : Error(ErrorKind::peer_lost, text) {}
};

using LineSink = std::function<void(std::string_view line)>;

/// Starts them all, hands each complete line of standard output to `on_line`, and returns when all have ended well.
/// Throws ProcessSetFailed, or Interrupted; either way no child is left.
void run_process_set(const std::vector<ChildSpec>& specs, const LineSink& on_line, Deadline deadline,
              const InterruptWatch& watch);

/// Runs one program to its end and throws ProcessSetFailed unless it succeeds.
void run_tool(ChildSpec spec, const InterruptWatch& watch);

}  // namespace maniple::bench
