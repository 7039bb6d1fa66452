// The safetensors format: tensors in a file that cannot execute anything and that other tools can read.
//
//   length:u64 (little-endian)   of the header in bytes
//   header                       JSON: {"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [begin, end]}, ...,
//                                "__metadata__": {"key": "text"}}, padded with spaces
//   data                         the tensors' bytes, little-endian, in row-major order, one after the other without
//                                holes
//
// This file does not use LibTorch. It parses headers and checks them before they are trusted: lengths are bounded
// before anything is allocated, products and sums cannot overflow, and ranges may not overlap, leave holes or pass the
// end of the file. Format: https://github.com/huggingface/safetensors
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace maniple {

inline constexpr std::uint64_t kSafetensorsPrefixBytes = 8;
/// The limit of other readers, too: a longer header is an attack or a mistake.
inline constexpr std::uint64_t kMaxSafetensorsHeaderBytes = 100'000'000;

struct SafetensorsEntry {
  std::string name;
  std::string dtype;  ///< "F32", "BF16", "I64", "BOOL", ...
  std::vector<std::int64_t> shape;
  std::uint64_t begin = 0;  ///< offset into the data
  std::uint64_t end = 0;

  std::uint64_t bytes() const noexcept { return end - begin; }
  friend bool operator==(const SafetensorsEntry&, const SafetensorsEntry&) = default;
};

struct SafetensorsHeader {
  std::vector<SafetensorsEntry> entries;  ///< in the order of their data
  std::map<std::string, std::string> metadata;

  std::uint64_t data_bytes() const noexcept { return entries.empty() ? 0 : entries.back().end; }
};

/// Bytes per element; nullopt for a name that the format does not have.
std::optional<std::uint64_t> safetensors_element_bytes(std::string_view dtype) noexcept;

/// Bytes of a tensor with this shape; nullopt if no file could have that size.
std::optional<std::uint64_t> tensor_bytes(const std::vector<std::int64_t>& shape, std::uint64_t element_bytes);

/// A name from a file, made safe for a message: cut, with unprintable characters replaced.
std::string shown_name(std::string_view name);

/// Places the entries in the given order. Throws InvalidArgument for a name that occurs twice, an unknown dtype, or a
/// shape that is negative or too large.
void place_safetensors(SafetensorsHeader& header);

/// Prefix and header as stored in a file; the data follows directly, aligned to 8 bytes.
std::string encode_safetensors(const SafetensorsHeader& header);

/// The length of the header, from the first eight bytes of a file of `file_bytes`. Throws ProtocolError saying what is
/// wrong.
std::uint64_t safetensors_header_bytes(std::string_view prefix, std::uint64_t file_bytes);

/// `text` is the header without the prefix; `data_bytes` is the number of bytes that follow it in the file. Throws
/// ProtocolError saying which tensor is wrong and how.
SafetensorsHeader parse_safetensors(std::string_view text, std::uint64_t data_bytes);

}  // namespace maniple
