// What the parent is told when a spawned process fails, and what becomes of the others.
#include "launch/spawn/spawn_fixture.h"

#include <dlfcn.h>
#include <sys/resource.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>

#include <fmt/format.h>

#include <maniple/comm.h>

namespace maniple {
namespace {

class SpawnFailure : public SpawnTest, public testing::WithParamInterface<StartMethod> {
 protected:
  SpawnOptions options(int nprocs) const { return {.nprocs = nprocs, .start_method = GetParam()}; }
};

INSTANTIATE_TEST_SUITE_P(Spawn, SpawnFailure, testing::Values(StartMethod::reexec, StartMethod::fork),
                         [](const auto& each) { return each.param == StartMethod::fork ? "fork" : "reexec"; });

struct Custom : std::exception {
  const char* what() const noexcept override { return "custom text"; }
};

void no_core() {
  const rlimit none{0, 0};
  ::setrlimit(RLIMIT_CORE, &none);
}

TEST_P(SpawnFailure, ExceptionsKeepTypeAndText) {
  const SpawnError error = spawn_error(
      [](int rank) {
        if (rank == 1) throw std::out_of_range("no cheese left");
        wait_for_the_end();
      },
      options(3));
  EXPECT_EQ(error.rank(), 1);
  EXPECT_GT(error.pid(), 0);
  EXPECT_EQ(error.type(), "std::out_of_range");
  EXPECT_EQ(error.text(), "no cheese left");
  EXPECT_EQ(error.exit_code(), 1);
  EXPECT_EQ(error.signal(), 0);
  EXPECT_EQ(std::string(error.what()),
            fmt::format("[spawn process 1/3 pid {}] threw std::out_of_range: no cheese left", error.pid()));
}

// The others would wait for the time-out of half an hour.
TEST_P(SpawnFailure, OneThatExitsBeforeInitIsNamedAtOnce) {
  const SpawnError error = spawn_error(
      [](int rank) {
        if (rank != 1) init();
      },
      options(3));
  EXPECT_EQ(error.rank(), 1);
  EXPECT_EQ(error.exit_code(), 0);
  EXPECT_NE(std::string(error.what()).find("ended before it called init(), where rank "), std::string::npos)
      << error.what();
  // A smaller world does not need it.
  spawn(
      [](int rank) {
        const std::string place = std::string("tcp://127.0.0.1:") + std::getenv("MASTER_PORT");
        if (rank < 2) init({.init_method = place, .rank = rank, .world_size = 2})->barrier();
      },
      options(3));
}

TEST_P(SpawnFailure, TheStackThatLibTorchAppendsIsNotInTheLine) {
  const SpawnError error = spawn_error(
      [](int) {
        throw std::runtime_error(
            "sizes differ\nException raised from f at g.cpp:1 (most recent call first):\nframe #0: f");
      },
      options(1));
  EXPECT_EQ(std::string(error.what()),
            fmt::format("[spawn process 0/1 pid {}] threw std::runtime_error: sizes differ", error.pid()));
  EXPECT_NE(error.text().find("frame #0"), std::string::npos);
}

TEST_P(SpawnFailure, ExceptionsOfManyTypes) {
  const auto thrower = [](int, int which) {
    switch (which) {
      case 0: throw Custom();
      case 1: throw 42;
      case 2: throw std::string("a string");
      case 3: throw Timeout("rank 3 did not arrive");
      case 4: throw PeerLost("rank 2 is gone", 2);
      case 5: throw std::runtime_error(std::string(100'000, 'x'));
      default: throw std::runtime_error("");
    }
  };
  const SpawnError custom = spawn_error(thrower, options(1), 0);
  EXPECT_NE(custom.type().find("Custom"), std::string::npos);
  EXPECT_EQ(custom.text(), "custom text");
  EXPECT_EQ(spawn_error(thrower, options(1), 1).type(), "int");
  EXPECT_EQ(spawn_error(thrower, options(1), 2).text(), "a string");
  const SpawnError timeout = spawn_error(thrower, options(1), 3);
  EXPECT_EQ(timeout.kind(), ErrorKind::timeout);
  EXPECT_EQ(timeout.type(), "maniple::Timeout");
  EXPECT_EQ(timeout.text(), "rank 3 did not arrive");
  EXPECT_EQ(spawn_error(thrower, options(1), 4).kind(), ErrorKind::peer_lost);
  EXPECT_EQ(spawn_error(thrower, options(1), 5).text().substr(0, 10), "xxxxxxxxxx");
  EXPECT_EQ(spawn_error(thrower, options(1), 6).type(), "std::runtime_error");
}

TEST_P(SpawnFailure, SignalsAreNamed) {
  const auto die = [](int rank, int signal) {
    no_core();
    if (rank == 1) ::raise(signal);
    wait_for_the_end();
  };
  const SpawnError segv = spawn_error(die, options(2), SIGSEGV);
  EXPECT_EQ(segv.rank(), 1);
  EXPECT_EQ(segv.signal(), SIGSEGV);
  EXPECT_EQ(segv.exit_code(), -1);
  EXPECT_NE(std::string(segv.what()).find("was ended by signal 11 (SIGSEGV, Segmentation fault)"), std::string::npos)
      << segv.what();
  EXPECT_EQ(spawn_error(die, options(2), SIGKILL).signal(), SIGKILL);
  EXPECT_EQ(spawn_error(die, options(2), SIGTERM).signal(), SIGTERM);
}

TEST_P(SpawnFailure, ExitCodesArePassedOn) {
  const auto leave = [](int, int code) { std::_Exit(code); };
  const SpawnError error = spawn_error(leave, options(2), 37);
  EXPECT_EQ(error.exit_code(), 37);
  EXPECT_NE(std::string(error.what()).find("exited with code 37"), std::string::npos) << error.what();
  spawn(leave, options(2), 0);  // that is not a failure
}

TEST_F(SpawnTest, ExitRunsWhatWasRegisteredAndItsCodeIsPassedOn) {
  EXPECT_EQ(spawn_error([](int) { std::exit(3); }, SpawnOptions{}).exit_code(), 3);
}

TEST_P(SpawnFailure, OthersAreEndedAlsoThoseThatIgnoreSigterm) {
  SpawnOptions quick = options(4);
  quick.grace = Seconds(0.3);
  const auto worker = [](int rank, const std::string& path) {
    ::signal(SIGTERM, SIG_IGN);
    append_line(path, std::to_string(::getpid()));
    require(rank != 2 || eventually([&] { return count_lines(path) == 4; }), "all are up");
    if (rank == 2) throw std::runtime_error("first");
    wait_for_the_end();
  };
  EXPECT_EQ(spawn_error(worker, quick, file("pids")).rank(), 2);
  std::istringstream pids(contents(file("pids")));
  int count = 0;
  for (int pid = 0; pids >> pid; ++count) EXPECT_EQ(::kill(pid, 0), -1) << pid;
  EXPECT_EQ(count, 4);
}

TEST_P(SpawnFailure, OthersMayTidyUpOnSigterm) {
  const auto worker = [](int rank, const std::string& path) {
    static std::atomic<bool> asked{false};
    ::signal(SIGTERM, [](int) { asked = true; });
    append_line(path + ".up", std::to_string(rank));
    require(eventually([&] { return count_lines(path + ".up") == 3; }), "all are up");
    if (rank == 0) throw std::runtime_error("first");
    require(eventually([&] { return asked.load(); }), "asked to end");
    append_line(path, "tidy");
  };
  SpawnOptions lenient = options(3);
  lenient.grace = Seconds(60);
  EXPECT_EQ(spawn_error(worker, lenient, file("tidy")).text(), "first");
  EXPECT_EQ(count_lines(file("tidy")), 2u);
}

// A stopped process could not act on SIGTERM, and spawn would wait for the whole grace time.
TEST_P(SpawnFailure, StoppedProcessesAreContinued) {
  const auto worker = [](int rank, const std::string& path) {
    static std::atomic<bool> asked{false};
    ::signal(SIGTERM, [](int) { asked = true; });
    if (rank == 1) {
      append_line(path + ".pid", std::to_string(::getpid()));
      ::raise(SIGSTOP);
      require(eventually([&] { return asked.load(); }), "asked to end");
      return append_line(path, "tidy");
    }
    require(eventually([&] { return count_lines(path + ".pid") == 1; }), "the other is up");
    const std::string stat = "/proc/" + std::to_string(std::stoi(contents(path + ".pid"))) + "/stat";
    require(eventually([&] { return contents(stat).find(") T ") != std::string::npos; }), "the other is stopped");
    throw std::runtime_error("first");
  };
  SpawnOptions lenient = options(2);
  lenient.grace = Seconds(60);
  EXPECT_EQ(spawn_error(worker, lenient, file("tidy")).text(), "first");
  EXPECT_EQ(count_lines(file("tidy")), 1u);
}

// The survivors' "peer lost" may come in before the cause: it is not what the user wants to read.
TEST_P(SpawnFailure, TheCauseComesBeforeItsConsequences) {
  const auto worker = [](int rank) {
    auto world = init();
    world->barrier();
    if (rank == 2) throw std::runtime_error("the cause");
    int one = 1;
    world->all_reduce(buffer_of(one));
  };
  const SpawnError error = spawn_error(worker, options(3));
  EXPECT_EQ(error.rank(), 2) << error.what();
  EXPECT_EQ(error.text(), "the cause");
}

TEST_P(SpawnFailure, ACrashComesBeforeItsConsequences) {
  const auto worker = [](int rank) {
    no_core();
    auto world = init();
    world->barrier();
    if (rank == 1) std::abort();
    int one = 1;
    world->all_reduce(buffer_of(one));
  };
  const SpawnError error = spawn_error(worker, options(3));
  EXPECT_EQ(error.rank(), 1) << error.what();
  EXPECT_EQ(error.signal(), SIGABRT);
}

TEST_F(SpawnTest, ErrorsOfNestedSpawnsTellTheWholeStory) {
  const SpawnError error =
      spawn_error([](int) { spawn([](int) { throw std::runtime_error("deep inside"); }); }, SpawnOptions{});
  EXPECT_EQ(error.type(), "maniple::SpawnError");
  EXPECT_NE(error.text().find("threw std::runtime_error: deep inside"), std::string::npos) << error.text();
}

TEST_F(SpawnTest, ImpossibleNumbersOfProcesses) {
  for (const int count : {0, -1, 5000}) EXPECT_THROW(spawn([](int) {}, {.nprocs = count}), InvalidArgument) << count;
}

TEST_F(SpawnTest, AFunctionOfASharedLibraryIsRefused) {
  using Foreign = int (*)(int);
  const auto foreign = reinterpret_cast<Foreign>(::dlsym(RTLD_DEFAULT, "toupper"));
  ASSERT_NE(foreign, nullptr);
  try {
    spawn(foreign, {.nprocs = 2});
    ADD_FAILURE() << "it was not refused";
  } catch (const InvalidArgument& error) {
    EXPECT_NE(std::string(error.what()).find("not in the main program"), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find("libc"), std::string::npos) << error.what();
  }
  EXPECT_THROW(spawn(static_cast<void (*)(int)>(nullptr), {}), InvalidArgument);
}

TEST_F(SpawnTest, ProcessesThatCannotBeStartedLeaveNoneBehind) {
  // Few descriptors: somewhere on the way to 200 processes there are none left.
  const SpawnError error = spawn_error(
      [](int) {
        const rlimit few{40, 40};
        ::setrlimit(RLIMIT_NOFILE, &few);
        spawn([](int) { wait_for_the_end(); }, {.nprocs = 200});
      },
      SpawnOptions{});
  EXPECT_EQ(error.kind(), ErrorKind::system) << error.what();
}

TEST_F(SpawnTest, AParentThatIgnoresSigchldStillLearnsOfFailures) {
  spawn([](int) {
    ::signal(SIGCHLD, SIG_IGN);
    spawn([](int) {}, {.nprocs = 2});
    const SpawnError error = spawn_error([](int) { throw std::runtime_error("seen"); }, SpawnOptions{});
    require(error.text() == "seen", error.what());
    const SpawnError killed = spawn_error([](int) { ::raise(SIGKILL); }, SpawnOptions{});
    require(std::string(killed.what()).find("ignores SIGCHLD") != std::string::npos, killed.what());
  });
}

}  // namespace
}  // namespace maniple
