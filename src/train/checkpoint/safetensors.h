// The safetensors format: tensors in a file that cannot execute anything and that other tools read.
//
//   length:u64 (little-endian)   of the header in bytes
//   header                       JSON: {"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [begin, end]}, ...,
//                                "__metadata__": {"key": "text"}}, padded with spaces
//   data                         the tensors' bytes, little-endian, in row-major order, one after the other without
//                                holes
//
// This is the part without LibTorch: what a header says, checked before anything is believed. Lengths are bounded
// before anything is allocated, products and sums cannot overflow, ranges may not overlap, leave holes or pass the end
// of the file. Format: https://github.com/huggingface/safetensors
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace maniple {

inline constexpr std::uint64_t kSafetensorsPrefixBytes = 8;
/// As in other readers: a longer header is an attack or a mistake.
inline constexpr std::uint64_t kMaxSafetensorsHeaderBytes = 100'000'000;

struct SafetensorsEntry {
  std::string name;
  std::string dtype;  ///< "F32", "BF16", "I64", "BOOL", ...
  std::vector<std::int64_t> shape;
  std::uint64_t begin = 0;  ///< into the data
  std::uint64_t end = 0;

  std::uint64_t bytes() const noexcept { return end - begin; }
  friend bool operator==(const SafetensorsEntry&, const SafetensorsEntry&) = default;
};

struct SafetensorsHeader {
  std::vector<SafetensorsEntry> entries;  ///< in the order of their data
  std::map<std::string, std::string> metadata;

  std::uint64_t data_bytes() const noexcept { return entries.empty() ? 0 : entries.back().end; }
};

/// Bytes of an element; nullopt for a name that the format does not have.
std::optional<std::uint64_t> safetensors_element_bytes(std::string_view dtype) noexcept;

/// Bytes of a tensor of these extents; nullopt when that is no number of bytes a file could have.
std::optional<std::uint64_t> tensor_bytes(const std::vector<std::int64_t>& shape, std::uint64_t element_bytes);

/// A name from a file as it may stand in a message: hostile ones are cut and made printable.
std::string shown_name(std::string_view name);

/// Gives the entries their places, in the order given. Throws InvalidArgument for a name that occurs twice, an unknown
/// dtype, or a shape that is negative or too large.
void place_safetensors(SafetensorsHeader& header);

/// Prefix and header as they stand in a file; the data follows directly, aligned to 8 bytes.
std::string encode_safetensors(const SafetensorsHeader& header);

/// The header's length from the first eight bytes of a file of `file_bytes`. Throws ProtocolError saying what is wrong.
std::uint64_t safetensors_header_bytes(std::string_view prefix, std::uint64_t file_bytes);

/// `text` is the header without the prefix; `data_bytes` is what follows it in the file. Throws ProtocolError saying
/// which tensor is wrong and how.
SafetensorsHeader parse_safetensors(std::string_view text, std::uint64_t data_bytes);

}  // namespace maniple
