// What `maniple doctor` thinks of facts; and the table of `maniple ps`.
#include <gtest/gtest.h>

#include "launch/jobs/job_list.h"
#include "tools/doctor/checks.h"
#include "tools/doctor/hosts.h"
#include <maniple/comm/error.h>

namespace maniple::doctor {
namespace {

Verdict worst(const Findings& findings) {
  Verdict verdict = Verdict::ok;
  for (const Finding& finding : findings) {
    verdict = std::max(verdict, finding.verdict);
    EXPECT_FALSE(finding.found.empty());
    EXPECT_EQ(finding.found.find('\n'), std::string::npos) << finding.found;
    EXPECT_TRUE(finding.verdict == Verdict::ok || !finding.fix.empty()) << "how to fix: " << finding.found;
  }
  return verdict;
}

bool says(const Findings& findings, const std::string& text) {
  return std::any_of(findings.begin(), findings.end(), [&](const Finding& finding) {
    return finding.found.find(text) != std::string::npos || finding.fix.find(text) != std::string::npos;
  });
}

NetworkFacts good_network() {
  return {.interfaces = {{"lo", "127.0.0.1", true, true}, {"eth0", "10.0.0.5", true, false}},
          .route = "10.0.0.5",
          .hostname = "node1",
          .hostname_addresses = {"10.0.0.5"}};
}

TEST(Doctor, Network) {
  EXPECT_EQ(worst(judge(good_network())), Verdict::ok);
  EXPECT_TRUE(says(judge(good_network()), "eth0 10.0.0.5"));

  NetworkFacts alone = good_network();
  alone.interfaces.pop_back();
  EXPECT_EQ(worst(judge(alone)), Verdict::warn);
  NetworkFacts down = good_network();
  down.interfaces[1].up = false;
  EXPECT_TRUE(says(judge(down), "only the loopback interface"));

  NetworkFacts wrong = good_network();
  wrong.chosen = "ib7";
  wrong.chosen_problem = "there is lo, eth0";
  EXPECT_EQ(worst(judge(wrong)), Verdict::fail);
  EXPECT_TRUE(says(judge(wrong), "MANIPLE_INTERFACE is \"ib7\""));

  NetworkFacts named = good_network();
  named.hostname_addresses = {"127.0.1.1"};
  EXPECT_EQ(worst(judge(named)), Verdict::warn);
  named.hostname_addresses.clear();
  EXPECT_TRUE(says(judge(named), "has no address"));

  NetworkFacts dead = good_network();
  dead.loopback_problem = "Network is unreachable";
  EXPECT_EQ(worst(judge(dead)), Verdict::fail);
  EXPECT_TRUE(says(judge(dead), "ip link set lo up"));
  NetworkFacts walled = good_network();
  walled.port_problem = "Operation not permitted";
  EXPECT_EQ(worst(judge(walled)), Verdict::fail);
  NetworkFacts open = good_network();
  open.openssl_problem = "libcrypto.so.3: cannot open shared object file";
  EXPECT_EQ(worst(judge(open)), Verdict::fail);
  EXPECT_TRUE(says(judge(open), "apt-get install libssl3"));
}

TEST(Doctor, Sharing) {
  EXPECT_EQ(worst(judge(SharingFacts{.dev_shm_bytes = std::uint64_t{8} << 30})), Verdict::ok);
  EXPECT_EQ(worst(judge(SharingFacts{.dev_shm_bytes = std::uint64_t{64} << 20})), Verdict::warn);
  EXPECT_TRUE(says(judge(SharingFacts{.dev_shm_bytes = std::uint64_t{64} << 20}), "64 MiB"));
  EXPECT_EQ(worst(judge(SharingFacts{})), Verdict::warn);
  const SharingFacts unread{.dev_shm_bytes = kUnlimited, .reads_peers = false};
  EXPECT_EQ(worst(judge(unread)), Verdict::warn);
  EXPECT_TRUE(says(judge(unread), "cannot read each other's memory"));
  EXPECT_EQ(worst(judge(SharingFacts{.memfd_problem = "denied", .dev_shm_bytes = kUnlimited})), Verdict::fail);
  EXPECT_EQ(worst(judge(SharingFacts{.pass_problem = "denied", .dev_shm_bytes = kUnlimited})), Verdict::fail);
}

TEST(Doctor, Limits) {
  EXPECT_EQ(worst(judge(LimitFacts{.files_soft = 1024, .files_hard = 1 << 20})), Verdict::ok);
  EXPECT_EQ(worst(judge(LimitFacts{.files_soft = 1024, .files_hard = 1024})), Verdict::warn);
  EXPECT_EQ(worst(judge(LimitFacts{.files_soft = 64, .files_hard = 64})), Verdict::fail);
  EXPECT_EQ(worst(judge(LimitFacts{.address_bytes = std::uint64_t{4} << 30})), Verdict::warn);
  EXPECT_EQ(worst(judge(LimitFacts{.processes = 100})), Verdict::warn);
  LimitFacts container{.memory_limit = std::uint64_t{16} << 30, .memory_used = std::uint64_t{2} << 30};
  EXPECT_EQ(worst(judge(container)), Verdict::ok);
  EXPECT_TRUE(says(judge(container), "2.0 GiB of 16 GiB"));
  container.memory_used = std::uint64_t{15} << 30;
  EXPECT_EQ(worst(judge(container)), Verdict::warn);
  EXPECT_EQ(parse_group_limit("max"), kUnlimited);
  EXPECT_EQ(parse_group_limit("9223372036854771712"), kUnlimited);
  EXPECT_EQ(parse_group_limit("1048576"), 1048576u);
  EXPECT_FALSE(parse_group_limit("much"));
  EXPECT_FALSE(parse_group_limit(""));
}

TEST(Doctor, Processors) {
  EXPECT_EQ(worst(judge(ProcessorFacts{.online = 8, .allowed = 8, .huge_pages = "madvise"})), Verdict::ok);
  EXPECT_EQ(worst(judge(ProcessorFacts{.online = 8, .allowed = 4})), Verdict::ok);
  const Findings few = judge(ProcessorFacts{.online = 8, .allowed = 8, .quota = 2.5});
  EXPECT_EQ(worst(few), Verdict::warn);
  EXPECT_TRUE(says(few, "8 cores are seen, but this container gets the time of 2.5"));
  EXPECT_TRUE(says(few, "at most 2 rank(s)"));
  EXPECT_EQ(worst(judge(ProcessorFacts{.online = 2, .allowed = 2, .quota = 2.0})), Verdict::ok);
  EXPECT_EQ(worst(judge(ProcessorFacts{.huge_pages = "never"})), Verdict::warn);
  EXPECT_EQ(worst(judge(ProcessorFacts{.online = 2, .allowed = 2, .omp_threads = "64"})), Verdict::warn);
  EXPECT_EQ(parse_cpu_max("250000 100000"), 2.5);
  EXPECT_FALSE(parse_cpu_max("max 100000"));
  EXPECT_FALSE(parse_cpu_max("-1 100000"));
  EXPECT_FALSE(parse_cpu_max("1"));
  EXPECT_EQ(parse_choice("always [madvise] never"), "madvise");
  EXPECT_EQ(parse_choice("] ["), "");
}

TEST(Doctor, Blas) {
  EXPECT_EQ(worst(judge(BlasFacts{"/usr/lib/x86_64-linux-gnu/openblas-pthread/libblas.so.3"})), Verdict::ok);
  const Findings slow = judge(BlasFacts{"/usr/lib/x86_64-linux-gnu/blas/libblas.so.3.11.0"});
  EXPECT_EQ(worst(slow), Verdict::warn);
  EXPECT_TRUE(says(slow, "20 times slower"));
  EXPECT_TRUE(says(slow, "apt-get install libopenblas0-pthread"));
  EXPECT_EQ(worst(judge(BlasFacts{""})), Verdict::warn);
}

TEST(Doctor, Gpus) {
  EXPECT_EQ(worst(judge(GpuFacts{})), Verdict::ok);
  EXPECT_EQ(worst(judge(GpuFacts{.driver = "535.1"})), Verdict::warn);
  EXPECT_EQ(worst(judge(GpuFacts{.devices = 4, .driver = "535.1", .has_cuda = true})), Verdict::ok);
  EXPECT_EQ(worst(judge(GpuFacts{.devices = 4, .has_cuda = true})), Verdict::fail);
  const Findings refused =
      judge(GpuFacts{.devices = 4, .refused = {"/dev/nvidia1", "/dev/nvidiactl"}, .driver = "535.1", .has_cuda = true});
  EXPECT_EQ(worst(refused), Verdict::fail);
  EXPECT_TRUE(says(refused, "may not open /dev/nvidia1, /dev/nvidiactl"));
  EXPECT_EQ(worst(judge(GpuFacts{.devices = 1, .has_uvm = false, .driver = "535.1", .has_cuda = true})), Verdict::fail);
  EXPECT_EQ(worst(judge(GpuFacts{.devices = 1, .driver = "535.1"})), Verdict::fail);
  EXPECT_EQ(worst(judge(GpuFacts{.devices = 1, .driver = "535.1", .has_cuda = true, .visible_is_set = true})),
            Verdict::warn);
  EXPECT_EQ(judge(GpuFacts{.nccl = "/lib/libnccl.so.2"}).size(), 1u) << "without a driver there is one line";
  EXPECT_TRUE(says(judge(GpuFacts{}), "no NVIDIA GPU"));

  GpuFacts all{
      .devices = 3, .models = {"NVIDIA H200", "NVIDIA T4", "NVIDIA H200"}, .driver = "535.1", .has_cuda = true};
  EXPECT_TRUE(says(judge(all), "3 GPU(s) (2 x NVIDIA H200, NVIDIA T4), driver 535.1"));
  EXPECT_TRUE(says(judge(all), "apt-get install nvidia-cuda-mps"));
  EXPECT_TRUE(says(judge(all), "apt-get install libnccl2"));
  EXPECT_TRUE(says(judge(all), "no libcudart.so"));
  all.mps = "/usr/bin/nvidia-cuda-mps-control";
  all.nccl = "/usr/lib/libnccl.so.2.28.3";
  all.toolkit = "/usr/local/cuda/lib64/libcudart.so.13";
  EXPECT_TRUE(says(judge(all), "--share-gpu): /usr/bin/nvidia-cuda-mps-control"));
  EXPECT_TRUE(says(judge(all), "NCCL: /usr/lib/libnccl.so.2.28.3"));
  EXPECT_TRUE(says(judge(all), "CUDA runtime: /usr/local/cuda/lib64/libcudart.so.13"));
  EXPECT_FALSE(says(judge(all), "apt-get"));
  EXPECT_EQ(worst(judge(all)), Verdict::ok);
  EXPECT_EQ(parse_gpu_model("Model: \t\t NVIDIA H200\nIRQ:   \t\t 16\n"), "NVIDIA H200");
  EXPECT_EQ(parse_gpu_model("IRQ: 16\nModel:"), "");
  EXPECT_EQ(parse_gpu_model(""), "");

  EXPECT_EQ(parse_driver_version(
                "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\nGCC 12.3"),
            "535.104.05");
  EXPECT_EQ(parse_driver_version(""), "");
}

TEST(Doctor, BackendsClockDisk) {
  EXPECT_TRUE(says(judge(BackendFacts{{"Open MPI", "/usr/bin/mpirun", "openmpi-bin"}, {"Gloo", "", "libgloo-dev"}}),
                   "apt-get install libgloo-dev"));
  EXPECT_EQ(worst(judge(ClockFacts{.now = 1'800'000'000, .source = "tsc", .read_ns = 30})), Verdict::ok);
  EXPECT_EQ(worst(judge(ClockFacts{.now = 1000, .read_ns = 30})), Verdict::warn);
  EXPECT_EQ(worst(judge(ClockFacts{.now = 1'800'000'000, .source = "hpet", .read_ns = 1500})), Verdict::warn);
  EXPECT_EQ(worst(judge(ClockFacts{.now = 1'800'000'000, .goes_forward = false})), Verdict::fail);
  EXPECT_EQ(worst(judge(DiskFacts{.path = "/tmp", .free_bytes = std::uint64_t{5} << 30})), Verdict::ok);
  EXPECT_EQ(worst(judge(DiskFacts{.path = "/tmp", .free_bytes = std::uint64_t{100} << 20})), Verdict::warn);
  EXPECT_EQ(worst(judge(DiskFacts{.path = "/tmp", .free_bytes = 1000})), Verdict::fail);
  EXPECT_EQ(worst(judge(DiskFacts{.path = "/tmp", .problem = "Read-only file system"})), Verdict::fail);
}

TEST(Doctor, Hosts) {
  HostFacts good{
      .host = "b", .address = "10.0.0.2", .own_address = "10.0.0.1", .interface_name = "eth0", .version = "0.1.0"};
  EXPECT_EQ(worst(judge(good, "0.1.0")), Verdict::ok);
  EXPECT_TRUE(says(judge(good, "0.1.0"), "b (10.0.0.2) from 10.0.0.1 on eth0"));
  EXPECT_EQ(worst(judge(good, "0.2.0")), Verdict::fail);
  for (std::string HostFacts::* problem :
       {&HostFacts::resolve_problem, &HostFacts::shell_problem, &HostFacts::there_problem, &HostFacts::back_problem}) {
    HostFacts bad = good;
    bad.*problem = "it went wrong";
    EXPECT_EQ(worst(judge(bad, "0.1.0")), Verdict::fail);
    EXPECT_TRUE(says(judge(bad, "0.1.0"), "it went wrong"));
  }
  EXPECT_EQ(worst(judge(HostFacts{.host = "b", .address = "10.0.0.2"}, "0.1.0")), Verdict::fail);
}

TEST(Doctor, EveryCheckOfThisMachineReturnsAResult) {
  for (const Check& check : checks()) {
    SCOPED_TRACE(check.name);
    const Findings findings = check.run();
    EXPECT_FALSE(findings.empty());
    worst(findings);
  }
}

TEST(JobTable, FitsTheTerminal) {
  using launch::JobInfo;
  std::vector<JobInfo> jobs = {
      {.id = "1234-abcd",
       .command = "./train --data /somewhere/far/away --epochs 100 --batch 64 --lr 0.001 --more of --this",
       .world_size = 8,
       .hosts = {"node-with-a-long-name.example.org", "b", "c"},
       .pid = 4194304,
       .started = 1000,
       .ranks_up = 7,
       .restarts = 2},
      {.id = std::string(200, 'j'),
       .command = "x\033[31m\n",
       .world_size = 100'000,
       .pid = 2,
       .started = 90'000,
       .ranks_up = 100'000}};
  for (const int width : {80, 110}) {
    const std::string table = launch::job_table(jobs, 100'000, width);
    std::istringstream lines(table);
    int count = 0;
    for (std::string line; std::getline(lines, line); ++count)
      EXPECT_LE(line.size(), static_cast<std::size_t>(width)) << line;
    EXPECT_EQ(count, 3);
    EXPECT_NE(table.find("7/8"), std::string::npos);
    EXPECT_NE(table.find("1d03h"), std::string::npos) << table;
    EXPECT_NE(table.find("./train"), std::string::npos);
    EXPECT_EQ(table.find('\033'), std::string::npos);
  }
  EXPECT_NE(launch::job_table(jobs, 100'000, 0).find("--more of --this"), std::string::npos);
  EXPECT_EQ(launch::elapsed_text(-5), "0s");
  EXPECT_EQ(launch::elapsed_text(59), "59s");
  EXPECT_EQ(launch::elapsed_text(187), "3m07s");
  EXPECT_EQ(launch::elapsed_text(8100), "2h15m");
}

}  // namespace
}  // namespace maniple::doctor
