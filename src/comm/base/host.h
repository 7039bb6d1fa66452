// The host of this process: which one it is, and which of its cores the process may use.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include <maniple/export.h>

namespace MANIPLE_API maniple {

/// The cores that a process may run on.
///
/// A launcher binds each rank to cores of its own, so a rank alone sees too few: whether the ranks of a host outnumber
/// its cores, and spinning would steal from a neighbour, follows from the union of what all of them may use.
class CoreSet {
 public:
  static constexpr std::size_t kMostCores = 8192;

  CoreSet() = default;
  static CoreSet of_this_process();
  static CoreSet of(const std::vector<int>& cores);

  bool empty() const noexcept { return words_.empty(); }
  int count() const noexcept;
  std::vector<int> list() const;
  void add(const CoreSet& other);
  /// One hardware thread for each physical core that has any of these: its first, whether it is among these or not.
  /// Where `folder` says nothing each hardware thread is a core.
  CoreSet physical(const std::string& folder = "/sys/devices/system/cpu") const;
  friend bool operator==(const CoreSet&, const CoreSet&) = default;

  /// Little-endian words, without zero words at the end. Decoding throws ProtocolError for what encode cannot give.
  std::string encode() const;
  static CoreSet decode(std::string_view bytes);

 private:
  std::vector<std::uint64_t> words_;  // the last one is never zero
};

/// Which host this process is on, by fact: the kernel's boot id and the namespaces that decide whether memory can be
/// shared.
struct HostIdentity {
  std::string key;   ///< equal exactly for processes that can share memory with each other
  std::string name;  ///< for people
};

/// MANIPLE_HOST overrides the key (tests that want several hosts on one).
HostIdentity host_identity();

}  // namespace maniple
