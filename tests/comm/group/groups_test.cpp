// Sub-groups, groups inside groups, groups used from several threads, groups made and dropped many times; topology;
// store.
#include <unistd.h>

#include <limits>
#include <numeric>
#include <thread>

#include <fmt/format.h>

#include <maniple/comm/error.h>

#include "comm/group/matrix.h"

namespace maniple::harness {
namespace {

class Groups : public Operations {};
INSTANTIATE_TEST_SUITE_P(Every, Groups, testing::ValuesIn(places({1, 2, 3, 4, 5, 8})), name_of);

int sum_of_ones(ProcessGroup& group) {
  int value = 1;
  group.all_reduce(buffer_of(value));
  return value;
}

TEST_P(Groups, NewGroupOrdersItsRanksAsListed) {
  run([](Rank& r) {
    std::vector<int> backwards(r.size);
    std::iota(backwards.rbegin(), backwards.rend(), 0);
    const auto group = r.world->new_group(backwards);
    ASSERT_NE(group, nullptr);
    EXPECT_EQ(group->size(), r.size);
    EXPECT_EQ(group->rank(), r.size - 1 - r.rank);
    std::vector<int> gathered(r.size);
    group->all_gather(buffer_of(r.rank), buffer_of(gathered));
    EXPECT_EQ(gathered, backwards);
    EXPECT_NE(group->name(), r.world->name());
  });
}

TEST_P(Groups, RanksOutsideAreNotMembers) {
  run([](Rank& r) {
    const std::vector<int> even = [&] {
      std::vector<int> list;
      for (int rank = 0; rank < r.size; rank += 2) list.push_back(rank);
      return list;
    }();
    const auto group = r.world->new_group(even);
    ASSERT_NE(group, nullptr);
    ASSERT_EQ(group->is_member(), r.rank % 2 == 0);
    if (group->is_member()) {
      EXPECT_EQ(sum_of_ones(*group), static_cast<int>(even.size()));
      EXPECT_EQ(group->topology().members[group->rank()].global_rank, r.rank);
    }
    EXPECT_EQ(sum_of_ones(*r.world), r.size);
  });
}

TEST_P(Groups, SplitByColorAndKey) {
  run([](Rank& r) {
    // Two colours; keys turn the order round.
    const auto group = r.world->split(r.rank % 2, -r.rank);
    ASSERT_NE(group, nullptr);
    const int members = r.rank % 2 == 0 ? (r.size + 1) / 2 : r.size / 2;
    EXPECT_EQ(group->size(), members);
    EXPECT_EQ(group->rank(), members - 1 - r.rank / 2);
    std::vector<int> gathered(members);
    group->all_gather(buffer_of(r.rank), buffer_of(gathered));
    for (int i = 0; i < members; ++i) EXPECT_EQ(gathered[i], 2 * (members - 1 - i) + r.rank % 2);
  });
}

TEST_P(Groups, SplitWithEqualKeysKeepsTheOrderAndNegativeColorMeansNoGroup) {
  run([](Rank& r) {
    const auto group = r.world->split(r.rank == 0 ? -1 : 7);
    if (r.rank == 0) {
      EXPECT_FALSE(group->is_member());
    } else {
      ASSERT_TRUE(group->is_member());
      EXPECT_EQ(group->rank(), r.rank - 1);
      EXPECT_EQ(sum_of_ones(*group), r.size - 1);
    }
    EXPECT_FALSE(r.world->split(-1)->is_member());
  });
}

// A group of ranks 0 and 1 is used by all ranks, as in programs with one source: no rank may take it for the world.
TEST_P(Groups, OutsideEveryOperationDoesNothing) {
  run([](Rank& r) {
    if (r.size < 3) return;
    const auto group = r.world->new_group(std::vector<int>{0, 1});
    int value = 1 + r.rank;
    group->all_reduce(buffer_of(value));
    EXPECT_EQ(value, r.rank < 2 ? 3 : 1 + r.rank);
    if (group->is_member()) {
      group->barrier();
      return;
    }

    EXPECT_EQ(group->rank(), -1);
    EXPECT_EQ(group->size(), -1);
    EXPECT_EQ(group->transport(), "none");
    EXPECT_EQ(group->backend(), r.world->backend());
    EXPECT_TRUE(group->topology().members.empty());
    EXPECT_NE(group->name(), r.world->name());
    EXPECT_EQ(group->error(), nullptr);
    EXPECT_TRUE(group->recent_operations().empty());
    EXPECT_THROW(group->store(), InvalidArgument);
    EXPECT_THROW(group->require_member("a taker"), InvalidArgument);
    EXPECT_THROW(group->new_group(std::vector<int>{0}), InvalidArgument);
    EXPECT_THROW(group->split(0), InvalidArgument);

    const Buffer x = buffer_of(value);
    group->broadcast(x, 0);
    group->reduce(x, x, 1);
    group->all_reduce(ConstBuffer(x), x);
    group->all_reduce_coalesced(std::span(&x, 1));
    group->gather(x, x, 0);
    group->all_gather(x, x);
    group->scatter(x, x, 0);
    group->reduce_scatter(x, x);
    group->all_to_all(x, x);
    group->barrier();
    group->monitored_barrier(Seconds(60));
    group->send(x, 0);
    EXPECT_EQ(group->recv(x, kAnySource), -1);
    int source = 5;
    const PointToPoint batch[] = {PointToPoint::send(x, 0), PointToPoint::recv(x, 1)};
    std::vector<Work> works = group->batch_isend_irecv(batch);
    EXPECT_EQ(works.size(), 2u);
    const ReduceOp op = ReduceOp::sum;
    const CallOptions later{.async_op = true};
    for (const Work& work :
         {group->broadcast(x, 0, later), group->reduce(x, x, 1, op, later), group->all_reduce(x, op, later),
          group->all_reduce(ConstBuffer(x), x, op, later), group->all_reduce_coalesced(std::span(&x, 1), op, later),
          group->gather(x, x, 0, {}, later), group->all_gather(x, x, {}, later), group->scatter(x, x, 0, {}, later),
          group->reduce_scatter(x, x, op, {}, later), group->all_to_all(x, x, {}, {}, later), group->barrier(later),
          group->isend(x, 0), group->irecv(x, 0, 0, &source)}) {
      works.push_back(work);
    }
    for (const Work& work : works) {
      EXPECT_TRUE(work.done());
      work.wait();
    }
    EXPECT_EQ(source, -1);
    EXPECT_EQ(group->broadcast_object("mine", 0), "");
    EXPECT_TRUE(group->gather_objects("mine", 0).empty());
    EXPECT_TRUE(group->all_gather_objects("mine").empty());
    EXPECT_EQ(group->scatter_objects({}, 0), "");
    EXPECT_EQ(group->allocate(4096).size(), 0u);
    group->abort("no other member");
    EXPECT_EQ(value, 1 + r.rank);
  });
}

TEST(Outside, IsToldOnceForEachGroup) {
  testing::internal::CaptureStderr();
  run_ranks({.n = 3, .backend = "native"}, [](Rank& r) {
    const auto pair = r.world->new_group(std::vector<int>{0, 1});
    for (int round = 0; round < 3; ++round) pair->barrier();
    r.world->barrier();
  });
  const std::string logged = testing::internal::GetCapturedStderr();
  const std::string line = "barrier on group world/1: rank 2 of the world is not in it";
  const auto at = logged.find(line);
  EXPECT_NE(at, std::string::npos) << logged;
  EXPECT_EQ(logged.find(line, at + 1), std::string::npos) << logged;
}

// The world can be left while a handle to a group that this rank is not in is still held.
TEST_P(Groups, AHandleFromOutsideKeepsNothingAlive) {
  std::vector<std::shared_ptr<ProcessGroup>> outside(static_cast<std::size_t>(GetParam().n));
  run([&](Rank& r) {
    const auto group = r.world->split(r.rank == 0 ? 0 : -1);
    if (r.rank != 0) outside[static_cast<std::size_t>(r.rank)] = group;
  });
  for (const auto& group : outside) {
    if (group) group->barrier();
  }
}

TEST_P(Groups, InvalidOptionsAreRefusedByAllRanks) {
  run([](Rank& r) {
    const std::vector<int> first = {0};
    const double nan = std::numeric_limits<double>::quiet_NaN();
    for (const GroupOptions& options :
         {GroupOptions{.timeout = Seconds(-1), .transport = {}, .algorithm = {}},
          GroupOptions{.timeout = Seconds(0), .transport = {}, .algorithm = {}},
          GroupOptions{.timeout = Seconds(nan), .transport = {}, .algorithm = {}},
          GroupOptions{.timeout = {}, .transport = {}, .algorithm = "fastest"},
          GroupOptions{.timeout = {}, .transport = static_cast<TransportKind>(99), .algorithm = {}}}) {
      EXPECT_THROW(r.world->new_group(first, options), InvalidArgument);
      EXPECT_THROW(r.world->split(r.rank == 0 ? 0 : -1, 0, options), InvalidArgument);
    }
    EXPECT_EQ(sum_of_ones(*r.world), r.size);
    EXPECT_EQ(sum_of_ones(*r.world->split(0)), r.size);
  });
}

// Ranks with different or invalid lists get an error instead of waiting for each other.
TEST_P(Groups, OptionsOfASplitMustAgreeInEachColour) {
  run([](Rank& r) {
    if (r.size < 3) return;
    const int color = r.rank == 2 ? 1 : 0;
    const auto timeout = r.rank == 0 ? std::optional<Seconds>(-1) : std::nullopt;
    if (color == 0) {
      EXPECT_THROW(r.world->split(color, 0, {.timeout = timeout, .transport = {}, .algorithm = {}}), InvalidArgument);
    } else {
      EXPECT_EQ(sum_of_ones(*r.world->split(color)), 1);
    }
    EXPECT_EQ(sum_of_ones(*r.world), r.size);
    EXPECT_EQ(sum_of_ones(*r.world->split(0)), r.size);
  });
}

TEST_P(Groups, Nested) {
  run([](Rank& r) {
    std::shared_ptr<ProcessGroup> group = r.world;
    int members = r.size;
    while (members > 1) {
      const int half = (members + 1) / 2;
      const bool lower = group->rank() < half;
      group = group->split(lower ? 0 : 1);
      ASSERT_NE(group, nullptr);
      members = lower ? half : members - half;
      ASSERT_EQ(group->size(), members);
      EXPECT_EQ(sum_of_ones(*group), members);
      const RegisteredMemory memory = group->allocate(4096);
      memory.as<std::int32_t>(1)[0] = 1;
      group->all_reduce(buffer_of(memory.as<std::int32_t>(1)));
      EXPECT_EQ(memory.as<std::int32_t>(1)[0], members);
    }
    EXPECT_EQ(sum_of_ones(*r.world), r.size);
  });
}

TEST_P(Groups, OfOneRankDoEverythingAlone) {
  run([](Rank& r) {
    const auto group = r.world->split(r.rank);
    ASSERT_EQ(group->size(), 1);
    EXPECT_EQ(group->transport(), "none");
    std::vector<float> values = {1, 2, 3}, copy(3);
    group->all_reduce(buffer_of(values));
    group->all_reduce(buffer_of(values), ReduceOp::premultiplied(2));
    EXPECT_EQ(values, (std::vector<float>{2, 4, 6}));
    group->all_gather(buffer_of(values), buffer_of(copy));
    EXPECT_EQ(copy, values);
    copy.assign(3, 0);
    group->all_to_all(buffer_of(values), buffer_of(copy));
    EXPECT_EQ(copy, values);
    group->barrier();
    group->monitored_barrier(Seconds(5));
    EXPECT_EQ(group->all_gather_objects("me"), std::vector<std::string>{"me"});
    group->all_reduce(buffer_of(values), ReduceOp::sum, {.async_op = true}).wait();
  });
}

TEST_P(Groups, UsedFromSeveralThreadsEachWithItsOwn) {
  run([](Rank& r) {
    constexpr int kThreads = 3;
    std::vector<std::shared_ptr<ProcessGroup>> groups;
    for (int i = 0; i < kThreads; ++i) groups.push_back(r.world->split(0, i % 2 == 0 ? r.rank : -r.rank));
    std::vector<std::thread> threads;
    std::vector<std::string> errors(kThreads);
    const int rounds = kSanitized ? 10 : 50;
    for (int i = 0; i < kThreads; ++i) {
      threads.emplace_back([&, i] {
        try {
          for (int round = 0; round < rounds; ++round) {
            std::vector<float> values(100 * (i + 1) + round, static_cast<float>(i + 1));
            groups[i]->all_reduce(buffer_of(values));
            if (values.back() != static_cast<float>((i + 1) * r.size)) errors[i] = "wrong sum";
            groups[i]->all_reduce(buffer_of(values), ReduceOp::max, {.async_op = true}).wait();
            groups[i]->broadcast(buffer_of(values), round % r.size);
            groups[i]->barrier();
          }
        } catch (const std::exception& error) {
          errors[i] = error.what();
        }
      });
    }
    int world_sum = 0;
    for (int round = 0; round < rounds; ++round) world_sum += sum_of_ones(*r.world);
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(errors, std::vector<std::string>(kThreads));
    EXPECT_EQ(world_sum, rounds * r.size);
  });
}

TEST_P(Groups, MadeAndDroppedManyTimes) {
  run([](Rank& r) {
    for (int round = 0; round < 50; ++round) {
      const auto group = r.world->split(0);
      EXPECT_EQ(sum_of_ones(*group), r.size) << "round " << round;
    }
  });
}

TEST_P(Groups, OutliveTheWorldThatMadeThem) {
  run([](Rank& r) {
    const auto group = r.world->split(0);
    r.world->barrier();
    r.world.reset();
    EXPECT_EQ(sum_of_ones(*group), r.size);
  });
}

TEST_P(Groups, TopologyKnowsHostsAndProcesses) {
  run([](Rank& r) {
    const Topology& topology = r.world->topology();
    ASSERT_EQ(topology.size(), r.size);
    EXPECT_EQ(topology.rank, r.rank);
    EXPECT_EQ(topology.node_count(), 1);
    EXPECT_EQ(topology.node_rank(), 0);
    EXPECT_EQ(topology.local_rank(), r.rank);
    EXPECT_EQ(topology.local_size(), r.size);
    for (int rank = 0; rank < r.size; ++rank) {
      const Topology::Member& member = topology.members[rank];
      EXPECT_EQ(member.global_rank, rank);
      EXPECT_EQ(member.local_rank, rank);
      EXPECT_EQ(member.node_rank, 0);
      EXPECT_EQ(member.pid, r.pid_of(rank));
      EXPECT_FALSE(member.host.empty());
      EXPECT_EQ(topology.nodes[0][rank], rank);
    }
  });
}

TEST_P(Groups, HaveStoresOfTheirOwn) {
  run([](Rank& r) {
    const auto group = r.world->split(r.rank % 2);
    // The same key in the stores of two groups must not meet.
    if (group->rank() == 0) group->store().set("who", std::to_string(r.rank % 2));
    EXPECT_EQ(group->store().get("who", Deadline::after(Seconds(30))), std::to_string(r.rank % 2));
    const std::int64_t arrived = r.world->store().add("arrived", 1);
    EXPECT_GE(arrived, 1);
    r.world->barrier();
    EXPECT_EQ(r.world->store().add("arrived", 0), r.size);
  });
}

TEST_P(Groups, JoinAgainInOneProcess) {
  const Place place = GetParam();
  run_ranks({.n = place.n, .as = place.as, .transport = place.transport, .init = false}, [](Rank& r) {
    for (int round = 0; round < 5; ++round) {
      InitOptions options = r.init_options();
      options.init_method = fmt::format("file://{}/result{}", r.dir(), round);
      const std::string prefix = fmt::format("round{}", round);
      const auto world = r.store() ? init(make_prefix_store(prefix, r.store()), options) : init(options);
      EXPECT_EQ(sum_of_ones(*world), r.size);
      world->barrier();
    }
  });
}

TEST_P(Groups, MemoryMayBeDroppedByAThreadThatTheGroupDoesNotKnow) {
  run([](Rank& r) {
    std::vector<float> values(1000);  // long enough to be looked for in registered memory
    for (int round = 0; round < 20; ++round) {
      RegisteredMemory memory = r.world->allocate(64);
      std::thread other([memory = std::move(memory)]() mutable { memory = {}; });
      values.assign(values.size(), 1);
      r.world->all_reduce(buffer_of(values));
      EXPECT_EQ(values, std::vector<float>(values.size(), static_cast<float>(r.size)));
      other.join();
    }
  });
}

TEST(Stages, TheFirstRanksStageSizeIsUsedByAll) {
  run_ranks({.n = 3, .as = As::processes, .backend = "native", .init = false}, [](Rank& r) {
    ASSERT_EQ(::setenv("MANIPLE_STAGE_KIB", std::to_string(100 << r.rank).c_str(), 1), 0);
    r.init();
    std::vector<float> values(300'001, 1);
    r.world->all_reduce(buffer_of(values));
    EXPECT_EQ(values, std::vector<float>(values.size(), 3));
  });
}

TEST_P(Groups, InvalidRankListsThrowInvalidArgument) {
  run([](Rank& r) {
    EXPECT_THROW(r.world->new_group(std::vector<int>{0, r.size}), InvalidArgument);
    EXPECT_THROW(r.world->new_group(std::vector<int>{-1}), InvalidArgument);
    EXPECT_THROW(r.world->new_group(std::vector<int>{0, 0}), InvalidArgument);
    EXPECT_EQ(sum_of_ones(*r.world), r.size);
  });
}

}  // namespace
}  // namespace maniple::harness
