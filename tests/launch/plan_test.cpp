// The arithmetic of ranks, and everything else about a start that can be computed without starting anything.
#include <gtest/gtest.h>

#include "launch/option_values.h"
#include "launch/placement/binding.h"
#include "launch/placement/rank_plan.h"
#include "launch/workers/mps_daemon.h"
#include <maniple/comm/error.h>

namespace maniple::launch {
namespace {

// 2 nodes with 4 devices each, one device per process: rank = node x 4 + device.
TEST(RankPlan, TwoNodesOfFourDevicesOneEach) {
  EXPECT_EQ(processes_for(4, 1), 4);
  const auto assignments =
      plan_ranks({{.processes = 4, .devices_per_process = 1}, {.processes = 4, .devices_per_process = 1}});
  ASSERT_EQ(assignments.size(), 8u);
  const int expected[8][4] = {{0, 0, 0, 0}, {1, 0, 1, 1}, {2, 0, 2, 2}, {3, 0, 3, 3},
                              {4, 1, 0, 0}, {5, 1, 1, 1}, {6, 1, 2, 2}, {7, 1, 3, 3}};
  for (std::size_t i = 0; i < 8; ++i) {
    EXPECT_EQ(assignments[i].rank, expected[i][0]);
    EXPECT_EQ(assignments[i].node_rank, expected[i][1]);
    EXPECT_EQ(assignments[i].local_rank, expected[i][2]);
    EXPECT_EQ(assignments[i].first_device, expected[i][3]);
    EXPECT_EQ(assignments[i].device_count, 1);
    EXPECT_EQ(assignments[i].world_size, 8);
    EXPECT_EQ(assignments[i].local_size, 4);
  }
}

// The same nodes, two devices per process: two processes per node, four in all.
TEST(RankPlan, TwoNodesOfFourDevicesTwoEach) {
  EXPECT_EQ(processes_for(4, 2), 2);
  const auto assignments =
      plan_ranks({{.processes = 2, .devices_per_process = 2}, {.processes = 2, .devices_per_process = 2}});
  ASSERT_EQ(assignments.size(), 4u);
  const int expected[4][4] = {{0, 0, 0, 0}, {1, 0, 1, 2}, {2, 1, 0, 0}, {3, 1, 1, 2}};
  for (std::size_t i = 0; i < 4; ++i) {
    EXPECT_EQ(assignments[i].rank, expected[i][0]);
    EXPECT_EQ(assignments[i].node_rank, expected[i][1]);
    EXPECT_EQ(assignments[i].local_rank, expected[i][2]);
    EXPECT_EQ(assignments[i].first_device, expected[i][3]);
    EXPECT_EQ(assignments[i].device_count, 2);
    EXPECT_EQ(assignments[i].world_size, 4);
    EXPECT_EQ(assignments[i].local_size, 2);
  }
}

TEST(RankPlan, UnevenNodes) {
  const auto assignments = plan_ranks({{.processes = 3}, {.processes = 1}, {.processes = 2}});
  ASSERT_EQ(assignments.size(), 6u);
  EXPECT_EQ(assignments[3],
            (WorkerAssignment{.rank = 3, .node_rank = 1, .local_rank = 0, .local_size = 1, .world_size = 6}));
  EXPECT_EQ(assignments[5],
            (WorkerAssignment{.rank = 5, .node_rank = 2, .local_rank = 1, .local_size = 2, .world_size = 6}));
}

// --share-gpu: blocks as equal as can be, whatever the numbers.
TEST(RankPlan, SharedDevices) {
  const auto devices = [](int processes, int shared) {
    std::vector<int> list;
    for (const WorkerAssignment& one : plan_ranks({{.processes = processes, .shared_devices = shared}})) {
      EXPECT_EQ(one.device_count, shared > 0 ? 1 : 0);
      list.push_back(one.first_device);
    }
    return list;
  };
  EXPECT_EQ(devices(6, 2), (std::vector<int>{0, 0, 0, 1, 1, 1}));
  EXPECT_EQ(devices(5, 2), (std::vector<int>{0, 0, 0, 1, 1}));
  EXPECT_EQ(devices(3, 1), (std::vector<int>{0, 0, 0}));
  EXPECT_EQ(devices(2, 4), (std::vector<int>{0, 2}));
  EXPECT_EQ(devices(2, 0), (std::vector<int>{0, 0}));
}

TEST(MpsDaemon, DevicesAndFolder) {
  EXPECT_EQ(renumbered_devices("2,5"), "0,1");
  EXPECT_EQ(renumbered_devices("7"), "0");
  for (const char* as_it_is : {"", "-1", "GPU-aa,GPU-bb", "1,GPU-bb", "MIG-1", "1,,2", "NoDevFiles"}) {
    EXPECT_EQ(renumbered_devices(as_it_is), as_it_is);
  }
  EXPECT_EQ(mps_parent_folder("/var/tmp"), "/var/tmp");
  EXPECT_EQ(mps_parent_folder("/" + std::string(80, 'x')), "/tmp") << "names of sockets have 107 characters at most";
}

TEST(RankPlan, SaysWhatDoesNotDivide) {
  try {
    processes_for(4, 3);
    FAIL();
  } catch (const InvalidArgument& error) {
    EXPECT_STREQ(error.what(),
                 "4 devices per node cannot be shared out evenly with 3 devices per process: 1 would be left over");
  }
  EXPECT_THROW(processes_for(0, 1), InvalidArgument);
  EXPECT_THROW(processes_for(4, 0), InvalidArgument);
  EXPECT_THROW(processes_for(2, 4), InvalidArgument);
  EXPECT_THROW(plan_ranks({}), InvalidArgument);
}

TEST(RankPlan, Explains) {
  EXPECT_EQ(explain_plan({{.host = "a", .processes = 2, .devices_per_process = 2}, {.host = "b", .processes = 1}}),
            "3 ranks on 2 nodes\n\n"
            "  rank   node  local rank  host  devices\n"
            "     0      0           0  a     0,1\n"
            "     1      0           1  a     2,3\n"
            "     2      1           0  b     -\n");
}

TEST(RankPlan, Ranges) {
  EXPECT_EQ(parse_node_range("3"), (NodeRange{3, 3}));
  EXPECT_EQ(parse_node_range("2:4"), (NodeRange{2, 4}));
  for (const char* bad : {"", "0", "-1", "4:2", "2:", ":2", "x", "2:4:6", "1 ", "99999999999"}) {
    EXPECT_THROW(parse_node_range(bad), InvalidArgument) << bad;
  }
}

TEST(OptionValues, Hosts) {
  EXPECT_EQ(parse_hosts("a:4,b:2"), (std::vector<HostSlots>{{"a", 4}, {"b", 2}}));
  EXPECT_EQ(parse_hosts("fd00::1,[fd00::2],[fd00::3]:2"),
            (std::vector<HostSlots>{{"fd00::1", 0}, {"fd00::2", 0}, {"fd00::3", 2}}));
  EXPECT_EQ(parse_hosts("user@a, [fe80::1]:3"), (std::vector<HostSlots>{{"user@a", 0}, {"fe80::1", 3}}));
  for (const char* bad :
       {"", "a:0", "a:-1", "a:x", "a,,b", "a:4,a:2", "-oProxyCommand=x", "a b", "[::1", "a;b", "a:99999"}) {
    EXPECT_THROW(parse_hosts(bad), InvalidArgument) << bad;
  }
}

TEST(OptionValues, Hostfile) {
  EXPECT_EQ(parse_hostfile("# all of them\na slots=4\n\nb 2 # old\r\nc:3\nd", "f"),
            (std::vector<HostSlots>{{"a", 4}, {"b", 2}, {"c", 3}, {"d", 0}}));
  try {
    parse_hostfile("a\nb slots=none\n", "hosts.txt");
    FAIL();
  } catch (const InvalidArgument& error) {
    EXPECT_NE(std::string(error.what()).find("hosts.txt:2: \"b slots=none\" is not a host"), std::string::npos)
        << error.what();
  }
  EXPECT_THROW(parse_hostfile("", "f"), InvalidArgument);
  EXPECT_THROW(parse_hostfile("a:2 4", "f"), InvalidArgument);
  EXPECT_THROW(read_hostfile("/nonexistent/hosts"), InvalidArgument);
}

TEST(OptionValues, Others) {
  EXPECT_EQ(parse_master("10.0.0.1:1234"), (MasterAddress{"10.0.0.1", 1234}));
  EXPECT_EQ(parse_master("node1"), (MasterAddress{"node1", 29500}));
  EXPECT_EQ(parse_master("[::1]:80"), (MasterAddress{"::1", 80}));
  EXPECT_EQ(to_string(parse_master("[::1]:80")), "[::1]:80");
  EXPECT_EQ(to_string(parse_master("a:80")), "a:80");
  for (const char* bad : {"", ":80", "a:", "a:65536", "a:-1", "a:b", "a:1:2", "::1", "::1:80", "[::1", "[::1]80"})
    EXPECT_THROW(parse_master(bad), InvalidArgument) << bad;
  EXPECT_EQ(parse_process_count("auto", 0, 6), 6);
  EXPECT_EQ(parse_process_count("auto", 4, 6), 4);
  EXPECT_EQ(parse_process_count("gpu", 4, 6), 4);
  EXPECT_EQ(parse_process_count("7", 4, 6), 7);
  EXPECT_THROW(parse_process_count("gpu", 0, 6), InvalidArgument);
  EXPECT_THROW(parse_process_count("0", 0, 6), InvalidArgument);
  EXPECT_EQ(parse_assignment("A=b=c"), (Assignment{"A", "b=c", false}));
  EXPECT_EQ(parse_assignment("A"), (Assignment{"A", "", true}));
  EXPECT_THROW(parse_assignment("=x"), InvalidArgument);
}

TEST(Binding, BlocksOfWholeCores) {
  // 2 packages, 2 cores each, 2 threads each; threads of a core are numbered apart.
  std::vector<Cpu> cpus;
  for (int id = 0; id < 8; ++id) cpus.push_back({.id = id, .package = id / 2 % 2, .numa = id / 2 % 2, .core = id % 2});
  EXPECT_EQ(bind_ranks(cpus, 2), (std::vector<std::vector<int>>{{0, 1, 4, 5}, {2, 3, 6, 7}}));
  EXPECT_EQ(bind_ranks(cpus, 4), (std::vector<std::vector<int>>{{0, 4}, {1, 5}, {2, 6}, {3, 7}}));
  EXPECT_EQ(bind_ranks(cpus, 3), (std::vector<std::vector<int>>{{0, 1, 4, 5}, {2, 6}, {3, 7}}));
  EXPECT_EQ(bind_ranks(cpus, 5).size(), 5u) << "more ranks than cores: hardware threads";
  EXPECT_TRUE(bind_ranks(cpus, 9).empty()) << "more than those, too";
  EXPECT_EQ(bind_ranks(cpus, 1).front().size(), 8u);
  EXPECT_TRUE(bind_ranks({}, 1).empty());
  EXPECT_EQ(describe_cpus({0, 1, 2, 5, 7, 8}), "0-2,5,7-8");
}

TEST(Binding, ThisMachine) {
  EXPECT_EQ(static_cast<int>(allowed_cpus().size()), allowed_cpu_count());
  EXPECT_GE(allowed_cpu_count(), 1);
}

}  // namespace
}  // namespace maniple::launch
