#include "comm/rendezvous/schedulers.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

#include <maniple/comm/error.h>

namespace maniple {
namespace {

using Variables = std::map<std::string, std::string>;

std::optional<SchedulerAssignment> detect(const Variables& variables) {
  return detect_scheduler([&](const char* name) -> std::optional<std::string> {
    const auto found = variables.find(name);
    return found == variables.end() ? std::nullopt : std::optional(found->second);
  });
}

TEST(Schedulers, WithoutARankVariableNoSchedulerIsDetected) {
  EXPECT_FALSE(detect({{"SLURM_JOB_ID", "7"}}).has_value());
}

TEST(Schedulers, OpenMpiOnOneHostNeedsNoMaster) {
  const auto assignment = detect({{"OMPI_COMM_WORLD_RANK", "3"},
                                  {"OMPI_COMM_WORLD_SIZE", "4"},
                                  {"OMPI_COMM_WORLD_LOCAL_RANK", "3"},
                                  {"OMPI_COMM_WORLD_LOCAL_SIZE", "4"},
                                  {"PMIX_NAMESPACE", "prterun-host-17@1"}});
  ASSERT_TRUE(assignment.has_value());
  EXPECT_EQ(assignment->rank, 3);
  EXPECT_EQ(assignment->world_size, 4);
  EXPECT_EQ(assignment->local_rank, 3);
  EXPECT_EQ(assignment->master_addr, "127.0.0.1");
  EXPECT_TRUE(assignment->master_port.has_value());
}

TEST(Schedulers, OpenMpiOnSeveralHostsDoesNotGuess) {
  const auto assignment =
      detect({{"OMPI_COMM_WORLD_RANK", "3"}, {"OMPI_COMM_WORLD_SIZE", "8"}, {"OMPI_COMM_WORLD_LOCAL_SIZE", "4"}});
  EXPECT_FALSE(assignment->master_addr.has_value());
}

TEST(Schedulers, Slurm) {
  const auto assignment = detect({{"SLURM_PROCID", "5"},
                                  {"SLURM_NTASKS", "8"},
                                  {"SLURM_LOCALID", "1"},
                                  {"SLURM_NODEID", "2"},
                                  {"SLURM_JOB_NODELIST", "gpu[07-09,12],cpu1"},
                                  {"SLURM_JOB_ID", "123456"}});
  ASSERT_TRUE(assignment.has_value());
  EXPECT_STREQ(assignment->scheduler, "Slurm");
  EXPECT_EQ(assignment->rank, 5);
  EXPECT_EQ(assignment->world_size, 8);
  EXPECT_EQ(assignment->local_rank, 1);
  EXPECT_EQ(assignment->node_rank, 2);
  EXPECT_EQ(assignment->master_addr, "gpu07");
  EXPECT_EQ(assignment->master_port, port_for_job("123456"));
}

TEST(Schedulers, ASlurmStepMayBeSmallerThanItsJob) {
  const auto assignment = detect({{"SLURM_PROCID", "1"},
                                  {"SLURM_NTASKS", "8"},
                                  {"SLURM_STEP_NUM_TASKS", "2"},
                                  {"SLURM_JOB_NODELIST", "a[1-4]"},
                                  {"SLURM_STEP_NODELIST", "a3"}});
  EXPECT_EQ(assignment->world_size, 2);
  EXPECT_EQ(assignment->master_addr, "a3");
}

TEST(Schedulers, TheInnerOneWins) {
  const auto assignment = detect({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "1"}, {"PMI_RANK", "2"}, {"PMI_SIZE", "3"}});
  EXPECT_STREQ(assignment->scheduler, "PMI");
  EXPECT_EQ(assignment->rank, 2);
}

TEST(Schedulers, NonsenseIsNamed) {
  const auto complaint = [](const Variables& variables) -> std::string {
    try {
      detect(variables);
    } catch (const InvalidArgument& error) {
      return error.what();
    }
    return "accepted";
  };
  using testing::HasSubstr;
  EXPECT_THAT(complaint({{"PMI_RANK", "x"}, {"PMI_SIZE", "2"}}), HasSubstr("PMI_RANK is \"x\""));
  EXPECT_THAT(complaint({{"PMI_RANK", "1"}}), HasSubstr("PMI_SIZE is not"));
  EXPECT_THAT(complaint({{"SLURM_PROCID", "4"}, {"SLURM_NTASKS", "4"}}),
              HasSubstr("SLURM_PROCID is 4 but SLURM_NTASKS is 4"));
}

TEST(Schedulers, FirstHostOfANodeList) {
  EXPECT_EQ(first_host("node1"), "node1");
  EXPECT_EQ(first_host("node1,node2"), "node1");
  EXPECT_EQ(first_host("node[003-010,012]"), "node003");
  EXPECT_EQ(first_host("node[12]"), "node12");
  EXPECT_EQ(first_host("rack[2-3]-n[07,09],x"), "rack2-n07");
  EXPECT_EQ(first_host("gpu-a[1,3-5].cluster.example"), "gpu-a1.cluster.example");
  EXPECT_THROW(first_host(""), InvalidArgument);
  EXPECT_THROW(first_host("node[1-"), InvalidArgument);
}

TEST(Schedulers, PortsOfJobsAreBelowTheEphemeralRange) {
  for (int job = 0; job < 10'000; ++job) {
    const auto port = port_for_job(std::to_string(job));
    ASSERT_GE(port, 15000);
    ASSERT_LT(port, 30000);
  }
}

}  // namespace
}  // namespace maniple
