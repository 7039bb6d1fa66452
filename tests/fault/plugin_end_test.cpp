// How ranks end: soon after they were initialised, at different times. They exit with status 0, and so does mpirun.
#include <dlfcn.h>
#include <sys/stat.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <fstream>
#include <thread>

#include "fault/expect_error.h"
#include "harness/run_ranks.h"

namespace {

std::function<void()> end_hook;     // called once when this rank, at its end, waits for the others
std::function<void()> posted_hook;  // called whenever MPI may continue

}  // namespace

// As in plugin_setup_test.cpp: in front of MPI's own.
extern "C" __attribute__((visibility("default"))) int MPI_Ibarrier(std::intptr_t comm, void* request) {
  if (const auto hook = std::exchange(end_hook, nullptr)) hook();
  void* library = ::dlopen("libmpi.so.40", RTLD_LAZY | RTLD_NOLOAD);
  if (library == nullptr) library = ::dlopen("libmpich.so.12", RTLD_LAZY | RTLD_NOLOAD);
  using Barrier = int (*)(std::intptr_t, void*);
  const int result = reinterpret_cast<Barrier>(::dlsym(library, "PMPI_Ibarrier"))(comm, request);
  if (posted_hook) posted_hook();
  return result;
}

namespace maniple::harness {
namespace {

RunOptions options(int ranks) {
  RunOptions run;
  run.n = ranks;
  run.as = As::processes;
  run.timeout = Seconds(30);
  run.limit = Seconds(40);
  return run;
}

// Connections that MPI has begun to open are not open yet when the ranks end; with more ranks than cores some of them
// end before others have polled theirs. (MPICH's MPI_Finalize hung then.)
TEST(PluginEnd, SoonAfterInit) {
  RunOptions run = options(5);
  run.env = {{"UCX_TLS", "^cma"}};  // what MPICH uses between hosts
  for (int again = 0; again < 6; ++again) {
    run_ranks(run, [](Rank& r) {
      for (int root = 0; root < r.size; ++root) r.world->broadcast_object(std::string(20'000, 'x'), root);
    });
  }
}

// A rank that is done waits for those that still have to receive what it has sent, for as long as they need.
TEST(PluginEnd, WhatWasSentIsReceivedAfterTheSendersEnd) {
  run_ranks(options(2), [](Rank& r) {
    const std::string path = r.dir() + "/end";
    if (r.rank == 1 && ::mkfifo(path.c_str(), 0600) != 0) ADD_FAILURE() << "mkfifo";
    r.world->barrier();
    r.phase("the path is there");
    std::vector<float> values(40'000, 7.0f);  // more than MPI sends eagerly
    if (r.rank == 0) {
      r.world->send(buffer_of(values), 1);
      r.world.reset();
      end_hook = [path] { std::ofstream(path) << "at its end"; };
    } else {
      std::string said;
      std::getline(std::ifstream(path), said);  // written when rank 0 has called it
      EXPECT_EQ(said, "at its end");
      std::vector<float> got(values.size());
      r.world->recv(buffer_of(got), 0);
      EXPECT_EQ(got, values);
    }
  });
}

void await_end_of(pid_t pid) {
  const Deadline limit = Deadline::after(std::chrono::seconds(20));
  while (::kill(pid, 0) == 0 && !limit.expired()) std::this_thread::yield();
}

// Rank 0 has given up waiting, after it had taken part in both barriers: rank 1, which comes later, finds it in both
// and in MPI_Finalize no more.
TEST(PluginEnd, ARankThatGaveUpAtTheEndIsNotAwaitedInFinalize) {
  RunOptions run = options(2);
  run.expect_dead = {0};
  const auto result = run_ranks(run, [](Rank& r) {
    r.world->barrier();
    r.world.reset();
    static int posted = 0;
    posted = 0;
    if (r.rank == 0) {
      posted_hook = [] {
        if (++posted == 2) ::_exit(0);
      };
    } else {
      posted_hook = [first = r.pid_of(0)] {
        if (++posted == 1) end_hook = [first] { await_end_of(first); };
      };
    }
  });
  if (!result) return;
  EXPECT_LT(result.elapsed.count(), 20.0);
}

// Rank 1 gets no notice that rank 0 is gone: it would wait for half an hour.
TEST(PluginEnd, ARankThatIsGoneAtTheEndIsNotAwaited) {
  RunOptions run = options(2);
  run.expect_dead = {0};
  const auto result = run_ranks(run, [](Rank& r) {
    r.world->barrier();
    r.world.reset();
    if (r.rank == 0) {
      end_hook = [] { ::_exit(0); };
    } else {
      ::setenv("OMPI_MCA_orte_enable_recovery", "0", 1);  // as without that option of mpirun
    }
  });
  if (!result) return;
  EXPECT_LT(result.elapsed.count(), 20.0);
}

// The group is never destroyed. Its rank waits for the others, and they for it: they get an error.
TEST(PluginEnd, AGroupThatExistsAtExitIsLeft) {
  RunOptions run = options(2);
  run.expect_dead = {0};
  run_ranks(run, [](Rank& r) {
    static std::shared_ptr<ProcessGroup> kept;
    r.world->barrier();
    if (r.rank == 0) {
      kept = r.world;
      return;
    }
    int x = 0;
    const Caught caught = catch_error([&] { r.world->recv(buffer_of(x), 0); });
    EXPECT_TRUE(caught.is(ErrorKind::peer_lost)) << caught;
    EXPECT_TRUE(contains(caught.text, "has left the group")) << caught;
    ::kill(r.pid_of(0), SIGKILL);  // it would wait for this one, which ends without
  });
}

}  // namespace
}  // namespace maniple::harness
