#include <fcntl.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
#include <gmock/gmock.h>

#include <algorithm>
#include <cstring>
#include <future>
#include <set>
#include <thread>
#include <vector>

#include "comm/base/files.h"
#include "comm/net/handshake.h"
#include "comm/rendezvous/clean_environment.h"
#include "comm/rendezvous/rendezvous.h"
#include "comm/rendezvous/round.h"
#include "comm/rendezvous/secret_source.h"
#include "comm/store/tcp_store.h"
#include <maniple/comm/error.h>

namespace maniple {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::AllOf;
using testing::HasSubstr;

std::uint16_t free_port() {
  const UniqueFd listener = listen_on(Address::parse("127.0.0.1:0"));
  return Address::of_socket(listener.get()).port();
}

InitOptions options_for(const std::string& method, int rank, int world_size) {
  InitOptions options;
  options.init_method = method;
  options.rank = rank;
  options.world_size = world_size;
  return options;
}

Deadline soon() { return Deadline::after(seconds(60)); }

class Rendezvous : public CleanEnvironment {
 protected:
  void SetUp() override {
    char name[] = "/tmp/maniple-meet-XXXXXX";
    ASSERT_NE(::mkdtemp(name), nullptr);
    directory = name;
    file_method = "file://" + directory + "/store";
  }
  void TearDown() override {
    ::unlink((directory + "/store").c_str());
    ::unlink((directory + "/secret").c_str());
    ::rmdir(directory.c_str());
  }
  void give_secret() {
    const std::string path = directory + "/secret";
    const UniqueFd fd(::open(path.c_str(), O_CREAT | O_WRONLY | O_CLOEXEC, 0600));
    const std::string hex = hex_of(Secret::random());
    ASSERT_EQ(::write(fd.get(), hex.data(), hex.size()), static_cast<ssize_t>(hex.size()));
    set("MANIPLE_SECRET_FILE", path.c_str());
  }
  static std::string complaint(const InitOptions& options) {
    try {
      rendezvous(options, Deadline::after(seconds(5)));
    } catch (const InvalidArgument& error) {
      return error.what();
    }
    ADD_FAILURE() << "accepted";
    return {};
  }
  /// The keys of the round in which all ranks meet.
  static void meet_in_round(RendezvousResult& result) {
    result.store = meet(result.store, {.rank = result.identity.rank,
                                       .world_size = result.identity.world_size,
                                       .announcement = {},
                                       .combine = [](const auto&) { return std::string(); },
                                       .deadline = soon()})
                       .store;
  }
  /// Joins as thread-ranks, lets each see the others' keys, and returns the results.
  std::vector<RendezvousResult> init_all(const std::string& method, int world_size, bool assign = false) {
    std::vector<std::future<RendezvousResult>> joining;
    for (int rank = 0; rank < world_size; ++rank) {
      joining.push_back(std::async(std::launch::async, [=] {
        RendezvousResult result = rendezvous(options_for(method, assign ? -1 : rank, world_size), soon());
        meet_in_round(result);
        const std::string own = std::to_string(result.identity.rank);
        // A key that is there already would belong to an earlier group.
        EXPECT_EQ(result.store->compare_set("here/" + own, "", "rank " + own), "rank " + own);
        EXPECT_EQ(result.store->add("times/" + own, 1), 1);
        for (int other = 0; other < world_size; ++other) result.store->get("here/" + std::to_string(other), soon());
        return result;
      }));
    }
    std::vector<RendezvousResult> results;
    for (auto& each : joining) results.push_back(each.get());
    return results;
  }
  std::string directory;
  std::string file_method;
};

TEST_F(Rendezvous, TcpWithoutSecretStaysOnLoopback) {
  const auto results = init_all("tcp://127.0.0.1:" + std::to_string(free_port()), 4);
  for (int rank = 0; rank < 4; ++rank) {
    const RendezvousResult& result = results[static_cast<std::size_t>(rank)];
    EXPECT_EQ(result.identity.rank, rank);
    EXPECT_EQ(result.identity.world_size, 4);
    EXPECT_TRUE(result.identity.secret.is_none());
    EXPECT_EQ(result.data_address.to_string(), "127.0.0.1:0");
  }
}

TEST_F(Rendezvous, WithoutSecretOtherAddressesNeedPermission) {
  const std::string text = complaint(options_for("tcp://192.0.2.1:29500", 1, 2));
  EXPECT_THAT(text,
              AllOf(HasSubstr("192.0.2.1"), HasSubstr("MANIPLE_SECRET_FILE"), HasSubstr("MANIPLE_ALLOW_NO_SECRET=1")));
}

TEST_F(Rendezvous, RankZeroMustBeAtTheMasterAddress) {
  give_secret();
  EXPECT_THAT(complaint(options_for("tcp://192.0.2.1:29500", 0, 2)),
              AllOf(HasSubstr("192.0.2.1"), HasSubstr("rank 0")));
  EXPECT_THAT(complaint(options_for("tcp://0.0.0.0:29500", 0, 2)), HasSubstr("0.0.0.0"));
}

TEST_F(Rendezvous, UnknownInterfacesAreNamed) {
  set("MANIPLE_INTERFACE", "nope9");
  const std::string method = "tcp://127.0.0.1:" + std::to_string(free_port());
  EXPECT_THAT(complaint(options_for(method, 0, 1)), HasSubstr("MANIPLE_INTERFACE is \"nope9\""));
  set("MANIPLE_INTERFACE", "lo");
  EXPECT_TRUE(rendezvous(options_for(method, 0, 1), soon()).data_address.is_loopback());
}

TEST_F(Rendezvous, EnvWithSecretJobAndGeneration) {
  give_secret();
  set("MASTER_ADDR", "localhost");
  set("MASTER_PORT", std::to_string(free_port()).c_str());
  set("RANK", "0");
  set("WORLD_SIZE", "1");
  set("MANIPLE_JOB", "night run");
  set("MANIPLE_GENERATION", "3");
  const RendezvousResult result = rendezvous({}, soon());
  EXPECT_FALSE(result.identity.secret.is_none());
  EXPECT_EQ(result.identity.job, "night run");
  EXPECT_EQ(result.identity.generation, 3u);
  set("MANIPLE_JOB", std::string(65, 'j').c_str());
  EXPECT_THAT(complaint({}), HasSubstr("MANIPLE_JOB"));
}

TEST_F(Rendezvous, AStoreOfTheLauncherIsUsed) {
  Identity launcher;
  const TcpStoreServer server(Address::parse("127.0.0.1:0"), launcher);
  set("MANIPLE_STORE_HOSTED", "1");
  const std::string method = "tcp://" + server.address().to_string();
  for (int round = 0; round < 3; ++round) init_all(method, 3);
}

TEST_F(Rendezvous, AgainAndAgainOnTheSamePort) {
  const std::string method = "tcp://127.0.0.1:" + std::to_string(free_port());
  for (int round = 0; round < 10; ++round) init_all(method, 3);
}

TEST_F(Rendezvous, RanksRejoinAtTheirOwnPace) {
  const std::string method = "tcp://127.0.0.1:" + std::to_string(free_port());
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < 3; ++rank) {
    ranks.emplace_back([=] {
      for (int round = 0; round < 10; ++round) {
        RendezvousResult result = rendezvous(options_for(method, rank, 3), soon());
        meet_in_round(result);
        result.store->set("round/" + std::to_string(rank), std::to_string(round));
        for (int other = 0; other < 3; ++other) {
          EXPECT_EQ(result.store->get("round/" + std::to_string(other), soon()), std::to_string(round));
        }
      }
    });
  }
  for (auto& rank : ranks) rank.join();
}

