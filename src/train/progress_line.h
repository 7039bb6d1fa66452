// The text of a progress bar, as a pure function of what is known.
#pragma once

#include <cstddef>
#include <string>

namespace maniple {

struct ProgressState {
  std::string label = {}, unit = {}, note = {};
  std::string memory = {};  ///< of a GPU
  std::size_t total = 0;    ///< 0: not known
  std::size_t start = 0;    ///< steps that were done before, by an earlier process: not counted for speed and time
  std::size_t steps = 0;    ///< those included
  std::size_t amount = 0;   ///< units done since
  double elapsed = 0;       ///< seconds since
  std::size_t width = 110;  ///< columns that there are
  bool over = false;        ///< the loop has ended: the time it took is shown, not what is left
  bool must_fit = true;     ///< false: the note and the label are never cut, and no part is left out
};

/// "epoch 1 [#####.....]  50 % 5/10  2210 samples/s  14 s left  loss 0.081". Where there is too little room the bar
/// shrinks and goes first, then the memory, the throughput, then the count, and what is still too long is cut, with a
/// "~".
std::string progress_line(const ProgressState& state);

/// "GPU 3.1 of 4.0 GiB": what tensors took at most, of what was reserved for them; empty where nothing was.
std::string memory_text(std::size_t allocated, std::size_t reserved);

/// "14 s", "2:05 min", "1:02 h", "3 d 4:05 h".
std::string duration_text(double seconds);

}  // namespace maniple
