// Plan, rows, table and goals of `maniple bench gpu`, without a GPU.
#include "tools/bench/gpu_bench.h"

#include <sys/stat.h>

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include <cstdlib>
#include <fstream>
#include <set>

namespace maniple::bench {
namespace {

constexpr std::uint64_t kMib = std::uint64_t{1} << 20;

GpuRow collective(const std::string& system, const std::string& kind, int ranks, bool mps, std::uint64_t bytes,
                  double us) {
  GpuRow row;
  row.what = "all_reduce";
  row.system = system;
  row.kind = kind;
  row.ranks = ranks;
  row.mps = mps;
  row.bytes = bytes;
  row.us = us;
  return row;
}

GpuRow step(const std::string& model, const std::string& system, const std::string& kind, int ranks, double us) {
  GpuRow row;
  row.what = model;
  row.system = system;
  row.kind = kind;
  row.ranks = ranks;
  row.mps = ranks > 1;
  row.us = us;
  row.items = 128.0 * ranks;
  return row;
}

const GpuGoal& goal_of(const std::vector<GpuGoal>& goals, const std::string& text) {
  for (const GpuGoal& goal : goals) {
    if (goal.what.find(text) != std::string::npos) return goal;
  }
  throw InvalidArgument("no goal " + text);
}

TEST(GpuBench, MeasurementNamesAreUnique) {
  std::set<std::string> names;
  int usual = 0;
  for (const GpuMeasurement& one : gpu_measurements()) {
    EXPECT_TRUE(names.insert(one.name()).second) << one.name();
    usual += one.by_default ? 1 : 0;
  }
  for (const char* name : {"all_reduce cuda, 2 ranks, MPS", "all_reduce cuda, 1 rank", "all_reduce limit, 8 ranks, MPS",
                           "all_reduce nccl, 2 ranks", "resnet50 maniple, 4 ranks, MPS", "mlp torch, 1 rank",
                           "gpt2 maniple over nccl, 1 rank"})
    EXPECT_TRUE(names.count(name)) << name;
  EXPECT_EQ(picked_measurements("").size(), static_cast<std::size_t>(usual));
  EXPECT_LT(usual, static_cast<int>(names.size()));
}

TEST(GpuBench, OnlyPicksByName) {
  for (const GpuMeasurement& one : picked_measurements("cuda, [48] ranks")) {
    EXPECT_EQ(one.subject, "cuda");
    EXPECT_GE(one.ranks, 4);
  }
  EXPECT_EQ(picked_measurements("mlp t*").size(), 1u);
  EXPECT_THROW(picked_measurements("frobnicate"), InvalidArgument);
}

// Without the measurement behind it, a goal could never be reached by a default run.
TEST(GpuBench, DefaultRunHasARowForEveryGoal) {
  std::vector<GpuRow> rows;
  for (const GpuMeasurement& one : picked_measurements("")) {
    using Program = GpuMeasurement::Program;
    for (const std::uint64_t bytes : {std::uint64_t{4}, 64 * kMib, 256 * kMib}) {
      if (one.program == Program::limit)
        rows.push_back(collective("limit", "registered", one.ranks, one.mps, bytes, 100));
      if (one.program != Program::collectives) continue;
      for (const char* kind : {"registered", "ordinary"})
        rows.push_back(collective(one.subject, kind, one.ranks, one.mps, bytes, 100));
      if (one.subject == "nccl") rows.push_back(collective("bare NCCL", "ordinary", one.ranks, one.mps, bytes, 100));
    }
    const bool torch = one.program == Program::torch;
    if (!torch && one.program != Program::ddp) continue;
    for (const char* kind : {"plain", "DDP", "DDP best"})
      rows.push_back(step(one.subject, torch ? "torch" : "maniple", kind, one.ranks, 30000));
  }
  for (const GpuGoal& goal : gpu_goals(rows)) {
    EXPECT_FALSE(goal.measured.empty()) << goal.what;
    EXPECT_FALSE(goal.beside.empty()) << goal.what;
  }
  for (const GpuGoal& goal : gpu_goals({})) {
    EXPECT_TRUE(goal.measured.empty()) << goal.what;
    EXPECT_FALSE(goal.reached) << goal.what;
  }
}

TEST(GpuBench, GoalsAreReachedOnTheirOwnSide) {
  const auto overhead = [](double ddp_us) {
    const std::vector<GpuRow> rows = {step("resnet50", "maniple", "plain", 1, 30000),
                                      step("resnet50", "maniple", "DDP", 1, ddp_us)};
    return goal_of(gpu_goals(rows), "resnet50: DDP of 1 rank");
  };
  EXPECT_TRUE(overhead(30200).reached);
  EXPECT_FALSE(overhead(30400).reached);
  EXPECT_EQ(overhead(30300).measured, "+1.00 %");
  EXPECT_TRUE(overhead(29000).reached) << "faster is fine";

  const auto latency = [](double us) {
    return goal_of(gpu_goals({collective("cuda", "registered", 2, true, 4, us)}), "2 ranks, MPS, 4 B").reached;
  };
  EXPECT_TRUE(latency(8.9));
  EXPECT_FALSE(latency(9.1));

  const auto share = [](double us) {
    const std::vector<GpuRow> rows = {collective("cuda", "registered", 8, true, 256 * kMib, us),
                                      collective("limit", "registered", 8, true, 256 * kMib, 1000)};
    return goal_of(gpu_goals(rows), "8 ranks, MPS, 256 MiB").reached;
  };
  EXPECT_TRUE(share(1100));
  EXPECT_FALSE(share(1200));

  const auto images = [](double us) {
    const std::vector<GpuRow> rows = {step("resnet50", "maniple", "plain", 1, 30000),
                                      step("resnet50", "maniple", "DDP", 4, us)};
    return goal_of(gpu_goals(rows), "resnet50: 4 ranks").reached;
  };
  EXPECT_TRUE(images(4 * 30000));
  EXPECT_FALSE(images(4 * 30000 * 1.05));
}

TEST(GpuBench, ReadsARow) {
  const GpuRow row = parse_gpu_row(
      R"({"case": "all_reduce", "system": "cuda", "kind": "registered", "ranks": 2, "bytes": 268435456, "us": 310.5, )"
      R"("enqueue_us": 4})");
  EXPECT_EQ(row.what, "all_reduce");
  EXPECT_EQ(row.bytes, 256 * kMib);
  EXPECT_NEAR(row.gigabytes_per_second(), 864.5, 0.1);
  for (const char* wrong : {"", "{", "[]", R"({"case": "all_reduce"})"}) {
    EXPECT_THROW(parse_gpu_row(wrong), InvalidArgument) << wrong;
  }
}

TEST(GpuBench, TableShowsFiguresOrReasons) {
  std::vector<GpuRow> rows = {step("resnet50", "torch", "plain", 1, 30000),
                              step("resnet50", "torch", "DDP best", 1, 33000)};
  EXPECT_NE(gpu_table_line(rows[1], rows).find("+10.00 %"), std::string::npos) << gpu_table_line(rows[1], rows);
  EXPECT_NE(gpu_table_line(rows[0], rows).find("4267/s"), std::string::npos) << gpu_table_line(rows[0], rows);
  EXPECT_LE(gpu_table_header().size(), 90u);
  GpuRow missing = rows[0];
  missing.missing = "no python3 here has PyTorch";
  EXPECT_NE(gpu_table_line(missing, rows).find("not measured: no python3"), std::string::npos);
}

TEST(GpuBench, ReportHoldsRowsAndGoals) {
  const std::vector<GpuRow> rows = {collective("cuda", "registered", 2, true, 256 * kMib, 300)};
  const auto report = nlohmann::json::parse(gpu_report_text({}, "a GPU", rows));
  EXPECT_EQ(report.at("machine").at("gpu"), "a GPU");
  ASSERT_EQ(report.at("rows").size(), 1u);
  EXPECT_EQ(report.at("rows")[0].at("mps"), true);
  EXPECT_EQ(report.at("goals").size(), gpu_goals(rows).size());
}

void write_program(const std::string& path, const std::string& script) {
  std::ofstream(path) << "#!/bin/sh\n" << script;
  ASSERT_EQ(::chmod(path.c_str(), 0700), 0);
}

/// A machine that looks as if it had a GPU and an MPS daemon; `maniple run` is a script.
class GpuBenchRun : public ::testing::Test {
 protected:
  GpuBenchRun() {
    for (const char* name : {"CUDA_VISIBLE_DEVICES", "CUDA_MPS_PIPE_DIRECTORY"}) ::setenv(name, "0", 1);
    testbed_.program = scratch_.file("maniple");
    testbed_.libexec = scratch_.file("");
    testbed_.scratch = &scratch_;
  }
  ~GpuBenchRun() override {
    for (const char* name : {"CUDA_VISIBLE_DEVICES", "CUDA_MPS_PIPE_DIRECTORY"}) ::unsetenv(name);
  }
  std::vector<GpuRow> run(const std::string& only) {
    return bench_.run(picked_measurements(only), [](const GpuRow&, const std::vector<GpuRow>&) {});
  }

