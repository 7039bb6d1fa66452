// Records of jobs: there while the job runs, true, private, and no harm from what others put in their place.
#include <gtest/gtest.h>

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>

#include "comm/base/files.h"
#include "comm/base/unique_fd.h"
#include "harness/temporary_directory.h"
#include "launch/jobs/job_list.h"
#include "launch/jobs/job_record.h"
#include <maniple/comm/error.h>

namespace maniple::launch {
namespace {

class JobRecords : public testing::Test {
 protected:
  void SetUp() override { ::setenv("XDG_RUNTIME_DIR", scratch_.path().c_str(), 1); }
  void TearDown() override { ::unsetenv("XDG_RUNTIME_DIR"); }

  std::string directory() const { return scratch_.path() + "/maniple"; }
  std::string own_file() const { return paths_below(directory()).at(0); }
  void write(const std::string& name, const std::string& text) const {
    const UniqueFd file(::open((directory() + "/" + name).c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600));
    ASSERT_EQ(::write(file.get(), text.data(), text.size()), static_cast<ssize_t>(text.size()));
  }
  std::vector<JobInfo> jobs() const { return running_jobs_in(directory()); }

  harness::TemporaryDirectory scratch_;
};

TEST_F(JobRecords, LiveAsLongAsTheJob) {
  EXPECT_TRUE(jobs().empty());
  {
    JobRecord record({.id = "job-1", .command = "./train --lr 0.1\n%", .world_size = 8, .hosts = {"a", "b"}});
    ASSERT_EQ(jobs().size(), 1u);
    const JobInfo job = jobs()[0];
    EXPECT_EQ(job.id, "job-1");
    EXPECT_EQ(job.command, "./train --lr 0.1\n%");
    EXPECT_EQ(job.world_size, 8);
    EXPECT_EQ(job.hosts, (std::vector<std::string>{"a", "b"}));
    EXPECT_EQ(job.pid, ::getpid());
    EXPECT_GT(job.started, 0);
    record.update(5, 2, "running");
    EXPECT_EQ(jobs()[0].ranks_up, 5);
    EXPECT_EQ(jobs()[0].restarts, 2);
    EXPECT_EQ(jobs()[0].state, "running");
    EXPECT_EQ(paths_below(directory()).size(), 1u);
  }
  EXPECT_TRUE(paths_below(directory()).empty());
}

TEST_F(JobRecords, ArePrivate) {
  const JobRecord record({.id = "j", .command = "x"});
  struct stat status{};
  ASSERT_EQ(::stat(directory().c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777, 0700u);
  ASSERT_EQ(::stat(own_file().c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777, 0600u);
}

TEST_F(JobRecords, OfLaunchersThatAreGoneAreDropped) {
  const pid_t child = ::fork();
  if (child == 0) {
    const JobRecord record({.id = "killed", .command = "x"});
    ::kill(::getpid(), SIGKILL);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(paths_below(directory()).size(), 1u);
  EXPECT_TRUE(jobs().empty());
  EXPECT_TRUE(paths_below(directory()).empty());
}

TEST_F(JobRecords, ANumberGivenAwayAgainIsNotMistaken) {
  const JobRecord record({.id = "mine", .command = "x"});
  JobInfo earlier = record.info();
  earlier.id = "earlier";
  earlier.pid_started -= 1;
  write("job-earlier", encode_job(earlier));
  ASSERT_EQ(jobs().size(), 1u);
  EXPECT_EQ(jobs()[0].id, "mine");
  EXPECT_EQ(paths_below(directory()).size(), 1u);
}

TEST_F(JobRecords, OfAnotherPidSpaceAreLeftAlone) {
  const JobRecord record({.id = "mine", .command = "x"});
  JobInfo other = record.info();
  other.pid = 999'999'999;
  other.pid_space = "pid:[1]";
  write("job-other", encode_job(other));
  EXPECT_EQ(jobs().size(), 1u);
  EXPECT_EQ(paths_below(directory()).size(), 2u);
}

TEST_F(JobRecords, GarbageIsPassedOver) {
  const JobRecord record({.id = "mine", .command = "x"});
  const std::string good = encode_job(record.info());
  write("job-empty", "");
  write("job-noise", std::string(5000, '\xff'));
  write("job-large", good + "host " + std::string(200'000, 'h') + "\n");
  write("job-cut", good.substr(0, good.size() / 2));
  write("unrelated", good);
  ASSERT_EQ(::symlink(own_file().c_str(), (directory() + "/job-link").c_str()), 0);
  ASSERT_EQ(::mkfifo((directory() + "/job-pipe").c_str(), 0600), 0);
  ASSERT_EQ(::mkdir((directory() + "/job-directory").c_str(), 0700), 0);
  ASSERT_EQ(jobs().size(), 1u);
  EXPECT_EQ(jobs()[0].id, "mine");
}

TEST_F(JobRecords, TextThatIsNoRecord) {
  const std::string good =
      encode_job({.id = "a", .command = "b", .world_size = 2, .hosts = {"h"}, .pid = 7, .state = "c"});
  ASSERT_TRUE(decode_job(good));
  for (std::size_t length = 0; length < good.size(); ++length) {
    const auto cut = decode_job(good.substr(0, length));
    EXPECT_TRUE(!cut || cut->hosts.empty()) << length;  // without its last line it is a job on no host
  }
  const auto with = [&](const std::string& from, const std::string& to) {
    std::string text = good;
    return decode_job(text.replace(text.find(from), from.size(), to));
  };
  EXPECT_FALSE(with("pid 7", "pid -7"));
  EXPECT_FALSE(with("pid 7", "pid 0"));
  EXPECT_FALSE(with("pid 7", "pid 7x"));
  EXPECT_FALSE(with("pid 7", "pid 99999999999999999999"));
  EXPECT_FALSE(with("world_size 2", "world_size "));
  EXPECT_FALSE(with("command b", "command %zz"));
  EXPECT_FALSE(with("command b", "command %1"));
  EXPECT_FALSE(with("host h", "hose h"));
}

TEST_F(JobRecords, DirectoriesOfOthersAreNotUsed) {
  ASSERT_EQ(::mkdir(directory().c_str(), 0700), 0);
  ASSERT_EQ(::chmod(directory().c_str(), 0777), 0);
  EXPECT_THROW(open_job_directory(directory(), true), InvalidArgument);
  ASSERT_EQ(::rmdir(directory().c_str()), 0);
  const std::string elsewhere = scratch_.path() + "/elsewhere";
  ASSERT_EQ(::mkdir(elsewhere.c_str(), 0700), 0);
  ASSERT_EQ(::symlink(elsewhere.c_str(), directory().c_str()), 0);
  EXPECT_THROW(open_job_directory(directory(), true), SystemError);
  EXPECT_TRUE(paths_below(elsewhere).empty());
}

TEST_F(JobRecords, LongValuesStillFit) {
  JobInfo info{
      .id = std::string(10'000, 'i'), .command = std::string(1'000'000, '\n'), .world_size = 100'000, .pid = 1};
  for (int i = 0; i < 10'000; ++i) info.hosts.push_back("host" + std::to_string(i));
  const std::string text = encode_job(info);
  EXPECT_LE(text.size(), kMostRecordBytes);
  const auto back = decode_job(text);
  ASSERT_TRUE(back);
  EXPECT_GT(back->hosts.size(), 1000u);
}

}  // namespace
}  // namespace maniple::launch
