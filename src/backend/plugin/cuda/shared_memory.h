// Memory of devices that all ranks of a group map: one piece for each rank, on its own device.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "backend/device/device_plugin.h"

namespace maniple::cuda_plugin {

class SharedMemory {
 public:
  /// All ranks call it with the same sizes (bytes, of all ranks) and topic, and wait for each other. Zeroed. If `in_use` says so at its
  /// end, the device may be using it for ever: it stays mapped.
  SharedMemory(DescriptorExchange& descriptors, int rank, int device, std::span<const std::size_t> sizes,
               const std::string& topic, Deadline deadline, std::shared_ptr<const std::atomic<bool>> in_use = nullptr);
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  /// Where this process sees the piece of a rank; null for a piece of no bytes.
  std::byte* of(int rank) const noexcept { return pieces_[rank].data; }
  std::size_t size(int rank) const noexcept { return pieces_[rank].asked; }

 private:
  struct Piece {
    std::byte* data = nullptr;
    std::size_t asked = 0;
    std::size_t mapped = 0;  // the size asked for, rounded up
  };
  void unmap() noexcept;

  int device_ = 0;
  std::shared_ptr<const std::atomic<bool>> in_use_;
  std::vector<Piece> pieces_;
};

}  // namespace maniple::cuda_plugin
