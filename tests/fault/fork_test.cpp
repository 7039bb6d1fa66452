// Fault 30: a forked child is not a rank. Using its parent's group throws, and does not hang or harm the parent.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <fstream>

#include "comm/backend/work_state.h"
#include "comm/shm/sleeper.h"
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

// ---- What a child does that its parent must not notice --------------------------------------------------------------

constexpr std::size_t kNumbers = 100000;

/// A body for a child, and how it ends.
struct Childhood {
  const char* name;
  std::function<void(Rank&, RegisteredMemory&)> body;
};

void unwind(Rank& r, RegisteredMemory& memory) {
  try {
    const std::shared_ptr<ProcessGroup> group = std::move(r.world);
    const RegisteredMemory part = std::move(memory);
    throw std::runtime_error("the child gives up");
  } catch (const std::runtime_error&) {
  }
}

int wait_for(pid_t child) {
  int status = -1;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  return status;
}

/// All ranks sum registered memory and exchange a message.
void expect_working(Rank& r, RegisteredMemory& memory) {
  const std::span<int> numbers = memory.as<int>(kNumbers);
  const std::vector<int> before(numbers.begin(), numbers.end());
  r.world->all_reduce(buffer_of(numbers));
  for (std::size_t i = 0; i < numbers.size(); ++i) ASSERT_EQ(numbers[i], 2 * before[i]) << "number " << i;
  std::copy(before.begin(), before.end(), numbers.begin());
  int sent = r.rank, received = -1;
  const Work arrival = r.world->irecv(buffer_of(received), 1 - r.rank);
  r.world->send(buffer_of(sent), 1 - r.rank);
  arrival.wait();
  EXPECT_EQ(received, 1 - r.rank);
}

TEST_P(Fork, ParentIsARankAsBefore) {
  const Childhood all[] = {
      {"_exit", [](Rank&, RegisteredMemory&) { ::_exit(0); }},
      {"exit", [](Rank&, RegisteredMemory&) { std::exit(0); }},
      {"unwinds, then exit",
       [](Rank& r, RegisteredMemory& memory) {
         unwind(r, memory);
         std::exit(0);
       }},
      {"drops the memory first",
       [](Rank& r, RegisteredMemory& memory) {
         memory = {};
         r.world.reset();
         ::_exit(0);
       }},
      {"reads registered memory",
       [](Rank&, RegisteredMemory& memory) { ::_exit(memory.as<int>(kNumbers).back() == 7 ? 0 : 1); }},
      {"system",
       [](Rank&, RegisteredMemory&) { ::_exit(std::system("exit 0")); }},  // NOLINT(cert-env33-c): what is tested
  };
  run_ranks({.n = 2, .as = As::processes, .transport = GetParam(), .env = {{"MANIPLE_HEARTBEAT", "0"}}}, [&](Rank& r) {
    RegisteredMemory memory = r.world->allocate(kNumbers * sizeof(int));
    std::ranges::fill(memory.as<int>(kNumbers), 7);
    for (const Childhood& childhood : all) {
      SCOPED_TRACE(childhood.name);
      const pid_t child = ::fork();
      if (child == 0) {
        ::alarm(20);
        childhood.body(r, memory);
        ::_exit(2);
      }
      const int status = wait_for(child);
      EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
      expect_working(r, memory);
    }
  });
}

/// A job of two children of one process: they must not take each other for threads, nor use their parent's event loop.
void expect_job_of_children(const std::string& file, TransportKind transport) {
  pid_t children[2];
  for (int rank = 0; rank < 2; ++rank) {
    children[rank] = ::fork();
    if (children[rank] != 0) continue;
    ::alarm(30);
    int value = 1;
    try {
      const auto group = init({.init_method = "file://" + file,
                               .rank = rank,
                               .world_size = 2,
                               .timeout = Seconds(20),
                               .transport = transport});
      group->all_reduce(buffer_of(value));
    } catch (const std::exception& error) {
      std::fprintf(stderr, "child %d: %s\n", rank, error.what());
      ::_exit(1);
    }
    ::_exit(value == 2 ? 0 : 3);
  }
  for (const pid_t child : children) EXPECT_EQ(wait_for(child), 0);
}

