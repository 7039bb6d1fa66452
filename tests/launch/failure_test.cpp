// What happens when something ends that should not: ranks or the launcher.
#include <gtest/gtest.h>

#include <sys/stat.h>
#include <unistd.h>

#include <csignal>
#include <fstream>
#include <regex>

#include <fmt/format.h>

#include "harness/temporary_directory.h"
#include "launch/launched.h"

namespace maniple::launched {
namespace {

using harness::TemporaryDirectory;

TEST(Failure, ExitCodeOfTheFirst) {
  const std::string mark = new_mark();
  const Result result =
      maniple({"run", "-n", "3", "--env", mark, "sh", "-c",
               "if [ $RANK = 1 ]; then echo one; echo 'ValueError: wrong' >&2; exit 7; fi; sleep 1000"});
  EXPECT_EQ(result.code, 7);
  EXPECT_NE(result.err.find("maniple: rank 1 of 3 failed first, on host "), std::string::npos) << result.err;
  EXPECT_NE(result.err.find("exit code 7"), std::string::npos) << result.err;
  EXPECT_NE(result.err.find("error: ValueError: wrong"), std::string::npos) << result.err;
  EXPECT_NE(result.err.find("maniple:     one"), std::string::npos) << result.err;
  EXPECT_EQ(result.err.find("failed first", result.err.find("failed first") + 1), std::string::npos) << "once";
  EXPECT_TRUE(processes_with(mark).empty()) << "all are ended when the launcher ends";
}

TEST(Failure, SignalsAreNamed) {
  const Result result = maniple({"run", "-n", "2", "sh", "-c", "[ $RANK = 1 ] && kill -SEGV $$; sleep 1000"});
  EXPECT_EQ(result.code, 139);
  EXPECT_NE(result.err.find("signal SIGSEGV (segmentation fault)"), std::string::npos) << result.err;
  const Result killed = maniple({"run", "sh", "-c", "kill -KILL $$"});
  EXPECT_EQ(killed.code, 137);
  EXPECT_NE(killed.err.find("signal SIGKILL (killed)\n"), std::string::npos) << "no memory was short: " << killed.err;
}

// A crash says where: its stack is among the last lines of the report, and the signal ends the rank as it always does.
TEST(Failure, ACrashHasAStack) {
  const Result result = maniple({"run", "-n", "2", worker_program(), "crash", "1"});
  EXPECT_EQ(result.code, 139) << result.err;
  EXPECT_NE(result.err.find("maniple:     maniple: rank 1: SIGSEGV at address 0x8; the stack of its thread"),
            std::string::npos)
      << result.err;
  EXPECT_NE(result.err.find("maniple:     " + worker_program() + "("), std::string::npos) << result.err;
  const Result without = maniple({"run", "-n", "2", "--env", "MANIPLE_CRASH_TRACE=0", worker_program(), "crash", "1"});
  EXPECT_EQ(without.code, 139) << without.err;
  EXPECT_EQ(without.err.find("the stack of its thread"), std::string::npos) << without.err;
}

// Rank 2 dies inside a collective: the others say so, but it is the one that is shown.
TEST(Failure, TheCauseIsShownNotTheVictims) {
  const Result result = maniple({"run", "-n", "4", worker_program(), "die", "2"});
  EXPECT_EQ(result.code, 137) << result.err;
  EXPECT_NE(result.err.find("maniple: rank 2 of 4 failed first"), std::string::npos) << result.err;
  const auto lost = result.err.find(" is lost: ");
  EXPECT_EQ(lost, result.err.rfind(" is lost: ")) << "said once: " << result.err;
}

// The cause is not seen to end: it is stopped. The survivors that lost it, or waited for it until their time-out, are
// not the headline.
void expect_stopped_rank_is_the_cause(const std::string& heartbeat, const std::string& limit) {
  SCOPED_TRACE(heartbeat + ", " + limit);
  const TemporaryDirectory folder;
  const std::string mark = new_mark();
  Launched launched({"run", "-n", "3", "--env", mark, "--env", heartbeat, "--env", limit, worker_program(), "until",
                     folder.path() + "/end"});
  ASSERT_TRUE(launched.wait_for("joined", 60, 3)) << launched.err();
  std::string stopped;
  for (const pid_t pid : processes_with(mark)) {
    std::ifstream file(fmt::format("/proc/{}/environ", pid), std::ios::binary);
    for (std::string word; std::getline(file, word, '\0');) {
      if (word == "RANK=1" && ::kill(pid, SIGSTOP) == 0) stopped = word;
    }
  }
  ASSERT_EQ(stopped, "RANK=1");
  EXPECT_EQ(launched.wait(), 1) << launched.err();
  EXPECT_NE(
      launched.err().find("maniple: rank 1 of 3 failed first, but has not ended (stopped, cut off, or busy?); rank "),
      std::string::npos)
      << launched.err();
  EXPECT_TRUE(processes_with(mark).empty());
}

TEST(Failure, AStoppedRankIsTheCause) {
  expect_stopped_rank_is_the_cause("MANIPLE_HEARTBEAT=0.5", "CALL_TIMEOUT=1800");
  expect_stopped_rank_is_the_cause("MANIPLE_HEARTBEAT=0", "CALL_TIMEOUT=5");
}

// All ranks report the same mismatch: one shows it, the others are listed, and the report does not repeat it in the
// last lines.
TEST(Failure, AMismatchIsShownOnceAndSummedUp) {
  const Result result = maniple({"run", "-n", "3", worker_program(), "mismatch", "1"});
  EXPECT_EQ(result.code, 1) << result.err;
  int count = 0;
  const std::string text = "ranks called different things";
  for (auto at = result.err.find(text); at != std::string::npos; at = result.err.find(text, at + 1)) ++count;
  EXPECT_EQ(count, 2) << "by a rank, and as the error of the report: " << result.err;
  EXPECT_NE(result.err.find(" reported the same mismatch in call #"), std::string::npos) << result.err;
  // The rank of the headline is not listed once more.
  std::smatch headline, list;
  ASSERT_TRUE(std::regex_search(result.err, headline, std::regex("maniple: rank (\\d) of 3 failed first")));
  ASSERT_TRUE(std::regex_search(result.err, list, std::regex("maniple: ranks? ([0-9, ]+) reported the same")));
  EXPECT_EQ(list[1].str().find(headline[1].str()), std::string::npos) << result.err;
}

// Programs that print the error on standard output. What else they print there is shown.
TEST(Failure, AMismatchOnStandardOutputIsSummedUp) {
  const Result result = maniple({"run", "-n", "3", "--grace", "60", worker_program(), "mismatch", "1", "out"});
  EXPECT_EQ(result.code, 1) << result.err;
  const std::string text = "ranks called different things";
  const auto first = result.out.find(text);
  EXPECT_NE(first, std::string::npos) << result.out;
  EXPECT_EQ(first, result.out.rfind(text)) << "one rank shows it: " << result.out;
  EXPECT_NE(result.err.find(" reported the same mismatch in call #"), std::string::npos) << result.err;
  for (const char* line : {"] caught\n", "] saved\n"}) {
    for (int rank = 0; rank < 3; ++rank)
      EXPECT_NE(result.out.find("[rank " + std::to_string(rank) + line), std::string::npos) << rank << result.out;
  }
}

// What ranks report through their descriptor decides, not what they print; one of them is shown.
TEST(Failure, ReportedLossesAreConsequences) {
  const TemporaryDirectory folder;
  const Result result = maniple({"run", "-n", "4", worker_program(), "report", "2", folder.path() + "/pid"});
  EXPECT_EQ(result.code, 137) << result.err;
  EXPECT_NE(result.err.find("maniple: rank 2 of 4 failed first"), std::string::npos) << result.err;
  const auto lost = result.err.find("rank 2 is lost: its process ended");
  EXPECT_NE(lost, std::string::npos) << result.err;
  EXPECT_EQ(lost, result.err.rfind("rank 2 is lost: its process ended")) << "shown once: " << result.err;
  EXPECT_NE(result.err.find("reported the same loss of rank 2"), std::string::npos) << result.err;
  // Ranks that go on are shown, all of them.
  const Result recovered = maniple({"run", "-n", "3", worker_program(), "recover", "7"});
  EXPECT_EQ(recovered.code, 0) << recovered.err;
  for (const char* line : {"[rank 0] rank 0 goes on\n", "[rank 1] rank 1 goes on\n", "[rank 2] rank 2 goes on\n"})
    EXPECT_NE(recovered.err.find(line), std::string::npos) << line << recovered.err;
  EXPECT_EQ(recovered.err.find("reported the same loss"), std::string::npos) << recovered.err;
  // Nobody has died: then the first of them is shown, with what it reported.
  const Result none = maniple({"run", "-n", "2", worker_program(), "report", "7"});
  EXPECT_EQ(none.code, 1) << none.err;
  EXPECT_NE(none.err.find("/2] rank 7 is lost: its process ended\n"), std::string::npos) << none.err;
  EXPECT_NE(none.err.find("maniple:   error: [barrier #1 world rank "), std::string::npos) << none.err;
}

// The others would wait for it in init() until the time-out of half an hour.
TEST(Failure, ARankThatExitsBeforeInitIsNamedAtOnce) {
  const Result result = maniple({"run", "-n", "3", worker_program(), "leave", "1"});
  EXPECT_EQ(result.code, 1) << result.err;
  EXPECT_NE(result.err.find("maniple: rank 1 of 3 failed first, on host "), std::string::npos) << result.err;
  EXPECT_NE(result.err.find("exit code 0 before it called init(), where rank "), std::string::npos) << result.err;
  EXPECT_NE(result.err.find(" waits for it: every rank must call init()"), std::string::npos) << result.err;
  const Result smaller = maniple({"run", "-n", "3", "--env", "JOIN_WORLD_SIZE=2", worker_program(), "leave", "2"});
  EXPECT_EQ(smaller.code, 0) << smaller.err << "the two do not need the third";
}

// The others lose it. Whether it left its group first or not, it did not fail, and it does not run any more.
TEST(Failure, ARankThatEndsEarlyWithZeroIsNamed) {
  for (const char* word : {"quit", "part", "cascade"}) {
    const Result result = maniple({"run", "-n", "3", worker_program(), word, "1"});
    EXPECT_EQ(result.code, 1) << word << result.err;
    EXPECT_NE(result.err.find("maniple: rank 1 of 3 ended early, on host "), std::string::npos) << word << result.err;
    EXPECT_NE(result.err.find(": exit code 0, while other ranks waited for it; rank "), std::string::npos)
        << word << result.err;
    EXPECT_EQ(result.err.find("failed first"), std::string::npos) << word << result.err;
  }
}

TEST(Failure, RanksThatIgnoreSigtermAreKilled) {
  const std::string mark = new_mark();
  const Result result = maniple({"run", "-n", "2", "--env", mark, "sh", "-c",
                                 "[ $RANK = 1 ] && exit 3; trap '' TERM; while :; do sleep 1000; done"});
  EXPECT_EQ(result.code, 3);
  EXPECT_TRUE(processes_with(mark).empty());
}

// What started the launcher may ignore the ends of its own children, and that is inherited.
TEST(Failure, EndsAreSeenWhereTheyWereIgnored) {
  Launched launched(
      {"-c",
       "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])",
       maniple_program(), "run", "sh", "-c", "exit 3"},
      {.program = "/usr/bin/python3"});
  EXPECT_EQ(launched.wait(), 3) << launched.err();
}

TEST(Failure, NothingIsLeftBehindWhenAllGoesWell) {
  const std::string mark = new_mark();
  const Result result =
      maniple({"run", "-n", "2", "--env", mark, "sh", "-c", "sleep 1000 & setsid sleep 1000 & exit 0"});
  EXPECT_EQ(result.code, 0);
  EXPECT_TRUE(processes_with(mark).empty());
}

constexpr const char* kFamily = "setsid sh -c 'setsid sleep 1000 & sleep 1000' & sleep 1000 & echo up; wait";

TEST(Failure, TheLauncherIsKilled) {
  const std::string mark = new_mark();
  Launched launched({"run", "-n", "2", "--env", mark, "sh", "-c", kFamily});
  ASSERT_TRUE(becomes_true([&] { return processes_with(mark).size() >= 10; }));
  launched.signal(SIGKILL);
  EXPECT_EQ(launched.wait(), 137);
  EXPECT_TRUE(becomes_true([&] { return processes_with(mark).empty(); }, 20)) << processes_with(mark).size();
}

TEST(Failure, TheAgentOrTheReaperIsKilled) {
  for (const bool reaper : {false, true}) {
    const std::string mark = new_mark();
    Launched launched({"run", "-n", "2", "--env", mark, "sh", "-c", kFamily});
    ASSERT_TRUE(becomes_true([&] { return processes_with(mark).size() >= 10; }));
    ::kill(reaper ? launched.reaper() : launched.agent(), SIGKILL);
    EXPECT_EQ(launched.wait(), 137);
    EXPECT_NE(launched.err().find("agent"), std::string::npos) << launched.err();
    EXPECT_TRUE(becomes_true([&] { return processes_with(mark).empty(); }, 20));
  }
}

std::string text_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

// Whichever two are killed at once, the third ends what is left; nothing of the job has the mark but the workers.
TEST(Failure, TwoOfTheLaunchersProcessesAreKilledTogether) {
  for (const int spared : {0, 1, 2}) {
    const std::string mark = new_mark();
    Launched launched({"run", "-n", "2", "--env", mark, "sh", "-c", kFamily});
    ASSERT_TRUE(becomes_true([&] { return processes_with(mark).size() >= 10; }));
    const pid_t all[] = {launched.pid(), launched.reaper(), launched.agent()};
    for (const pid_t pid : all) ::kill(pid, SIGSTOP);  // so that none can act on the end of another
    for (const pid_t pid : all) ASSERT_TRUE(becomes_true([&] { return state_of(pid) == 'T'; }));
    for (int i = 0; i < 3; ++i) ::kill(all[i], i == spared ? SIGCONT : SIGKILL);
    EXPECT_TRUE(becomes_true([&] { return processes_with(mark).empty(); }, 20)) << "spared " << spared;
    EXPECT_EQ(launched.wait(), 137) << "spared " << spared;
  }
}

// `pkill -KILL maniple`, also with -f, is for the launcher and spares the reaper, which then ends everything.
TEST(Failure, TheReaperHasAnotherName) {
  const std::string mark = new_mark();
  Launched launched({"run", "-n", "2", "--env", mark, "sleep", "1000"});
  ASSERT_TRUE(becomes_true([&] { return processes_with(mark).size() >= 2; }));
  const pid_t reaper = launched.reaper();
  const auto text = [&](const char* name) { return text_of(fmt::format("/proc/{}/{}", reaper, name)); };
  EXPECT_TRUE(becomes_true([&] { return text("comm") == "rank-reaper\n"; })) << text("comm");
  EXPECT_TRUE(becomes_true([&] { return text("cmdline").find("maniple") == std::string::npos; })) << text("cmdline");
  launched.signal(SIGTERM);
  EXPECT_EQ(launched.wait(), 143);
  EXPECT_EQ(state_of(reaper), '\0');
}

TEST(Restarts, WholeGroupWithANewGeneration) {
  const TemporaryDirectory folder, marks;
  // Rank 1 fails when rank 0 has spoken: what ends a group ends it at once.
  const Result result = maniple(
      {"run", "-n", "2", "--max-restarts", "2", "--restart-delay", "0.05", "--log-dir", folder.path(), "sh", "-c",
       "echo try $MANIPLE_RESTART_COUNT $MANIPLE_GENERATION; mark=" + marks.path() +
           "/$MANIPLE_RESTART_COUNT; "
           "[ $RANK = 1 ] || { touch $mark; exit 0; }; while ! [ -e $mark ]; do sleep 0.01; done; "
           "[ $MANIPLE_RESTART_COUNT -ge 2 ] || exit 5"});
  EXPECT_EQ(result.code, 0) << result.err;
  for (int i = 0; i < 3; ++i)
    EXPECT_NE(result.out.find(fmt::format("[rank 0] try {} {}\n", i, i)), std::string::npos) << result.out;
  EXPECT_NE(result.err.find("(restart 2 of 2)"), std::string::npos) << result.err;
  std::ifstream file(folder.path() + "/rank_0.log");
  const std::string log{std::istreambuf_iterator<char>(file), {}};
  EXPECT_NE(log.find("--- start 3 ---\ntry 2 2"), std::string::npos) << log;
}

TEST(Restarts, EndWithTheLastFailure) {
  const Result result = maniple({"run", "-n", "2", "--max-restarts", "1", "--restart-delay", "0.05", "sh", "-c",
                                 "exit $((4 + MANIPLE_RESTART_COUNT))"});
  EXPECT_EQ(result.code, 5);
}

TEST(Restarts, RanksJoinAgain) {
  const Result result =
      maniple({"run", "-n", "2", "--max-restarts", "1", "--restart-delay", "0.05", "sh", "-c",
               "if [ $MANIPLE_RESTART_COUNT = 0 ]; then exec \"$0\" die 1; fi; exec \"$0\" join", worker_program()});
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_NE(result.out.find("[rank 1] sum 1 of 2 restart 1\n"), std::string::npos) << result.out;
}

// So a process of the first that outlives it is refused by the second (InitFault.ZombieOfAnEarlierGeneration...).
TEST(Restarts, EachGenerationHasASecretOfItsOwn) {
  const TemporaryDirectory folder;
  const Result result = maniple(
      {"run", "-n", "2", "--max-restarts", "1", "--restart-delay", "0.05", "sh", "-c",
       "if [ $MANIPLE_RESTART_COUNT = 0 ]; then od -An -v -tx1 /proc/self/fd/$MANIPLE_SECRET_FD | tr -d ' \\n' "
       ">$DIR/s$RANK; exit 1; fi; "
       "od -An -v -tx1 /proc/self/fd/$MANIPLE_SECRET_FD | tr -d ' \\n' >$DIR/t$RANK; ! cmp -s $DIR/s$RANK $DIR/t$RANK"},
      {.env = {{"DIR", folder.path()}}});
  EXPECT_EQ(result.code, 0) << result.err;
}

/// A control group of version 1 that goes with its owner.
struct ControlGroup {
  explicit ControlGroup(const std::string& controller)
      : path(fmt::format("/sys/fs/cgroup/{}/maniple-test-{}", controller, ::getpid())) {
    made = ::mkdir(path.c_str(), 0755) == 0;
  }
  ~ControlGroup() {
    if (made) becomes_true([&] { return ::rmdir(path.c_str()) == 0; }, 20);
  }
  bool set(const std::string& file, const std::string& value) const {
    std::ofstream out(path + "/" + file);
    out << value;
    out.flush();
    return out.good();
  }
  std::string path;
  bool made = false;
};

TEST(Memory, TheKernelsKillIsToldApart) {
  const ControlGroup group("memory");
  if (!group.made || !group.set("memory.limit_in_bytes", "67108864"))
    GTEST_SKIP() << "no control group of version 1 here";
  // The job runs inside the group: a launcher in a launcher.
  const Result result =
      maniple({"run", "sh", "-c",
               "echo $$ >" + group.path + "/cgroup.procs; exec " + maniple_program() +
                   " run -n 2 sh -c '[ $RANK = 0 ] && exec sleep 1000; exec " + worker_program() + " eat'"});
  EXPECT_EQ(result.code, 137) << result.err;
  EXPECT_NE(result.err.find("rank 1 of 2 failed first"), std::string::npos) << result.err;
  EXPECT_NE(
      result.err.find("by the kernel's out-of-memory killer: the limit of its control group is 64 MiB, the peak was"),
      std::string::npos)
      << result.err;
}

// A worker in a small group of its own: the machine has memory enough, and is not named.
TEST(Memory, TheLimitOfAWorkersOwnGroupIsTold) {
  const ControlGroup group("memory");
  if (!group.made || !group.set("memory.limit_in_bytes", "67108864"))
    GTEST_SKIP() << "no control group of version 1 here";
  const Result result = maniple({"run", "-n", "2", "sh", "-c",
                                 "[ $RANK = 0 ] && exec sleep 1000; echo $$ >" + group.path + "/cgroup.procs; exec " +
                                     worker_program() + " eat"});
  EXPECT_EQ(result.code, 137) << result.err;
  EXPECT_EQ(result.err.find("the machine ran out of memory"), std::string::npos) << result.err;
  const auto says = [&](const char* text) { return result.err.find(text) != std::string::npos; };
  EXPECT_TRUE(says("the limit of its control group is 64 MiB, the peak was 64 MiB") ||
              says("a control group with a limit, or the machine, ran out of memory"))  // the log is not readable here
      << result.err;
}

// The kernel's text is "Resource temporarily unavailable", which is neither temporary nor helpful.
TEST(Failure, ALimitOfProcessesIsNamed) {
  const ControlGroup group("pids");
  if (!group.made) GTEST_SKIP() << "no control group of version 1 here";
  for (const char* limit : {"2", "3"}) {  // the launcher is three processes
    ASSERT_TRUE(group.set("pids.max", limit));
    const Result result = maniple(
        {"run", "sh", "-c", "echo $$ >" + group.path + "/cgroup.procs; exec " + maniple_program() + " run true"});
    EXPECT_EQ(result.code, 1) << result.err;
    EXPECT_NE(result.err.find("the limit of processes and threads is reached"), std::string::npos) << result.err;
  }
}

// A frozen process cannot be killed: the launcher reports it and ends.
TEST(Failure, AProcessThatTheKernelHoldsIsLeftBehind) {
  const ControlGroup group("freezer");
  if (!group.made) GTEST_SKIP() << "no freezer of version 1 here";
  const std::string mark = new_mark();
  Launched launched({"run", "-n", "2", "--env", mark, "sh", "-c",
                     "[ $RANK = 1 ] && { echo $$ >" + group.path + "/cgroup.procs; echo up; }; sleep 1000"});
  ASSERT_TRUE(launched.wait_for("[rank 1] up"));
  group.set("freezer.state", "FROZEN");
  launched.signal(SIGINT);
  launched.signal(SIGTERM);
  const int code = launched.wait(40);
  group.set("freezer.state", "THAWED");
  EXPECT_EQ(code, 130) << launched.err();
  EXPECT_TRUE(launched.err().find("does not end even with SIGKILL") != std::string::npos ||
              processes_with(mark).empty())
      << launched.err();
  EXPECT_TRUE(becomes_true([&] { return processes_with(mark).empty(); }));
}

}  // namespace
}  // namespace maniple::launched
