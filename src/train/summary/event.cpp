#include "train/summary/event.h"

#include <bit>

#include "comm/base/crc32c.h"
#include "comm/base/format.h"

namespace maniple {
namespace {

enum class Wire : unsigned { varint = 0, eight_bytes = 1, length = 2, four_bytes = 5 };

template <class T>
void put_little_endian(std::string& to, T bits) {
  for (std::size_t i = 0; i < sizeof(T); ++i) to += static_cast<char>(bits >> (8 * i));
}

void put_varint(std::string& to, std::uint64_t value) {
  for (; value >= 0x80; value >>= 7) to += static_cast<char>((value & 0x7f) | 0x80);
  to += static_cast<char>(value);
}

/// A protocol buffer message under construction. Writes fields with value zero, too; readers accept them.
class Message {
 public:
  Message& number(unsigned field, std::int64_t value) {
    key(field, Wire::varint);
    put_varint(bytes_, static_cast<std::uint64_t>(value));
    return *this;
  }
  Message& real(unsigned field, double value) {
    key(field, Wire::eight_bytes);
    put_little_endian(bytes_, std::bit_cast<std::uint64_t>(value));
    return *this;
  }
  Message& real32(unsigned field, float value) {
    key(field, Wire::four_bytes);
    put_little_endian(bytes_, std::bit_cast<std::uint32_t>(value));
    return *this;
  }
  Message& bytes(unsigned field, std::string_view value) {
    key(field, Wire::length);
    put_varint(bytes_, value.size());
    bytes_ += value;
    return *this;
  }
  Message& text(unsigned field, std::string_view value) { return bytes(field, valid_utf8(value)); }
  Message& message(unsigned field, const Message& value) { return bytes(field, value.bytes_); }
  const std::string& bytes() const noexcept { return bytes_; }

 private:
  void key(unsigned field, Wire wire) { put_varint(bytes_, field << 3 | static_cast<unsigned>(wire)); }

  std::string bytes_;
};

Message event_at(EventTime time) { return Message().real(1, time.wall_time).number(2, time.step); }

std::uint32_t masked_crc(std::string_view bytes) {
  const std::uint32_t crc = crc32c(0, bytes.data(), bytes.size());
  return (crc >> 15 | crc << 17) + 0xa282ead8u;
}

}  // namespace

std::string version_event(double wall_time) { return Message().real(1, wall_time).text(3, "brain.Event:2").bytes(); }

std::string restart_event(EventTime time) {
  constexpr std::int64_t kStart = 1;
  return event_at(time).message(7, Message().number(1, kStart)).bytes();
}

std::string scalar_event(EventTime time, std::string_view tag, float value) {
  const Message one = Message().text(1, tag).real32(2, value);
  return event_at(time).message(5, Message().message(1, one)).bytes();
}

std::string text_event(EventTime time, std::string_view tag, std::string_view text) {
  constexpr std::int64_t kString = 7;
  const Message shape = Message().message(2, Message().number(1, 1));  // one dimension of size one
  const Message tensor = Message().number(1, kString).message(2, shape).text(8, text);
  const Message metadata = Message().message(1, Message().text(1, "text"));  // the name of TensorBoard's plug-in
  const Message one = Message().text(1, std::string(tag) + "/text_summary").message(8, tensor).message(9, metadata);
  return event_at(time).message(5, Message().message(1, one)).bytes();
}

std::string record_of(std::string_view event) {
  std::string record;
  put_little_endian(record, static_cast<std::uint64_t>(event.size()));
  put_little_endian(record, masked_crc(record));
  record += event;
  put_little_endian(record, masked_crc(event));
  return record;
}

}  // namespace maniple
