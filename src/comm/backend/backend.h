// What runs the operations of one group on memory of the host: the contract of "native", "gloo" and "mpi". Those on
// memory of a device are run by what device/device_plugin.h describes, or through a backend of the host
// (comm/group/device_calls.h).
//
// Collectives are run one at a time, in order, by whichever thread the group chooses. Messages are independent of them.
// Errors are thrown as the typed errors of error.h, without the call's name in front: the group adds it.
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
  Deadline deadline;  ///< for setting up
};

class Backend {
 public:
  virtual ~Backend() = default;

  /// "shm", "tcp", ...: for people
  virtual std::string_view transport() const noexcept = 0;
  /// Whether all other ranks see a failure of this one without the session (all share memory).
  virtual bool all_share_memory() const noexcept = 0;

  /// Whether `run` calls op_context.contribution_published() before it waits for others.
  virtual bool reports_publication() const noexcept { return false; }
  virtual void run(const Operation& operation, OperationContext& op_context) = 0;

  /// A rank of the group has left, or its process has ended: it will send nothing new. Any thread; must not block.
  virtual void mark_gone(int rank) noexcept { (void)rank; }

  /// A send or recv that can be done at once, or after a short wait, without what `start` needs; false: it was not, and
  /// nothing has happened.
  virtual bool try_now(Message& message) { return (void)message, false; }
  virtual void start(std::span<const std::shared_ptr<Message>> messages, bool background) = 0;
  virtual void drive(Message& message) = 0;
  virtual AwaitedMessages awaited() = 0;  ///< any thread; must not block

  /// `sizes`: of all ranks of the group; `number`: of the allocation in the group. All ranks call it together.
  virtual RegisteredMemory allocate(std::span<const std::size_t> sizes, std::uint64_t number, Deadline deadline) = 0;
  /// The same memory on all ranks of a host. Throws Unsupported on all ranks, or on none.
  virtual RegisteredMemory allocate_shared(std::size_t bytes, std::uint64_t number, Deadline deadline);
};

struct BackendEntry {
  std::string_view name;
  std::string_view sentence;
  std::unique_ptr<Backend> (*make)(const BackendContext& context);  ///< null: it is for memory of a device
  std::string (*missing)();  ///< empty: it is here; otherwise what is missing and how to get it, in a line
};

/// What InitOptions::backend means: "native", "nccl", "cpu:native,cuda:nccl".
struct BackendChoice {
  const BackendEntry* host = nullptr;    ///< never null: a group with a backend for GPUs uses native for all else
  const BackendEntry* device = nullptr;  ///< null: memory of a device goes through that of the host
  bool host_tensors = true;              ///< whether tensors of the CPU are accepted
};
/// Throws Unsupported as find_backend does, InvalidArgument for what is no such text.
BackendChoice parse_backend(std::string_view text);

/// All that this version knows, whether here or missing.
std::span<const BackendEntry> backends() noexcept;
/// Throws Unsupported: what is missing and how to get it, or the names there are.
const BackendEntry& find_backend(std::string_view name);

std::unique_ptr<Backend> make_native_backend(const BackendContext& context);
std::unique_ptr<Backend> make_gloo_backend(const BackendContext& context);
std::unique_ptr<Backend> make_mpi_backend(const BackendContext& context);

}  // namespace maniple
