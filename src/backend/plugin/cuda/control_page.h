// Memory of the host that all ranks of a group map: the faults that kernels found, flags, and what each rank called last.
//
// Kernels compare what was called before they move anything. But ranks that call very different things may wait for each other in
// different ways, and then no kernel starts: so the hosts compare, too, whenever they look for faults.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <vector>

#include "backend/device/device_plugin.h"
#include "backend/plugin/cuda/kernels.h"

namespace maniple::cuda_plugin {

class ControlPage {
 public:
  /// All ranks call it and wait for each other.
  ControlPage(DescriptorExchange& descriptors, int rank, int ranks, Deadline deadline);
  ~ControlPage();
  ControlPage(const ControlPage&) = delete;
  ControlPage& operator=(const ControlPage&) = delete;

  /// This rank's next call.
  void note_call(std::uint64_t hash, std::uint64_t seq) noexcept;
  /// The number of a call in which ranks differ; `found` says whether there is one. Any thread.
  std::uint64_t find_mismatch(bool& found) noexcept;
  /// The flags of a rank, as the host sees them, and as devices do.
  Flags* flags(int rank) const noexcept;
  Flags* flags_on_device(int rank) const noexcept;
  /// Where kernels of this rank write what they find.
  FaultRecord* on_device() const noexcept { return device_records_ + rank_; }

 private:
  struct CallRecord {
    std::atomic<std::uint64_t> number;  // of the call, from 1; the last to be written
    std::atomic<std::uint64_t> hash;
    std::atomic<std::uint64_t> seq;
  };
  CallRecord& call(int rank, std::uint64_t number) const noexcept;

  int rank_ = 0;
  int ranks_ = 0;
  std::size_t bytes_ = 0;
  std::uint64_t calls_ = 0;
  std::mutex mutex_;
  std::vector<std::uint64_t> compared_;  // calls that were compared with those of each rank
  FaultRecord* records_ = nullptr;
  FaultRecord* device_records_ = nullptr;
};

}  // namespace maniple::cuda_plugin
