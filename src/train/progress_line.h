// The text of a progress bar, as a pure function of the state.
#pragma once

#include <cstddef>
#include <string>

namespace maniple {

struct ProgressState {
  std::string label = {}, unit = {}, note = {};
  std::string memory = {};  ///< GPU memory, see memory_text()
  std::size_t total = 0;    ///< 0: unknown
  std::size_t start = 0;    ///< steps done by an earlier process: excluded from speed and time
  std::size_t steps = 0;    ///< steps done, including `start`
  std::size_t amount = 0;   ///< units done since `start`
  double elapsed = 0;       ///< seconds since `start`
  std::size_t width = 110;  ///< columns available
  bool over = false;        ///< the loop has ended: show the time it took, not the time left
  bool must_fit = true;     ///< false: never cut the note and the label, never leave out a part
};

/// Formats the line: "epoch 1 [#####.....]  50 % 5/10  2210 samples/s  14 s left  loss 0.081". If `width` is too small,
/// the bar shrinks and is dropped first, then the memory, the throughput and the count. A line that is still too long
/// is cut and ends in "~".
std::string progress_line(const ProgressState& state);

/// "GPU 3.1 of 4.0 GiB": peak bytes allocated for tensors, of peak bytes reserved; empty if nothing was reserved.
std::string memory_text(std::size_t allocated, std::size_t reserved);

/// "14 s", "2:05 min", "1:02 h", "3 d 4:05 h".
std::string duration_text(double seconds);

}  // namespace maniple
