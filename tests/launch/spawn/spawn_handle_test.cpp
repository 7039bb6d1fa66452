// The handle of spawn without join, and daemons.
#include "launch/spawn/spawn_fixture.h"

#include <sys/prctl.h>
#include <unistd.h>

#include <csignal>

namespace maniple {
namespace {

void wait_for_word(int, const std::string& path) {
  require(eventually([&] { return !contents(path).empty(); }), "a word");
}

void report_and_stay(int, const std::string& path) {
  append_line(path, std::to_string(::getpid()));
  wait_for_the_end();
}

TEST_F(SpawnTest, AHandleKnowsItsProcesses) {
  SpawnContext context = spawn(wait_for_word, {.nprocs = 3, .join = false}, file("go"));
  ASSERT_EQ(context.pids().size(), 3u);
  for (const int pid : context.pids()) EXPECT_EQ(::kill(pid, 0), 0);
  EXPECT_FALSE(context.join(Seconds(0)));
  EXPECT_FALSE(context.join(Seconds(0.02)));
  EXPECT_FALSE(context.join(Seconds(-1)));
  append_line(file("go"), "go");
  EXPECT_TRUE(context.join(Seconds(60)));
  EXPECT_TRUE(context.join());
  EXPECT_FALSE(context.error());
  EXPECT_EQ(context.pids().size(), 3u);
}

TEST_F(SpawnTest, JoinOfAHandleThrowsOnce) {
  SpawnContext context = spawn(
      [](int rank) {
        if (rank == 1) throw std::runtime_error("once");
        wait_for_the_end();
      },
      {.nprocs = 2, .join = false});
  EXPECT_THROW(context.join(), SpawnError);
  ASSERT_TRUE(context.error());
  EXPECT_EQ(context.error()->text(), "once");
  EXPECT_TRUE(context.join());
}

TEST_F(SpawnTest, TerminateEndsAllAndIsNoFailure) {
  SpawnContext context = spawn(report_and_stay, {.nprocs = 3, .join = false}, file("pids"));
  ASSERT_TRUE(eventually([&] { return count_lines(file("pids")) == 3; }));
  context.terminate();
  for (const int pid : context.pids()) EXPECT_EQ(::kill(pid, 0), -1);
  EXPECT_TRUE(context.join());
  EXPECT_FALSE(context.error());
  context.terminate();
}

TEST_F(SpawnTest, StoppedProcessesAreEndedToo) {
  SpawnContext context = spawn(report_and_stay, {.nprocs = 2, .join = false, .grace = Seconds(0.1)}, file("pids"));
  ASSERT_TRUE(eventually([&] { return count_lines(file("pids")) == 2; }));
  for (const int pid : context.pids()) ::kill(pid, SIGSTOP);
  context.terminate();
  EXPECT_TRUE(context.join());
}

TEST_F(SpawnTest, TheDestructorWaits) {
  {
    const SpawnContext context =
        spawn([](int rank, const std::string& path) { append_line(path, std::to_string(rank)); },
              {.nprocs = 2, .join = false}, file("done"));
  }
  EXPECT_EQ(count_lines(file("done")), 2u);
}

TEST_F(SpawnTest, TheDestructorEndsDaemons) {
  std::vector<int> pids;
  {
    const SpawnContext context = spawn(report_and_stay, {.nprocs = 2, .join = false, .daemon = true}, file("pids"));
    pids = context.pids();
  }
  for (const int pid : pids) EXPECT_EQ(::kill(pid, 0), -1);
}

TEST_F(SpawnTest, AnExceptionEndsThemInsteadOfWaiting) {
  try {
    const SpawnContext context = spawn(report_and_stay, {.nprocs = 2, .join = false}, file("pids"));
    throw std::runtime_error("away");
  } catch (const std::runtime_error&) {
  }
}

TEST_F(SpawnTest, HandlesMove) {
  SpawnContext one = spawn(wait_for_word, {.nprocs = 1, .join = false}, file("go"));
  SpawnContext two = std::move(one);
  EXPECT_TRUE(one.pids().empty());
  EXPECT_TRUE(one.join());
  EXPECT_EQ(two.pids().size(), 1u);
  append_line(file("go"), "go");
  two = spawn(wait_for_word, {.nprocs = 2, .join = false}, file("go"));  // waits for the one before
  EXPECT_EQ(two.pids().size(), 2u);
  EXPECT_TRUE(two.join());
}

TEST_F(SpawnTest, DetachedProcessesRunOn) {
  SpawnContext context = spawn(wait_for_word, {.nprocs = 1, .join = false}, file("go"));
  const int pid = context.pids()[0];
  context.detach();
  EXPECT_TRUE(context.pids().empty());
  EXPECT_EQ(::kill(pid, 0), 0);
  append_line(file("go"), "go");
  int status = -1;
  EXPECT_EQ(::waitpid(pid, &status, 0), pid);
  EXPECT_EQ(status, 0);
  SpawnContext daemons = spawn(report_and_stay, {.join = false, .daemon = true}, file("pids"));
  EXPECT_THROW(daemons.detach(), Unsupported);
}

class SpawnDaemons : public SpawnTest, public testing::WithParamInterface<StartMethod> {};
INSTANTIATE_TEST_SUITE_P(Spawn, SpawnDaemons, testing::Values(StartMethod::reexec, StartMethod::fork),
                         [](const auto& each) { return each.param == StartMethod::fork ? "fork" : "reexec"; });

void parent_of_daemons(int, const std::string& path, StartMethod method) {
  // Both kinds at a time: a forked process must not hold the parent_pipe of the others.
  const SpawnContext bystanders =
      spawn(report_and_stay, {.nprocs = 1, .join = false, .daemon = true, .start_method = StartMethod::reexec}, path);
  const SpawnContext daemons =
      spawn(report_and_stay, {.nprocs = 3, .join = false, .daemon = true, .start_method = method}, path);
  wait_for_the_end();
}

TEST_P(SpawnDaemons, DieWithAParentThatIsKilled) {
  // Orphans come to us, so that we can see how they ended.
  ASSERT_EQ(::prctl(PR_SET_CHILD_SUBREAPER, 1), 0);
  SpawnContext parent = spawn(parent_of_daemons, {.join = false}, file("pids"), GetParam());
  ASSERT_TRUE(eventually([&] { return count_lines(file("pids")) == 4; }));
  ::kill(parent.pids()[0], SIGKILL);
  EXPECT_THROW(parent.join(), SpawnError);
  std::istringstream pids(contents(file("pids")));
  for (int pid = 0; pids >> pid;) {
    int status = 0;
    EXPECT_TRUE(eventually([&] { return ::waitpid(pid, &status, WNOHANG) == pid; })) << pid << " lives on";
    EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) << status;
    if (!WIFSIGNALED(status)) ::kill(pid, SIGKILL);
  }
  ASSERT_EQ(::prctl(PR_SET_CHILD_SUBREAPER, 0), 0);
}

}  // namespace
}  // namespace maniple
