// Store: a small key-value store that ranks share while they find each other.
//
//   auto store = maniple::make_file_store("/shared/job");
//   if (rank == 0) store->set("master", "node1:29500");
//   store->get("master", maniple::Deadline::after(std::chrono::seconds(10)));   // waits until rank 0 has set the key
//
//   make_memory_store       threads of one process
//   make_file_store         processes that share a file (mode 0600); needs nothing else
//   make_prefix_store       a view of another store in which every key starts with a prefix
//   ProcessGroup::store     the group's store; for env:// and tcp:// a TCP server in rank 0 or in the launcher
//
// Limits: keys are byte strings of 1 to 1,024 bytes, values byte strings of up to 64 MiB.
//
// Errors: a method that waits takes a deadline and throws `Timeout` naming the keys that were not set. A store that has
// lost its server throws `PeerLost` or `SystemError`.
//
// Threads: all methods may be called from several threads.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <maniple/comm/deadline.h>
#include <maniple/export.h>

namespace MANIPLE_API maniple {

class Store {
 public:
  virtual ~Store() = default;
  Store() = default;
  Store(const Store&) = delete;
  Store& operator=(const Store&) = delete;

  /// Sets the key, whether or not it exists, and wakes its waiters.
  virtual void set(std::string_view key, std::string_view value) = 0;

  /// Waits until the key exists; returns its value.
  virtual std::string get(std::string_view key, Deadline deadline) = 0;

  /// Waits until all keys exist; returns their values. Uses one request.
  virtual std::vector<std::string> multi_get(std::span<const std::string> keys, Deadline deadline) = 0;

  /// Waits until all keys exist.
  virtual void wait(std::span<const std::string> keys, Deadline deadline) = 0;

  /// For each key, in order: whether it exists now. Does not wait for keys.
  virtual std::vector<bool> check(std::span<const std::string> keys) = 0;

  /// Adds to a decimal counter (an absent key counts as 0) and returns the new value. Throws InvalidArgument if the
  /// value is not a number.
  virtual std::int64_t add(std::string_view key, std::int64_t delta) = 0;

  /// If the key holds `expected` (or is absent and `expected` is empty), sets it to `desired`. Returns the value that
  /// the key holds afterwards; for an absent key that was not set, returns `expected`.
  virtual std::string compare_set(std::string_view key, std::string_view expected, std::string_view desired) = 0;

  /// Removes the key; returns whether it existed.
  virtual bool erase(std::string_view key) = 0;

  virtual std::int64_t num_keys() = 0;

  /// For messages: "tcp store at 127.0.0.1:29500".
  virtual std::string describe() const = 0;
};

/// Key `k` of the result is key `prefix + "/" + k` of `store`. num_keys counts all keys of `store`.
std::shared_ptr<Store> make_prefix_store(std::string prefix, std::shared_ptr<Store> store);

/// A store in this process, for ranks that are threads.
std::shared_ptr<Store> make_memory_store();

/// Creates the file (mode 0600) if it does not exist. All processes must see the same file system.
std::shared_ptr<Store> make_file_store(const std::string& path);

}  // namespace maniple
