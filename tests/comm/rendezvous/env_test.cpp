#include <sys/socket.h>

#include <gmock/gmock.h>

#include "comm/base/error_codec.h"
#include "comm/base/launcher_socket.h"
#include "comm/base/unique_fd.h"
#include "comm/rendezvous/clean_environment.h"
#include "comm/rendezvous/methods.h"
#include <maniple/comm/error.h>
#include <maniple/comm/process_group.h>

namespace maniple {
namespace {

using testing::AllOf;
using testing::HasSubstr;

class Env : public CleanEnvironment {
 protected:
  Env() {
    set("RANK", "3");
    set("WORLD_SIZE", "8");
    set("MASTER_ADDR", "127.0.0.1");
    set("MASTER_PORT", "29500");
  }
  std::string complaint(const InitOptions& options = {}) const {
    try {
      assignment_from_environment(options);
    } catch (const InvalidArgument& error) {
      return error.what();
    }
    ADD_FAILURE() << "accepted";
    return {};
  }
};

TEST_F(Env, ReadsTheFour) {
  const RankAssignment assignment = assignment_from_environment({});
  EXPECT_EQ(assignment.rank, 3);
  EXPECT_EQ(assignment.world_size, 8);
  EXPECT_EQ(assignment.host, "127.0.0.1");
  EXPECT_EQ(assignment.port, 29500);
}

TEST_F(Env, EachMissingVariableIsNamed) {
  for (const char* name : {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}) {
    const std::string value = std::getenv(name);
    set(name, nullptr);
    EXPECT_THAT(complaint(), HasSubstr(std::string(name) + " is not set")) << name;
    set(name, value.c_str());
  }
}

// `export MASTER_ADDR=$UNSET` is a mistake, also where a default or a scheduler would do.
TEST_F(Env, EachEmptyVariableIsNamed) {
  set("SLURM_PROCID", "0");
  set("SLURM_NTASKS", "1");
  for (const char* name :
       {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK"}) {
    const char* before = std::getenv(name);
    const auto kept = before == nullptr ? std::nullopt : std::optional<std::string>(before);
    set(name, "");
    EXPECT_THAT(complaint(), HasSubstr(std::string(name) + " is set, but empty")) << name;
    set(name, kept ? kept->c_str() : nullptr);
  }
}

TEST_F(Env, WrongValuesAreShownWithWhatWasExpected) {
  const struct {
    const char* name;
    const char* value;
    std::vector<const char*> parts;
  } cases[] = {
      {"RANK", "9", {"RANK is 9", "WORLD_SIZE is 8", "0 to 7"}},
      {"RANK", "8", {"RANK is 8", "WORLD_SIZE is 8"}},
      {"RANK", "-1", {"RANK is \"-1\"", "from 0"}},
      {"RANK", "three", {"RANK is \"three\"", "whole number"}},
      {"RANK", "3 ", {"RANK is \"3 \""}},
      {"WORLD_SIZE", "0", {"WORLD_SIZE is \"0\"", "from 1"}},
      {"WORLD_SIZE", "99999999999999999999", {"WORLD_SIZE is \"99999999999999999999\""}},
      {"MASTER_PORT", "99999", {"MASTER_PORT is \"99999\"", "1 to 65535"}},
      {"MASTER_PORT", "0", {"MASTER_PORT is \"0\""}},
      {"LOCAL_RANK", "8", {"LOCAL_RANK is 8", "WORLD_SIZE is 8"}},
      {"LOCAL_RANK", "x", {"LOCAL_RANK is \"x\""}},
      {"LOCAL_WORLD_SIZE", "9", {"LOCAL_WORLD_SIZE is 9", "WORLD_SIZE is 8"}},
      {"NODE_RANK", "8", {"NODE_RANK is 8", "WORLD_SIZE is 8"}},
  };
  for (const auto& [name, value, parts] : cases) {
    const char* before = std::getenv(name);
    const auto kept = before == nullptr ? std::nullopt : std::optional<std::string>(before);
    set(name, value);
    const std::string text = complaint();
    for (const char* part : parts) EXPECT_THAT(text, HasSubstr(part)) << name << "=" << value;
    set(name, kept ? kept->c_str() : nullptr);
  }
}

TEST_F(Env, LocalValuesAreComparedWithEachOther) {
  set("LOCAL_WORLD_SIZE", "4");
  set("LOCAL_RANK", "4");
  EXPECT_THAT(complaint(),
              AllOf(HasSubstr("LOCAL_RANK is 4"), HasSubstr("LOCAL_WORLD_SIZE is 4"), HasSubstr("0 to 3")));
  set("LOCAL_RANK", "3");
  set("NODE_RANK", "1");
  EXPECT_EQ(assignment_from_environment({}).rank, 3);
  set("LOCAL_WORLD_SIZE", "8");
  EXPECT_THAT(complaint(), HasSubstr("NODE_RANK is 1"));
}

TEST_F(Env, OptionsThatContradictTheEnvironment) {
  InitOptions options;
  options.rank = 2;
  EXPECT_THAT(complaint(options), AllOf(HasSubstr("RANK is 3"), HasSubstr("InitOptions::rank is 2")));
  options.rank = 3;
  EXPECT_EQ(assignment_from_environment(options).rank, 3);
  options.world_size = 4;
  EXPECT_THAT(complaint(options), AllOf(HasSubstr("WORLD_SIZE is 8"), HasSubstr("InitOptions::world_size is 4")));
  options = {};
  options.init_method = "env://somewhere";
  EXPECT_THAT(complaint(options), HasSubstr("env://somewhere"));
}

TEST_F(Env, OptionsFillWhatTheEnvironmentLeavesOut) {
  set("RANK", nullptr);
  set("WORLD_SIZE", nullptr);
  InitOptions options;
  options.rank = 1;
  options.world_size = 2;
  EXPECT_EQ(assignment_from_environment(options).world_size, 2);
}

TEST_F(Env, ASchedulersVariablesAreUsedWhenTheOrdinaryOnesAreAbsent) {
  set("OMPI_COMM_WORLD_RANK", "1");
  set("OMPI_COMM_WORLD_SIZE", "2");
  EXPECT_EQ(assignment_from_environment({}).rank, 3);
  set("RANK", nullptr);
  set("WORLD_SIZE", nullptr);
  EXPECT_EQ(assignment_from_environment({}).rank, 1);
  EXPECT_EQ(assignment_from_environment({}).world_size, 2);
}

// A program started without a launcher.
class NoLauncher : public CleanEnvironment {
 protected:
  NoLauncher() {
    int fds[2];
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, fds), 0);
    launcher_ = UniqueFd(fds[0]);
    worker_ = UniqueFd(fds[1]);
    set("MANIPLE_REPORT_FD", launcher_socket_value(worker_.get()).c_str());
  }
  ErrorInfo reported() const {
    std::string packet(kMaxReportBytes, '\0');
    const ssize_t got = ::recv(launcher_.get(), packet.data(), packet.size(), 0);
    EXPECT_GT(got, 0);
    return got > 0 ? decode_report(std::string_view(packet).substr(0, static_cast<std::size_t>(got))).error
                   : ErrorInfo{};
  }
  bool has_report() const {
    char byte = 0;
    return ::recv(launcher_.get(), &byte, 1, MSG_PEEK) > 0;
  }

