// `mpirun -n 2 maniple run -n 2`: two jobs by mistake; and the correct uses.
#include <gtest/gtest.h>

#include <map>

#include "tools/cli/outer_launcher.h"

namespace maniple::cli {
namespace {

std::string warning(const std::map<std::string, std::string>& environment) {
  return outer_launcher_warning(
      [&](const char* name) {
        const auto found = environment.find(name);
        return found == environment.end() ? std::nullopt : std::optional<std::string>(found->second);
      },
      2);
}

TEST(OuterLauncher, SeveralLaunchersAreReportedOnce) {
  const std::string text = warning({{"OMPI_COMM_WORLD_SIZE", "3"}, {"OMPI_COMM_WORLD_RANK", "0"}});
  EXPECT_NE(
      text.find("mpirun has started 3 launchers (OMPI_COMM_WORLD_SIZE is 3), and each starts a job of its own with 2 "
                "ranks; for one job: maniple run -n 6 without mpirun"),
      std::string::npos)
      << text;
  EXPECT_EQ(warning({{"OMPI_COMM_WORLD_SIZE", "3"}, {"OMPI_COMM_WORLD_RANK", "1"}}), "");
  EXPECT_NE(warning({{"PMI_SIZE", "2"}, {"PMI_RANK", "0"}}), "");
  EXPECT_NE(warning({{"SLURM_STEP_NUM_TASKS", "2"}, {"SLURM_PROCID", "0"}}).find("srun has started 2"),
            std::string::npos);
}

TEST(OuterLauncher, OneLauncherIsRight) {
  EXPECT_EQ(warning({}), "");
  EXPECT_EQ(warning({{"OMPI_COMM_WORLD_SIZE", "1"}, {"OMPI_COMM_WORLD_RANK", "0"}}), "");
  EXPECT_EQ(warning({{"SLURM_NTASKS", "4"}, {"SLURM_PROCID", "0"}}), "") << "a batch script, not srun";
}

}  // namespace
}  // namespace maniple::cli
