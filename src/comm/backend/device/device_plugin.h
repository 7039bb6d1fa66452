// The interface of a plugin that communicates device (GPU) memory: "cuda" and "nccl".
//
// On a device an operation is *enqueued on a stream*: it starts after the work already in the stream, later work in the
// stream sees its result, and the host does not wait. A device plugin therefore never blocks on other ranks, except
// while a group is set up.
//
// Like the plugins of plugin.h, a device plugin is a shared library that is loaded on first use and needs no symbol of
// Maniple: everything here is a pure interface, a plain value or an inline function. It throws Maniple's errors
// (error.h). A `stream` is the runtime's own handle (cudaStream_t), an `event` the handle of an event made by the
// DeviceRuntime below.
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

/// A stream. Every device's default stream has a null handle, so a handle alone does not identify a stream.
struct DeviceStream {
  int device = 0;
  void* handle = nullptr;
  friend auto operator<=>(const DeviceStream&, const DeviceStream&) = default;
};

struct DeviceEvent {
  int device = 0;
  void* handle = nullptr;
};

/// The device runtime's functions that Maniple needs. One object per process; all methods may be called from any
/// thread. They throw SystemError with the runtime's own text. They act on the device that their arguments name, leave
/// the calling thread's current device unchanged, and create no context on other devices.
class DeviceRuntime {
 public:
  virtual ~DeviceRuntime() = default;

  virtual int device_count() noexcept = 0;  ///< 0 without a driver
  /// Identifies the physical device: the same in all processes of a host, even if they number devices differently.
  virtual std::string device_id(int device) = 0;
  virtual std::string describe(
      int device) = 0;  ///< "NVIDIA H200, 139.8 GiB (138.1 free), compute 9.0, no MPS": for display

  /// Makes a stream of high priority that does not synchronise with the default stream.
  virtual DeviceStream make_stream(int device) = 0;
  virtual void free_stream(DeviceStream stream) noexcept = 0;
  virtual bool is_capturing(DeviceStream stream) = 0;  ///< whether it is being captured into a graph

  virtual DeviceEvent make_event(int device) = 0;
  virtual void free_event(DeviceEvent event) noexcept = 0;
  virtual void record(DeviceEvent event, DeviceStream stream) = 0;  ///< both must belong to one device
  virtual void wait(DeviceStream stream, DeviceEvent event) = 0;    ///< orders later work in the stream after the event
  virtual bool reached(DeviceEvent event) = 0;                      ///< polls

  virtual std::byte* make_memory(int device, std::size_t bytes) = 0;
  virtual void free_memory(int device, std::byte* memory) noexcept = 0;  ///< may wait for all work on the device

  /// Allocates host memory that every device reaches directly; `device` is one that the process uses anyway.
  virtual std::byte* make_pinned(int device, std::size_t bytes) = 0;
  virtual void free_pinned(int device, std::byte* memory) noexcept = 0;

  /// Enqueues a copy between any two of device memory, pinned memory and ordinary host memory.
  virtual void copy(void* to, const void* from, std::size_t bytes, DeviceStream stream) = 0;
  /// Enqueues a wait until the word, in pinned memory, has any bit of `bits` set. The host may set it.
  virtual void wait_for_bits(DeviceStream stream, const std::uint32_t* word, std::uint32_t bits) = 0;
};

/// Passes open files between a group's ranks on this host (device memory is shared by descriptor).
class DescriptorExchange {
 public:
  virtual ~DescriptorExchange() = default;
  /// All local ranks call it with the same topic. The rank `maker` passes a descriptor, which it keeps; the others pass
  /// -1 and get a descriptor that they must close. The maker gets -1.
  virtual int share(std::string_view topic, int maker, int descriptor, Deadline deadline) = 0;
};

struct DeviceContext {
  std::string group;              ///< unique in the world, the same on all its ranks
  int rank = 0;                   ///< in the group
  std::vector<int> global_ranks;  ///< indexed by group rank
  std::vector<int> nodes;         ///< host index of each rank
  int device = 0;                 ///< the device this rank uses in this group
  Store* store = nullptr;         ///< holds only this group's keys
  DescriptorExchange* descriptors = nullptr;
  Deadline deadline;  ///< for the set-up
  const AbortToken* abort = nullptr;
  bool compare = true;  ///< whether ranks compare their calls (MANIPLE_CHECKS)

  int size() const noexcept { return static_cast<int>(global_ranks.size()); }
};

