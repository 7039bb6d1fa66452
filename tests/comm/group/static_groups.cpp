// Groups in static objects: they are destroyed at exit, one after all that the library has made meanwhile, the other
// before. The program ends with 0 if its ranks do, as threads of it and as processes.
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include <maniple/comm/process_group.h>

using maniple::InitOptions;
using maniple::ProcessGroup;

namespace {

constexpr int kRanks = 2;

struct Held {
  std::shared_ptr<ProcessGroup> groups[2 * kRanks];
  maniple::RegisteredMemory memory[kRanks];
  maniple::Work works[kRanks];
};

Held made_before_first_use;

Held& made_after_first_use() {
  static Held held;
  return held;
}

/// The world, a part of it, memory and an operation that never ends.
void use(Held& held, int rank, const std::shared_ptr<ProcessGroup>& world) {
  int value = 1;
  world->all_reduce(maniple::buffer_of(value));
  if (value != kRanks) std::abort();
  const auto at = static_cast<std::size_t>(rank);
  held.memory[at] = world->allocate(4096);
  held.groups[kRanks + at] = world->split(0);
  static int never_received[kRanks];
  held.works[at] = world->irecv(maniple::buffer_of(never_received[at]), 1 - rank);
  held.groups[at] = world;
}

InitOptions options_of(int rank) { return {.rank = rank, .world_size = kRanks, .timeout = maniple::Seconds(60)}; }

void run_threads(Held& held) {
  const auto store = maniple::make_memory_store();
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&held, &store, rank] { use(held, rank, maniple::init(store, options_of(rank))); });
  }
  for (std::thread& thread : threads) thread.join();
}

int run_process(int rank, const std::string& file) {
  for (Held* held : {&made_before_first_use, &made_after_first_use()}) {
    InitOptions options = options_of(rank);
    options.init_method = "file://" + file;
    use(*held, rank, maniple::init(options));
  }
  return 0;
}

}  // namespace

int main() {
  const std::string file = "/tmp/maniple-static-groups-" + std::to_string(::getpid());
  pid_t ranks[kRanks];
  for (int rank = 0; rank < kRanks; ++rank) {
    ranks[rank] = ::fork();
    if (ranks[rank] == 0) return run_process(rank, file);
  }
  for (const pid_t pid : ranks) {
    int status = -1;
    ::waitpid(pid, &status, 0);
    if (status == 0) continue;
    std::fprintf(stderr, "a rank ended with status %d\n", status);
    return 1;
  }
  run_threads(made_before_first_use);
  run_threads(made_after_first_use());
  return 0;
}
