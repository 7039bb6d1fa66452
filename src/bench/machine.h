// What the figures were taken on.
#pragma once

#include <string>

namespace maniple::bench {

struct Machine {
  std::string cpu;              ///< model name, or the core's part when the kernel gives no name
  int cores = 0;                ///< that this process may use
  std::string arch;             ///< "aarch64"
  std::string kernel;           ///< "6.1.0"
  std::string instruction_set;  ///< widest vector set that the kernel reports: "avx2", "sve", "neon", ...
};

Machine this_machine();

}  // namespace maniple::bench