  SignalWatch watch_;
  ScratchDirectory scratch_;
  Testbed testbed_;
  GpuBench bench_{testbed_, watch_, [](const std::string&) {}};
};

TEST_F(GpuBenchRun, TakesRowsAndRecordsHowTheyWereMeasured) {
  write_program(scratch_.file("limit_gpu"), "");
  write_program(testbed_.program,
                "echo '{\"gpu\": \"some GPU\"}'\n"
                "echo something else\n"
                "[ \"$CUDA_VISIBLE_DEVICES $1 $2 $3\" = '0 run -n 1' ] || exit 1\n"
                "case \"$*\" in *' --share-gpu '*'/limit_gpu 4 '*) ;; *) exit 1 ;; esac\n"
                "echo '{\"case\": \"all_reduce\", \"system\": \"limit\", \"kind\": \"registered\", \"ranks\": 4, "
                "\"bytes\": 4, \"us\": 13}'\n");
  const std::vector<GpuRow> rows = run("limit, 4 ranks");
  ASSERT_EQ(rows.size(), 1u);
  EXPECT_EQ(rows[0].missing, "");
  EXPECT_TRUE(rows[0].mps);
  EXPECT_DOUBLE_EQ(rows[0].us, 13);
  EXPECT_EQ(bench_.gpu(), "some GPU");
  EXPECT_FALSE(bench_.failed());
}

TEST_F(GpuBenchRun, AFailureIsARowAndTheRestGoesOn) {
  write_program(scratch_.file("limit_gpu"), "");
  write_program(testbed_.program, "echo 'maniple: before' >&2\necho 'limit_gpu: out of memory' >&2\nexit 3\n");
  const std::vector<GpuRow> rows = run("limit, [48] ranks");
  ASSERT_EQ(rows.size(), 2u);
  EXPECT_EQ(rows[0].missing, "failed: limit_gpu: out of memory");
  EXPECT_EQ(rows[1].ranks, 8);
  EXPECT_TRUE(bench_.failed());
  ASSERT_EQ(bench_.errors().size(), 2u);
  EXPECT_NE(bench_.errors()[0].find("all_reduce limit, 4 ranks, MPS: "), std::string::npos) << bench_.errors()[0];
}

TEST_F(GpuBenchRun, WhatIsMissingIsNamed) {
  const std::vector<GpuRow> rows = run("mlp maniple, 1 rank");
  ASSERT_EQ(rows.size(), 1u);
  EXPECT_NE(rows[0].missing.find("this build has no ddp_gpu_worker; it needs LibTorch with CUDA"), std::string::npos)
      << rows[0].missing;
  EXPECT_FALSE(bench_.failed());
  ::setenv("CUDA_VISIBLE_DEVICES", "", 1);
  EXPECT_THROW(run("mlp"), InvalidArgument);
}

}  // namespace
}  // namespace maniple::bench
