// Requests to a running job.
#include <gtest/gtest.h>

#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>

#include "comm/base/files.h"
#include "comm/net/poller.h"
#include "harness/error_of.h"
#include "harness/temporary_directory.h"
#include "launch/jobs/job_control.h"
#include "launch/jobs/job_list.h"
#include "launch/jobs/job_record.h"

namespace maniple::launch {
namespace {

class JobControls : public testing::Test {
 protected:
  void SetUp() override { ::setenv("XDG_RUNTIME_DIR", runtime_.c_str(), 1); }
  void TearDown() override { ::unsetenv("XDG_RUNTIME_DIR"); }

  /// Runs the poller until `call` has returned in a thread of its own.
  template <class Call>
  void serve_during(Call call) {
    std::atomic<bool> done = false;
    std::thread caller([&] {
      call();
      done = true;
    });
    while (!done) {
      poller_.call_after(std::chrono::duration<double>(0.01), [] {});
      poller_.turn();
    }
    caller.join();
  }
  std::string directory() const { return runtime_ + "/maniple"; }

  harness::TemporaryDirectory scratch_;
  std::string runtime_ = scratch_.path();
  Poller poller_;
};

TEST_F(JobControls, ARequestIsAnswered) {
  const JobRecord record({.id = "run-1", .command = "x"});
  std::string got;
  const JobControl control(poller_, "run-1", [&](std::string_view request) {
    got = request;
    return ControlAnswer{.accepted = request != "no", .text = "answer to " + got};
  });
  serve_during([] {
    const ControlAnswer yes = ask_job("run-1", "resize 3");
    EXPECT_TRUE(yes.accepted);
    EXPECT_EQ(yes.text, "answer to resize 3");
    const ControlAnswer no = ask_job(std::to_string(::getpid()), "no");
    EXPECT_FALSE(no.accepted);
    EXPECT_EQ(no.text, "answer to no");
  });
  EXPECT_EQ(got, "no");
}

TEST_F(JobControls, LeavesNothingBehind) {
  {
    const JobRecord record({.id = "run-1", .command = "x"});
    const JobControl control(poller_, "run-1", [](std::string_view) { return ControlAnswer{}; });
    EXPECT_EQ(paths_below(directory()).size(), 2u);
    EXPECT_EQ(running_jobs_in(directory()).size(), 1u) << "the socket is not a record";
  }
  EXPECT_TRUE(paths_below(directory()).empty());
}

TEST_F(JobControls, TheSocketOfAKilledJobIsRemovedWithItsRecord) {
  const pid_t pid = ::fork();
  if (pid == 0) {
    Poller poller;
    JobRecord* const record = new JobRecord({.id = "run-2", .command = "x"});
    JobControl* const control = new JobControl(poller, "run-2", [](std::string_view) { return ControlAnswer{}; });
    ::_exit(record != nullptr && control != nullptr ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(pid, &status, 0), pid);
  ASSERT_EQ(paths_below(directory()).size(), 2u);
  EXPECT_TRUE(running_jobs_in(directory()).empty());
  EXPECT_TRUE(paths_below(directory()).empty());
}

TEST_F(JobControls, JobsThatTakeNoRequestsAreNamed) {
  EXPECT_NE(error_of([] { ask_job("run-3", "x"); }).find("no job \"run-3\" runs here"), std::string::npos);
  const JobRecord record({.id = "run-3", .command = "x"});
  EXPECT_NE(error_of([] { ask_job("run-3", "x"); }).find("job run-3 takes no requests here"), std::string::npos);
}

TEST_F(JobControls, ALongFolderIsNoObstacle) {
  runtime_ += "/" + std::string(150, 'x');
  ASSERT_EQ(::mkdir(runtime_.c_str(), 0700), 0);
  SetUp();
  const JobRecord record({.id = "run-4", .command = "x"});
  const JobControl control(poller_, "run-4", [](std::string_view) { return ControlAnswer{.accepted = true}; });
  serve_during([] { EXPECT_TRUE(ask_job("run-4", "x").accepted); });
}

TEST_F(JobControls, AJobThatEndsMeanwhileIsAnError) {
  const JobRecord record({.id = "run-5", .command = "x"});
  auto control = std::make_unique<JobControl>(poller_, "run-5", [](std::string_view) { return ControlAnswer{}; });
  std::atomic<bool> asked = false;
  std::thread caller([&] {
    asked = true;
    EXPECT_NE(error_of([] { ask_job("run-5", "x"); }), "no error");
  });
  while (!asked) std::this_thread::yield();
  control.reset();  // the caller has connected, or finds no socket
  caller.join();
}

}  // namespace
}  // namespace maniple::launch
