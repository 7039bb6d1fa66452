// The flight recorder: the last operations of this rank in a group, for error messages and bug reports.
//
// Writing costs a few stores and at most two reads of the processor's counter. Reading, from any thread, skips entries that change
// while it reads them.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/ticks.h"
#include "call/signature.h"
#include "session/wait_report.h"
#include <maniple/comm/source_location.h>

namespace maniple {

class Recorder {
 public:
  explicit Recorder(std::size_t entries);

  /// Returns the time of it, in ticks; 0 when nothing is recorded.
  std::uint64_t begin(const Operation& operation) noexcept {
    if (mask_ == 0) return 0;
    const std::uint64_t now = ticks();
    Entry& entry = entries_[operation.seq & mask_];
    // Release stores instead of a fence: nobody sees what follows under the old number, and nothing has to wait until all before it
    // can be seen.
    entry.seq.store(0, std::memory_order_relaxed);
    const Signature signature = Signature::of(operation);
    entry.words[0].store(signature.what, std::memory_order_release);
    entry.words[1].store(signature.count, std::memory_order_release);
    entry.words[2].store(signature.detail, std::memory_order_release);
    entry.file.store(operation.where.file_name(), std::memory_order_release);
    entry.line.store(operation.where.line(), std::memory_order_release);
    entry.began.store(now, std::memory_order_release);
    entry.ended.store(0, std::memory_order_release);
    entry.seq.store(signature.seq, std::memory_order_release);
    return now;
  }
  /// `when`: in ticks, where the caller knows it to a fraction of a microsecond; 0: now.
  void end(std::uint64_t seq, bool failed, std::uint64_t when = 0) noexcept {
    if (mask_ == 0) return;
    Entry& entry = entries_[seq & mask_];
    entry.failed.store(failed, std::memory_order_relaxed);
    entry.ended.store(when != 0 ? when : ticks(), std::memory_order_release);
  }

  /// "all_reduce #12 float32[1000] sum", "train.cpp:40"; empty if it is not (or no longer) recorded. The rank is not set.
  RankCall called(std::uint64_t seq) const;
  /// The last call that began.
  CallProgress last() const;
  /// Oldest first: the call, how long ago it began, how long it took or that it is still running.
  std::vector<std::string> lines() const;

 private:
  struct alignas(64) Entry {  // one cache line
    std::atomic<std::uint64_t> seq{0};
    std::array<std::atomic<std::uint64_t>, 3> words{};
    std::atomic<const char*> file{""};
    std::atomic<unsigned> line{0};
    std::atomic<bool> failed{false};
    std::atomic<std::uint64_t> began{0};
    std::atomic<std::uint64_t> ended{0};
  };
  static RankCall call_of(const Entry& entry, std::uint64_t seq);
  static std::string describe(const Entry& entry, std::uint64_t seq);
  std::unique_ptr<Entry[]> entries_;
  std::uint64_t mask_ = 0;
};

}  // namespace maniple
