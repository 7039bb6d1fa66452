// Memory of devices that all ranks of a group map: one piece for each rank, on its own device. A process sees them at
// equal distances.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "comm/backend/device/device_plugin.h"

namespace maniple::cuda_plugin {

class SharedMemory {
 public:
  /// All ranks call it with the same sizes (bytes, of all ranks) and topic, and wait for each other. Zeroed. If
  /// `in_use` says so at its end, the device may be using it for ever: it stays mapped.
  SharedMemory(DescriptorExchange& descriptors, int rank, int device, std::span<const std::size_t> sizes,
               const std::string& topic, Deadline deadline, std::shared_ptr<const std::atomic<bool>> in_use = nullptr);
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  /// Where this process sees the piece of a rank; null for a piece of no bytes.
  std::byte* of(int rank) const noexcept { return mapped_[rank] != 0 ? first_ + rank * apart_ : nullptr; }
  std::byte* first() const noexcept { return first_; }   ///< where rank 0's would be
  std::size_t apart() const noexcept { return apart_; }  ///< bytes from one to the next

 private:
  void unmap() noexcept;

  int device_ = 0;
  std::shared_ptr<const std::atomic<bool>> in_use_;
  std::byte* first_ = nullptr;
  std::size_t apart_ = 0;
  std::vector<std::size_t> mapped_;  // bytes of each rank's piece, rounded up; 0: it is not mapped
};

}  // namespace maniple::cuda_plugin
