// The interface of a plugin: another communication library (Gloo, an MPI, ...) that runs a group's operations.
//
// A plugin is a shared library that is loaded on first use. It includes this header (and the headers this one includes)
// and needs no symbol of Maniple: everything here is a pure interface, a plain value or an inline function. It throws
// Maniple's errors (error.h), or std::exception for other failures.
//
// A plugin offers two things, from which PluginBackend builds every operation:
//   its own collectives, where `can` reports that the result is right (Maniple supplies the others);
//   byte channels between two ranks, which never block. They carry the collectives that Maniple supplies, and the
//   signatures that ranks compare. Without channels Maniple uses its own TCP connections.
//
// Collectives run one at a time; other threads may use channels meanwhile.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "comm/call/operation.h"
#include "comm/transport/byte_channel.h"
#include <maniple/comm/deadline.h>
#include <maniple/comm/error.h>
#include <maniple/comm/store.h>
#include <maniple/export.h>

namespace maniple {

/// A thread that waits inside a plugin polls this.
class AbortToken {
 public:
  virtual ~AbortToken() = default;
  virtual bool aborted() const noexcept = 0;  ///< the group has failed: stop waiting at once
};

/// into[i] = a[i] op b[i], with the native backend's kernels. Any alignment; `into` may be `a` or `b`.
using PairReduce = void (*)(DType dtype, ReduceOp op, void* into, const void* a, const void* b, std::size_t count);

struct PluginContext {
  std::string group;              ///< unique in the world, the same on all its ranks
  int rank = 0;                   ///< in the group
  std::vector<int> global_ranks;  ///< indexed by group rank
  std::vector<int> pids;          ///< the other ranks that are processes on this host
  int world_size = 1;
  std::string address;     ///< numeric address of the interface that leads to the other ranks
  Store* store = nullptr;  ///< holds only this group's keys
  Deadline deadline;       ///< for the set-up
  const AbortToken* abort = nullptr;
  PairReduce pair_reduce = nullptr;
  /// Maximum elements (or bytes, when moving bytes) per call of a library that counts in int.
  std::size_t most = std::size_t{1} << 28;

  int size() const noexcept { return static_cast<int>(global_ranks.size()); }
};

/// What a channel carries; a group has one set of channels for each.
enum class Traffic : std::uint8_t { collectives, messages };
inline constexpr std::size_t kTrafficCount = 2;

class Plugin {
 public:
  /// Never waits long. Delivers data in transit for up to some seconds, except after an abort, when it may be lost.
  virtual ~Plugin() = default;

  virtual std::string_view name() const noexcept = 0;  ///< "gloo", "openmpi": for display

  /// Whether `run` supports the operation with the result that types.h promises. Must be the same on all ranks.
  virtual bool can(const Operation& operation) const noexcept = 0;

  /// Returns false if it gave up because the group was aborted or the deadline passed. Must not touch the call's memory
  /// after it returns.
  virtual bool run(const Operation& operation, Deadline deadline) = 0;

  /// Called when the group was aborted: `run` must return soon. `lost`: a rank may be gone; otherwise one has left in
  /// good order, and all processes still run. Any thread; must not block.
  virtual void interrupt(bool lost) noexcept = 0;

  /// Byte channels to and from another rank of the group; each is made once. They are destroyed before the plugin.
  /// Null: the plugin has no channels, on any rank.
  virtual std::unique_ptr<ByteSink> sink(int rank, Traffic traffic) = 0;
  virtual std::unique_ptr<ByteSource> source(int rank, Traffic traffic) = 0;
};

/// The symbol that a plugin's library exports: `extern "C" MANIPLE_API const maniple::PluginEntry*
/// maniple_plugin_entry()`.
struct PluginEntry {
  std::uint32_t abi = 0;          ///< kPluginAbi of the header it was built with
  std::uint32_t operation = 0;    ///< sizeof(Operation), on which both sides must agree
  const char* version = nullptr;  ///< of the library, for display
  std::unique_ptr<Plugin> (*make)(const PluginContext& context) = nullptr;
};
inline constexpr std::uint32_t kPluginAbi = 5;
inline constexpr const char* kPluginSymbol = "maniple_plugin_entry";

}  // namespace maniple
