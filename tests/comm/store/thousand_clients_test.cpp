// A thousand ranks meet through one server, learn each other's addresses and pass a barrier.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdio>
#include <mutex>
#include <thread>
#include <vector>

#include "comm/net/address.h"
#include "comm/store/tcp_store.h"

namespace maniple {
namespace {

constexpr int kRanks = 1000;

TEST(ThousandClients, MeetAndPassABarrier) {
  raise_descriptor_limit();
  const std::uint64_t needed = 2 * kRanks + 100;
  ASSERT_GE(descriptor_use().limit, needed) << "the hard limit of open files is too low for this test";

  Identity identity;
  identity.secret = Secret::random();
  identity.world_size = kRanks;
  const TcpStoreServer server(Address::parse("127.0.0.1:0"), identity);
  std::vector<std::string> keys;
  for (int rank = 0; rank < kRanks; ++rank) keys.push_back("rank/" + std::to_string(rank));

  std::mutex mutex;
  std::vector<std::string> failures;
  std::atomic<int> passed{0};
  const auto start = Deadline::Clock::now();
  const Deadline deadline = Deadline::after(std::chrono::seconds(120));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        Identity mine = identity;
        mine.rank = rank;
        const auto store = connect_tcp_store("127.0.0.1", server.address().port(), mine, deadline);
        store->set(keys[static_cast<std::size_t>(rank)], "address of " + std::to_string(rank));
        const auto addresses = store->multi_get(keys, deadline);
        if (addresses.back() != "address of 999") throw std::runtime_error("wrong address");
        if (store->add("barrier", 1) == kRanks) store->set("go", "");
        store->get("go", deadline);
        ++passed;
      } catch (const std::exception& error) {
        const std::lock_guard lock(mutex);
        failures.push_back(error.what());
      }
    });
  }
  for (auto& thread : threads) thread.join();
  const std::chrono::duration<double> took = Deadline::Clock::now() - start;
  std::printf("%d clients met and passed a barrier in %.2f s\n", kRanks, took.count());
  EXPECT_EQ(passed, kRanks) << (failures.empty() ? "" : failures.front());
}

}  // namespace
}  // namespace maniple
