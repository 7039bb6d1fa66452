// Bounded encoding and decoding of fields: little-endian integers and length-prefixed strings.
//
// The reader never reads past its span and never trusts a length: an impossible length throws ProtocolError before
// memory is allocated for it.
#pragma once

#include <concepts>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>

#include <maniple/comm/error.h>
#include <maniple/export.h>

namespace MANIPLE_API maniple {

class ByteWriter {
 public:
  template <class T>
    requires(std::integral<T> || std::is_enum_v<T>)
  void put(T value) {
    auto bits = static_cast<std::uint64_t>(value);
    for (std::size_t i = 0; i < sizeof(T); ++i) bytes_.push_back(static_cast<char>(bits >> (8 * i)));
  }
  void put_string(std::string_view text) {
    put(static_cast<std::uint32_t>(text.size()));
    bytes_.append(text);
  }
  void put_raw(std::string_view bytes) { bytes_.append(bytes); }

  const std::string& bytes() const noexcept { return bytes_; }
  std::string take() noexcept { return std::move(bytes_); }

 private:
  std::string bytes_;
};

class ByteReader {
 public:
  explicit ByteReader(std::string_view bytes) noexcept : bytes_(bytes) {}

  template <class T>
    requires(std::integral<T> || std::is_enum_v<T>)
  T get() {
    const std::string_view raw = get_raw(sizeof(T));
    std::uint64_t bits = 0;
    for (std::size_t i = 0; i < sizeof(T); ++i) bits |= std::uint64_t{static_cast<unsigned char>(raw[i])} << (8 * i);
    return static_cast<T>(bits);
  }
  std::string_view get_string(std::size_t limit) {
    const auto length = get<std::uint32_t>();
    if (length > limit)
      throw ProtocolError("a string of " + std::to_string(length) + " bytes where at most " + std::to_string(limit) +
                          " are allowed");
    return get_raw(length);
  }
  std::string_view get_raw(std::size_t count) {
    if (count > bytes_.size())
      throw ProtocolError("truncated: " + std::to_string(count) + " bytes expected, " + std::to_string(bytes_.size()) +
                          " left");
    const std::string_view result = bytes_.substr(0, count);
    bytes_.remove_prefix(count);
    return result;
  }
  std::size_t left() const noexcept { return bytes_.size(); }
  void expect_end() const {
    if (!bytes_.empty()) throw ProtocolError(std::to_string(bytes_.size()) + " bytes too many");
  }

 private:
  std::string_view bytes_;
};

}  // namespace maniple