TEST_F(Rendezvous, TheServerOutlivesRankZerosGroup) {
  const std::string method = "tcp://127.0.0.1:" + std::to_string(free_port());
  auto results = init_all(method, 2);
  results[0].store->set("last", "value");
  results[0].store.reset();
  EXPECT_EQ(results[1].store->get("last", soon()), "value");
}

// A stopped rank keeps its connection, and with it the server, whose process begins anew without that rank.
TEST_F(Rendezvous, ALaterGenerationTakesThePortOfARetiredServer) {
  const std::string method = "tcp://127.0.0.1:" + std::to_string(free_port());
  set("MANIPLE_GENERATION", "1");
  auto results = init_all(method, 2);
  results[0] = {};
  set("MANIPLE_GENERATION", "2");
  EXPECT_EQ(rendezvous(options_for(method, 0, 1), soon()).identity.generation, 2u);
  EXPECT_THROW(results[1].store->get("never set", soon()), PeerLost);
}

TEST_F(Rendezvous, ATakenPortIsNamed) {
  const UniqueFd other = listen_on(Address::parse("127.0.0.1:0"));
  const Address taken = Address::of_socket(other.get());
  try {
    rendezvous(options_for("tcp://" + taken.to_string(), 0, 2), soon());
    ADD_FAILURE() << "accepted";
  } catch (const SystemError& error) {
    EXPECT_THAT(error.what(), AllOf(HasSubstr(taken.to_string()), HasSubstr("pid")));
  }
}

