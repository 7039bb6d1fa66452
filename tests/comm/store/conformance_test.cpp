// What every kind of store must do, run over all of them.
#include <stdlib.h>
#include <unistd.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <thread>
#include <vector>

#include "comm/store/key_table.h"
#include "comm/store/tcp_store.h"
#include <maniple/comm/error.h>
#include <maniple/comm/store.h>

namespace maniple {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::ElementsAre;
using testing::HasSubstr;
using Keys = std::vector<std::string>;

/// One store, seen by as many clients as a test wants.
class Place {
 public:
  explicit Place(const std::string& kind) : kind_(kind) {
    if (kind == "memory" || kind == "prefix") shared_ = make_memory_store();
    if (kind == "file") {
      char name[] = "/tmp/maniple-store-XXXXXX";
      const UniqueFd fd(::mkstemp(name));
      path_ = name;
    }
    if (kind == "tcp") {
      identity_.secret = Secret::random();
      server_ = std::make_unique<TcpStoreServer>(Address::parse("127.0.0.1:0"), identity_);
    }
  }
  ~Place() {
    if (!path_.empty()) ::unlink(path_.c_str());
  }
  std::shared_ptr<Store> client() const {
    if (kind_ == "file") return make_file_store(path_);
    if (kind_ == "prefix") return make_prefix_store("some/prefix", shared_);
    if (kind_ == "tcp") {
      return connect_tcp_store("127.0.0.1", server_->address().port(), identity_, Deadline::after(seconds(20)));
    }
    return shared_;
  }

