// What workers write arrives: whole lines, all of them, in files too.
#include <gtest/gtest.h>

#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

#include <fstream>
#include <iterator>
#include <sstream>

#include <fmt/format.h>

#include "harness/temporary_directory.h"
#include "launch/launched.h"

namespace maniple::launched {
namespace {

using harness::TemporaryDirectory;

std::string contents(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

void expect_flood(int ranks, long bytes) {
  const TemporaryDirectory folder;
  Launched launched({"run", "-n", std::to_string(ranks), "--log-dir", folder.path() + "/deep/logs", worker_program(),
                     "flood", std::to_string(bytes)});
  ASSERT_EQ(launched.wait(240), 0);
  std::vector<long> next(static_cast<std::size_t>(ranks), 0);
  std::istringstream in(launched.out());
  for (std::string line; std::getline(in, line);) {
    int shown = -1, rank = -1;
    long number = -1;
    char rest[64] = "";
    ASSERT_EQ(std::sscanf(line.c_str(), "[rank %d] %d:%ld:%63s", &shown, &rank, &number, rest), 4) << line;
    ASSERT_EQ(shown, rank);
    ASSERT_EQ(number, next[static_cast<std::size_t>(rank)]++);
    ASSERT_STREQ(rest, "0123456789abcdefghijklmnopqrstuvwxyz");
  }
  for (int rank = 0; rank < ranks; ++rank) {
    const std::string file = contents(fmt::format("{}/deep/logs/rank_{}.log", folder.path(), rank));
    EXPECT_GE(static_cast<long>(file.size()), bytes);
    EXPECT_EQ(std::count(file.begin(), file.end(), '\n'), next[static_cast<std::size_t>(rank)]);
    EXPECT_EQ(file.find("[rank"), std::string::npos) << "files hold what the worker wrote";
  }
}

TEST(Logs, AFloodArrivesWhole) { expect_flood(4, 2 << 20); }

// Run by the entry launch_flood_test, in the long mode of the tests.
TEST(Logs, DISABLED_AHundredMegabytesFromEachOfFourRanks) { expect_flood(4, 100 << 20); }

TEST(Logs, LastLineWithoutABreakAndOddBytes) {
  const Result result = maniple({"run", "sh", "-c", "printf 'a\\0b\\377\\nlast'"});
  EXPECT_EQ(result.out, std::string("[rank 0] a\0b\377\n[rank 0] last\n", 28));
}

// Neither joins a group nor flushes: what it prints is seen at once, and not lost when it aborts.
TEST(Logs, LinesComeAsTheyArePrintedAndSurviveAnAbort) {
  const TemporaryDirectory folder;
  const std::string go = folder.path() + "/go";
  Launched launched({"run", "-n", "2", "--log-dir", folder.path(), worker_program(), "print", go},
                    {.env = {{"TERM", "xterm"}, {"NO_COLOR", ""}}});
  ASSERT_TRUE(launched.wait_for("first", 60, 2)) << launched.out() << launched.err();
  EXPECT_EQ(launched.count("terminal 1 colour 1 term dumb\n"), 2) << launched.out() << "it ends in a pipe: no colours";
  std::ofstream(go) << "now";
  EXPECT_EQ(launched.wait(), 134) << launched.err();
  EXPECT_NE(launched.out().find("last\n"), std::string::npos) << launched.out();
  EXPECT_NE(contents(folder.path() + "/rank_0.log").find("first\n"), std::string::npos);
}

TEST(Logs, StandardOutputMayBeAPipe) {
  const TemporaryDirectory folder;
  const std::string go = folder.path() + "/go";
  std::ofstream(go) << "now";
  const Result result = maniple({"run", "--stdout", "pipe", worker_program(), "print", go},
                                {.env = {{"TERM", "xterm"}, {"NO_COLOR", "no"}}});
  EXPECT_EQ(result.code, 134) << result.err;
  EXPECT_EQ(result.out, "") << "the C library keeps lines for a pipe, and an abort loses them";
  EXPECT_EQ(
      maniple({"run", "--stdout", "pipe", "sh", "-c", "test -t 1 || echo $TERM"}, {.env = {{"TERM", "xterm"}}}).out,
      "[rank 0] xterm\n");
  EXPECT_EQ(maniple({"run", "--env", "TERM=vt100", "sh", "-c", "test -t 1 && echo $TERM"}).out, "[rank 0] vt100\n");
  EXPECT_EQ(maniple({"run", "--stdout", "file", "true"}).code, 2);
}

// A process that a worker leaves behind holds its output open: what it writes before it is ended is shown, and the job
// ends.
TEST(Logs, AGrandchildKeepsTheOutputOpen) {
  const TemporaryDirectory folder;
  const Result result = maniple({"run", "--cwd", folder.path(), "sh", "-c",
                                 "(trap 'echo still here; exit' TERM; touch ready; while :; do sleep 0.05; done) & "
                                 "while [ ! -e ready ]; do sleep 0.05; done; echo done"});
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_NE(result.out.find("[rank 0] done\n"), std::string::npos) << result.out;
  EXPECT_NE(result.out.find("[rank 0] still here\n"), std::string::npos) << result.out;
}

TEST(Logs, VeryLongLinesComeInPieces) {
  const Result result = maniple({"run", "sh", "-c", "head -c 300000 /dev/zero | tr '\\0' x; echo; echo end"});
  EXPECT_EQ(std::count(result.out.begin(), result.out.end(), 'x'), 300'000);
  EXPECT_NE(result.out.find("[rank 0] end\n"), std::string::npos);
}

TEST(Logs, WhatIsShown) {
  const std::vector<std::string> program = {"sh", "-c", "echo $RANK out; echo $RANK err >&2"};
  const auto run = [&](std::vector<std::string> options) {
    options.insert(options.begin(), {"run", "-n", "3"});
    options.insert(options.end(), program.begin(), program.end());
    return maniple(options);
  };
  Result result = run({"--only-rank", "1"});
  EXPECT_EQ(result.out, "[rank 1] 1 out\n");
  EXPECT_EQ(result.err, "[rank 1] 1 err\n");
  result = run({"--only-rank", "1", "--only-rank", "2", "--no-prefix"});
  EXPECT_TRUE(result.out == "1 out\n2 out\n" || result.out == "2 out\n1 out\n") << result.out;
  result = run({"--quiet"});
  EXPECT_EQ(result.out + result.err, "");
  result = run({"--color", "always", "--only-rank", "0"});
  EXPECT_EQ(result.out, "\x1b[36m[rank 0]\x1b[0m 0 out\n");
}

TEST(Logs, ATerminalHasColoursAndAStatusLine) {
  const TemporaryDirectory folder;
  Launched launched(
      {"run", "-n", "2", "sh", "-c", "echo hello; while ! [ -e $STOP ]; do sleep 0.05; done"},
      {.env = {{"STOP", folder.path() + "/stop"}, {"TERM", "xterm"}, {"NO_COLOR", ""}}, .terminal = true});
  EXPECT_TRUE(launched.wait_for("maniple: 2 of 2 ranks up, 0:00:0"));
  std::ofstream(folder.path() + "/stop") << "now";
  EXPECT_EQ(launched.wait(), 0);
  EXPECT_NE(launched.out().find("\x1b[36m[rank 0]\x1b[0m hello"), std::string::npos) << launched.out();
  EXPECT_NE(launched.out().find("\r\x1b[K"), std::string::npos);
  Launched plain({"run", "sh", "-c", "echo hello"}, {.env = {{"NO_COLOR", "1"}, {"TERM", "xterm"}}, .terminal = true});
  EXPECT_EQ(plain.wait(), 0);
  EXPECT_NE(plain.out().find("[rank 0] hello"), std::string::npos);
  EXPECT_EQ(plain.out().find("\x1b[36m"), std::string::npos);
}

TEST(Logs, AClosedOutputEndsTheJob) {
  const std::string mark = new_mark();
  const Result result =
      maniple({"run", "sh", "-c", "\"$0\" run -n 2 --env " + mark + " yes | head -n 2; echo ${PIPESTATUS:-done}",
               maniple_program()});
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_TRUE(becomes_true([&] { return processes_with(mark).empty(); }));
}

/// A shell with job control and a terminal of its own runs this.
Result in_a_terminal(const std::string& commands) {
  Launched shell({"-qec", fmt::format("bash -c 'set -m; {}'", commands), "/dev/null"},
                 {.env = {{"TERM", "xterm"}, {"M", maniple_program()}}, .program = "/usr/bin/script"});
  const int code = shell.wait();
  return {.code = code, .out = shell.out(), .err = shell.err()};
}

// It neither draws over the shell's prompt nor takes what is typed there.
TEST(Logs, AJobInTheBackgroundLeavesTheTerminalAlone) {
  if (::access("/usr/bin/script", X_OK) != 0) GTEST_SKIP() << "no script";
  const Result front = in_a_terminal("$M run sleep 1.5");
  EXPECT_EQ(front.code, 0) << front.out << front.err;
  EXPECT_NE(front.out.find("1 of 1 ranks up"), std::string::npos) << front.out;
  const Result behind = in_a_terminal("$M run sleep 1.5 & wait; $M run cat & wait; echo over");
  EXPECT_EQ(behind.code, 0) << behind.out << behind.err;
  EXPECT_EQ(behind.out.find("ranks up"), std::string::npos) << behind.out;
  EXPECT_NE(behind.out.find("over"), std::string::npos) << behind.out;
}

/// Of many looks at the process until it ends: how often it ran or wanted to. Load makes no difference to one that
/// spins.
double share_of_work_until_the_end(pid_t pid) {
  int looks = 0, working = 0;
  becomes_true([&] {
    const char state = state_of(pid);
    ++looks;
    if (state == 'R') ++working;
    return state == '\0' || state == 'Z';
  });
  return static_cast<double>(working) / looks;
}

// `maniple run ... | head -1`: the workers have 3 s to end and use them up; the launcher has nothing to do meanwhile,
// and does nothing.
TEST(Logs, AReaderThatGoesCostsNoProcessorTime) {
  const TemporaryDirectory folder;
  const std::string mark = new_mark(), go = folder.path() + "/go";
  Launched launched({"run", "-n", "2", "--grace", "3", "--env", mark, "sh", "-c",
                     "trap '' TERM PIPE; echo first; while [ ! -e " + go +
                         " ]; do sleep 0.05; done; seq 1 100000; while :; do sleep 0.5; done"});
  ASSERT_TRUE(launched.wait_for("first", 60, 2)) << launched.err();
  const pid_t agent = launched.agent();
  launched.close_output();
  std::ofstream(go) << "now";
  EXPECT_LT(share_of_work_until_the_end(agent), 0.5);
  EXPECT_EQ(launched.wait(), 141) << launched.err();
  EXPECT_TRUE(becomes_true([&] { return processes_with(mark).empty(); }));
}

TEST(Logs, AWorkerThatWritesForEverEndsWithItsReader) {
  const std::string mark = new_mark();
  Launched launched({"run", "-n", "2", "--env", mark, "yes"});
  ASSERT_TRUE(launched.wait_for("[rank 1] y")) << launched.err();
  launched.close_output();
  EXPECT_EQ(launched.wait(), 141) << launched.err();
  EXPECT_TRUE(becomes_true([&] { return processes_with(mark).empty(); }));
}

TEST(Logs, AFullDiskCostsOneWarning) {
  const TemporaryDirectory folder;
  if (::mount("none", folder.path().c_str(), "tmpfs", 0, "size=64k") != 0)
    GTEST_SKIP() << "needs root to mount a small file system";
  const Result result = maniple({"run", "-n", "2", "--log-dir", folder.path(), worker_program(), "flood", "300000"});
  ::umount2(folder.path().c_str(), MNT_DETACH);
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_GE(result.out.size(), 600'000u);
  EXPECT_NE(result.err.find("the job goes on: No space left on device"), std::string::npos) << result.err;
  EXPECT_EQ(std::count(result.err.begin(), result.err.end(), '\n'), 1) << result.err;
}

}  // namespace
}  // namespace maniple::launched
