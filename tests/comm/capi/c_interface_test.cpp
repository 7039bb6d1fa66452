// maniple/c.h, used as a program in C would: ranks are threads, and the store is a map.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <mutex>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include <maniple/c.h>

namespace c_interface_test {
namespace {

using testing::HasSubstr;

constexpr maniple_reduce_op kSum{MANIPLE_SUM, 1};

struct Keys {
  std::mutex mutex;
  std::map<std::string, std::string> values;
  int released = 0;
  bool broken = false;
};

std::string text(maniple_bytes bytes) { return {bytes.data, bytes.size}; }
Keys& keys_of(void* context) { return *static_cast<Keys*>(context); }

maniple_store store_of(Keys& keys) {
  maniple_store store{};
  store.context = &keys;
  store.set = [](void* context, maniple_bytes key, maniple_bytes value) -> maniple_error* {
    Keys& all = keys_of(context);
    const std::lock_guard lock(all.mutex);
    if (all.broken) return maniple_error_new(MANIPLE_PEER_LOST, "the map is broken");
    all.values[text(key)] = text(value);
    return nullptr;
  };
  store.get = [](void* context, maniple_bytes key, maniple_reply reply, void* to) -> maniple_error* {
    Keys& all = keys_of(context);
    const std::lock_guard lock(all.mutex);
    const std::string& value = all.values.at(text(key));
    reply(to, value.data(), value.size());
    return nullptr;
  };
  store.has_all = [](void* context, const maniple_bytes* names, size_t count, int* all) -> maniple_error* {
    Keys& there = keys_of(context);
    const std::lock_guard lock(there.mutex);
    *all = 1;
    for (size_t i = 0; i < count; ++i) *all &= there.values.count(text(names[i])) != 0 ? 1 : 0;
    return nullptr;
  };
  store.add = [](void* context, maniple_bytes key, int64_t delta, int64_t* sum) -> maniple_error* {
    Keys& all = keys_of(context);
    const std::lock_guard lock(all.mutex);
    std::string& value = all.values[text(key)];
    *sum = (value.empty() ? 0 : std::stoll(value)) + delta;
    value = std::to_string(*sum);
    return nullptr;
  };
  store.compare_set = [](void* context, maniple_bytes key, maniple_bytes expected, maniple_bytes desired,
                         maniple_reply reply, void* to) -> maniple_error* {
    Keys& all = keys_of(context);
    const std::lock_guard lock(all.mutex);
    if (all.broken) return maniple_error_new(MANIPLE_PEER_LOST, "the map is broken");
    const auto found = all.values.find(text(key));
    std::string value = found == all.values.end() ? text(expected) : found->second;
    if (value == text(expected) && (found != all.values.end() || expected.size == 0))
      all.values[text(key)] = value = text(desired);
    reply(to, value.data(), value.size());
    return nullptr;
  };
  store.erase = [](void* context, maniple_bytes key, int* existed) -> maniple_error* {
    Keys& all = keys_of(context);
    const std::lock_guard lock(all.mutex);
    *existed = static_cast<int>(all.values.erase(text(key)));
    return nullptr;
  };
  store.release = [](void* context) {
    Keys& all = keys_of(context);
    const std::lock_guard lock(all.mutex);
    ++all.released;
  };
  store.description = "a map";
  return store;
}

std::string text_of(maniple_error* error) {
  if (error == nullptr) return "success";
  const std::string result = maniple_error_text(error);
  maniple_error_free(error);
  return result;
}

int kind_of(maniple_error* error) {
  if (error == nullptr) return -1;
  const int kind = maniple_error_kind(error);
  maniple_error_free(error);
  return kind;
}

template <class Value>
maniple_buffer buffer_of(std::vector<Value>& values, int dtype) {
  return {values.data(), values.size(), dtype, MANIPLE_CPU, 0};
}

/// Runs the body as `size` ranks that are threads, each with the world.
template <class Body>
void with_ranks(int size, Body body) {
  Keys keys;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      const maniple_store store = store_of(keys);
      const maniple_init_options options{rank, size, 60, "test", nullptr, nullptr, -1};
      maniple_group* group = nullptr;
      ASSERT_EQ(text_of(maniple_init(&store, &options, nullptr, &group)), "success");
      EXPECT_EQ(maniple_group_rank(group), rank);
      EXPECT_EQ(maniple_group_size(group), size);
      EXPECT_STREQ(maniple_group_name(group), "test");
      body(group, rank, size);
      maniple_group_free(group);
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(keys.released, size);
}

TEST(CInterface, Collectives) {
  with_ranks(3, [](maniple_group* group, int rank, int size) {
    const auto n = static_cast<size_t>(size);
    std::vector<float> x(5, static_cast<float>(rank));
    maniple_buffer own = buffer_of(x, MANIPLE_FLOAT32);
    EXPECT_EQ(text_of(maniple_all_reduce(group, &own, &own, kSum, nullptr, nullptr)), "success");
    EXPECT_EQ(x, std::vector<float>(5, 3));
    EXPECT_EQ(text_of(maniple_all_reduce(group, &own, &own, {MANIPLE_PREMUL_SUM, 0.5}, nullptr, nullptr)), "success");
    EXPECT_EQ(x, std::vector<float>(5, 4.5));
    std::vector<std::int64_t> parts(n);
    std::vector<std::int64_t> mine{rank};
    maniple_buffer in = buffer_of(mine, MANIPLE_INT64);
    maniple_buffer out = buffer_of(parts, MANIPLE_INT64);
    EXPECT_EQ(text_of(maniple_all_gather(group, &in, &out, nullptr, nullptr, nullptr)), "success");
    EXPECT_EQ(parts, (std::vector<std::int64_t>{0, 1, 2}));
    EXPECT_EQ(text_of(maniple_reduce_scatter(group, &out, &in, kSum, nullptr, nullptr, nullptr)), "success");
    EXPECT_EQ(mine.front(), 3 * rank);
    EXPECT_EQ(text_of(maniple_broadcast(group, &in, 2, nullptr, nullptr)), "success");
    EXPECT_EQ(mine.front(), 6);
    std::vector<std::int64_t> swapped(n);
    maniple_buffer there = buffer_of(swapped, MANIPLE_INT64);
    std::iota(parts.begin(), parts.end(), 10 * rank);
    EXPECT_EQ(text_of(maniple_all_to_all(group, &out, &there, nullptr, nullptr, nullptr, nullptr)), "success");
    EXPECT_EQ(swapped, (std::vector<std::int64_t>{rank, 10 + rank, 20 + rank}));
    EXPECT_EQ(text_of(maniple_barrier(group, nullptr, nullptr)), "success");
    EXPECT_EQ(text_of(maniple_monitored_barrier(group, 30, nullptr)), "success");
  });
}

TEST(CInterface, WorkReportsCompletion) {
  with_ranks(2, [](maniple_group* group, int rank, int) {
    std::vector<float> x(1000, 1);
    const maniple_buffer own = buffer_of(x, MANIPLE_FLOAT32);
    maniple_work* work = nullptr;
    ASSERT_EQ(text_of(maniple_all_reduce(group, &own, &own, kSum, nullptr, &work)), "success");
    int done = 0;
    EXPECT_EQ(text_of(maniple_work_wait(work, -1, &done)), "success");
    EXPECT_EQ(done, 1);
    EXPECT_EQ(maniple_work_done(work), 1);
    EXPECT_EQ(x.front(), 2);
    int called = 0;
    maniple_work_on_done(
        work, [](void* context, maniple_error* error) { *static_cast<int*>(context) += error == nullptr ? 1 : 100; },
        &called);
    EXPECT_EQ(called, 1);
    EXPECT_EQ(maniple_work_source(work), -1);
    maniple_work_free(work);
    if (rank == 0) {
      ASSERT_EQ(text_of(maniple_isend(group, &own, 1, 7, nullptr, &work)), "success");
    } else {
      ASSERT_EQ(text_of(maniple_irecv(group, &own, -1, 7, nullptr, &work)), "success");
    }
    EXPECT_EQ(text_of(maniple_work_wait(work, -1, &done)), "success");
    EXPECT_EQ(maniple_work_source(work), rank == 0 ? -1 : 0);
    maniple_work_free(work);
    EXPECT_EQ(kind_of(maniple_isend(group, &own, 1 - rank, 7, nullptr, nullptr)), MANIPLE_INVALID_ARGUMENT);
  });
}

TEST(CInterface, SubgroupsNeedTheirRanksOnly) {
  with_ranks(3, [](maniple_group* group, int rank, int) {
    if (rank == 1) return;
    const int ranks[] = {2, 0};
    maniple_group* pair = nullptr;
    ASSERT_EQ(text_of(maniple_subgroup(group, "a pair", ranks, 2, 0, &pair)), "success");
    EXPECT_EQ(maniple_group_rank(pair), rank == 2 ? 0 : 1);
    std::vector<float> x(1, 1);
    const maniple_buffer own = buffer_of(x, MANIPLE_FLOAT32);
    EXPECT_EQ(text_of(maniple_all_reduce(pair, &own, &own, kSum, nullptr, nullptr)), "success");
    EXPECT_EQ(x.front(), 2);
    maniple_group_free(pair);
    const int others[] = {1};
    EXPECT_THAT(text_of(maniple_subgroup(group, "others", others, 1, 0, &pair)), HasSubstr("is not among the ranks"));
  });
}

TEST(CInterface, ErrorsHaveAKindATextAndRanks) {
  with_ranks(2, [](maniple_group* group, int rank, int) {
    std::vector<float> x(4, 1);
    maniple_buffer own = buffer_of(x, 77);
    EXPECT_EQ(kind_of(maniple_all_reduce(group, &own, &own, kSum, nullptr, nullptr)), MANIPLE_INVALID_ARGUMENT);
    own.dtype = MANIPLE_FLOAT32;
    EXPECT_EQ(kind_of(maniple_all_reduce(group, &own, &own, {99, 1}, nullptr, nullptr)), MANIPLE_INVALID_ARGUMENT);
    EXPECT_EQ(kind_of(maniple_broadcast(group, &own, 5, nullptr, nullptr)), MANIPLE_INVALID_ARGUMENT);
    EXPECT_EQ(maniple_group_error(group), nullptr);
    own.count = 3 + static_cast<size_t>(rank);
    EXPECT_EQ(kind_of(maniple_all_reduce(group, &own, &own, kSum, nullptr, nullptr)), MANIPLE_MISMATCH);
    EXPECT_EQ(kind_of(maniple_group_error(group)), MANIPLE_MISMATCH);
    EXPECT_EQ(kind_of(maniple_barrier(group, nullptr, nullptr)), MANIPLE_ABORTED);
  });
}

TEST(CInterface, TheInterruptedCallbackEndsAWaitingOperation) {
  with_ranks(2, [](maniple_group* group, int rank, int) {
    std::vector<float> x(1, 1);
    const maniple_buffer own = buffer_of(x, MANIPLE_FLOAT32);
    if (rank == 1) {  // comes only after rank 0 has given up, and learns of it as everyone does
      maniple_work* work = nullptr;
      int done = 0;
      if (maniple_error* error = maniple_irecv(group, &own, 0, 0, nullptr, &work)) return maniple_error_free(error);
      EXPECT_NE(kind_of(maniple_work_wait(work, -1, &done)), -1);
      return maniple_work_free(work);
    }
    int asked = 0;
    maniple_call call{};
    call.context = &asked;
    call.interrupted = [](void* context) { return ++*static_cast<int*>(context) == 2 ? 1 : 0; };
    EXPECT_THAT(text_of(maniple_all_reduce(group, &own, &own, kSum, &call, nullptr)),
                HasSubstr("interrupted by a signal"));
    EXPECT_EQ(asked, 2);
  });
}

TEST(CInterface, AStoreThatFailsIsNamed) {
  Keys keys;
  keys.broken = true;
  const maniple_store store = store_of(keys);
  const maniple_init_options options{0, 1, 60, nullptr, nullptr, nullptr, -1};
  maniple_group* group = nullptr;
  EXPECT_THAT(text_of(maniple_init(&store, &options, nullptr, &group)), HasSubstr("the map is broken"));
  EXPECT_EQ(keys.released, 1);
  EXPECT_EQ(maniple_c_interface(), MANIPLE_C_INTERFACE);
}

}  // namespace
}  // namespace c_interface_test