 private:
  std::string kind_;
  std::shared_ptr<Store> shared_;
  std::string path_;
  Identity identity_;
  std::unique_ptr<TcpStoreServer> server_;
};

class StoreConformance : public testing::TestWithParam<const char*> {
 protected:
  Place place{GetParam()};
  std::shared_ptr<Store> a = place.client();
  std::shared_ptr<Store> b = place.client();
  Deadline soon() const { return Deadline::after(seconds(20)); }
};

TEST_P(StoreConformance, SetAndGet) {
  a->set("key", "value");
  EXPECT_EQ(b->get("key", soon()), "value");
  b->set("key", "");
  EXPECT_EQ(a->get("key", soon()), "");
}

TEST_P(StoreConformance, BytesOfAnyKind) {
  const std::string key("k\0\xff\n/", 5);
  std::string value;
  for (int i = 0; i < 1000; ++i) value += static_cast<char>(i);
  a->set(key, value);
  EXPECT_EQ(b->get(key, soon()), value);
}

TEST_P(StoreConformance, LargeValues) {
  const std::string value(5'000'001, 'x');
  a->set("large", value);
  EXPECT_EQ(b->get("large", soon()), value);
}

TEST_P(StoreConformance, GetWaitsForTheKey) {
  auto value = std::async(std::launch::async, [&] { return a->get("late", soon()); });
  EXPECT_EQ(value.wait_for(milliseconds(20)), std::future_status::timeout);
  b->set("late", "here");
  EXPECT_EQ(value.get(), "here");
}

TEST_P(StoreConformance, MultiGetKeepsTheOrderAndWaitsForAll) {
  auto values = std::async(std::launch::async, [&] { return a->multi_get(Keys{"z", "a", "z", "m"}, soon()); });
  b->set("m", "3");
  b->set("a", "2");
  EXPECT_EQ(values.wait_for(milliseconds(20)), std::future_status::timeout);
  b->set("z", "1");
  EXPECT_THAT(values.get(), ElementsAre("1", "2", "1", "3"));
  EXPECT_TRUE(a->multi_get(Keys{}, soon()).empty());
}

TEST_P(StoreConformance, TimeoutNamesTheMissingKeys) {
  a->set("there", "");
  const auto start = Deadline::Clock::now();
  try {
    b->wait(Keys{"there", "rank/3", "rank/5"}, Deadline::after(milliseconds(50)));
    ADD_FAILURE() << "no timeout";
  } catch (const Timeout& error) {
    EXPECT_THAT(error.what(), HasSubstr("2 of 3 keys missing"));
    EXPECT_THAT(error.what(), HasSubstr("rank/3"));
    EXPECT_THAT(error.what(), HasSubstr("rank/5"));
    EXPECT_THAT(error.what(), testing::Not(HasSubstr("there\"")));
  }
  EXPECT_LT(Deadline::Clock::now() - start, seconds(5));
  EXPECT_THROW(a->get("nope", Deadline::after(milliseconds(0))), Timeout);
  // A deadline that has passed must not hide what is there.
  EXPECT_EQ(a->get("there", Deadline::after(milliseconds(0))), "");
}

TEST_P(StoreConformance, AWaitThatTimedOutLeavesTheStoreUsable) {
  for (int i = 0; i < 5; ++i) EXPECT_THROW(a->get("never", Deadline::after(milliseconds(1))), Timeout);
  b->set("never", "now");
  EXPECT_EQ(a->get("never", soon()), "now");
}

TEST_P(StoreConformance, CheckNeverWaits) {
  a->set("x", "");
  EXPECT_EQ(b->check(Keys{"x", "y", "x"}), (std::vector<bool>{true, false, true}));
}

TEST_P(StoreConformance, AddCounts) {
  EXPECT_EQ(a->add("n", 5), 5);
  EXPECT_EQ(b->add("n", -7), -2);
  EXPECT_EQ(a->get("n", soon()), "-2");
  a->set("n", "40");
  EXPECT_EQ(b->add("n", 2), 42);
  a->set("n", "forty");
  EXPECT_THROW(b->add("n", 1), InvalidArgument);
  EXPECT_EQ(a->get("n", soon()), "forty");
  a->set("n", std::to_string(INT64_MAX));
  EXPECT_THROW(b->add("n", 1), InvalidArgument);
}

TEST_P(StoreConformance, AddWakesWaiters) {
  auto value = std::async(std::launch::async, [&] { return a->get("count", soon()); });
  b->add("count", 3);
  EXPECT_EQ(value.get(), "3");
}

TEST_P(StoreConformance, CompareSet) {
  EXPECT_EQ(a->compare_set("c", "expected", "new"), "expected");  // absent, so not set
  EXPECT_EQ(a->check(Keys{"c"}), (std::vector<bool>{false}));
  EXPECT_EQ(a->compare_set("c", "", "one"), "one");
  EXPECT_EQ(b->compare_set("c", "", "two"), "one");
  EXPECT_EQ(b->compare_set("c", "one", "three"), "three");
  EXPECT_EQ(a->get("c", soon()), "three");
}

TEST_P(StoreConformance, EraseAndCount) {
  const auto before = a->num_keys();
  a->set("e1", "1");
  a->set("e2", "2");
  EXPECT_EQ(b->num_keys(), before + 2);
  EXPECT_TRUE(b->erase("e1"));
  EXPECT_FALSE(a->erase("e1"));
  EXPECT_EQ(a->num_keys(), before + 1);
  EXPECT_THROW(a->get("e1", Deadline::after(milliseconds(1))), Timeout);
}

TEST_P(StoreConformance, InvalidLimitsThrowInvalidArgument) {
  EXPECT_THROW(a->set("", "x"), InvalidArgument);
  EXPECT_THROW(a->set(std::string(kMaxKeyBytes + 1, 'k'), "x"), InvalidArgument);
  EXPECT_THROW(a->set("v", std::string(kMaxValueBytes + 1, 'v')), InvalidArgument);
  EXPECT_THROW(a->check(Keys(kMaxKeysPerRequest + 1, "k")), InvalidArgument);
  EXPECT_THROW(a->wait(Keys{""}, soon()), InvalidArgument);
  a->set("still", "usable");
  EXPECT_EQ(b->get("still", soon()), "usable");
}

TEST_P(StoreConformance, ThreadsOfOneClientDoNotBlockEachOther) {
  std::vector<std::thread> waiting;
  std::atomic<int> woken{0};
  for (int i = 0; i < 8; ++i) {
    waiting.emplace_back([&, i] {
      if (a->get("turn/" + std::to_string(i), soon()) == std::to_string(i)) ++woken;
    });
  }
  // The same client that has eight threads waiting sets what they wait for, last one first.
  for (int i = 7; i >= 0; --i) a->set("turn/" + std::to_string(i), std::to_string(i));
  for (auto& thread : waiting) thread.join();
  EXPECT_EQ(woken, 8);
}

TEST_P(StoreConformance, CountersOfManyThreadsAddUp) {
  constexpr int kThreads = 8;
  constexpr int kAdds = 50;
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      const auto mine = t % 2 == 0 ? a : place.client();
      for (int i = 0; i < kAdds; ++i) mine->add("sum", 1);
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(a->add("sum", 0), kThreads * kAdds);
}

TEST_P(StoreConformance, OneWinnerOfACompareSet) {
  std::vector<std::thread> threads;
  std::atomic<int> winners{0};
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([&, t] {
      const std::string mine = "thread " + std::to_string(t);
      if (place.client()->compare_set("winner", "", mine) == mine) ++winners;
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(winners, 1);
}

INSTANTIATE_TEST_SUITE_P(All, StoreConformance, testing::Values("memory", "file", "tcp", "prefix"),
                         [](const auto& kind) { return std::string(kind.param); });

}  // namespace
}  // namespace maniple
