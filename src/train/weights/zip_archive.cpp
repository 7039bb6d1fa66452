#include "train/weights/zip_archive.h"

#include <algorithm>
#include <optional>

#include "comm/base/check.h"
#include "train/checkpoint/safetensors.h"

namespace maniple {
namespace {

// Widths and places of fields follow PKWARE's APPNOTE.TXT, 4.3 and 4.5.3.
constexpr std::string_view kLocalSignature = "PK\3\4";
constexpr std::string_view kCentralSignature = "PK\1\2";
constexpr std::string_view kEndSignature = "PK\5\6";
constexpr std::string_view kEnd64Signature = "PK\6\6";
constexpr std::string_view kLocator64Signature = "PK\6\7";
constexpr std::size_t kLocalBytes = 30, kCentralBytes = 46, kEndBytes = 22, kEnd64Bytes = 56, kLocator64Bytes = 20;
constexpr std::size_t kMaxCommentBytes = 0xffff;
constexpr std::uint64_t kMaxDirectoryBytes = std::uint64_t{64} << 20;
constexpr std::uint64_t kEncrypted = 0x10000;  // outside the range of compression methods
constexpr std::uint64_t kIn64 = 0xffffffff;    // marks a field whose value is in the zip64 extra field

std::uint64_t number_at(std::string_view bytes, std::size_t at, std::size_t width) {
  MANIPLE_ASSERT(at + width <= bytes.size());
  std::uint64_t value = 0;
  for (std::size_t i = 0; i < width; ++i) value |= std::uint64_t{static_cast<unsigned char>(bytes[at + i])} << (8 * i);
  return value;
}

std::string read_bytes(const ReadAt& read, std::uint64_t offset, std::size_t count) {
  std::string bytes(count, '\0');
  read(offset, bytes.data(), count);
  return bytes;
}

struct Directory {
  std::uint64_t begin = 0;
  std::uint64_t bytes = 0;
  std::uint64_t entries = 0;
};

Directory find_directory(std::uint64_t file_bytes, const ReadAt& read) {
  const auto tail_bytes = std::min<std::uint64_t>(file_bytes, kEndBytes + kMaxCommentBytes + kLocator64Bytes);
  const std::string tail = read_bytes(read, file_bytes - tail_bytes, tail_bytes);
  std::optional<std::size_t> end;
  for (std::size_t at = tail.size() < kEndBytes ? 0 : tail.size() - kEndBytes + 1; at-- > 0 && !end;) {
    if (tail.compare(at, 4, kEndSignature) == 0 && at + kEndBytes + number_at(tail, at + 20, 2) == tail.size())
      end = at;
  }
  if (!end) throw ProtocolError("the zip archive has no directory at its end: truncated?");
  const std::uint64_t end_offset = file_bytes - tail_bytes + *end;
  std::uint64_t limit = end_offset;
  Directory found;
  found.entries = number_at(tail, *end + 10, 2);
  found.bytes = number_at(tail, *end + 12, 4);
  found.begin = number_at(tail, *end + 16, 4);
  if (*end >= kLocator64Bytes && tail.compare(*end - kLocator64Bytes, 4, kLocator64Signature) == 0) {
    const std::uint64_t at = number_at(tail, *end - kLocator64Bytes + 8, 8);
    limit = end_offset - kLocator64Bytes;
    if (at > limit || limit - at < kEnd64Bytes)
      throw ProtocolError("the zip archive's zip64 record lies outside of it");
    const std::string record = read_bytes(read, at, kEnd64Bytes);
    if (record.compare(0, 4, kEnd64Signature) != 0)
      throw ProtocolError("the zip archive has no zip64 record where it should be");
    found.entries = number_at(record, 32, 8);
    found.bytes = number_at(record, 40, 8);
    found.begin = number_at(record, 48, 8);
    limit = at;
  }
  if (found.begin > limit || found.bytes > limit - found.begin)
    throw ProtocolError(
        format_text("the zip archive's directory lies outside of its {} bytes: truncated?", file_bytes));
  if (found.bytes > kMaxDirectoryBytes)
    throw ProtocolError(format_text("the zip archive's directory has {} bytes; at most {} are allowed", found.bytes,
                                    kMaxDirectoryBytes));
  return found;
}

struct Central {
  std::string name;
  std::uint64_t local = 0;  // offset of its local header
  std::uint64_t bytes = 0;
  std::uint64_t method = 0;
};

/// Replaces fields that did not fit into 32 bits by the zip64 extra field's values. It contains only those fields, in
/// this order.
void widen(std::string_view extra, const std::string& name, std::initializer_list<std::uint64_t*> fields) {
  std::string_view wide;
  for (std::size_t at = 0; at + 4 <= extra.size();) {
    const std::size_t bytes = number_at(extra, at + 2, 2);
    if (bytes > extra.size() - at - 4)
      throw ProtocolError(format_text("zip entry \"{}\": its extra fields are cut", shown_name(name)));
    if (number_at(extra, at, 2) == 1) wide = extra.substr(at + 4, bytes);
    at += 4 + bytes;
  }
  for (std::uint64_t* field : fields) {
    if (*field != kIn64) continue;
    if (wide.size() < 8)
      throw ProtocolError(format_text("zip entry \"{}\": its zip64 field is missing", shown_name(name)));
    *field = number_at(wide, 0, 8);
    wide.remove_prefix(8);
  }
}

std::vector<Central> read_entries(const Directory& directory, const ReadAt& read) {
  const std::string bytes = read_bytes(read, directory.begin, directory.bytes);
  std::vector<Central> entries;
  std::size_t at = 0;
  for (std::uint64_t i = 0; i < directory.entries; ++i) {
    if (bytes.size() - at < kCentralBytes || bytes.compare(at, 4, kCentralSignature) != 0)
      throw ProtocolError(format_text("the zip archive's directory ends after {} of {} entries", i, directory.entries));
    const std::uint64_t flags = number_at(bytes, at + 8, 2), method = number_at(bytes, at + 10, 2);
    std::uint64_t packed = number_at(bytes, at + 20, 4);
    const std::size_t name_bytes = number_at(bytes, at + 28, 2), extra_bytes = number_at(bytes, at + 30, 2);
    const std::size_t comment_bytes = number_at(bytes, at + 32, 2);
    if (bytes.size() - at - kCentralBytes < name_bytes + extra_bytes + comment_bytes)
      throw ProtocolError(format_text("the zip archive's directory ends inside entry {} of {}", i, directory.entries));
    Central entry{bytes.substr(at + kCentralBytes, name_bytes), number_at(bytes, at + 42, 4),
                  number_at(bytes, at + 24, 4), 0};
    widen(std::string_view(bytes).substr(at + kCentralBytes + name_bytes, extra_bytes), entry.name,
          {&entry.bytes, &packed, &entry.local});
    entry.method = (flags & 1) != 0 ? kEncrypted : method;
    if (entry.method == 0 && packed != entry.bytes)
      throw ProtocolError(
          format_text("zip entry \"{}\" is not compressed, but has {} bytes in the file and {} in memory",
                      shown_name(entry.name), packed, entry.bytes));
    entry.bytes = packed;
    entries.push_back(std::move(entry));
    at += kCentralBytes + name_bytes + extra_bytes + comment_bytes;
  }
  if (at != bytes.size())
    throw ProtocolError(format_text("the zip archive's directory has {} bytes too many", bytes.size() - at));
  return entries;
}

}  // namespace

bool looks_like_zip(std::string_view first_bytes) noexcept {
  return first_bytes.starts_with(kLocalSignature) || first_bytes.starts_with(kEndSignature);
}

std::map<std::string, ZipEntry> read_zip_directory(std::uint64_t file_bytes, const ReadAt& read) {
  const Directory directory = find_directory(file_bytes, read);
  std::vector<Central> entries = read_entries(directory, read);
  std::sort(entries.begin(), entries.end(), [](const Central& a, const Central& b) { return a.local < b.local; });
  std::map<std::string, ZipEntry> result;
  std::uint64_t taken = 0;  // end of the previous entries
  for (const Central& entry : entries) {
    const std::string shown = shown_name(entry.name);
    if (entry.local < taken) throw ProtocolError(format_text("zip entry \"{}\" overlaps the one before it", shown));
    if (entry.local > directory.begin || directory.begin - entry.local < kLocalBytes + entry.name.size())
      throw ProtocolError(
          format_text("zip entry \"{}\" lies outside of the file's {} bytes: truncated?", shown, file_bytes));
    const std::string local = read_bytes(read, entry.local, kLocalBytes + entry.name.size());
    if (local.compare(0, 4, kLocalSignature) != 0 || number_at(local, 26, 2) != entry.name.size() ||
        local.compare(kLocalBytes, entry.name.size(), entry.name) != 0)
      throw ProtocolError(format_text("zip entry \"{}\" is not where the directory says", shown));
    const std::uint64_t begin = entry.local + local.size() + number_at(local, 28, 2);
    if (begin > directory.begin || entry.bytes > directory.begin - begin)
      throw ProtocolError(format_text("zip entry \"{}\" of {} bytes reaches beyond the data in the file: truncated?",
                                      shown, entry.bytes));
    taken = begin + entry.bytes;
    if (!result.emplace(entry.name, ZipEntry{begin, entry.bytes, entry.method}).second)
      throw ProtocolError(format_text("the zip archive has two entries \"{}\"", shown));
  }
  return result;
}

void require_plain(const std::string& name, const ZipEntry& entry) {
  MANIPLE_REQUIRE(entry.method != kEncrypted, "zip entry \"{}\" is encrypted, which torch.save never does",
                  shown_name(name));
  MANIPLE_REQUIRE(entry.method == 0,
                  "zip entry \"{}\" is compressed (method {}); torch.save stores without compression: save it again",
                  shown_name(name), entry.method);
}

}  // namespace maniple