 private:
  UniqueFd launcher_;
  UniqueFd worker_;
};

TEST_F(NoLauncher, IsAWorldOfOne) {
  EXPECT_TRUE(has_no_launcher({}));
  const auto world = init();
  EXPECT_EQ(world->rank(), 0);
  EXPECT_EQ(world->size(), 1);
  float x = 3;
  EXPECT_TRUE(world->all_reduce(buffer_of(x)).done());
  EXPECT_EQ(x, 3);
  EXPECT_FALSE(has_report());
}

TEST_F(NoLauncher, IsNotAssumedWhenAnythingIsSet) {
  EXPECT_FALSE(has_no_launcher({.rank = 0}));
  EXPECT_FALSE(has_no_launcher({.world_size = 2}));
  EXPECT_FALSE(has_no_launcher({.init_method = "tcp://127.0.0.1:1"}));
  EXPECT_FALSE(has_no_launcher({.init_method = "env://?rank=0"}));
  for (const char* name : {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}) {
    set(name, "");
    EXPECT_FALSE(has_no_launcher({})) << name;
    set(name, nullptr);
  }
  set("SLURM_PROCID", "0");
  set("SLURM_NTASKS", "1");
  EXPECT_FALSE(has_no_launcher({}));
}

TEST_F(NoLauncher, TransportsAreNotBackends) {
  for (const char* name : {"tcp", "shm"}) {
    try {
      init({.backend = name});
      ADD_FAILURE() << "accepted";
    } catch (const InvalidArgument& error) {
      EXPECT_THAT(error.what(),
                  HasSubstr(std::string(".backend = \"native\", .transport = maniple::TransportKind::") + name));
    }
    EXPECT_EQ(reported().kind, ErrorKind::invalid_argument) << "a failing init() is reported";
  }
}

TEST_F(NoLauncher, TheFirstFailureOfAGroupIsReported) {
  const auto world = init();
  world->abort("why");
  EXPECT_THROW(world->barrier(), Aborted);
  EXPECT_THROW(world->barrier(), Aborted);
  const ErrorInfo error = reported();
  EXPECT_EQ(error.kind, ErrorKind::aborted);
  EXPECT_EQ(error.operation, "barrier");
  EXPECT_EQ(error.group, "world");
  EXPECT_EQ(error.rank, 0);
  EXPECT_EQ(error.size, 1);
  EXPECT_EQ(error.origin, 0);
  EXPECT_EQ(error.reason, "[abort world rank 0/1] why");
  EXPECT_FALSE(has_report()) << "once only";
}

}  // namespace
}  // namespace maniple
