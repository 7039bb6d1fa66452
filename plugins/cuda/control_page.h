// Memory of the host that all ranks of a group map: the faults that kernels found, the word that stops them, flags, and
// what each rank called last.
//
// Kernels compare what was called before they move anything. But ranks that call very different things may wait for
// each other in different ways, and then no kernel starts: so the hosts compare, too, whenever they look for faults.
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
  /// All ranks call it and wait for each other.
  ControlPage(DescriptorExchange& descriptors, int rank, int ranks, Deadline deadline);
  ~ControlPage();
  ControlPage(const ControlPage&) = delete;
  ControlPage& operator=(const ControlPage&) = delete;

  /// This rank's next call; `led`: the first rank does it for all.
  void note_call(std::uint64_t hash, std::uint64_t seq, bool led) noexcept;
  /// The number of a call in which ranks differ; `found` says whether there is one. Any thread.
  std::uint64_t find_mismatch(bool& found) noexcept;
  /// The flags of a rank, as the host sees them, and as devices do.
  Flags* flags(int rank) const noexcept;
  Flags* flags_on_device(int rank) const noexcept;
  /// As kernels of this rank see its record.
  HostRecord* on_device() const noexcept { return device_records_ + rank_; }
  HostRecord& record(int rank) const noexcept { return records_[rank]; }

  /// Ends what a rank waits for, unless it has ended already.
  void stop(int rank, StopReason reason) noexcept;
  StopReason stopped() const noexcept;  ///< this rank

  /// Ranks that have not made the call (Operation::seq); `led` as this rank noted it. Empty, too, when it is forgotten.
  std::vector<int> not_called(std::uint64_t seq, bool& led) const;

 private:
  struct CallRecord {
    std::atomic<std::uint64_t> number;  // of the call, from 1; the last to be written
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
  std::vector<std::uint64_t> compared_ MANIPLE_GUARDED_BY(mutex_);  // calls that were compared with those of each rank
  HostRecord* records_ = nullptr;
  HostRecord* device_records_ = nullptr;
};

}  // namespace maniple::cuda_plugin
