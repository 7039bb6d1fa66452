#include "tools/bench/process_set.h"

#include <gtest/gtest.h>

#include <chrono>
#include <csignal>
#include <cstdlib>

namespace maniple::bench {
namespace {

ChildSpec shell(const std::string& script) {
  ChildSpec spec;
  spec.name = "child";
  spec.argv = {"sh", "-c", script};
  return spec;
}

Deadline soon() { return Deadline::after(std::chrono::seconds(20)); }

std::string failure_of(const std::vector<ChildSpec>& specs, Deadline deadline = soon()) {
  const SignalWatch watch;
  try {
    run_process_set(specs, [](std::string_view) {}, deadline, watch);
  } catch (const ProcessSetFailed& failure) {
    return failure.what();
  }
  return "";
}

TEST(ProcessSet, HandsOverCompleteLines) {
  const SignalWatch watch;
  std::vector<std::string> lines;
  run_process_set(
      {shell("printf 'one\\ntwo'; printf ' and more\\n'")}, [&](std::string_view line) { lines.emplace_back(line); },
      soon(), watch);
  EXPECT_EQ(lines, (std::vector<std::string>{"one", "two and more"}));
}

TEST(ProcessSet, AFailureNamesTheChildItsEndAndItsErrorOutput) {
  const std::string text = failure_of({shell("echo alas >&2; exit 3")});
  EXPECT_NE(text.find("child ended with exit code 3"), std::string::npos) << text;
  EXPECT_NE(text.find("alas"), std::string::npos) << text;
  EXPECT_NE(failure_of({shell("kill -9 $$")}).find("signal 9"), std::string::npos);
}

TEST(ProcessSet, OneThatDiesEndsTheOthers) {
  const auto start = std::chrono::steady_clock::now();
  EXPECT_NE(failure_of({shell("exec sleep 1000"), shell("exit 1")}).find("exit code 1"), std::string::npos);
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(10));
}

TEST(ProcessSet, OneThatIgnoresTermIsKilled) {
  EXPECT_NE(failure_of({shell("trap '' TERM; while :; do sleep 1; done"), shell("exit 1")}).find("exit code 1"),
            std::string::npos);
}

TEST(ProcessSet, TimeIsLimited) {
  const std::string text = failure_of({shell("exec sleep 1000")}, Deadline::after(std::chrono::milliseconds(50)));
  EXPECT_NE(text.find("did not finish in time"), std::string::npos) << text;
}

TEST(ProcessSet, AProgramThatIsNotThereIsASystemError) {
  ChildSpec spec = shell("");
  spec.argv = {"/nonexistent/program"};
  const SignalWatch watch;
  EXPECT_THROW(run_process_set({spec}, [](std::string_view) {}, soon(), watch), SystemError);
}

TEST(ProcessSet, ASignalInterruptsAndLeavesNothing) {
  const SignalWatch watch;
  pid_t child = 0;
  const auto on_line = [&](std::string_view line) {
    child = static_cast<pid_t>(std::atoi(std::string(line).c_str()));
    kill(getpid(), SIGINT);
  };
  EXPECT_THROW(run_process_set({shell("echo $$; exec sleep 1000")}, on_line, soon(), watch), Interrupted);
  ASSERT_GT(child, 0);
  EXPECT_EQ(kill(child, 0), -1) << "it was ended and reaped";
}

TEST(ProcessSet, ChildrenSeeTheirEnvironmentAndNoBlockedSignals) {
  const SignalWatch watch;
  std::string out;
  ChildSpec spec = shell("echo $TEST_WORD; grep SigBlk /proc/self/status");
  spec.environment = {{"TEST_WORD", "hello"}};
  run_process_set({spec}, [&](std::string_view line) { out += std::string(line) + "\n"; }, soon(), watch);
  EXPECT_EQ(out, "hello\nSigBlk:\t0000000000000000\n");
}

}  // namespace
}  // namespace maniple::bench