TEST_F(Rendezvous, UnreachableServerTimesOut) {
  EXPECT_THROW(rendezvous(options_for("tcp://127.0.0.1:" + std::to_string(free_port()), 1, 2),
                          Deadline::after(milliseconds(200))),
               Timeout);
}

TEST_F(Rendezvous, AnotherWorldSizeIsRefused) {
  const std::string method = "tcp://127.0.0.1:" + std::to_string(free_port());
  const RendezvousResult first = rendezvous(options_for(method, 0, 2), soon());
  try {
    rendezvous(options_for(method, 1, 3), soon());
    ADD_FAILURE() << "accepted";
  } catch (const ProtocolError& error) {
    EXPECT_THAT(error.what(), HasSubstr("world size is 2"));
  }
}

/// Runs `body` in a process of its own; it must not use threads that exist here, so it is started before any.
template <class Body>
std::string in_another_process(Body body) {
  int ends[2];
  if (::pipe(ends) != 0) return "no pipe";
  const pid_t child = ::fork();
  if (child == 0) {
    std::string text;
    try {
      body();
      text = "accepted";
    } catch (const std::exception& error) {
      text = error.what();
    }
    const auto written = ::write(ends[1], text.data(), text.size());
    ::_exit(written < 0);
  }
  ::close(ends[1]);
  std::string text;
  char bytes[4096];
  for (ssize_t got = 0; (got = ::read(ends[0], bytes, sizeof(bytes))) > 0;)
    text.append(bytes, static_cast<std::size_t>(got));
  ::close(ends[0]);
  ::waitpid(child, nullptr, 0);
  return text;
}

TEST_F(Rendezvous, ADuplicateRankIsRefusedAndBothProcessesAreNamed) {
  const std::string first = in_another_process([&] {
    const RendezvousResult result = rendezvous(options_for(file_method, 1, 3), soon());
    ::_exit(0);  // as if killed: it never leaves
  });
  EXPECT_EQ(first, "");
  const std::string text = complaint(options_for(file_method, 1, 3));
  EXPECT_THAT(text, AllOf(HasSubstr("rank 1 has been taken by host"), HasSubstr("pid " + std::to_string(::getpid()))));
}

TEST_F(Rendezvous, FileGivesRanksInOrderOfArrivalAndASecret) {
  const auto results = init_all(file_method, 4, true);
  std::set<int> ranks;
  for (const RendezvousResult& result : results) {
    ranks.insert(result.identity.rank);
    EXPECT_FALSE(result.identity.secret.is_none());
    EXPECT_EQ(result.identity.secret.bytes, results[0].identity.secret.bytes);
    EXPECT_TRUE(result.data_address.is_loopback());
  }
  EXPECT_EQ(ranks, (std::set<int>{0, 1, 2, 3}));
}

