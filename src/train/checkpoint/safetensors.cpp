#include "train/checkpoint/safetensors.h"

#include <algorithm>
#include <array>
#include <limits>
#include <set>

#include <nlohmann/json.hpp>

#include "comm/base/check.h"
#include <maniple/comm/error.h>

namespace maniple {
namespace {

using Json = nlohmann::json;

constexpr std::string_view kMetadata = "__metadata__";
constexpr std::uint64_t kAlignment = 8;
constexpr std::size_t kMaxDimensions = 64;
constexpr std::size_t kMaxNameBytes = 4096;

struct ElementType {
  std::string_view name;
  std::uint64_t bytes;
};
constexpr std::array kElementTypes = {
    ElementType{"BOOL", 1},    ElementType{"U8", 1},  ElementType{"I8", 1},  ElementType{"F8_E5M2", 1},
    ElementType{"F8_E4M3", 1}, ElementType{"I16", 2}, ElementType{"U16", 2}, ElementType{"F16", 2},
    ElementType{"BF16", 2},    ElementType{"I32", 4}, ElementType{"U32", 4}, ElementType{"F32", 4},
    ElementType{"F64", 8},     ElementType{"I64", 8}, ElementType{"U64", 8}, ElementType{"C64", 8},
    ElementType{"F8_E8M0", 1},
};

std::uint64_t get_offset(const Json& value, const std::string& name) {
  // The parser has other types for negative numbers and fractions.
  if (!value.is_number_unsigned())
    throw ProtocolError(format_text("tensor \"{}\": an offset is not a whole number", shown_name(name)));
  return value.get<std::uint64_t>();
}

SafetensorsEntry entry_of(const std::string& name, const Json& value) {
  const auto wrong = [&](std::string_view what) {
    return ProtocolError(format_text("tensor \"{}\": {}", shown_name(name), what));
  };
  if (!value.is_object()) throw wrong("its description is not an object");
  for (const auto& [key, unused] : value.items()) {
    if (key != "dtype" && key != "shape" && key != "data_offsets")
      throw wrong(format_text("unknown field \"{}\"", shown_name(key)));
  }
  if (value.size() != 3) throw wrong("it needs dtype, shape and data_offsets");
  SafetensorsEntry entry;
  entry.name = name;
  if (!value["dtype"].is_string()) throw wrong("its dtype is not text");
  entry.dtype = value["dtype"].get<std::string>();
  const auto element = safetensors_element_bytes(entry.dtype);
  if (!element) throw wrong(format_text("unknown dtype \"{}\"", shown_name(entry.dtype)));
  const Json& shape = value["shape"];
  if (!shape.is_array() || shape.size() > kMaxDimensions) throw wrong("its shape is not a list of at most 64 extents");
  for (const Json& extent : shape) {
    if (!extent.is_number_unsigned() || extent.get<std::uint64_t>() > std::numeric_limits<std::int64_t>::max()) {
      throw wrong("an extent of its shape is not a whole number");
    }
    entry.shape.push_back(extent.get<std::int64_t>());
  }
  const Json& offsets = value["data_offsets"];
  if (!offsets.is_array() || offsets.size() != 2) throw wrong("its data_offsets are not two numbers");
  entry.begin = get_offset(offsets[0], name);
  entry.end = get_offset(offsets[1], name);
  if (entry.end < entry.begin) throw wrong(format_text("it ends at {} before it begins at {}", entry.end, entry.begin));
  const auto bytes = tensor_bytes(entry.shape, *element);
  if (!bytes) throw wrong("its shape is larger than any file");
  if (*bytes != entry.bytes()) {
    throw wrong(format_text("dtype {} and shape [{}] make {} bytes, its offsets {}", entry.dtype, joined(entry.shape),
                            *bytes, entry.bytes()));
  }
  return entry;
}

/// The tensors must be contiguous, without overlap and without holes, and fill the file.
void check_places(const std::vector<SafetensorsEntry>& entries, std::uint64_t data_bytes) {
  std::uint64_t at = 0;
  const SafetensorsEntry* before = nullptr;
  for (const SafetensorsEntry& entry : entries) {
    if (entry.end > data_bytes) {
      throw ProtocolError(format_text("tensor \"{}\" ends at byte {}, but the file has {} bytes of data: truncated?",
                                      shown_name(entry.name), entry.end, data_bytes));
    }
    if (entry.begin < at) {
      throw ProtocolError(
          format_text("tensors \"{}\" and \"{}\" overlap", shown_name(before->name), shown_name(entry.name)));
    }
    if (entry.begin > at) {
      throw ProtocolError(
          format_text("{} bytes before tensor \"{}\" belong to none", entry.begin - at, shown_name(entry.name)));
    }
    at = entry.end;
    before = &entry;
  }
  if (at != data_bytes) throw ProtocolError(format_text("{} bytes at the end belong to no tensor", data_bytes - at));
}

}  // namespace

std::optional<std::uint64_t> safetensors_element_bytes(std::string_view dtype) noexcept {
  for (const ElementType& type : kElementTypes) {
    if (type.name == dtype) return type.bytes;
  }
  return std::nullopt;
}

std::optional<std::uint64_t> tensor_bytes(const std::vector<std::int64_t>& shape, std::uint64_t element_bytes) {
  constexpr auto kMax = static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());
  std::uint64_t product = element_bytes;
  bool empty = false;
  for (const std::int64_t extent : shape) {
    if (extent < 0) return std::nullopt;
    empty |= extent == 0;
    if (extent != 0 && product > kMax / static_cast<std::uint64_t>(extent)) return std::nullopt;
    product *= extent == 0 ? 1 : static_cast<std::uint64_t>(extent);
  }
  return empty ? 0 : product;
}

