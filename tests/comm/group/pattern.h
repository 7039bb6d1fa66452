// Contents of test buffers: a short table, repeated. Every rank can compute every other rank's input, so expected
// results need no communication.
//
// The period is a prime, so a chunk that lands at the wrong place shows.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "comm/group/element_types.h"

namespace maniple::harness {

class Pattern {
 public:
  static constexpr std::size_t kPeriod = 997;

  /// value(i) gives the element i; T is the element type of the dtype.
  template <class T, class Value>
  static Pattern of(Value value) {
    Pattern pattern(dtype_of<T>());
    for (std::size_t i = 0; i < kPeriod; ++i) {
      const T element = value(i);
      std::memcpy(pattern.bytes_.data() + i * sizeof(T), &element, sizeof(T));
    }
    return pattern;
  }

  /// Any bits at all (true or false for bool8), different for every seed: for operations that only move data.
  static const Pattern& noise(DType dtype, unsigned seed) {
    static Remembered<std::pair<DType, unsigned>> all;
    return all.get({dtype, seed}, [&] { return new_noise(dtype, seed); });
  }

  /// Patterns by what they depend on, made when they are first asked for: making one takes longer than most operations.
  template <class Key>
  class Remembered {
   public:
    template <class Make>
    const Pattern& get(const Key& key, Make make) {
      const std::lock_guard lock(mutex_);
      const auto found = patterns_.find(key);
      return found != patterns_.end() ? found->second : patterns_.emplace(key, make()).first->second;
    }

   private:
    std::mutex mutex_;
    std::map<Key, Pattern> patterns_;
  };

  /// Writes the elements [first, first + count) of the endless repetition.
  void fill(void* to, std::size_t count, std::size_t first = 0) const {
    walk(count, first, [&](std::size_t at, const std::byte* from, std::size_t size) {
      std::memcpy(static_cast<std::byte*>(to) + at, from, size);
      return true;
    });
  }

  /// Success, or the first element that differs.
  testing::AssertionResult matches(const void* data, std::size_t count, std::size_t first = 0) const {
    std::size_t wrong = count;
    walk(count, first, [&](std::size_t at, const std::byte* expected, std::size_t size) {
      const std::byte* actual = static_cast<const std::byte*>(data) + at;
      if (std::memcmp(actual, expected, size) == 0) return true;
      const std::size_t offset = std::mismatch(actual, actual + size, expected).first - actual;
      wrong = (at + offset) / element_;
      return false;
    });
    if (wrong == count) return testing::AssertionSuccess();
    const std::byte* actual = static_cast<const std::byte*>(data) + wrong * element_;
    const std::byte* expected = bytes_.data() + (first + wrong) % kPeriod * element_;
    return testing::AssertionFailure() << fmt::format("element {} of {} is {}, expected {}", wrong, count, show(actual),
                                                      show(expected));
  }

 private:
  static Pattern new_noise(DType dtype, unsigned seed) {
    Pattern pattern(dtype);
    std::uint64_t state = 0x9e3779b97f4a7c15ULL * (seed + 1);
    for (std::byte& byte : pattern.bytes_) {
      state ^= state << 13;
      state ^= state >> 7;
      state ^= state << 17;
      byte = static_cast<std::byte>(dtype == DType::bool8 ? state & 1 : state);
    }
    return pattern;
  }

  explicit Pattern(DType dtype) : dtype_(dtype), element_(size_of(dtype)), bytes_(kPeriod * element_) {}

  template <class Visit>
  void walk(std::size_t count, std::size_t first, Visit visit) const {
    for (std::size_t done = 0; done < count;) {
      const std::size_t begin = (first + done) % kPeriod;
      const std::size_t length = std::min(kPeriod - begin, count - done);
      if (!visit(done * element_, bytes_.data() + begin * element_, length * element_)) return;
      done += length;
    }
  }

  std::string show(const std::byte* at) const {
    return with_element_type(dtype_, [&]<class T>(std::type_identity<T>) {
      T value{};
      if constexpr (std::is_same_v<T, bool>) return fmt::format("byte {}", static_cast<int>(*at));
      std::memcpy(&value, at, sizeof value);
      return fmt::format("{}", widen(value));
    });
  }

  DType dtype_;
  std::size_t element_;
  std::vector<std::byte> bytes_;
};

}  // namespace maniple::harness
