// Fault 30: a forked child is not a rank. Using its parent's group throws, and does not hang or harm the parent.
#include <sys/wait.h>
#include <unistd.h>

#include "fault/expect_error.h"
#include "fault/ways.h"

namespace maniple::harness {
namespace {

class Fork : public EveryTransport {};
INSTANTIATE_TEST_SUITE_P(Faults, Fork, process_transports(), transport_name);

enum ChildExit { kThrew = 0, kReturned = 1 };

int run_in_fork(const std::function<void()>& call) {
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(20);  // a hang ends by a signal, which the parent sees
    int exit = kReturned;
    try {
      call();
    } catch (const Error&) {
      exit = kThrew;
    }
    ::_exit(exit);
  }
  int status = -1;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  return status;
}

TEST_P(Fork, EveryCallOfTheChildThrows) {
  run_ranks({.n = 2, .as = As::processes, .transport = GetParam()}, [](Rank& r) {
    int value = 1;
    r.world->all_reduce(buffer_of(value));
    ProcessGroup& world = *r.world;
    const auto expect_throw = [&](const char* what, const std::function<void()>& call) {
      const int status = run_in_fork(call);
      EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == kThrew) << what << ": status " << status;
    };
    expect_throw("all_reduce", [&] { world.all_reduce(buffer_of(value)); });
    expect_throw("all_reduce with async_op",
                 [&] { world.all_reduce(buffer_of(value), ReduceOp::sum, {.async_op = true}).wait(); });
    expect_throw("barrier", [&] { world.barrier(); });
    expect_throw("send", [&] { world.send(buffer_of(value), 1 - r.rank); });
    expect_throw("recv", [&] { world.recv(buffer_of(value), 1 - r.rank); });
    expect_throw("split", [&] { world.split(0); });
    expect_throw("allocate", [&] { world.allocate(64); });
    expect_throw("monitored_barrier", [&] { world.monitored_barrier(Seconds(1)); });
    expect_throw("abort", [&] { world.abort("the child has had enough"); });
    EXPECT_EQ(world.error(), nullptr);
    // What the parent waits for, the child cannot.
    std::int32_t message = 0;
    const Work pending = world.irecv(buffer_of(message), 1 - r.rank);
    expect_throw("wait", [&] { pending.wait(); });
    r.phase("both have tried to wait");
    world.send(buffer_of(value), 1 - r.rank);
    pending.wait();
    // The parent is a rank as before.
    value = 1;
    r.world->all_reduce(buffer_of(value));
    EXPECT_EQ(value, 2);
  });
}

TEST_P(Fork, ChildDoesNotDisturbTheStoreOfItsParent) {
  run_ranks({.n = 2, .as = As::processes, .transport = GetParam(), .rendezvous_by_tcp = true}, [](Rank& r) {
    Store& store = r.world->store();
    for (int round = 0; round < 3; ++round) {
      const int status = run_in_fork([&] { store.set("from a child", "1"); });
      EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == kThrew) << status;
      const std::string key = std::to_string(round);
      store.add(key, 1);
      r.world->barrier();
      EXPECT_EQ(store.add(key, 0), 2);
    }
    r.phase("rank 0, which serves the store, stays until both have looked");
  });
}

TEST_P(Fork, ChildMayDropItsCopyOfTheGroup) {
  run_ranks({.n = 2, .as = As::processes, .transport = GetParam()}, [](Rank& r) {
    int value = 1;
    r.world->all_reduce(buffer_of(value));
    const int status = run_in_fork([&] { r.world.reset(); });
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == kReturned) << status;
    value = 1;
    r.world->all_reduce(buffer_of(value));
    EXPECT_EQ(value, 2);
  });
}

}  // namespace
}  // namespace maniple::harness
