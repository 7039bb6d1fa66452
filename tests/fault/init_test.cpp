// Joining that goes wrong: the port is taken, ranks are missing, a process of an earlier generation comes along.
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <thread>

#include <fmt/format.h>

#include "comm/base/unique_fd.h"
#include "comm/net/address.h"
#include "fault/expect_error.h"
#include "harness/run_ranks.h"
#include "harness/sanitizers.h"
#include "harness/start_process.h"

namespace maniple::harness {
namespace {

// A listener on a port of loopback that the kernel chose.
std::pair<UniqueFd, int> occupied_port() {
  UniqueFd fd = listen_on(Address::parse("127.0.0.1:0"));
  const int port = Address::of_socket(fd.get()).port();
  return {std::move(fd), port};
}

TEST(InitFault, PortTakenIsNamedWithItsHolder) {  // fault 16
  const auto [holder, port] = occupied_port();
  const Caught caught = catch_error([port = port] {
    InitOptions options;
    options.init_method = fmt::format("tcp://127.0.0.1:{}", port);
    options.rank = 0;
    options.world_size = 2;
    options.timeout = Seconds(10);
    init(options);
  });
  EXPECT_TRUE(caught.is(ErrorKind::system)) << caught;
  EXPECT_TRUE(contains(caught.text, std::to_string(port))) << caught;
  EXPECT_TRUE(contains(caught.text, std::to_string(::getpid()))) << "the holder's pid: " << caught;
  EXPECT_LT(caught.took, 5.0) << "trying again does not help";
}

// Six of eight ranks call init(). The error of each says how many joined and who did not.
void join_without_3_and_5(Rank& r) {
  constexpr int kPresent[] = {0, 1, 2, 4, 6, 7};
  InitOptions options = r.init_options();
  options.rank = kPresent[r.rank];
  options.world_size = 8;
  // Rank 0 may serve the store, so it must not be the first to leave.
  options.init_timeout = Seconds(options.rank == 0 ? 3.0 : 1.5) * kSlowdown;
  r.phase("all have started");
  const Caught caught = catch_error([&] { r.init(options); });
  EXPECT_TRUE(caught.is(ErrorKind::timeout)) << caught;
  EXPECT_TRUE(contains(caught.text, "6 of 8 ranks joined")) << caught;
  EXPECT_EQ(caught.info.ranks, (std::vector<int>{3, 5})) << caught;
  EXPECT_TRUE(contains(caught.text, "waiting for ranks 3, 5")) << caught;
}

TEST(InitFault, MissingRanksAreNamedByFile) {
  run_ranks({.n = 6, .as = As::processes, .init = false}, join_without_3_and_5);
}

TEST(InitFault, MissingRanksAreNamedByTcp) {
  run_ranks({.n = 6, .as = As::processes, .init = false, .rendezvous_by_tcp = true}, join_without_3_and_5);
}

TEST(InitFault, MissingRanksAreNamedToThreads) {
  run_ranks({.n = 6, .as = As::threads, .init = false}, join_without_3_and_5);
}

// Rank 0 serves the store, so the other missing ranks are unknown.
TEST(InitFault, MissingRankZeroIsNamedByTcp) {
  InitOptions options;
  options.init_method = fmt::format("tcp://127.0.0.1:{}", free_loopback_port());
  options.rank = 1;
  options.world_size = 2;
  options.init_timeout = Seconds(0.5);
  const Caught caught = catch_error([&] { init(options); });
  EXPECT_TRUE(caught.is(ErrorKind::timeout)) << caught;
  EXPECT_EQ(caught.info.ranks, std::vector<int>{0}) << caught;
  EXPECT_TRUE(contains(caught.text, "waiting for rank 0")) << caught;
  EXPECT_GE(caught.info.waited_s, 0.4) << caught;
}

// Ranks that try again and again meet, whatever the number of their tries: rank 2 comes when the others have tried
// often, each at its own pace.
void join_after_other_tries(Rank& r, bool with_rank = true) {
  InitOptions options = r.init_options();
  if (!with_rank) options.rank = -1;
  options.init_timeout = Seconds(r.rank == 0 ? 0.5 : 0.7) * kSlowdown;
  const auto tried = [&](int rank) { return fmt::format("{}/tried-{}", r.dir(), rank); };
  const Deadline limit = Deadline::after(std::chrono::seconds(40));
  if (r.rank == 2) {
    while ((::access(tried(0).c_str(), F_OK) != 0 || ::access(tried(1).c_str(), F_OK) != 0) && !limit.expired()) {
      std::this_thread::yield();
    }
  }
  for (int tries = 1; !r.world && !limit.expired(); ++tries) {
    const Caught caught = catch_error([&] { r.init(options); });
    if (tries == 3 + r.rank) std::ofstream(tried(r.rank)) << tries;
  }
  ASSERT_NE(r.world, nullptr);
  int value = 1;
  r.world->all_reduce(buffer_of(value), ReduceOp::sum, {.timeout = Seconds(20)});
  EXPECT_EQ(value, 3);
}

TEST(InitFault, RetriesMeetByFile) {
  run_ranks({.n = 3, .as = As::processes, .init = false}, [](Rank& r) { join_after_other_tries(r); });
}

TEST(InitFault, RetriesMeetByFileWithoutRanks) {
  run_ranks({.n = 3, .as = As::processes, .init = false}, [](Rank& r) { join_after_other_tries(r, false); });
}

TEST(InitFault, RetriesMeetByTcp) {
  run_ranks({.n = 3, .as = As::processes, .init = false, .rendezvous_by_tcp = true},
            [](Rank& r) { join_after_other_tries(r); });
}

TEST(InitFault, RetriesMeetToThreads) {
  run_ranks({.n = 3, .as = As::threads, .init = false}, [](Rank& r) { join_after_other_tries(r); });
}

TEST(InitFault, ZombieOfAnEarlierGenerationIsRefusedAndTheNewJobStarts) {  // fault 17
  run_ranks({.n = 3, .as = As::processes, .init = false, .rendezvous_by_tcp = true}, [](Rank& r) {
    const bool zombie = r.rank == 2;
    ASSERT_EQ(::setenv("MANIPLE_GENERATION", zombie ? "3" : "4", 1), 0);
    InitOptions options = r.init_options();
    options.world_size = 2;
    options.rank = zombie ? 1 : r.rank;
    options.init_timeout = Seconds(20) * kSlowdown;
    // The zombie comes while only rank 0 is there, then rank 1 comes.
    if (r.rank == 1) r.phase("the zombie has been refused");
    const Caught caught = catch_error([&] {
      if (r.rank == 0) {
        // Serving starts inside join, so the phases are passed beside it.
        std::jthread other([&] { r.phase("the zombie has been refused"); });
        r.init(options);
      } else {
        r.init(options);
      }
    });
    if (zombie) {
      EXPECT_TRUE(caught.is(ErrorKind::protocol)) << caught;
      EXPECT_TRUE(contains(caught.text, "superseded")) << caught;
      r.phase("the zombie has been refused");
      return;
    }
    ASSERT_FALSE(caught.any) << caught;
    int value = 1;
    r.world->all_reduce(buffer_of(value));
    EXPECT_EQ(value, 2);
  });
}

TEST(InitFault, ARankThatIsAliveOrWasCannotBeTakenAgain) {  // bad inputs 18, 19, 20
  run_ranks({.n = 4, .as = As::processes, .init = false, .rendezvous_by_tcp = true, .fault = kill_at(1, 1)},
            [](Rank& r) {
              InitOptions options = r.init_options();
              options.world_size = 3;
              options.rank = r.rank == 3 ? 1 : r.rank;
              options.init_timeout = Seconds(20) * kSlowdown;
              const auto come_late = [&](const std::string& whose) {
                const Caught caught = catch_error([&] { r.init(options); });
                EXPECT_TRUE(caught.is(ErrorKind::invalid_argument)) << caught;
                EXPECT_TRUE(contains(caught.text, "rank 1 has been taken by host")) << caught;
                EXPECT_TRUE(contains(caught.text, fmt::format("pid {}", r.pid_of(1)))) << whose << ": " << caught;
                EXPECT_TRUE(contains(caught.text, fmt::format("pid {}", ::getpid()))) << "both are named: " << caught;
                EXPECT_TRUE(contains(caught.text, "MANIPLE_GENERATION")) << "what to do: " << caught;
              };
              if (r.rank != 3) r.init(options);
              r.phase("three have joined");
              if (r.rank == 3) come_late("the first is alive");
              r.phase("the fourth was refused");
              if (r.rank != 3) {
                int value = 1;
                r.world->all_reduce(buffer_of(value));
                EXPECT_EQ(value, 3) << "the job goes on as if nothing had happened";
              }
              r.phase("done");
              if (r.rank == 1) r.step();
              if (r.rank == 3) {
                come_late("the first is dead: in this generation nobody else can be rank 1");
              } else {
                EXPECT_THROW(r.world->barrier(), PeerLost);
              }
              // Rank 0 serves the store, so it stays until the fourth has its answer.
              r.phase("refused again");
            });
}

TEST(InitFault, InANewGenerationTheRankOfADeadProcessIsFree) {  // bad input 19
  run_ranks({.n = 3, .as = As::processes, .init = false, .fault = kill_at(1, 1)}, [](Rank& r) {
    const auto join_as = [&](int rank, const char* generation) {
      ASSERT_EQ(::setenv("MANIPLE_GENERATION", generation, 1), 0);
      InitOptions options = r.init_options();
      options.world_size = 2;
      options.rank = rank;
      r.init(options);
    };
    if (r.rank != 2) join_as(r.rank, "1");
    r.phase("generation 1");
    if (r.rank == 1) r.step();
    if (r.rank == 0) {
      EXPECT_THROW(r.world->barrier(), PeerLost);
      r.world.reset();
    }
    r.phase("rank 1 is lost");
    join_as(r.rank == 2 ? 1 : 0, "2");
    int value = 1;
    r.world->all_reduce(buffer_of(value));
    EXPECT_EQ(value, 2);
  });
}

TEST(InitFault, WorldSizesThatDifferAreRefused) {
  run_ranks({.n = 2, .as = As::processes, .init = false, .rendezvous_by_tcp = true}, [](Rank& r) {
    InitOptions options = r.init_options();
    options.world_size = r.rank == 0 ? 2 : 3;
    options.init_timeout = Seconds(r.rank == 0 ? 3 : 20) * kSlowdown;
    r.phase("both have started");
    const Caught caught = catch_error([&] { r.init(options); });
    EXPECT_TRUE(caught.any);
    if (r.rank == 1) {
      EXPECT_TRUE(caught.is(ErrorKind::protocol)) << caught;
      EXPECT_TRUE(contains(caught.text, "2") && contains(caught.text, "3")) << caught;
    }
  });
}

TEST(InitFault, WrongSecretIsRefused) {
  run_ranks({.n = 2, .as = As::processes, .init = false, .rendezvous_by_tcp = true}, [](Rank& r) {
    if (r.rank == 1) {
      const std::string path = r.dir() + "/wrong";
      write_secret(path);  // a random one
      ASSERT_EQ(::setenv("MANIPLE_SECRET_FILE", path.c_str(), 1), 0);
    }
    InitOptions options = r.init_options();
    options.init_timeout = Seconds(3) * kSlowdown;
    r.phase("both have started");
    const Caught caught = catch_error([&] { r.init(options); });
    EXPECT_TRUE(caught.is(r.rank == 0 ? ErrorKind::timeout : ErrorKind::protocol)) << caught;
  });
}

}  // namespace
}  // namespace maniple::harness
