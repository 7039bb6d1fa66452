// The streams on which a group's operations run, shared by the group's backends for device memory.
//
// A group's operations run in call order, even on different streams: order_after_last() and set_last() see to that.
// Collectives are serialised by the group, so these two need no lock.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "comm/backend/device/device_plugin.h"
#include "comm/backend/device/stream_watcher.h"
#include "comm/base/mutex.h"
#include <maniple/comm/work.h>

namespace maniple {

/// Pools of events and pinned memory, kept for reuse. Shared with handles that may outlive the group.
class DevicePools {
 public:
  explicit DevicePools(DeviceRuntime& runtime) : runtime_(runtime) {}
  ~DevicePools();

  /// The last owner's release returns these to the pool.
  static std::shared_ptr<const DeviceEvent> event(const std::shared_ptr<DevicePools>& pools, int device);
  static std::shared_ptr<std::byte> pinned(const std::shared_ptr<DevicePools>& pools, int device, std::size_t bytes);

 private:
  struct Pinned {
    int device = 0;  // the device it was made with; all devices reach it
    std::byte* memory = nullptr;
  };
  DeviceRuntime& runtime_;
  Mutex mutex_;
  std::map<int, std::vector<std::unique_ptr<DeviceEvent>>> events_ MANIPLE_GUARDED_BY(mutex_);
  std::multimap<std::size_t, Pinned> pinned_ MANIPLE_GUARDED_BY(mutex_);
};

class DeviceStreams {
 public:
  /// Each purpose has a stream of its own: collectives must not wait behind a receive, nor a send behind either.
  enum class Purpose : int { collectives, sends, receives };

  explicit DeviceStreams(StreamWatcher::Options options);
  ~DeviceStreams();

  DeviceRuntime& runtime() noexcept { return runtime_; }
  StreamWatcher& watcher() noexcept { return watcher_; }

  /// The group communicates on this device only. -1: on any device.
  void bind(int device) noexcept { device_ = device; }
  int device() const noexcept { return device_; }
  /// Throws InvalidArgument if the group does not communicate on the device.
  void require_device(Device device, Op op) const;

  /// The stream on which an operation called on `caller` runs, ordered after the current contents of `caller`: `caller`
  /// itself, or a stream of the group for an asynchronous operation.
  DeviceStream stream_for(DeviceStream caller, bool async_op, Purpose purpose);
  void order_after_last(DeviceStream stream, bool captured);
  void set_last(std::shared_ptr<const DeviceEvent> end, DeviceStream stream);

  std::shared_ptr<const DeviceEvent> make_event(int device) { return DevicePools::event(pools_, device); }
  std::shared_ptr<std::byte> make_pinned(int device, std::size_t bytes) {
    return DevicePools::pinned(pools_, device, bytes);
  }
  /// The state of an operation on the stream; its end is yet to be recorded.
  std::shared_ptr<detail::WorkState> make_work(DeviceStream stream, bool captured);
  /// Returns a Work that completes when the stream's current contents do; `keep` lives until then.
  Work mark(DeviceStream stream, std::shared_ptr<void> keep);

 private:
  DeviceStream own_stream(int device, Purpose purpose);

  DeviceRuntime& runtime_;
  int device_ = -1;
  std::shared_ptr<DevicePools> pools_;
  Mutex streams_mutex_;
  std::map<std::pair<int, Purpose>, DeviceStream> streams_ MANIPLE_GUARDED_BY(streams_mutex_);
  std::shared_ptr<const DeviceEvent> last_event_;  // of the last operation outside graphs, and the stream it ran on
  DeviceStream last_stream_;
  StreamWatcher watcher_;  // last: its thread uses events of the pools
};

}  // namespace maniple
