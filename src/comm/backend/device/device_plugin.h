// The interface of a plugin that communicates memory of a device (a GPU): "cuda" and "nccl".
//
// On a device an operation is *enqueued on a stream*: it starts after what the stream holds already, its result is
// there for what is enqueued later, and the host does not wait. Such a plugin therefore never blocks on other ranks,
// except while a group is set up.
//
// Like the plugins of plugin.h it is a shared library that is loaded when first asked for, and needs no symbol of
// Maniple: all that is here is a pure interface, a plain value or an inline function. It throws Maniple's errors
// (error.h). A `stream` is the runtime's own handle (cudaStream_t), an `event` the handle of one that the runtime below
// made.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "comm/backend/plugin/plugin.h"
#include "comm/call/operation.h"
#include <maniple/comm/deadline.h>
#include <maniple/comm/error.h>
#include <maniple/comm/registered_memory.h>
#include <maniple/comm/store.h>
#include <maniple/export.h>

namespace maniple {

/// A stream. The default stream of every device has the handle null, so a handle alone does not name a stream.
struct DeviceStream {
  int device = 0;
  void* handle = nullptr;
  friend auto operator<=>(const DeviceStream&, const DeviceStream&) = default;
};

struct DeviceEvent {
  int device = 0;
  void* handle = nullptr;
};

/// The functions of a device's runtime that Maniple needs. One per process; all methods from any thread. They throw
/// SystemError with the runtime's own text. They act on the device that their arguments name, leave the calling
/// thread's current device unchanged, and create a context on no other device.
class DeviceRuntime {
 public:
  virtual ~DeviceRuntime() = default;

  virtual int device_count() noexcept = 0;  ///< 0 where there is no driver
  /// Of the physical device: the same in all processes of a host, whatever numbers they give it.
  virtual std::string device_id(int device) = 0;
  virtual std::string describe(
      int device) = 0;  ///< "NVIDIA H200, 139.8 GiB (138.1 free), compute 9.0, no MPS": for people

  /// Streams of our own: of high priority, not synchronised with the default stream.
  virtual DeviceStream make_stream(int device) = 0;
  virtual void free_stream(DeviceStream stream) noexcept = 0;
  virtual bool is_capturing(DeviceStream stream) = 0;  ///< into a graph

  virtual DeviceEvent make_event(int device) = 0;
  virtual void free_event(DeviceEvent event) noexcept = 0;
  virtual void record(DeviceEvent event, DeviceStream stream) = 0;  ///< both of one device
  virtual void wait(DeviceStream stream, DeviceEvent event) = 0;  ///< what follows in the stream comes after the event
  virtual bool reached(DeviceEvent event) = 0;                    ///< polls

  virtual std::byte* make_memory(int device, std::size_t bytes) = 0;
  virtual void free_memory(int device, std::byte* memory) noexcept = 0;  ///< may wait for all that the device does

  /// Host memory that every device reaches directly; `device` is one that the process uses anyway.
  virtual std::byte* make_pinned(int device, std::size_t bytes) = 0;
  virtual void free_pinned(int device, std::byte* memory) noexcept = 0;

  /// Enqueues a copy in any direction between the device, pinned and ordinary host memory.
  virtual void copy(void* to, const void* from, std::size_t bytes, DeviceStream stream) = 0;
  /// Enqueues: the stream waits until the word, in pinned memory, has any bit of `bits`. Whoever sets it may be the
  /// host.
  virtual void wait_for_bits(DeviceStream stream, const std::uint32_t* word, std::uint32_t bits) = 0;
};

/// How the ranks of a group that are on this host hand each other open files (memory of a device is shared by
/// descriptor).
class DescriptorExchange {
 public:
  virtual ~DescriptorExchange() = default;
  /// All local ranks call it with the same topic. The rank `maker` passes a descriptor, which stays its own; the others
  /// pass -1 and get one that is theirs to close. The maker gets -1 back.
  virtual int share(std::string_view topic, int maker, int descriptor, Deadline deadline) = 0;
};

struct DeviceContext {
  std::string group;              ///< unique in the world, the same on all its ranks
  int rank = 0;                   ///< in the group
  std::vector<int> global_ranks;  ///< of the group's ranks
  std::vector<int> nodes;         ///< index of the host of each rank
  int device = 0;                 ///< that this rank uses in this group
  Store* store = nullptr;         ///< keys of this group alone
  DescriptorExchange* descriptors = nullptr;
  Deadline deadline;  ///< for setting up
  const AbortToken* abort = nullptr;
  bool compare = true;  ///< whether ranks compare what they called (MANIPLE_CHECKS)

