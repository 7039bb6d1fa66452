// A small key-value store that ranks share while they find each other.
//
// Keys are byte strings of 1 to 1,024 bytes, values byte strings of up to 64 MiB. All methods may be called from
// several threads. A method that waits takes a deadline and throws `Timeout` naming the keys that were not set. A store
// that has lost its server throws `PeerLost` or `SystemError`.
//
//   MemoryStore   threads of one process
//   FileStore     processes that share a file (mode 0600); needs nothing else
//   TcpStore      processes on any host; one of them (or the launcher) runs the server
//   PrefixStore   a view of another store in which every key starts with a prefix
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

  /// Sets the key, whether it existed or not, and wakes those who wait for it.
  virtual void set(std::string_view key, std::string_view value) = 0;

  /// The value; waits until the key exists.
  virtual std::string get(std::string_view key, Deadline deadline) = 0;

  /// The values of many keys in one request; waits until all exist.
  virtual std::vector<std::string> multi_get(std::span<const std::string> keys, Deadline deadline) = 0;

  /// Waits until all keys exist.
  virtual void wait(std::span<const std::string> keys, Deadline deadline) = 0;

  /// Which of the keys exist now, in order. Never waits for a key.
  virtual std::vector<bool> check(std::span<const std::string> keys) = 0;

  /// Adds to a decimal counter (absent counts as 0) and returns the new value. Throws InvalidArgument if the key holds
  /// something that is no number.
  virtual std::int64_t add(std::string_view key, std::int64_t delta) = 0;

  /// If the key holds `expected` (or is absent and `expected` is empty), sets it to `desired`. Returns the value that
  /// the key holds afterwards; for an absent key that was not set, returns `expected`.
  virtual std::string compare_set(std::string_view key, std::string_view expected, std::string_view desired) = 0;

  /// Removes the key; false if there was none.
  virtual bool erase(std::string_view key) = 0;

  virtual std::int64_t num_keys() = 0;

  /// For messages: "tcp store at 127.0.0.1:29500".
  virtual std::string describe() const = 0;
};

/// Every key `k` of the result is the key `prefix + "/" + k` of `store`; num_keys counts the whole of `store`.
std::shared_ptr<Store> make_prefix_store(std::string prefix, std::shared_ptr<Store> store);

std::shared_ptr<Store> make_memory_store();

/// Creates the file (mode 0600) if it does not exist. All processes must see the same file system.
std::shared_ptr<Store> make_file_store(const std::string& path);

}  // namespace maniple
