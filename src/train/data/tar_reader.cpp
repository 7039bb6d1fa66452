#include "train/data/tar_reader.h"

#include <algorithm>
#include <charconv>
#include <optional>
#include <string_view>
#include <vector>

#include "comm/base/check.h"

namespace maniple {
namespace {

constexpr std::size_t kBlock = 512;
constexpr std::size_t kLongestPax = std::size_t{1} << 20;

// The places of the fields of a header.
struct Field {
  std::size_t at, size;
};
constexpr Field kName{0, 100}, kSize{124, 12}, kSum{148, 8}, kMagic{257, 6}, kPrefix{345, 155};
constexpr std::size_t kType = 156;

std::string_view bytes_of(const char* block, Field field) { return {block + field.at, field.size}; }

/// The field's text, up to the first NUL.
std::string text_of_field(const char* block, Field field) {
  const std::string_view bytes = bytes_of(block, field);
  return std::string(bytes.substr(0, bytes.find('\0')));
}

/// Octal digits between spaces and NULs, or (first bit set) big-endian base 256. Nullopt if it is neither, or too
/// large.
std::optional<std::size_t> number_of(std::string_view bytes) {
  if ((static_cast<unsigned char>(bytes[0]) & 0x80U) != 0) {
    std::size_t value = static_cast<unsigned char>(bytes[0]) & 0x7fU;
    for (const char byte : bytes.substr(1)) {
      if (value >> 55 != 0) return std::nullopt;
      value = value << 8 | static_cast<unsigned char>(byte);
    }
    return value;
  }
  const std::size_t first = bytes.find_first_not_of(' ');
  if (first == std::string_view::npos) return std::nullopt;
  bytes.remove_prefix(first);
  std::size_t value = 0;
  const auto [end, error] = std::from_chars(bytes.data(), bytes.data() + bytes.size(), value, 8);
  if (error == std::errc::result_out_of_range) return std::nullopt;
  const std::string_view rest(end, bytes.data() + bytes.size() - end);
  if (rest.find_first_not_of(std::string_view(" \0", 2)) != std::string_view::npos) return std::nullopt;
  return value;  // a field of NULs is 0
}

bool sum_fits(const char* block) {
  const auto expected = number_of(bytes_of(block, kSum));
  if (!expected) return false;
  std::size_t sum = 0;
  for (std::size_t i = 0; i < kBlock; ++i)
    sum += i >= kSum.at && i < kSum.at + kSum.size ? std::size_t{' '} : static_cast<unsigned char>(block[i]);
  return sum == *expected;
}

bool is_zero(const char* block) {
  return std::all_of(block, block + kBlock, [](char byte) { return byte == 0; });
}

}  // namespace

/// False at the end of the bytes; an incomplete block is an error.
bool TarReader::read_header(char* block) {
  const std::size_t got = bytes_->read(block, kBlock);
  MANIPLE_REQUIRE(got == 0 || got == kBlock, "{}: ends at offset {}, in the middle of a header: the tar is truncated",
                  tar(), bytes_->offset());
  return got == kBlock;
}

std::string TarReader::read_exactly(std::size_t size, const char* what) {
  const std::size_t start = bytes_->offset();
  if (const auto left = bytes_->left()) {
    MANIPLE_REQUIRE(*left >= size, "{}: offset {}: {} has {} bytes, but the tar ends after {}: it is truncated", tar(),
                    start, what, size, *left);
  }
  constexpr std::size_t kGrowth = std::size_t{1} << 20;  // inside gzip the real size is unknown until it has been read
  std::string text;
  while (text.size() < size) {
    const std::size_t before = text.size();
    const std::size_t portion = bytes_->left() ? size : std::min(kGrowth, size - before);
    text.resize(before + portion);
    const std::size_t got = bytes_->read(text.data() + before, portion);
    MANIPLE_REQUIRE(got == portion, "{}: offset {}: {} has {} bytes, but the tar ends after {}: it is truncated", tar(),
                    start, what, size, before + got);
  }
  return text;
}

void TarReader::skip_exactly(std::size_t size) {
  const std::size_t start = bytes_->offset();
  const std::size_t passed = bytes_->skip(size);
  MANIPLE_REQUIRE(passed == size, "{}: offset {}: {} bytes follow \"{}\", but the tar ends after {}: it is truncated",
                  tar(), start, size, one_line(name_), passed);
}

/// Records of the form "LENGTH KEY=VALUE\n", where LENGTH is the length of the whole record.
void TarReader::read_pax(std::size_t size) {
  const std::size_t start = bytes_->offset();
  const std::string text = read_exactly(size, "a pax header");
  std::string_view rest = text;
  while (!rest.empty() && rest[0] != '\0') {
    const std::size_t place = start + (text.size() - rest.size());
    std::size_t length = 0;
    const auto [end, error] = std::from_chars(rest.data(), rest.data() + rest.size(), length);
    const std::size_t digits = end - rest.data();
    MANIPLE_REQUIRE(
        error == std::errc{} && length > digits + 2 && length <= rest.size() && *end == ' ' && rest[length - 1] == '\n',
        "{}: offset {}: no record of a pax header; expected \"LENGTH KEY=VALUE\" and a line end", tar(), place);
    const std::string_view record = rest.substr(digits + 1, length - digits - 2);
    rest.remove_prefix(length);
    const std::size_t equals = record.find('=');
    MANIPLE_REQUIRE(equals != std::string_view::npos, "{}: offset {}: a record of a pax header without \"=\"", tar(),
                    place);
    const std::string_view key = record.substr(0, equals), value = record.substr(equals + 1);
    if (key == "path") {
      long_name_ = value;
    } else if (key == "size") {
      const auto [last, wrong] = std::from_chars(value.data(), value.data() + value.size(), long_size_);
      MANIPLE_REQUIRE(wrong == std::errc{} && last == value.data() + value.size(),
                      "{}: offset {}: \"{}\" is not a file size", tar(), place, one_line(value.substr(0, 40)));
      has_long_size_ = true;
    }
    MANIPLE_REQUIRE(!key.starts_with("GNU.sparse."), "{}: offset {}: a sparse file; make the tar without --sparse",
                    tar(), place);
  }
}

/// After the first block of zeros: reads the few bytes that usually follow, so that gzip's checksum is verified.
void TarReader::end_of_tar() {
  constexpr std::size_t kMaxPadding = std::size_t{1} << 20;
  ended_ = true;
  bytes_->skip(kMaxPadding);
}

bool TarReader::next() {
  if (ended_) return false;
  skip_exactly(std::exchange(unread_, 0) + std::exchange(padding_, 0));
  bool first = true;
  for (;;) {
    char block[kBlock];
    const std::size_t place = bytes_->offset();
    if (first) header_offset_ = place;
    MANIPLE_REQUIRE(read_header(block),
                    "{}: ends at offset {} without the blocks of zeros that end a tar: it is truncated", tar(), place);
    if (is_zero(block)) {
      MANIPLE_REQUIRE(first, "{}: offset {}: ends behind a header that belongs to a file", tar(), place);
      end_of_tar();
      return false;
    }
    MANIPLE_REQUIRE(sum_fits(block), "{}: offset {}: no header of a tar: its checksum is wrong", tar(), place);
    const auto size = number_of(bytes_of(block, kSize));
    MANIPLE_REQUIRE(size, "{}: offset {}: no size of a file in its header", tar(), place);
    const char type = block[kType];
    const auto padded = [](std::size_t bytes) { return (kBlock - bytes % kBlock) % kBlock; };
    if (type == 'x' || type == 'g' || type == 'L' || type == 'K') {
      MANIPLE_REQUIRE(*size <= kLongestPax, "{}: offset {}: a header of {} bytes; longer ones than {} are not read",
                      tar(), place, *size, kLongestPax);
      if (type == 'x') {
        read_pax(*size);
      } else if (type == 'L') {
        const std::string text = read_exactly(*size, "a long name");
        long_name_ = text.substr(0, text.find('\0'));
      } else {
        skip_exactly(*size);
      }
      skip_exactly(padded(*size));
      first = false;
      continue;
    }
    MANIPLE_REQUIRE(type != 'S', "{}: offset {}: a sparse file; make the tar without --sparse", tar(), place);
    name_ = std::exchange(long_name_, {});
    if (name_.empty()) {
      name_ = text_of_field(block, kName);
      // GNU tar uses the prefix field for other data.
      if (std::string_view(block + kMagic.at, 6) == std::string_view("ustar\0", 6) && block[kPrefix.at] != 0)
        name_ = text_of_field(block, kPrefix) + "/" + name_;
    }
    size_ = std::exchange(has_long_size_, false) ? long_size_ : *size;
    const bool is_link = type >= '1' && type <= '6';  // links, devices, directories: no data follows
    if (is_link) size_ = 0;
    const auto left = bytes_->left();
    MANIPLE_REQUIRE(!left || size_ <= *left,
                    "{}: offset {}: \"{}\" has {} bytes, but the tar ends after {}: it is truncated", tar(), place,
                    one_line(name_), size_, left.value_or(0));
    MANIPLE_REQUIRE(size_ <= kTarFileLimit, "{}: offset {}: \"{}\" has {} bytes; files above {} are not read", tar(),
                    place, one_line(name_), size_, kTarFileLimit);
    unread_ = size_;
    padding_ = padded(size_);
    if (type == '0' || type == '\0' || type == '7') return true;
    skip_exactly(std::exchange(unread_, 0) + std::exchange(padding_, 0));
    first = true;
  }
}

std::string TarReader::contents() {
  const std::string what = "\"" + one_line(name_) + "\"";
  return read_exactly(std::exchange(unread_, 0), what.c_str());
}

namespace {

class TarSamples final : public ShardReader {
 public:
  TarSamples(std::unique_ptr<ReadableBytes> bytes, std::string path) : tar_(std::move(bytes)), path_(std::move(path)) {}

