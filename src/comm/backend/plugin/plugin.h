// The interface of a plugin: another communication library (Gloo, an MPI, ...) that can run the operations of a group.
//
// A plugin is a shared library that is loaded when first asked for. It sees this header and the headers that it
// includes, and needs no symbol of Maniple: everything here is a pure interface, a plain value or an inline function.
// It throws Maniple's errors (error.h), or std::exception for what it cannot name.
//
// It offers two things, and PluginBackend builds every operation on them:
//   its own collectives, where it has one that gives the right result (`can` says so; Maniple supplies the others);
//   channels of bytes between two ranks, which never block. They carry what is supplied, and what ranks compare. A
//   plugin without them leaves these to Maniple's own TCP connections.
//
// Collectives run one at a time; channels are used by other threads at the same time.
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

/// Polled by whoever waits inside a plugin.
class AbortToken {
 public:
  virtual ~AbortToken() = default;
  virtual bool aborted() const noexcept = 0;  ///< the group has failed: give up at once
};

/// into[i] = a[i] op b[i], by the kernels that the native backend uses; any alignment, `into` may be `a` or `b`.
using PairReduce = void (*)(DType dtype, ReduceOp op, void* into, const void* a, const void* b, std::size_t count);

struct PluginContext {
  std::string group;              ///< unique in the world, the same on all its ranks
  int rank = 0;                   ///< in the group
  std::vector<int> global_ranks;  ///< of the group's ranks
  std::vector<int> pids;          ///< of the other ranks that are processes of this host
  int world_size = 1;
  std::string address;     ///< numeric, of the interface that leads to the other ranks
  Store* store = nullptr;  ///< keys of this group alone
  Deadline deadline;       ///< for setting up
  const AbortToken* abort = nullptr;
  PairReduce pair_reduce = nullptr;
  std::size_t most =
      std::size_t{1} << 28;  ///< elements (or bytes, where it moves bytes) for one call of a library that counts in int

  int size() const noexcept { return static_cast<int>(global_ranks.size()); }
};

/// What a channel carries: a group has one set of channels for each.
enum class Traffic : std::uint8_t { collectives, messages };
inline constexpr std::size_t kTrafficCount = 2;

class Plugin {
 public:
  /// Never waits for long: what is in transit may be lost after an abort; otherwise it is delivered, for some seconds.
  virtual ~Plugin() = default;

  virtual std::string_view name() const noexcept = 0;  ///< "gloo", "openmpi": for people

  /// Whether `run` can do it with the result that types.h promises. The same answer on all ranks of the group.
  virtual bool can(const Operation& operation) const noexcept = 0;

  /// False when it gave up, because the group was aborted or the deadline has passed. Memory of the call is not touched
  /// after it returned.
  virtual bool run(const Operation& operation, Deadline deadline) = 0;

  /// The group was aborted: `run` is to return soon. `lost`: a rank may be gone; otherwise one has left in good order,
  /// and all processes are there. Called from any thread; must not block.
  virtual void interrupt(bool lost) noexcept = 0;

  /// Bytes to and from another rank of the group; each is made once. They must be gone before the plugin is. Null:
  /// there are none, on any rank.
  virtual std::unique_ptr<ByteSink> sink(int rank, Traffic traffic) = 0;
  virtual std::unique_ptr<ByteSource> source(int rank, Traffic traffic) = 0;
};

/// What a plugin's library exports: `extern "C" MANIPLE_API const maniple::PluginEntry* maniple_plugin_entry()`.
struct PluginEntry {
  std::uint32_t abi = 0;          ///< kPluginAbi of the header it was built with
  std::uint32_t operation = 0;    ///< sizeof(Operation), as both sides must agree on it
  const char* version = nullptr;  ///< of the library, for people
  std::unique_ptr<Plugin> (*make)(const PluginContext& context) = nullptr;
};
inline constexpr std::uint32_t kPluginAbi = 5;
inline constexpr const char* kPluginSymbol = "maniple_plugin_entry";

}  // namespace maniple
