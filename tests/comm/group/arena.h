// Memory for the buffers of a run, of every kind a caller may bring along, with guards before and after each buffer.
#pragma once

#include <array>
#include <cstddef>
#include <cstdlib>
#include <memory>
#include <stdexcept>
#include <string>

#include <gtest/gtest.h>

#include "harness/device_memory.h"
#include "harness/rank.h"
#include "harness/run_ranks.h"

namespace maniple::harness {

enum class Memory {
  ordinary,
  misaligned,  ///< one byte off, in ordinary memory
  registered,  ///< at its start
  skewed,      ///< registered, at another offset on every rank
  mixed,       ///< registered (and one byte off) on even ranks, ordinary on odd ones
};
inline constexpr std::array<Memory, 5> kAllMemory = {Memory::ordinary, Memory::misaligned, Memory::registered,
                                                     Memory::skewed, Memory::mixed};

inline const char* to_string(Memory memory) {
  constexpr const char* kNames[] = {"ordinary", "misaligned", "registered", "skewed", "mixed"};
  return kNames[static_cast<int>(memory)];
}

class Arena {
 public:
  /// Collective: all ranks make theirs together. Two buffers, 0 and 1, of up to `capacity` bytes each.
  Arena(Rank& r, std::size_t capacity)
      : rank_(r.rank),
        slot_(capacity + kMargin),
        ordinary_(test_memory(2 * slot_)),
        registered_(r.world->allocate(test_device().is_cpu() ? 2 * slot_ : 1)) {}

  /// A buffer, filled with a byte that no expected result consists of, between guards.
  Buffer take(int slot, Memory memory, DType dtype, std::size_t count) {
    std::size_t offset = kGuard;
    bool registered = false;
    switch (memory) {
      case Memory::ordinary: break;
      case Memory::misaligned: offset += takes_any_address() ? 1 : size_of(dtype); break;
      case Memory::registered: registered = true; break;
      case Memory::skewed:
        registered = true;
        offset += 192 * static_cast<std::size_t>(rank_ + 1);
        break;
      case Memory::mixed:
        registered = rank_ % 2 == 0;
        if (registered) offset += takes_any_address() ? 1 : size_of(dtype);
        break;
    }
    // Registered GPU memory is not within reach of the host: tests/plugins has tests of its own for it.
    registered = registered && test_device().is_cpu();
    std::byte* base = (registered ? static_cast<std::byte*>(registered_.data()) : ordinary_.get()) + slot * slot_;
    std::byte* data = base + offset;
    const std::size_t bytes = count * size_of(dtype);
    if (offset + bytes + kGuard > slot_) throw std::logic_error("a buffer of this test is larger than its arena");
    std::memset(data - kGuard, kGuardByte, kGuard);
    std::memset(data, kFillByte, bytes);
    std::memset(data + bytes, kGuardByte, kGuard);
    taken_[slot] = {data, bytes};
    return {data, count, dtype, test_device()};
  }

  /// Nothing was written before or behind the buffers taken last.
  testing::AssertionResult guards_intact() const {
    for (const auto& [data, bytes] : taken_) {
      for (std::size_t i = 0; data != nullptr && i < kGuard; ++i) {
        if (data[bytes + i] != std::byte{kGuardByte})
          return testing::AssertionFailure() << "written " << i << " bytes behind the end";
        if (data[-1 - static_cast<std::ptrdiff_t>(i)] != std::byte{kGuardByte}) {
          return testing::AssertionFailure() << "written " << i + 1 << " bytes before the start";
        }
      }
    }
    return testing::AssertionSuccess();
  }

 private:
  /// NCCL reduces only memory that is aligned to its elements.
  static bool takes_any_address() { return chosen_backend() != "nccl"; }

  static constexpr std::size_t kGuard = 64;
  static constexpr std::size_t kMargin = 16384;  // guards and the largest skew
  static constexpr unsigned char kGuardByte = 0xa5;
  static constexpr unsigned char kFillByte = 0x5a;

  struct Taken {
    std::byte* data = nullptr;
    std::size_t bytes = 0;
  };
  int rank_;
  std::size_t slot_;
  std::shared_ptr<std::byte> ordinary_;
  RegisteredMemory registered_;
  std::array<Taken, 2> taken_{};
};

}  // namespace maniple::harness