/// A failure on the device or in another rank, detected outside the stream.
struct DeviceFault {
  enum class Kind : std::uint8_t { none, mismatch, failed };
  Kind kind = Kind::none;
  std::string reason = {};  ///< failed: the library's text; mismatch: empty, as Maniple then queries all ranks' calls
  std::uint64_t seq = 0;    ///< the operation's number, if known
};

/// A rank of the group that other ranks wait for.
struct LateRank {
  int rank = 0;
  bool called = false;  ///< it has made the call, but its stream has not reached the operation
};

/// One message of a batch: sends `data` to, or receives it from, rank `peer` of the group.
struct DeviceMessage {
  bool send = true;
  void* data = nullptr;
  std::size_t bytes = 0;
  int peer = 0;
  int tag = 0;
};

/// One group's operations on one device. Calls are serialised, except `fault` and `abort`, which other threads may call
/// at any time.
class DevicePlugin {
 public:
  /// Called after `finish`. Must not communicate.
  virtual ~DevicePlugin() = default;

  virtual std::string_view name() const noexcept = 0;  ///< "cuda", "NCCL 2.28": for display

  /// Whether `enqueue` supports the operation with the result that types.h promises. Must be the same on all ranks of
  /// the group. Other operations go through host memory.
  virtual bool can(const Operation& operation) const noexcept = 0;
  /// Enqueues the operation on operation.stream. Operations between begin_batch and end_batch start as one. Returns
  /// whether it recorded `end`, an event or null, after the operation; if not, the caller records it. Inside a batch
  /// `end` is null. The event stays valid until the next one is passed, or this object is destroyed.
  virtual bool enqueue(const Operation& operation, void* end = nullptr) = 0;
  virtual void begin_batch() = 0;
  virtual void end_batch(void* stream) = 0;

  /// Whether the plugin has messages; otherwise they go through host memory. They are matched in call order for each
  /// pair of ranks, and all messages of a batch start together.
  virtual bool has_messages() const noexcept = 0;
  virtual void enqueue_messages(std::span<const DeviceMessage> messages, void* stream) = 0;

  /// Whether `enqueue` accepts a stream that is being captured into a graph.
  virtual bool can_capture() const noexcept = 0;

  /// Allocates zeroed memory on which this group's collectives need no copies. `sizes`: every rank's size in bytes. All
  /// ranks call it together, and it may wait for them. The handle may outlive this object.
  virtual RegisteredMemory allocate(std::span<const std::size_t> sizes, std::uint64_t number, Deadline deadline) = 0;

  /// Polled; never blocks.
  virtual DeviceFault fault() noexcept = 0;
  /// Whether this rank's oldest incomplete operation waits for other ranks now. Unknown: the engine cannot report it,
  /// so an event must be recorded before each operation. An engine returns either always `unknown`, or never.
  enum class Waits : std::uint8_t { unknown, no, yes };
  virtual Waits waits() noexcept { return Waits::unknown; }
  /// The ranks that the running operation with that number (Operation::seq) waits for. Empty: unknown.
  virtual std::vector<LateRank> late_ranks(std::uint64_t) noexcept { return {}; }
  /// Cancels enqueued work and unblocks its streams; results are undefined. Later calls of enqueue throw Aborted. Any
  /// thread, even while another is inside enqueue; takes milliseconds.
  virtual void abort() noexcept = 0;
  /// The last call, after `abort` or when all enqueued work is complete: waits until the device has stopped using this
  /// object's memory. Returns false if it still uses it after some seconds; then that memory, including memory from
  /// `allocate`, is never freed.
  virtual bool finish() noexcept { return true; }
};

/// The symbol that a device plugin's library exports: `extern "C" const maniple::DevicePluginEntry*
/// maniple_device_plugin_entry()`.
struct DevicePluginEntry {
  std::uint32_t abi = 0;          ///< kDevicePluginAbi of the header it was built with
  std::uint32_t operation = 0;    ///< sizeof(Operation), on which both sides must agree
  const char* version = nullptr;  ///< of the library, for display
  /// Returns an empty string if the plugin is usable here, otherwise what is missing ("no NVIDIA driver", ...).
  std::string (*missing)() = nullptr;
  DeviceRuntime* (*runtime)() = nullptr;  ///< only "cuda" has one; otherwise null
  std::unique_ptr<DevicePlugin> (*make)(const DeviceContext& context) = nullptr;
};
inline constexpr std::uint32_t kDevicePluginAbi = 4;
inline constexpr const char* kDevicePluginSymbol = "maniple_device_plugin_entry";

}  // namespace maniple
