#include "cli/command.h"

namespace maniple::cli {

std::span<const Command> commands() noexcept {
  static constexpr Command kCommands[] = {
      {"run", "start a program as the ranks of a job, on this machine or on many", declare_run},
      {"ps", "list this user's running jobs", declare_ps},
      {"doctor", "look for what usually goes wrong on a machine, and say how to mend it", declare_doctor},
      {"backends", "list what can carry the operations: what is here, what is missing, how to get it", declare_backends},
      {"bench", "measure the operations, next to this machine's limits and other libraries", declare_bench},
      {"knobs", "list the MANIPLE_ variables that change behaviour", declare_knobs},
      {"version", "print the version", declare_version},
      {"bench-worker", "", declare_bench_worker},
      {"run-agent", "", declare_run_agent},
  };
  return kCommands;
}

}  // namespace maniple::cli
