#include "tools/cli/outer_launcher.h"

#include <cstdlib>

#include <fmt/format.h>

namespace maniple::cli {
namespace {

struct OuterLauncher {
  const char* name;
  const char* size;
  const char* rank;
};
// Slurm sets SLURM_NTASKS and SLURM_PROCID in batch scripts, too, where one launcher is right. Only srun sets
// SLURM_STEP_NUM_TASKS.
constexpr OuterLauncher kOuter[] = {
    {"mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"},
    {"mpirun", "PMI_SIZE", "PMI_RANK"},
    {"srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"},
};

}  // namespace

std::string outer_launcher_warning(const std::function<std::optional<std::string>(const char*)>& variable,
                                   int processes) {
  for (const OuterLauncher& outer : kOuter) {
    const auto size = variable(outer.size), rank = variable(outer.rank);
    if (!size || !rank) continue;
    const int count = std::atoi(size->c_str());
    if (count <= 1) continue;
    if (*rank != "0") return {};  // warn only once
    return fmt::format(
        "maniple: {} has started {} launchers ({} is {}), and each starts a job of its own with {} rank{}; for one "
        "job: "
        "maniple run -n {} without {}, or one launcher on each node with --nnodes and --master",
        outer.name, count, outer.size, count, processes, processes == 1 ? "" : "s", count * processes, outer.name);
  }
  return {};
}

}  // namespace maniple::cli
