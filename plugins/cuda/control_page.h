// Host memory that all ranks of a group map. Holds the faults that kernels found, the word that stops kernels, flags,
// and each rank's latest calls.
//
// Kernels compare the ranks' calls before they move data. But ranks that call very different operations may wait for
// each other in different ways, and then no kernel starts. So the hosts compare, too, whenever they check for faults.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "comm/backend/device/device_plugin.h"
#include "comm/base/mutex.h"
#include "plugins/cuda/kernels.h"

namespace maniple::cuda_plugin {

class ControlPage {
 public:
  /// Collective: all ranks call it and wait for each other.
  ControlPage(DescriptorExchange& descriptors, int rank, int ranks, Deadline deadline);
  ~ControlPage();
  ControlPage(const ControlPage&) = delete;
  ControlPage& operator=(const ControlPage&) = delete;

  /// Records this rank's next call; `led`: the first rank does the work for all.
  void note_call(std::uint64_t hash, std::uint64_t seq, bool led) noexcept;
  /// The `seq` of a call in which ranks differ; sets `found` to whether there is one. Any thread.
  std::uint64_t find_mismatch(bool& found) noexcept;
  /// A rank's flags, at their host address and at their device address.
  Flags* flags(int rank) const noexcept;
  Flags* flags_on_device(int rank) const noexcept;
  /// The device address of this rank's record.
  HostRecord* on_device() const noexcept { return device_records_ + rank_; }
  HostRecord& record(int rank) const noexcept { return records_[rank]; }

  /// Ends a rank's waits, unless they were ended already.
  void stop(int rank, StopReason reason) noexcept;
  StopReason stopped() const noexcept;  ///< this rank's reason

  /// The ranks that have not made call `seq` (Operation::seq); sets `led` as this rank recorded it. Also empty if this
  /// rank's record of the call was overwritten.
  std::vector<int> not_called(std::uint64_t seq, bool& led) const;

 private:
  struct CallRecord {
    std::atomic<std::uint64_t> number;  // of the call, counted from 1; written last
    std::atomic<std::uint64_t> hash;
    std::atomic<std::uint64_t> seq;
    std::atomic<std::uint64_t> led;
  };
  CallRecord& call(int rank, std::uint64_t number) const noexcept;

  int rank_ = 0;
  int ranks_ = 0;
  std::size_t bytes_ = 0;
  std::uint64_t calls_ = 0;
  Mutex mutex_;
  std::vector<std::uint64_t> compared_
      MANIPLE_GUARDED_BY(mutex_);  // for each rank: number of calls compared with its calls
  HostRecord* records_ = nullptr;
  HostRecord* device_records_ = nullptr;
};

}  // namespace maniple::cuda_plugin
