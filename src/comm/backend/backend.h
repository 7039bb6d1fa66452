// The interface of a backend, which runs one group's operations on host memory: "native", "gloo" and "mpi". Operations
// on device memory run on a device plugin (device/device_plugin.h), or through a host backend
// (comm/group/device_calls.h).
//
// Collectives run one at a time, in order, on whichever thread the group chooses. Messages are independent of them.
// Backends throw the typed errors of error.h without the call's name in front, which the group adds.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "comm/base/abort_signal.h"
#include "comm/base/operation_context.h"
#include "comm/call/operation.h"
#include "comm/session/session.h"
#include "comm/transport/message.h"
#include <maniple/comm/options.h>
#include <maniple/comm/registered_memory.h>
#include <maniple/comm/topology.h>
#include <maniple/export.h>

namespace MANIPLE_API maniple {

struct BackendContext {
  std::string group;  ///< unique in the world, the same on all ranks
  Topology topology;
  std::shared_ptr<Session> session;
  std::shared_ptr<AbortSignal> abort;
  TransportKind transport = TransportKind::automatic;
  std::string algorithm;
  Deadline deadline;  ///< for the set-up
};

class Backend {
 public:
  virtual ~Backend() = default;

  /// "shm", "tcp", ...: for display
  virtual std::string_view transport() const noexcept = 0;
  /// Whether all other ranks see this rank's failure without the session (all share memory).
  virtual bool all_share_memory() const noexcept = 0;

  /// Whether `run` calls op_context.contribution_published() before it waits for other ranks.
  virtual bool reports_publication() const noexcept { return false; }
  virtual void run(const Operation& operation, OperationContext& op_context) = 0;

  /// Called when a rank of the group has left or its process has ended: it will send nothing new. Any thread; must not
  /// block.
  virtual void mark_gone(int rank) noexcept { (void)rank; }

  /// Completes a send or recv at once, or after a short wait, without the cost of `start`. Returns false if nothing was
  /// done.
  virtual bool try_now(Message& message) { return (void)message, false; }
  virtual void start(std::span<const std::shared_ptr<Message>> messages, bool background) = 0;
  virtual void drive(Message& message) = 0;
  virtual AwaitedMessages awaited() = 0;  ///< any thread; must not block

  /// `sizes`: every rank's size in bytes; `number`: counts the group's allocations. All ranks call it together.
  virtual RegisteredMemory allocate(std::span<const std::size_t> sizes, std::uint64_t number, Deadline deadline) = 0;
  /// Allocates memory that all ranks of a host share. Throws Unsupported on all ranks, or on none.
  virtual RegisteredMemory allocate_shared(std::size_t bytes, std::uint64_t number, Deadline deadline);
};

struct BackendEntry {
  std::string_view name;
  std::string_view sentence;
  std::unique_ptr<Backend> (*make)(const BackendContext& context);  ///< null: it is for device memory
  std::string (*missing)();  ///< empty: available; otherwise one line: what is missing and how to get it
};

/// The meaning of InitOptions::backend: "native", "nccl", "cpu:native,cuda:nccl".
struct BackendChoice {
  const BackendEntry* host = nullptr;    ///< never null: a group with a GPU backend uses native for everything else
  const BackendEntry* device = nullptr;  ///< null: device memory goes through host memory
  bool host_tensors = true;              ///< whether CPU tensors are accepted
};
/// Throws Unsupported like find_backend, InvalidArgument if `text` is malformed.
BackendChoice parse_backend(std::string_view text);

/// All backends that this version knows, available or not.
std::span<const BackendEntry> backends() noexcept;
/// Throws Unsupported, naming what is missing and how to get it, or the available names.
const BackendEntry& find_backend(std::string_view name);

std::unique_ptr<Backend> make_native_backend(const BackendContext& context);
std::unique_ptr<Backend> make_gloo_backend(const BackendContext& context);
std::unique_ptr<Backend> make_mpi_backend(const BackendContext& context);

}  // namespace maniple
