// The flight recorder: this rank's last operations in a group, for error messages and bug reports.
//
// Writing costs a few stores and at most two reads of the processor's counter. The stores are relaxed, as ordering
// would make the operation's own stores and loads wait for them (50 ns of a broadcast of 8 bytes). Instead each entry
// carries a checksum of the fields that belong together; readers, on any thread, skip entries whose checksum does not
// match.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/base/ticks.h"
#include "comm/call/signature.h"
#include "comm/session/wait_report.h"
#include <maniple/comm/source_location.h>

namespace maniple {

class Recorder {
 public:
  explicit Recorder(std::size_t entries);

  /// Returns the start time in ticks; 0 if recording is off.
  std::uint64_t begin(const Operation& operation) noexcept {
    if (mask_ == 0) return 0;
    const Contents now{Signature::of(operation), operation.where.file_name(), operation.where.line(), ticks()};
    Entry& entry = entries_[operation.seq & mask_];
    entry.seq.store(now.signature.seq, std::memory_order_relaxed);
    entry.words[0].store(now.signature.what, std::memory_order_relaxed);
    entry.words[1].store(now.signature.count, std::memory_order_relaxed);
    entry.words[2].store(now.signature.detail, std::memory_order_relaxed);
    entry.file.store(now.file, std::memory_order_relaxed);
    entry.line_and_sum.store(std::uint64_t{now.line} << 32 | now.sum(), std::memory_order_relaxed);
    entry.began.store(now.began, std::memory_order_relaxed);
    return now.began;
  }
  /// `when`: the end time in ticks, if the caller knows it to a fraction of a microsecond; 0: now.
  void end(std::uint64_t seq, bool failed, std::uint64_t when = 0) noexcept {
    if (mask_ == 0) return;
    const std::uint64_t at = when != 0 ? when : ticks();
    entries_[seq & mask_].ended.store(at << 1 | (failed ? 1 : 0), std::memory_order_relaxed);
  }

  /// Returns call number `seq`: "all_reduce #12 float32[1000] sum", "train.cpp:40". Empty if it is not (or no longer)
  /// recorded. The rank is not set.
  RankCall called(std::uint64_t seq) const;
  /// Returns the last call that began.
  CallProgress last() const;
  /// One line per recorded call, oldest first: the call, how long ago it began, and its duration or that it is running.
  std::vector<std::string> lines() const;

 private:
  struct Contents {
    Signature signature;
    const char* file;
    std::uint32_t line;
    std::uint64_t began;
    std::uint32_t sum() const noexcept {
      constexpr std::uint64_t kOdd = 0x9e3779b97f4a7c15;
      std::uint64_t sum = (signature.seq ^ signature.what << 7) * kOdd;
      sum = (sum ^ signature.count ^ signature.detail << 9) * kOdd;
      sum = (sum ^ began ^ reinterpret_cast<std::uintptr_t>(file) << 11 ^ line) * kOdd;
      return static_cast<std::uint32_t>(sum >> 32);
    }
  };
  struct alignas(64) Entry {  // one cache line
    std::atomic<std::uint64_t> seq{0};
    std::array<std::atomic<std::uint64_t>, 3> words{};
    std::atomic<const char*> file{""};
    std::atomic<std::uint64_t> line_and_sum{0};
    std::atomic<std::uint64_t> began{0};
    std::atomic<std::uint64_t> ended{
        0};  // ticks << 1, lowest bit: failed. Earlier than `began`: left by an earlier call, so this one is running
  };
  static_assert(sizeof(Entry) == 64);
  /// An entry's contents and end (0: still running; lowest bit: failed). read() returns none while a writer changes it.
  struct Read {
    Contents contents;
    std::uint64_t ended;
  };
  static std::optional<Read> read(const Entry& entry) noexcept;
  static RankCall call_of(const Contents& contents);
  static std::string describe(const Contents& contents);
  std::unique_ptr<Entry[]> entries_;
  std::uint64_t mask_ = 0;
};

}  // namespace maniple