  bool next(RawSample* sample) override {
    if (!has_file_ && !find_file()) return false;
    const std::string key = key_;
    if (sample != nullptr) {
      *sample = RawSample{};
      sample->key = key;
      sample->shard = path_;
      sample->offset = tar_.offset();
    }
    extensions_.clear();
    do {
      MANIPLE_REQUIRE(std::find(extensions_.begin(), extensions_.end(), extension_) == extensions_.end(),
                      "{}: offset {}: the sample \"{}\" has a second file \"{}\"", tar_.tar(), tar_.offset(),
                      one_line(key), one_line(extension_));
      extensions_.push_back(extension_);
      if (sample != nullptr) sample->files[extension_] = tar_.contents();
    } while (find_file() && key_ == key);
    return true;
  }

 private:
  /// Goes to the next file that belongs to a sample.
  bool find_file() {
    while ((has_file_ = tar_.next())) {
      const std::string& name = tar_.name();
      const std::size_t base = name.rfind('/') + 1;  // npos + 1 is 0
      const std::size_t dot = name.find('.', base);
      if (dot == std::string::npos || dot == base || dot + 1 == name.size()) continue;
      const std::size_t start = name.starts_with("./") ? 2 : 0;
      key_ = name.substr(start, dot - start);
      extension_ = name.substr(dot + 1);
      std::transform(extension_.begin(), extension_.end(), extension_.begin(),
                     [](char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c; });
      return true;
    }
    return false;
  }

  TarReader tar_;
  std::string path_;
  bool has_file_ = false;
  std::string key_, extension_;
  std::vector<std::string> extensions_;  ///< of the current sample
};

}  // namespace

std::unique_ptr<ShardReader> tar_samples(std::unique_ptr<ReadableBytes> bytes, const std::string& path) {
  return std::make_unique<TarSamples>(std::move(bytes), path);
}

std::unique_ptr<ShardReader> open_tar(const std::string& path) { return tar_samples(open_bytes(path), path); }

}  // namespace maniple
