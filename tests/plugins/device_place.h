// Streams and memory of a rank in the tests of a group's operations on a device.
#pragma once

#include <gtest/gtest.h>

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <stdexcept>
#include <string>
#include <vector>

#include "comm/backend/plugin/load.h"
#include "harness/run_ranks.h"

namespace maniple::device_calls_test {

inline constexpr std::size_t kFew = 1000;
inline constexpr std::size_t kMany = 3'000'000;  // through host memory: in several pieces

/// Streams and memory of one rank.
class Place {
 public:
  explicit Place(int device = 0) : device_(device) {}
  ~Place() {
    for (void* stream : streams_) runtime_.free_stream(on(stream));
    for (std::byte* memory : memory_) runtime_.free_memory(device_, memory);
    for (std::byte* memory : pinned_) runtime_.free_pinned(device_, memory);
  }
  DeviceRuntime& runtime() { return runtime_; }
  void* stream() {
    streams_.push_back(runtime_.make_stream(device_).handle);
    return streams_.back();
  }
  /// Device memory, all of one value. Waits for a stream of its own alone.
  Buffer ints(std::size_t count, int value) {
    memory_.push_back(runtime_.make_memory(device_, count * sizeof(int)));
    auto* const data = reinterpret_cast<int*>(memory_.back());
    int* const values = on_host(count);
    std::fill(values, values + count, value);
    runtime_.copy(data, values, count * sizeof(int), on(copies_));
    finish(copies_);
    return {data, count, DType::int32, Device::cuda(device_)};
  }
  /// What it holds now. The stream that writes it has been waited for.
  std::vector<int> values(const Buffer& buffer) {
    int* const values = on_host(buffer.count);
    runtime_.copy(values, buffer.data, buffer.bytes(), on(copies_));
    finish(copies_);
    return {values, values + buffer.count};
  }
  void expect_all(const Buffer& buffer, int value) {
    const std::vector<int> found = values(buffer);
    const auto other = std::find_if(found.begin(), found.end(), [&](int one) { return one != value; });
    if (other == found.end()) return;
    ADD_FAILURE() << "element " << other - found.begin() << " of " << found.size() << " is " << *other << ", not "
                  << value;
  }
  /// What follows in the stream waits for `open`.
  void hold(void* stream) {
    word_ = reinterpret_cast<std::uint32_t*>(on_host(1));
    *word_ = 0;
    runtime_.wait_for_bits(on(stream), word_, 1);
  }
  void open() { std::atomic_ref<std::uint32_t>(*word_).store(1); }

  void copy(const Buffer& to, const Buffer& from, void* stream) {
    runtime_.copy(to.data, from.data, to.bytes(), on(stream));
  }
  /// Waits until the stream has got to its end.
  void finish(void* stream) {
    const DeviceEvent event = runtime_.make_event(device_);
    runtime_.record(event, on(stream));
    const Deadline limit = Deadline::after(std::chrono::seconds(20));
    while (!runtime_.reached(event)) {
      if (limit.expired()) throw std::runtime_error("the stream does not get to its end");
      ::sched_yield();
    }
    runtime_.free_event(event);
  }

 private:
  int* on_host(std::size_t count) {
    pinned_.push_back(runtime_.make_pinned(device_, count * sizeof(int)));
    return reinterpret_cast<int*>(pinned_.back());
  }

  DeviceStream on(void* stream) const { return {device_, stream}; }

  int device_;
  DeviceRuntime& runtime_ = device_runtime();
  std::vector<void*> streams_;
  void* const copies_ = stream();
  std::vector<std::byte*> memory_, pinned_;
  std::uint32_t* word_ = nullptr;
};

/// An engine for the device ("cuda"), and none ("native").
class EachBackend : public testing::TestWithParam<const char*> {
 protected:
  static harness::RunOptions ranks(int n) { return {.n = n, .as = harness::As::processes, .backend = GetParam()}; }
};

}  // namespace maniple::device_calls_test
