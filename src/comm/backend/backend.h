// The interface of a backend, which carries out one group's operations on the memory of the devices that it serves.
//
//   run       on host memory, returns when the operation is done: "native", "gloo", "mpi"
//   enqueue   on device memory, puts the operation in a stream and returns at once: "cuda", "nccl", and staging, which
//             wraps a host backend and copies through its memory
//
// A group has a list of backends, and choose_backend() returns the one for an operation. The group orders, numbers and
// records operations and handles their failure; the backend moves the bytes.
//
// Collectives run one at a time, in order, on whichever thread the group chooses. Messages are independent of them.
// Backends throw the typed errors of error.h without the call's name in front, which the group adds.
#pragma once

#include <functional>
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
#include <maniple/comm/work.h>
#include <maniple/export.h>

namespace MANIPLE_API maniple {

class DeviceStreams;

struct BackendContext {
  std::string group;  ///< unique in the world, the same on all ranks
  Topology topology;
  std::shared_ptr<Session> session;
  std::shared_ptr<AbortSignal> abort;
  TransportKind transport = TransportKind::automatic;
  std::string algorithm;
  Deadline deadline;                       ///< for the set-up
  int device = -1;                         ///< InitOptions::device; -1: the backend chooses
  std::shared_ptr<DeviceStreams> streams;  ///< null for a backend that serves host memory
};

/// How operations are enqueued.
struct StreamCall {
  Seconds limit{};                             ///< starts when the stream reaches the operation
  bool async_op = false;                       ///< on a stream of the group, otherwise on the caller's
  void* stream = nullptr;                      ///< the caller's, for messages; an Operation names its own
  std::function<void(Operation&)> begin = {};  ///< numbers and records an operation, right before it is enqueued
};

/// A message from or to device memory.
struct StreamMessage {
  std::shared_ptr<Message> message;
  Device device;
  ErrorInfo context;  ///< names the call
};

/// The host's part of an enqueued operation that goes through host memory. The stream waits for it.
class HostPart {
 public:
  virtual ~HostPart() = default;
  /// Calls `execute` for each piece of the operation, on host memory, once the stream has copied the piece's data.
  virtual void run(const std::function<void(Operation& piece)>& execute) = 0;
  /// Always the last call: the stream continues, whether `run` succeeded (null), failed or was never called.
  virtual void end(const std::exception_ptr& error) = 0;
};

struct Enqueued {
  Work work;
  std::shared_ptr<HostPart> host = {};  ///< null: the device does everything
};

class Backend {
 public:
  virtual ~Backend() = default;

  /// "shm", "tcp", "NCCL 2.28", ...: for display
  virtual std::string_view transport() const noexcept = 0;
  virtual bool serves(Device device) const noexcept { return device.is_cpu(); }
  /// Whether it supports the operation on memory that it serves. The same on all ranks.
  virtual bool can(const Operation&) const noexcept { return true; }

  // ---- On host memory ------------------------------------------------------------------------------------------
  /// Whether all other ranks see this rank's failure without the session (all share memory).
  virtual bool all_share_memory() const noexcept { return false; }
  /// Whether `run` calls op_context.contribution_published() before it waits for other ranks.
  virtual bool reports_publication() const noexcept { return false; }
  virtual void run(const Operation& operation, OperationContext& op_context);

  /// Called when a rank of the group has left or its process has ended: it will send nothing new. Any thread; must not
  /// block.
  virtual void mark_gone(int rank) noexcept { (void)rank; }

  /// Completes a send or recv at once, or after a short wait, without the cost of `start`. Returns false if nothing was
  /// done.
  virtual bool try_now(Message& message) { return (void)message, false; }
  virtual void start(std::span<const std::shared_ptr<Message>> messages, bool background);
  virtual void drive(Message& message);
  virtual AwaitedMessages awaited() { return {}; }  ///< any thread; must not block

  // ---- On device memory ----------------------------------------------------------------------------------------
  /// Whether operations are enqueued in the order of the group's calls. Messages are then matched in that order, and
  /// recv must name the sender. Otherwise the group runs only the host parts in that order.
  virtual bool takes_turns() const noexcept { return false; }
  /// Enqueues the operation on operation.stream. If it takes turns, several operations on one device run as one.
  virtual Enqueued enqueue(std::span<Operation> operations, const StreamCall& call);
  /// Whether it has messages; `by_tags`: matched by their tags.
  virtual bool has_messages(bool by_tags) const noexcept { return (void)by_tags, true; }
  /// Starts the messages together. Returns one Work per message.
  virtual std::vector<Work> enqueue_messages(std::span<const StreamMessage> messages, const StreamCall& call);

  // ---- Registered memory ---------------------------------------------------------------------------------------
  /// `sizes`: every rank's size in bytes; `number`: counts the group's allocations. All ranks call it together.
  virtual RegisteredMemory allocate(std::span<const std::size_t> sizes, std::uint64_t number, Deadline deadline) = 0;
  /// Allocates memory that all ranks of a host share. Throws Unsupported on all ranks, or on none.
  virtual RegisteredMemory allocate_shared(std::size_t bytes, std::uint64_t number, Deadline deadline);
};

struct BackendEntry {
  std::string_view name;
  std::string_view sentence;
  DeviceType device;  ///< the memory that it serves; host backends serve device memory through staging
  std::unique_ptr<Backend> (*make)(const BackendContext& context);
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

/// Returns the first of a group's backends that serves the device of the operations and supports all of them; the last
/// one supports all operations.
Backend& choose_backend(std::span<const std::unique_ptr<Backend>> backends, std::span<const Operation> operations);

/// All backends that this version knows, available or not.
std::span<const BackendEntry> backends() noexcept;
/// Throws Unsupported, naming what is missing and how to get it, or the available names.
const BackendEntry& find_backend(std::string_view name);

std::unique_ptr<Backend> make_native_backend(const BackendContext& context);
std::unique_ptr<Backend> make_gloo_backend(const BackendContext& context);
std::unique_ptr<Backend> make_mpi_backend(const BackendContext& context);
std::unique_ptr<Backend> make_cuda_backend(const BackendContext& context);
std::unique_ptr<Backend> make_nccl_backend(const BackendContext& context);
/// Serves device memory through host memory, with `host`, which must live longer. `name`: the group's, for errors.
std::unique_ptr<Backend> make_staged_backend(Backend& host, std::shared_ptr<DeviceStreams> streams, AbortSignal& abort,
                                             int rank, std::string name);

}  // namespace maniple