TEST_F(Rendezvous, TheLastToLeaveRemovesTheFile) {
  auto results = init_all(file_method, 3);
  EXPECT_EQ(::access((directory + "/store").c_str(), F_OK), 0);
  results.clear();
  EXPECT_NE(::access((directory + "/store").c_str(), F_OK), 0);
  for (int round = 0; round < 5; ++round) init_all(file_method, 3, round % 2 == 0);
}

TEST_F(Rendezvous, FileRanksRejoinAtTheirOwnPace) {
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < 3; ++rank) {
    ranks.emplace_back([=, this] {
      for (int round = 0; round < 10; ++round) {
        RendezvousResult result = rendezvous(options_for(file_method, rank, 3), soon());
        meet_in_round(result);
        result.store->set("round/" + std::to_string(rank), std::to_string(round));
        for (int other = 0; other < 3; ++other) {
          EXPECT_EQ(result.store->get("round/" + std::to_string(other), soon()), std::to_string(round));
        }
      }
    });
  }
  for (auto& rank : ranks) rank.join();
}

TEST_F(Rendezvous, AFileRemovedWhileItIsOpenedIsMadeAgain) {
  const std::string path = file_method.substr(std::strlen("file://"));
  const UniqueFd held(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  ASSERT_TRUE(held);
  ASSERT_EQ(::flock(held.get(), LOCK_EX), 0);
  std::thread joins([&] { EXPECT_NO_THROW(rendezvous(options_for(file_method, 0, 1), soon())); });
  const auto opened_twice = [&] {
    const std::vector<std::string> names = names_in("/proc/self/fd");
    return std::count_if(names.begin(), names.end(),
                         [&](const std::string& name) { return link_target("/proc/self/fd/" + name) == path; }) == 2;
  };
  const Deadline deadline = soon();
  while (!opened_twice() && !deadline.expired()) std::this_thread::yield();
  EXPECT_FALSE(deadline.expired()) << "the file was not opened";
  EXPECT_EQ(::unlink(path.c_str()), 0);
  ::flock(held.get(), LOCK_UN);
  joins.join();
}

/// The error of a rendezvous at the file, which must not be when the time is up.
std::string refusal(const std::string& method, Seconds within = seconds(20)) {
  const auto start = Deadline::Clock::now();
  std::string text = "accepted";
  try {
    rendezvous(options_for(method, 0, 2), soon());
  } catch (const Error& error) {
    text = error.what();
  }
  EXPECT_LT(Seconds(Deadline::Clock::now() - start).count(), within.count()) << text;
  return text;
}

TEST_F(Rendezvous, AFileThatCannotServeIsNamedAtOnce) {
  const std::string path = directory + "/store";
  const auto put = [&](const std::string& bytes, mode_t mode) {
    ::unlink(path.c_str());
    const UniqueFd fd(::open(path.c_str(), O_CREAT | O_WRONLY | O_CLOEXEC, 0600));
    EXPECT_EQ(::write(fd.get(), bytes.data(), bytes.size()), static_cast<ssize_t>(bytes.size()));
    EXPECT_EQ(::fchmod(fd.get(), mode), 0);
  };
  put("", 0644);
  EXPECT_THAT(refusal(file_method), AllOf(HasSubstr(path), HasSubstr("mode is 644"), HasSubstr("expected 600")));
  put("maniple file store 1\n", 0620);
  EXPECT_THAT(refusal(file_method), AllOf(HasSubstr(path), HasSubstr("mode is 620")));
  put("epoch 7 loss 0.25, and so on", 0600);
  EXPECT_THAT(refusal(file_method),
              AllOf(HasSubstr(path), HasSubstr("begins with \"epoch 7 loss"), HasSubstr("maniple file store 1")));
  put("x", 0600);
  EXPECT_THAT(refusal(file_method), AllOf(HasSubstr(path), HasSubstr("begins with \"x\"")));
  put("maniple file store 1\n" + std::string(100, 'z'), 0600);
  EXPECT_THAT(refusal(file_method), AllOf(HasSubstr(path), HasSubstr("damaged")));
  put("maniple file store 1\n", 0600);
  EXPECT_EQ(::truncate(path.c_str(), off_t{1} << 40), 0);
  EXPECT_THAT(refusal(file_method), AllOf(HasSubstr(path), HasSubstr("grown to")));
  ::unlink(path.c_str());

  EXPECT_EQ(::mkdir(path.c_str(), 0700), 0);
  EXPECT_THAT(refusal(file_method), AllOf(HasSubstr(path), HasSubstr("a directory")));
  ::rmdir(path.c_str());
  EXPECT_EQ(::mkfifo(path.c_str(), 0600), 0);
  EXPECT_THAT(refusal(file_method), AllOf(HasSubstr(path), HasSubstr("a named pipe")));
  ::unlink(path.c_str());
  EXPECT_EQ(::symlink("/nowhere", path.c_str()), 0);
  EXPECT_THAT(refusal(file_method), AllOf(HasSubstr(path), HasSubstr("a symbolic link")));
  ::unlink(path.c_str());
  EXPECT_THAT(refusal(file_method + "/deeper/store"),
              AllOf(HasSubstr("there is no folder"), HasSubstr(path + "/deeper")));
}

// What another user would see: root opens everything, so a child changes to the user "nobody".
TEST_F(Rendezvous, AFileOfAnotherUserIsNamedAtOnce) {
  if (::geteuid() != 0) GTEST_SKIP() << "needs root to be another user";
  const std::string path = directory + "/store";
  ASSERT_EQ(::chmod(directory.c_str(), 0755), 0);
  make_file_store(path);
  const auto as_nobody = [&] {
    return in_another_process([&] {
      if (::setuid(65534) != 0) throw Unsupported("setuid");
      throw Unsupported(refusal(file_method));
    });
  };
  EXPECT_THAT(as_nobody(), AllOf(HasSubstr(path), HasSubstr("of user 0 with mode 600"),
                                 HasSubstr("expected a regular file of user 65534"), HasSubstr("Permission denied")));
  ASSERT_EQ(::chown(path.c_str(), 65534, 65534), 0);
  ASSERT_EQ(::chmod(path.c_str(), 0400), 0);
  EXPECT_THAT(as_nobody(),
              AllOf(HasSubstr(path), HasSubstr("of user 65534 with mode 400"), HasSubstr("Permission denied")));
  ASSERT_EQ(::chmod(path.c_str(), 0666), 0);
  ASSERT_EQ(::chown(path.c_str(), 0, 0), 0);
  EXPECT_THAT(as_nobody(), AllOf(HasSubstr(path), HasSubstr("belongs to user 0, not to user 65534")));
}

// Its last process was killed after it had closed the file and before it could remove it.
TEST_F(Rendezvous, AFileThatWasClosedAndNotRemovedIsNamedSoon) {
  const auto store = make_file_store(directory + "/store");
  store->set("joins", "closed");
  EXPECT_THAT(refusal(file_method, seconds(40)),
              AllOf(HasSubstr(directory), HasSubstr("closed the file"), HasSubstr("remove the file")));
  store->set("joins", "nonsense");
  EXPECT_THAT(refusal(file_method), HasSubstr("not a whole number"));
}

TEST_F(Rendezvous, FileComplaints) {
  EXPECT_THAT(complaint(options_for("file://relative/path", 0, 2)), HasSubstr("three slashes"));
  EXPECT_THAT(complaint(options_for(file_method, 0, -1)), HasSubstr("world size"));
  EXPECT_THAT(complaint(options_for(file_method, 2, 2)), HasSubstr("0 to 1"));
  const RendezvousResult result = rendezvous(options_for(file_method, 0, 2), soon());
  EXPECT_THAT(complaint(options_for(file_method, 1, 4)),
              AllOf(HasSubstr("world size is 4 here but 2"), HasSubstr("remove it")));
}

}  // namespace
}  // namespace maniple
