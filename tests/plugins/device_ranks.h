// Ranks for tests of a device plugin: processes that are forked before anything touches the device, each with the
// plugin loaded and a DeviceContext made of sockets and a file store.
#pragma once

#include <sys/types.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/backend/device/device_plugin.h"

namespace maniple::device_test {

/// What all ranks of a run see: plain memory that was shared before the fork.
struct Board;

class Rank {
 public:
  Rank(int rank, int size, Board& board, std::string store, const std::vector<std::vector<int>>& sockets);
  ~Rank();

  int rank() const noexcept { return rank_; }
  int size() const noexcept { return size_; }
  DeviceRuntime& runtime() const noexcept { return *entry_->runtime(); }
  const DevicePluginEntry& entry() const noexcept { return *entry_; }
  /// For a group of all ranks, or of `members`, on one host; `group` names it. The store is this rank's.
  DeviceContext make_context(const std::string& group = "world", std::vector<int> members = {});
  /// Of such a group; `nodes` as in DeviceContext.
  std::unique_ptr<DevicePlugin> make(const std::string& group = "world", std::vector<int> nodes = {},
                                     std::vector<int> members = {});
  RegisteredMemory allocate(DevicePlugin& plugin, std::size_t bytes);  ///< of a group of all ranks
  const std::shared_ptr<Store>& store() const noexcept { return store_; }
  void barrier();              ///< of the processes, on the host
  pid_t pid(int rank) const;   ///< of another rank
  void expect_to_die() const;  ///< this rank's end by a signal is not a failure
  /// What this rank does from now on: a line of output, and a part of the message if the rank fails in it.
  void step(const std::string& what) const;

 private:
  struct Exchange;
  int rank_;
  int size_;
  Board& board_;
  std::string store_path_;
  const std::vector<std::vector<int>>& sockets_;
  std::vector<std::unique_ptr<Exchange>> exchanges_;
  std::shared_ptr<Store> store_;
  std::vector<std::shared_ptr<Store>> group_stores_;
  std::unique_ptr<AbortToken> token_;
  const DevicePluginEntry* entry_ = nullptr;
  std::uint64_t allocations_ = 0;
};

/// Runs `body` as `size` processes. Returns what went wrong, empty if nothing: the text of the first rank that threw,
/// or which were still running after `seconds`, with the steps that all were in. They are killed then; one that even
/// that does not end, because the driver holds it, is left alone after some seconds.
std::string run_ranks(int size, double seconds, const std::function<void(Rank&)>& body);

/// Fails a rank: throws with the text.
void require(bool condition, const std::string& text);

}  // namespace maniple::device_test
