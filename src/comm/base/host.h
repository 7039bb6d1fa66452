// The host of this process: its identity, and the cores the process may use.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include <maniple/export.h>

namespace MANIPLE_API maniple {

/// The cores a process may run on.
///
/// A launcher binds each rank to its own cores, so one rank's set is too small to judge the host. Whether the ranks
/// outnumber the host's cores, so that spinning would steal time from a neighbour, follows from the union of all ranks'
/// sets.
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
  /// The first hardware thread of each physical core that has a thread in this set; the first thread itself need not be
  /// in the set. A hardware thread without topology information in `folder` counts as a core.
  CoreSet physical(const std::string& folder = "/sys/devices/system/cpu") const;
  friend bool operator==(const CoreSet&, const CoreSet&) = default;

  /// Little-endian words without trailing zero words. decode throws ProtocolError for bytes that encode cannot produce.
  std::string encode() const;
  static CoreSet decode(std::string_view bytes);

 private:
  std::vector<std::uint64_t> words_;  // the last one is never zero
};

/// The host this process runs on, from the kernel's boot id and the namespaces that decide whether processes can share
/// memory.
struct HostIdentity {
  std::string key;   ///< equal if and only if two processes can share memory
  std::string name;  ///< for messages
};

/// MANIPLE_HOST overrides key and name (for tests that simulate several hosts on one).
HostIdentity host_identity();

}  // namespace maniple
