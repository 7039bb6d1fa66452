// Fault 32: a rank that comes late is not lost, whatever the others wait in, and whether it is their first operation or
// not. The network must not give up on it meanwhile, and no call may succeed that did not.
#include <functional>
#include <thread>

#include "fault/expect_error.h"
#include "harness/run_ranks.h"

namespace maniple::harness {
namespace {

// Twice what the kernel's own probes of a receiver that does not read took, when they had a limit.
constexpr double kLate = 7;
constexpr std::size_t kCount = 1 << 20;  // 4 MiB
constexpr std::size_t kBig = 16 << 20;

struct Case {
  const char* name;
  std::function<void(ProcessGroup& group)> run;
};

std::vector<float> filled(std::size_t count, float value) { return std::vector<float>(count, value); }

// Two ranks; rank 0 has 1s, rank 1 has 2s.
const std::vector<Case>& cases() {
  static const std::vector<Case> kCases = {
      {"broadcast",
       [](ProcessGroup& group) {
         auto x = filled(kCount, static_cast<float>(group.rank() + 1));
         group.broadcast(buffer_of(x), 0);
         EXPECT_EQ(x, filled(kCount, 1));
       }},
      {"all_reduce",
       [](ProcessGroup& group) {
         auto x = filled(kCount, static_cast<float>(group.rank() + 1));
         group.all_reduce(buffer_of(x));
         EXPECT_EQ(x, filled(kCount, 3));
       }},
      {"reduce",
       [](ProcessGroup& group) {
         const auto x = filled(kCount, static_cast<float>(group.rank() + 1));
         auto sum = filled(kCount, 0);
         group.reduce(buffer_of(x), buffer_of(sum), 1);
         if (group.rank() == 1) {
           EXPECT_EQ(sum, filled(kCount, 3));
         }
       }},
      {"all_gather",
       [](ProcessGroup& group) {
         const auto x = filled(kCount, static_cast<float>(group.rank() + 1));
         auto all = filled(2 * kCount, 0);
         group.all_gather(buffer_of(x), buffer_of(all));
         EXPECT_EQ(all.front() + all.back(), 3);
       }},
      {"gather",
       [](ProcessGroup& group) {
         const auto x = filled(kCount, static_cast<float>(group.rank() + 1));
         auto all = filled(2 * kCount, 0);
         group.gather(buffer_of(x), buffer_of(all), 1);
         if (group.rank() == 1) {
           EXPECT_EQ(all.front() + all.back(), 3);
         }
       }},
      {"scatter",
       [](ProcessGroup& group) {
         const auto all = filled(2 * kCount, 5);
         auto x = filled(kCount, 0);
         group.scatter(buffer_of(all), buffer_of(x), 0);
         EXPECT_EQ(x, filled(kCount, 5));
       }},
      {"reduce_scatter",
       [](ProcessGroup& group) {
         const auto all = filled(2 * kCount, static_cast<float>(group.rank() + 1));
         auto x = filled(kCount, 0);
         group.reduce_scatter(buffer_of(all), buffer_of(x));
         EXPECT_EQ(x, filled(kCount, 3));
       }},
      {"all_to_all",
       [](ProcessGroup& group) {
         const auto out = filled(2 * kCount, static_cast<float>(group.rank() + 1));
         auto in = filled(2 * kCount, 0);
         group.all_to_all(buffer_of(out), buffer_of(in));
         EXPECT_EQ(in.front() + in.back(), 3);
       }},
      {"send",
       [](ProcessGroup& group) {
         auto x = filled(kBig, static_cast<float>(group.rank() + 1));
         if (group.rank() == 0) {
           group.send(buffer_of(x), 1);
         } else {
           group.recv(buffer_of(x), 0);
           EXPECT_EQ(x, filled(kBig, 1));
         }
       }},
      {"barrier", [](ProcessGroup& group) { group.barrier(); }},
  };
  return kCases;
}

void expect_all_complete(bool warmed_up) {
  run_ranks({.n = 2,
             .as = As::processes,
             .transport = TransportKind::tcp,
             .limit = Seconds(120),
             .fault = delay_at(1, 1, Seconds(kLate)),
             .env = {{"MANIPLE_TCP_BUFFER_KIB", "256"}}},  // so that they take little of what is sent
            [&](Rank& r) {
              // A group for each, so that all of them wait at the same time.
              std::vector<std::shared_ptr<ProcessGroup>> groups;
              for (const Case& each : cases()) {
                groups.push_back(r.world->split(0));
                if (warmed_up) each.run(*groups.back());
              }
              r.world->barrier();
              r.step();
              std::vector<std::thread> threads;
              for (std::size_t i = 0; i < groups.size(); ++i) {
                threads.emplace_back([&, i] {
                  // Twice: what was reported as done must have been.
                  for (int round = 0; round < 2; ++round) {
                    const Caught caught = catch_error([&] { cases()[i].run(*groups[i]); });
                    EXPECT_FALSE(caught.any) << cases()[i].name << ", round " << round << ": " << caught;
                  }
                });
              }
              for (std::thread& thread : threads) thread.join();
              r.phase("all are done");
            });
}

TEST(Late, FirstOperation) { expect_all_complete(false); }

TEST(Late, LaterOperation) { expect_all_complete(true); }

}  // namespace
}  // namespace maniple::harness