std::string shown_name(std::string_view name) {
  std::string text;
  for (const char c : name.substr(0, 80)) text += (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) ? '?' : c;
  return name.size() > 80 ? text + "..." : text;
}

void place_safetensors(SafetensorsHeader& header) {
  std::set<std::string_view> names;
  std::uint64_t at = 0;
  for (SafetensorsEntry& entry : header.entries) {
    MANIPLE_REQUIRE(!entry.name.empty() && entry.name.size() <= kMaxNameBytes && entry.name != kMetadata,
                    "a tensor cannot be saved under the name \"{}\"", shown_name(entry.name));
    MANIPLE_REQUIRE(names.insert(entry.name).second, "two tensors are called \"{}\"", shown_name(entry.name));
    const auto element = safetensors_element_bytes(entry.dtype);
    MANIPLE_REQUIRE(element, "tensor \"{}\" has dtype {}, which safetensors files cannot hold", shown_name(entry.name),
                    entry.dtype);
    const auto bytes = tensor_bytes(entry.shape, *element);
    MANIPLE_REQUIRE(bytes && *bytes <= std::numeric_limits<std::int64_t>::max() - at, "tensor \"{}\" is too large",
                    shown_name(entry.name));
    entry.begin = at;
    entry.end = at += *bytes;
  }
}

std::string encode_safetensors(const SafetensorsHeader& header) {
  Json text = Json::object();
  if (!header.metadata.empty()) text[std::string(kMetadata)] = header.metadata;
  for (const SafetensorsEntry& entry : header.entries) {
    text[entry.name] = {{"dtype", entry.dtype}, {"shape", entry.shape}, {"data_offsets", {entry.begin, entry.end}}};
  }
  std::string body;
  try {
    body = text.dump();
  } catch (const Json::exception& error) {
    throw InvalidArgument(format_text("a name or a text of the checkpoint is not valid UTF-8: {}", error.what()));
  }
  body.append((kAlignment - body.size() % kAlignment) % kAlignment, ' ');
  MANIPLE_REQUIRE(body.size() <= kMaxSafetensorsHeaderBytes, "the names of these tensors fill {} bytes; at most {} fit",
                  body.size(), kMaxSafetensorsHeaderBytes);
  std::string bytes;
  for (std::size_t i = 0; i < kSafetensorsPrefixBytes; ++i)
    bytes += static_cast<char>(std::uint64_t{body.size()} >> (8 * i));
  return bytes + body;
}

std::uint64_t safetensors_header_bytes(std::string_view prefix, std::uint64_t file_bytes) {
  if (prefix.size() < kSafetensorsPrefixBytes || file_bytes < kSafetensorsPrefixBytes) {
    throw ProtocolError(format_text("{} bytes are too few for a safetensors file", file_bytes));
  }
  std::uint64_t length = 0;
  for (std::size_t i = 0; i < kSafetensorsPrefixBytes; ++i) {
    length |= std::uint64_t{static_cast<unsigned char>(prefix[i])} << (8 * i);
  }
  if (length > kMaxSafetensorsHeaderBytes) {
    throw ProtocolError(
        format_text("it claims a header of {} bytes; at most {} are allowed", length, kMaxSafetensorsHeaderBytes));
  }
  if (length > file_bytes - kSafetensorsPrefixBytes) {
    throw ProtocolError(
        format_text("it claims a header of {} bytes, but has only {} bytes: truncated?", length, file_bytes));
  }
  return length;
}

SafetensorsHeader parse_safetensors(std::string_view text, std::uint64_t data_bytes) {
  if (text.empty() || text.front() != '{') throw ProtocolError("the header does not begin with {");
  // Of duplicate names the parser would silently keep the last, and nesting could take unlimited memory: both are
  // refused while parsing.
  std::set<std::string> names;
  std::string error;
  const auto watch = [&](int depth, Json::parse_event_t event, Json& parsed) {
    constexpr int kDeepest = 3;
    if (depth > kDeepest) error = "it is nested too deeply";
    if (event == Json::parse_event_t::key && depth == 1) {
      const auto& name = parsed.get_ref<const std::string&>();
      if (name.size() > kMaxNameBytes) error = "a name is too long";
      if (!names.insert(name).second) error = format_text("tensor \"{}\" is described twice", shown_name(name));
    }
    return error.empty();
  };
  Json header;
  try {
    header = Json::parse(text.begin(), text.end(), watch);
  } catch (const Json::exception&) {
    throw ProtocolError("the header is not valid JSON");
  }
  if (!error.empty()) throw ProtocolError(error);
  if (!header.is_object()) throw ProtocolError("the header is not a JSON object");
  SafetensorsHeader result;
  for (const auto& [name, value] : header.items()) {
    if (name != kMetadata) {
      result.entries.push_back(entry_of(name, value));
      continue;
    }
    if (!value.is_object()) throw ProtocolError("__metadata__ is not an object");
    for (const auto& [key, entry] : value.items()) {
      if (!entry.is_string()) throw ProtocolError(format_text("__metadata__: \"{}\" is not text", shown_name(key)));
      result.metadata[key] = entry.get<std::string>();
    }
  }
  std::sort(result.entries.begin(), result.entries.end(), [](const SafetensorsEntry& a, const SafetensorsEntry& b) {
    return std::tie(a.begin, a.end, a.name) < std::tie(b.begin, b.end, b.name);
  });
  check_places(result.entries, data_bytes);
  return result;
}

}  // namespace maniple