  int size() const noexcept { return static_cast<int>(global_ranks.size()); }
};

/// What went wrong on the device or in another rank, noticed beside the stream.
struct DeviceFault {
  enum class Kind : std::uint8_t { none, mismatch, failed };
  Kind kind = Kind::none;
  std::string reason = {};  ///< for failed: in the library's words; mismatch: Maniple asks all ranks what they called
  std::uint64_t seq = 0;    ///< of the operation, where known
};

/// A rank of the group that others wait for.
struct LateRank {
  int rank = 0;
  bool called = false;  ///< it has made the call, but its stream has not reached it
};

/// One message of a batch: `data` is sent to, or received from, a rank of the group.
struct DeviceMessage {
  bool send = true;
  void* data = nullptr;
  std::size_t bytes = 0;
  int peer = 0;
  int tag = 0;
};

/// The operations of one group on one device. Calls come one at a time; `fault` and `abort` come from other threads at
/// any time.
class DevicePlugin {
 public:
  /// After `finish`. Does not communicate.
  virtual ~DevicePlugin() = default;

  virtual std::string_view name() const noexcept = 0;  ///< "cuda", "NCCL 2.28": for people

  /// Whether `enqueue` can do it with the result that types.h promises. The same answer on all ranks of the group. What
  /// it cannot do goes through host memory.
  virtual bool can(const Operation& operation) const noexcept = 0;
  /// Enqueues it on operation.stream. Operations between begin_batch and end_batch start as one. Returns whether it
  /// recorded the event `end`, if that is not null, after the operation; otherwise the caller does. Inside a batch
  /// `end` is null. The event stays valid until another is given, or this object ends.
  virtual bool enqueue(const Operation& operation, void* end = nullptr) = 0;
  virtual void begin_batch() = 0;
  virtual void end_batch(void* stream) = 0;

  /// Messages are matched in the order of the calls for each pair of ranks; all of a batch start together. False: it
  /// has none, and they go through host memory.
  virtual bool has_messages() const noexcept = 0;
  virtual void enqueue_messages(std::span<const DeviceMessage> messages, void* stream) = 0;

  /// Whether a stream that is being captured into a graph may be given to enqueue.
  virtual bool can_capture() const noexcept = 0;

  /// Memory on which the collectives of this group copy nothing; `sizes` of all ranks. All ranks call it together, and
  /// it may wait for them. Zeroed. The handle may outlive this object.
  virtual RegisteredMemory allocate(std::span<const std::size_t> sizes, std::uint64_t number, Deadline deadline) = 0;

  /// Polled; never blocks.
  virtual DeviceFault fault() noexcept = 0;
  /// Whether an operation waits for other ranks now: the oldest of this rank that is not complete. Unknown: the engine
  /// cannot tell, and an event has to be recorded before each operation. Which of the two it is does not change.
  enum class Waits : std::uint8_t { unknown, no, yes };
  virtual Waits waits() noexcept { return Waits::unknown; }
  /// Who is waited for in the operation of that number (Operation::seq), which is under way. Empty: nobody knows.
  virtual std::vector<LateRank> late_ranks(std::uint64_t) noexcept { return {}; }
  /// Ends what is enqueued, with results that mean nothing, so that streams go on. Later calls of enqueue throw
  /// Aborted. Any thread, also while another is inside enqueue; takes milliseconds.
  virtual void abort() noexcept = 0;
  /// The last call, after `abort` or when all that was enqueued is complete: waits until the device uses no memory of
  /// this object any more. False: it still does after some seconds; then that memory, with what `allocate` made, is
  /// never freed.
  virtual bool finish() noexcept { return true; }
};

/// What such a plugin's library exports: `extern "C" const maniple::DevicePluginEntry* maniple_device_plugin_entry()`.
struct DevicePluginEntry {
  std::uint32_t abi = 0;          ///< kDevicePluginAbi of the header it was built with
  std::uint32_t operation = 0;    ///< sizeof(Operation), as both sides must agree on it
  const char* version = nullptr;  ///< of the library, for people
  /// Empty when it can be used here; otherwise what is missing ("no NVIDIA driver", ...).
  std::string (*missing)() = nullptr;
  DeviceRuntime* (*runtime)() = nullptr;  ///< "cuda" alone has one; otherwise null
  std::unique_ptr<DevicePlugin> (*make)(const DeviceContext& context) = nullptr;
};
inline constexpr std::uint32_t kDevicePluginAbi = 4;
inline constexpr const char* kDevicePluginSymbol = "maniple_device_plugin_entry";

}  // namespace maniple
