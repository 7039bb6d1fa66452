// Device memory that all ranks of a group map: one piece per rank, on that rank's device. Each process maps the pieces
// at a constant stride.
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
  /// Collective: all ranks call it with the same sizes (bytes of each rank's piece) and topic, and wait for each other.
  /// The memory is zeroed. If `*in_use` is true on destruction, the device may still use the memory, and it stays
  /// mapped.
  SharedMemory(DescriptorExchange& descriptors, int rank, int device, std::span<const std::size_t> sizes,
               const std::string& topic, Deadline deadline, std::shared_ptr<const std::atomic<bool>> in_use = nullptr);
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  /// This process's address of a rank's piece; null for an empty piece.
  std::byte* of(int rank) const noexcept { return mapped_[rank] != 0 ? first_ + rank * apart_ : nullptr; }
  std::byte* first() const noexcept { return first_; }   ///< address of rank 0's piece, even if it is empty
  std::size_t apart() const noexcept { return apart_; }  ///< stride in bytes

 private:
  void unmap() noexcept;

  int device_ = 0;
  std::shared_ptr<const std::atomic<bool>> in_use_;
  std::byte* first_ = nullptr;
  std::size_t apart_ = 0;
  std::vector<std::size_t> mapped_;  // bytes of each rank's piece, rounded up; 0: not mapped
};

}  // namespace maniple::cuda_plugin