TEST_P(Fork, ChildrenHaveAJobOfTheirOwn) {
  run_ranks({.n = 2, .as = As::processes, .transport = GetParam()}, [](Rank& r) {
    const std::string file = r.dir() + "/children-of-" + std::to_string(r.rank);
    expect_job_of_children(file, GetParam());  // of a live rank
    int value = 1;
    r.world->all_reduce(buffer_of(value));
    EXPECT_EQ(value, 2);
    r.phase("both are done");
    r.world.reset();
    expect_job_of_children(file, GetParam());  // of a former rank
  });
}

TEST_P(Fork, WorkOfTheParentCannotBeFollowed) {
  run_ranks({.n = 2, .as = As::processes, .transport = GetParam()}, [](Rank& r) {
    int received = 0, sent = 5;
    const Work pending = r.world->irecv(buffer_of(received), 1 - r.rank);
    const int status = run_in_fork([&] { pending.then([] {}).wait(); });
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == kThrew) << status;
    r.phase("both have tried");
    r.world->send(buffer_of(sent), 1 - r.rank);
    pending.wait();
    EXPECT_EQ(received, 5);
  });
}

// Without heartbeats only the closed connections show it, so no child may hold them open.
TEST_P(Fork, DeathOfAParentIsNoticedAtOnce) {
  run_ranks(
      {.n = 2, .as = As::processes, .transport = GetParam(), .expect_dead = {1}, .env = {{"MANIPLE_HEARTBEAT", "0"}}},
      [](Rank& r) {
        int value = 1;
        r.world->all_reduce(buffer_of(value));
        const std::string path = r.dir() + "/survivor";
        if (r.rank == 1) {
          const pid_t child = ::fork();
          if (child == 0) {
            for (;;) ::pause();
          }
          ::setpgid(child, child);  // it outlives this rank, and is not one of its leftovers
          std::ofstream(path) << child;
        }
        r.phase("rank 1 has a child");
        if (r.rank == 1) r.kill_self();
        pid_t survivor = 0;
        std::ifstream(path) >> survivor;
        ASSERT_GT(survivor, 0);
        EXPECT_THROW(r.world->all_reduce(buffer_of(value)), PeerLost);
        EXPECT_EQ(::kill(survivor, SIGKILL), 0) << "it was alive all the time";
      });
}

TEST(ForkedStore, AFileStoreIsItsParents) {
  const std::string path = testing::TempDir() + "fork-store-" + std::to_string(::getpid());
  auto store = make_file_store(path);
  store->set("a", "1");
  const int status = run_in_fork([&] {
    try {
      store->set("b", "2");
    } catch (const Aborted&) {
      store.reset();
      throw;
    }
  });
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == kThrew) << status;
  store->set("c", "3");
  EXPECT_EQ(make_file_store(path)->num_keys(), 2);
  ::unlink(path.c_str());
}

// The destructor of a condition variable waits for its waiters, and threads of the parent never leave it in a child.
TEST(ForkedWork, AChildMayDropAWorkForWhichAThreadOfItsParentWaits) {
  auto state = std::make_shared<detail::WorkState>();
  Work work(state);
  const Sleeper waiter([&work] { work.wait(); });
  EXPECT_TRUE(waiter.falls_asleep());
  const int status = run_in_fork([&] {
    work = {};
    state.reset();
  });
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == kReturned) << status;
  state->finish(nullptr);
}

TEST(ForkedStore, AChildMayDropAStoreInWhichAThreadOfItsParentWaits) {
  auto store = make_memory_store();
  const Sleeper waiter([raw = store.get()] { raw->get("key", Deadline::never()); });
  EXPECT_TRUE(waiter.falls_asleep());
  const int status = run_in_fork([&] { store.reset(); });
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == kReturned) << status;
  store->set("key", "value");
}

TEST(ForkedStore, AMemoryStoreIsItsParents) {
  const auto store = make_memory_store();
  const int status = run_in_fork([&] { store->get("never set", Deadline::never()); });
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == kThrew) << status;
}

}  // namespace
}  // namespace maniple::harness
