#include "comm/backend/device/device_streams.h"

#include <algorithm>
#include <bit>

#include "comm/base/check.h"

namespace maniple {

DevicePools::~DevicePools() {
  for (const auto& [device, events] : events_) {
    for (const auto& event : events) runtime_.free_event(*event);
  }
  for (const auto& [bytes, one] : pinned_) runtime_.free_pinned(one.device, one.memory);
}

std::shared_ptr<const DeviceEvent> DevicePools::event(const std::shared_ptr<DevicePools>& pools, int device) {
  std::unique_ptr<DeviceEvent> event;
  {
    const MutexLock lock(pools->mutex_);
    if (auto& free = pools->events_[device]; !free.empty()) {
      event = std::move(free.back());
      free.pop_back();
    }
  }
  if (!event) event = std::make_unique<DeviceEvent>(pools->runtime_.make_event(device));
  return {event.release(), [pools, device](DeviceEvent* it) {
            std::unique_ptr<DeviceEvent> free(it);
            const MutexLock lock(pools->mutex_);
            pools->events_[device].push_back(std::move(free));
          }};
}

std::shared_ptr<std::byte> DevicePools::pinned(const std::shared_ptr<DevicePools>& pools, int device,
                                               std::size_t bytes) {
  const std::size_t size = std::bit_ceil(std::max<std::size_t>(bytes, 4096));
  Pinned one;
  {
    const MutexLock lock(pools->mutex_);
    if (const auto it = pools->pinned_.find(size); it != pools->pinned_.end()) {
      one = it->second;
      pools->pinned_.erase(it);
    }
  }
  if (one.memory == nullptr) one = {device, pools->runtime_.make_pinned(device, size)};
  return {one.memory, [pools, size, one](std::byte*) {
            const MutexLock lock(pools->mutex_);
            pools->pinned_.emplace(size, one);
          }};
}

DeviceStreams::DeviceStreams(StreamWatcher::Options options)
    : runtime_(*options.runtime), pools_(std::make_shared<DevicePools>(runtime_)), watcher_(std::move(options)) {}

DeviceStreams::~DeviceStreams() {
  watcher_.stop();
  watcher_.end_all();
  for (const auto& [key, stream] : streams_) runtime_.free_stream(stream);
}

void DeviceStreams::require_device(Device device, Op op) const {
  MANIPLE_REQUIRE(device.type == DeviceType::cuda, "{}: there is no device {}", to_string(op), to_string(device));
  MANIPLE_REQUIRE(device_ < 0 || device.index == device_,
                  "{}: the memory is on {}, but this rank's part of group {} is on cuda:{}; choose the GPU with "
                  "InitOptions::device, or with `maniple run`",
                  to_string(op), to_string(device), watcher_.context_of("").group, device_);
}

DeviceStream DeviceStreams::own_stream(int device, Purpose purpose) {
  const MutexLock lock(streams_mutex_);  // threads may send while another thread calls a collective
  const auto it = streams_.find({device, purpose});
  if (it != streams_.end()) return it->second;
  return streams_[{device, purpose}] = runtime_.make_stream(device);
}

DeviceStream DeviceStreams::stream_for(DeviceStream caller, bool async_op, Purpose purpose) {
  if (!async_op) return caller;
  const DeviceStream own = own_stream(caller.device, purpose);
  const auto event = make_event(caller.device);
  runtime_.record(*event, caller);
  runtime_.wait(own, *event);
  return own;
}

// Inside a graph the engine ensures the order: an event recorded in one capture is not valid in the next.
void DeviceStreams::order_after_last(DeviceStream stream, bool captured) {
  if (last_event_ && last_stream_ != stream && !captured) runtime_.wait(stream, *last_event_);
}

void DeviceStreams::set_last(std::shared_ptr<const DeviceEvent> end, DeviceStream stream) {
  last_event_ = std::move(end);
  last_stream_ = stream;
}

std::shared_ptr<detail::WorkState> DeviceStreams::make_work(DeviceStream stream, bool captured) {
  auto work = std::make_shared<detail::WorkState>();
  work->device = {&runtime_, make_event(stream.device), stream, captured, watcher_.watch()};
  return work;
}

Work DeviceStreams::mark(DeviceStream stream, std::shared_ptr<void> keep) {
  StreamOperation operation;
  operation.work = make_work(stream, runtime_.is_capturing(stream));
  StreamWatcher::Place place = watcher_.begin(stream);
  runtime_.record(*operation.work->device.event, stream);
  operation.limit = Seconds::max();  // the operations before it have limits
  operation.context = watcher_.context_of("copy");
  operation.keep = {std::move(keep)};
  auto work = operation.work;
  watcher_.add(std::move(operation), std::move(place));
  return Work(work);
}

}  // namespace maniple
