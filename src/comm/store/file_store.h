// The bytes of a file store: an append-only log. Pure.
//
//   file     "maniple file store 1\n", records
//   record   check:u32 kind:u8 key_length:u16 value_length:u32, key, value        check: FNV-1a of what follows it
//
// A process may die in the middle of an append, so the last record may be incomplete or wrong: it never happened. A
// wrong record with others behind it means that this is no file of ours or that it was damaged.
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

/// Takes one record from the front of `bytes`, which reach to the end of the file; nullopt when none is complete there.
/// Throws ProtocolError on a wrong record that others follow.
std::optional<Record> decode_record(std::string_view& bytes);

}  // namespace maniple
