// A rank is lost, or late, while MPI makes the communicator of a sub-group: a call that blocks inside MPI. The others
// get their errors nevertheless, and end.
//
// MPI's libraries let a program put a function of its own before theirs and call theirs by another name (PMPI_...): so
// the fault happens at the one moment that is meant.
#include <dlfcn.h>

#include <csignal>

#include "fault/expect_error.h"
#include "harness/run_ranks.h"

namespace {

std::function<void()> before_create;  // what a rank does before the call

}  // namespace

// The handles are pointers in Open MPI and ints in MPICH; a register holds either.
extern "C" __attribute__((visibility("default"))) int MPI_Comm_create_group(std::intptr_t comm, std::intptr_t group,
                                                                            int tag, void* made) {
  if (before_create) before_create();
  void* library = ::dlopen("libmpi.so.40", RTLD_LAZY | RTLD_NOLOAD);
  if (library == nullptr) library = ::dlopen("libmpich.so.12", RTLD_LAZY | RTLD_NOLOAD);
  using Create = int (*)(std::intptr_t, std::intptr_t, int, void*);
  const auto create = reinterpret_cast<Create>(::dlsym(library, "PMPI_Comm_create_group"));
  return create(comm, group, tag, made);
}

namespace maniple::harness::plugin_setup_test {
namespace {

constexpr double kSoon = 10;  // seconds; far below the limit of an operation

RunOptions options() {
  RunOptions run;
  run.n = 3;
  run.as = As::processes;
  run.backend = "mpi";
  run.timeout = Seconds(60);
  run.limit = Seconds(90);
  return run;
}

// In another order than the world's, so that it is made from scratch.
std::shared_ptr<ProcessGroup> backwards(Rank& r, Seconds timeout) {
  return r.world->split(0, -r.rank, {}, {.timeout = timeout});
}

TEST(PluginSetup, TheFaultHappensWhereItIsMeant) {
  run_ranks(options(), [](Rank& r) {
    int calls = 0;
    before_create = [&] { ++calls; };
    const auto group = backwards(r, Seconds(60));
    EXPECT_EQ(calls, 1);
    int x = 1;
    group->all_reduce(buffer_of(x));
    EXPECT_EQ(x, 3);
  });
}

TEST(PluginSetup, RankKilledWhileASubGroupIsMade) {
  RunOptions run = options();
  run.expect_dead = {1};
  const RunResult result = run_ranks(run, [](Rank& r) {
    if (r.rank == 1) before_create = [] { ::raise(SIGKILL); };
    r.world->barrier();
    const Caught caught = catch_error([&] { backwards(r, Seconds(60)); });
    EXPECT_TRUE(caught.is(ErrorKind::peer_lost)) << caught;
    EXPECT_EQ(caught.lost_rank, 1) << caught;
    EXPECT_LT(caught.took, kSoon);
  });
  if (result) {
    EXPECT_LT(result.elapsed.count(), 2 * kSoon) << "the survivors were slow to end";
  }
}

TEST(PluginSetup, LateRankWhileASubGroupIsMade) {
  const RunResult result = run_ranks(options(), [](Rank& r) {
    if (r.rank == 2) {
      before_create = [&r] { r.phase("the others have given up"); };
    }
    r.world->barrier();
    const Caught caught = catch_error([&] { backwards(r, Seconds(0.5)); });
    EXPECT_TRUE(caught.is_one_of({ErrorKind::timeout, ErrorKind::aborted})) << caught;
    EXPECT_LT(caught.took, kSoon);
    if (r.rank != 2) r.phase("the others have given up");
  });
  if (result) {
    EXPECT_LT(result.elapsed.count(), 2 * kSoon) << "the ranks were slow to end";
  }
}

}  // namespace
}  // namespace maniple::harness::plugin_setup_test
