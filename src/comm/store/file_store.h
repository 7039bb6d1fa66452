// The file format of a file store: an append-only log. Pure.
//
//   file     "maniple file store 1\n", records
//   record   check:u32 kind:u8 key_length:u16 value_length:u32, key, value        check: FNV-1a of what follows it
//
// A process may die during an append, so an incomplete or invalid last record is ignored. An invalid record followed by
// others means that the file is damaged or not a file store.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace maniple {

inline constexpr std::string_view kFileStoreMagic = "maniple file store 1\n";

enum class RecordKind : std::uint8_t { set = 1, erase = 2 };

struct Record {
  RecordKind kind = RecordKind::set;
  std::string_view key;
  std::string_view value;
};

std::string encode_record(const Record& record);

/// Consumes one record from the front of `bytes`, which must extend to the end of the file; nullopt if there is no
/// complete record. Throws ProtocolError for an invalid record that is followed by others.
std::optional<Record> decode_record(std::string_view& bytes);

}  // namespace maniple
