// What groups leave behind in a process that goes on: nothing, however they ended.
#include <dirent.h>

#include <fstream>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include <maniple/comm/error.h>

#include "comm/group/matrix.h"

namespace maniple::harness {
namespace {

std::size_t entries_of(const char* folder) {
  std::size_t count = 0;
  DIR* const all = ::opendir(folder);
  while (::readdir(all) != nullptr) ++count;
  ::closedir(all);
  return count;
}

// Mappings of shared memory; the allocator's own come and go.
std::size_t mapped_segments() {
  std::ifstream maps("/proc/self/maps");
  std::size_t count = 0;
  for (std::string line; std::getline(maps, line);) count += line.find("memfd:maniple") != std::string::npos ? 1 : 0;
  return count;
}

struct Held {
  std::size_t descriptors = 0;
  std::size_t threads = 0;
  std::size_t segments = 0;
  static Held now() {
    static std::mutex mutex;  // counting opens descriptors
    const std::lock_guard lock(mutex);
    return {entries_of("/proc/self/fd"), entries_of("/proc/self/task"), mapped_segments()};
  }
  bool exceeds(const Held& other) const {
    return descriptors > other.descriptors || threads > other.threads || segments > other.segments;
  }
};

class Leftovers : public Operations {
 protected:
  /// `use` leaves a group in some state; then it is destroyed. After some rounds nothing more is held than after the
  /// first ones.
  void run_rounds(const std::function<void(Rank&, ProcessGroup&)>& use) {
    run([&](Rank& r) {
      constexpr int kWarm = 3, kRounds = 13;
      Held before;
      for (int round = 0; round < kRounds; ++round) {
        auto group = r.world->split(r.rank < 2 ? 0 : 1);
        if (r.rank < 2) use(r, *group);
        r.phase("used" + std::to_string(round));
        group.reset();
        r.phase("destroyed" + std::to_string(round));
        if (round == kWarm) {
          r.world->barrier();
          before = Held::now();
          r.phase("counted");
        }
      }
      // The other side's end, and threads that end, may be noticed a little later.
      const Deadline limit = Deadline::after(std::chrono::seconds(20));
      Held after = Held::now();
      for (; after.exceeds(before) && !limit.expired(); after = Held::now()) std::this_thread::yield();
      EXPECT_LE(after.descriptors, before.descriptors);
      EXPECT_LE(after.threads, before.threads);
      EXPECT_LE(after.segments, before.segments);
      r.phase("compared");
    });
  }
};
INSTANTIATE_TEST_SUITE_P(Few, Leftovers, testing::ValuesIn(places({2, 3})), name_of);

TEST_P(Leftovers, OfAGroupWithAnUnreceivedMessage) {
  run_rounds([](Rank& r, ProcessGroup& group) {
    const int value = 7;
    if (r.rank == 0) group.send(buffer_of(value), 1);
  });
}

TEST_P(Leftovers, OfAGroupWithMessagesUnderWay) {
  const std::vector<char> large(8 << 20);
  run_rounds([&](Rank& r, ProcessGroup& group) {
    static thread_local int value = 0;
    if (r.rank == 0) group.isend(buffer_of(large), 1, 1);
    if (r.rank == 1) group.irecv(buffer_of(value), 0, 2);
  });
}

TEST_P(Leftovers, OfAGroupThatFailed) {
  run_rounds([](Rank& r, ProcessGroup& group) {
    int value = 0;
    if (r.rank == 1) {
      EXPECT_THROW(group.recv(buffer_of(value), 0, 1, {.timeout = std::chrono::milliseconds(10)}), Error);
    }
  });
}

TEST_P(Leftovers, OfAGroupThatCommunicated) {
  run_rounds([](Rank&, ProcessGroup& group) {
    int value = 1;
    group.all_reduce(buffer_of(value));
    const RegisteredMemory memory = group.allocate(100'000);
    group.barrier();
  });
}

}  // namespace
}  // namespace maniple::harness
