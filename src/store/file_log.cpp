#include "store/file_log.h"

#include "base/codec.h"
#include "store/limits.h"

namespace maniple {
namespace {

constexpr std::size_t kRecordHeaderBytes = 4 + 1 + 2 + 4;

std::uint32_t fnv1a(std::string_view bytes) {
  std::uint32_t hash = 2166136261u;
  for (const char c : bytes) hash = (hash ^ static_cast<unsigned char>(c)) * 16777619u;
  return hash;
}

}  // namespace

std::string encode_record(const Record& record) {
  ByteWriter writer;
  writer.put(record.kind);
  writer.put(static_cast<std::uint16_t>(record.key.size()));
  writer.put(static_cast<std::uint32_t>(record.value.size()));
  writer.put_raw(record.key);
  writer.put_raw(record.value);
  ByteWriter checked;
  checked.put(fnv1a(writer.bytes()));
  checked.put_raw(writer.bytes());
  return checked.take();
}

std::optional<Record> decode_record(std::string_view& bytes) {
  if (bytes.size() < kRecordHeaderBytes) return std::nullopt;
  ByteReader reader(bytes);
  const auto check = reader.get<std::uint32_t>();
  Record record;
  record.kind = reader.get<RecordKind>();
  const auto key_length = reader.get<std::uint16_t>();
  const auto value_length = reader.get<std::uint32_t>();
  const bool known = record.kind == RecordKind::set || record.kind == RecordKind::erase;
  if (!known || key_length == 0 || key_length > kMaxKeyBytes || value_length > kMaxValueBytes) {
    throw ProtocolError("an impossible record");
  }
  const std::size_t length = kRecordHeaderBytes + key_length + value_length;
  if (bytes.size() < length) return std::nullopt;
  record.key = reader.get_raw(key_length);
  record.value = reader.get_raw(value_length);
  if (check != fnv1a(bytes.substr(sizeof(check), length - sizeof(check)))) {
    if (bytes.size() == length) return std::nullopt;
    throw ProtocolError("a record with a wrong checksum");
  }
  bytes.remove_prefix(length);
  return record;
}

}  // namespace maniple
