#include "train/data/idx.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#define ZLIB_CONST  // next_in of the stream points to const
#include <zlib.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <new>
#include <string>
#include <string_view>
#include <utility>

#include "comm/base/check.h"
#include "comm/base/system_error.h"
#include "comm/base/unique_fd.h"

namespace maniple {
namespace {

/// By content: gzip data begins with these two bytes.
bool is_gzip(std::string_view bytes) noexcept { return bytes.substr(0, 2) == "\x1f\x8b"; }

/// Deflate expands data by a factor of at most 1032; a header that claims more is false.
constexpr std::size_t kGzipBestRatio = 1032;

/// Decompresses gzip data in memory, in portions of any size.
class GzipReader {
 public:
  /// The bytes must outlive the reader. `name` is used in errors.
  GzipReader(std::string_view bytes, std::string name);
  ~GzipReader();
  GzipReader(const GzipReader&) = delete;
  GzipReader& operator=(const GzipReader&) = delete;

  /// Fills `size` bytes, or fewer at the end. Throws InvalidArgument with file and offset if the data is truncated,
  /// damaged (its CRC-32 is verified) or followed by other data. Several consecutive members are one file.
  std::size_t read(std::uint8_t* to, std::size_t size);

 private:
  struct Stream;
  std::unique_ptr<Stream> stream_;
  std::string name_;
};

struct GzipReader::Stream {
  z_stream z = {};
  std::string_view rest;  ///< input not yet given to zlib, which counts in 32 bits
  std::size_t size = 0;
  bool ended = false;

  std::size_t offset() const { return size - rest.size() - z.avail_in; }

  void feed() {
    if (z.avail_in != 0) return;
    const std::size_t portion = std::min<std::size_t>(rest.size(), std::numeric_limits<uInt>::max());
    z.next_in = reinterpret_cast<const Bytef*>(rest.data());
    z.avail_in = static_cast<uInt>(portion);
    rest.remove_prefix(portion);
  }
};

GzipReader::GzipReader(std::string_view bytes, std::string name)
    : stream_(std::make_unique<Stream>()), name_(std::move(name)) {
  stream_->rest = bytes;
  stream_->size = bytes.size();
  constexpr int kGzipOnly = 16 + MAX_WBITS;
  if (::inflateInit2(&stream_->z, kGzipOnly) != Z_OK) throw_system_error("zlib cannot start reading " + name_, ENOMEM);
}

GzipReader::~GzipReader() { ::inflateEnd(&stream_->z); }

std::size_t GzipReader::read(std::uint8_t* to, std::size_t size) {
  Stream& stream = *stream_;
  std::size_t done = 0;
  while (done < size && !stream.ended) {
    stream.feed();
    const auto portion = static_cast<uInt>(std::min<std::size_t>(size - done, std::numeric_limits<uInt>::max()));
    stream.z.next_out = to + done;
    stream.z.avail_out = portion;
    const int result = ::inflate(&stream.z, Z_NO_FLUSH);
    done += portion - stream.z.avail_out;
    if (result == Z_STREAM_END) {
      stream.feed();
      if (stream.z.avail_in == 0) {
        stream.ended = true;
      } else {
        MANIPLE_REQUIRE(stream.z.next_in[0] == 0x1f, "{}: offset {}: {} bytes that are not gzip follow its end", name_,
                        stream.offset(), stream.size - stream.offset());
        ::inflateReset(&stream.z);
      }
      continue;
    }
    MANIPLE_REQUIRE(result != Z_BUF_ERROR,
                    "{}: ends at offset {}, in the middle of its gzip data: the file is truncated", name_, stream.size);
    if (result == Z_MEM_ERROR) throw_system_error("zlib cannot read " + name_, ENOMEM);
    MANIPLE_REQUIRE(result == Z_OK, "{}: offset {}: damaged gzip data: {}", name_, stream.offset(),
                    stream.z.msg != nullptr ? stream.z.msg : "zlib gives no reason");
  }
  return done;
}

constexpr std::size_t kMaxDimensions = 8;

const char* type_name(unsigned type) {
  switch (type) {
    case 0x08: return "unsigned byte";
    case 0x09: return "signed byte";
    case 0x0b: return "short";
    case 0x0c: return "int";
    case 0x0d: return "float";
    case 0x0e: return "double";
    default: return "no type of IDX";
  }
}

/// The bytes before the elements, once they are complete.
struct Header {
  std::vector<std::size_t> shape;
  std::size_t bytes = 0;  ///< size of the header
  std::size_t elements = 0;
};

std::uint8_t byte_at(std::string_view bytes, std::size_t i) { return static_cast<std::uint8_t>(bytes[i]); }

Header parse_header(std::string_view bytes, const std::string& name) {
  MANIPLE_REQUIRE(bytes.size() >= 4, "{}: ends at offset {}; an IDX file begins with 4 bytes of magic", name,
                  bytes.size());
  MANIPLE_REQUIRE(byte_at(bytes, 0) == 0 && byte_at(bytes, 1) == 0,
                  "{}: offset 0: {:02x} {:02x} is not the beginning of an IDX file (00 00), nor of gzip (1f 8b)", name,
                  byte_at(bytes, 0), byte_at(bytes, 1));
  const unsigned type = byte_at(bytes, 2);
  MANIPLE_REQUIRE(type == 0x08, "{}: offset 2: elements of type {:#04x} ({}); expected 0x08 (unsigned byte)", name,
                  type, type_name(type));
  const std::size_t dimensions = byte_at(bytes, 3);
  MANIPLE_REQUIRE(dimensions >= 1 && dimensions <= kMaxDimensions, "{}: offset 3: {} dimensions; expected 1 to {}",
                  name, dimensions, kMaxDimensions);
  Header header;
  header.bytes = 4 + 4 * dimensions;
  MANIPLE_REQUIRE(bytes.size() >= header.bytes, "{}: ends at offset {}, inside its header of {} bytes", name,
                  bytes.size(), header.bytes);
  header.elements = 1;
  for (std::size_t i = 0; i < dimensions; ++i) {
    const std::size_t at = 4 + 4 * i;
    const std::size_t size = (std::size_t{byte_at(bytes, at)} << 24) | (std::size_t{byte_at(bytes, at + 1)} << 16) |
                             (std::size_t{byte_at(bytes, at + 2)} << 8) | std::size_t{byte_at(bytes, at + 3)};
    MANIPLE_REQUIRE(size == 0 || header.elements <= std::numeric_limits<std::size_t>::max() / 2 / size,
                    "{}: offset {}: dimension {} of {} elements makes the array larger than any memory", name, at, i,
                    size);
    header.elements *= size;
    header.shape.push_back(size);
  }
  return header;
}

}  // namespace

IdxArray parse_idx(std::string_view file, const std::string& name) {
  IdxArray array;
  if (!is_gzip(file)) {
    Header header = parse_header(file, name);
    const std::size_t there = file.size() - header.bytes;
    MANIPLE_REQUIRE(there >= header.elements,
                    "{}: ends at offset {}; its header announces {} bytes of elements up to offset {}", name,
                    file.size(), header.elements, header.bytes + header.elements);
    MANIPLE_REQUIRE(there == header.elements, "{}: offset {}: {} bytes follow the last element", name,
                    header.bytes + header.elements, there - header.elements);
    array.shape = std::move(header.shape);
    array.bytes.assign(file.begin() + static_cast<std::ptrdiff_t>(header.bytes), file.end());
    return array;
  }

  // Inside gzip: first reads the max size of a header, which gives the size of the data.
  GzipReader gzip(file, name);
  std::string start(4 + 4 * kMaxDimensions, '\0');
  const std::string inner = name + " (uncompressed)";
  start.resize(gzip.read(reinterpret_cast<std::uint8_t*>(start.data()), start.size()));
  Header header = parse_header(start, inner);
  MANIPLE_REQUIRE(header.elements <= kIdxFileLimit,
                  "{}: offset 4: announces {} bytes of elements; arrays above {} are not read", inner, header.elements,
                  kIdxFileLimit);
  MANIPLE_REQUIRE(header.elements / kGzipBestRatio <= file.size(),
                  "{}: offset 4: announces {} bytes of elements; {} bytes of gzip cannot hold as many", inner,
                  header.elements, file.size());
  array.shape = std::move(header.shape);
  array.bytes.resize(header.elements);
  const std::size_t early = std::min(start.size() - header.bytes, header.elements);
  std::copy_n(start.begin() + static_cast<std::ptrdiff_t>(header.bytes), early, array.bytes.begin());
  const std::size_t more = gzip.read(array.bytes.data() + early, header.elements - early);
  MANIPLE_REQUIRE(early + more == header.elements,
                  "{}: ends at offset {}; its header announces {} bytes of elements up to offset {}", inner,
                  header.bytes + early + more, header.elements, header.bytes + header.elements);
  // Reading one more byte also makes zlib verify the checksum at the end.
  std::uint8_t extra = 0;
  MANIPLE_REQUIRE(start.size() - header.bytes <= early && gzip.read(&extra, 1) == 0,
                  "{}: offset {}: more bytes follow the last element", inner, header.bytes + header.elements);
  return array;
}

IdxArray read_idx(const std::string& path) {
  const UniqueFd file = open_file(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (!file) throw_system_error("cannot open " + path);
  struct stat status = {};
  if (::fstat(file.get(), &status) != 0) throw_system_error("cannot look at " + path);
  MANIPLE_REQUIRE(S_ISREG(status.st_mode), "{}: is not a regular file", path);
  const std::size_t size = status.st_size;
  MANIPLE_REQUIRE(size <= kIdxFileLimit, "{}: {} bytes; files above {} are not read", path, size, kIdxFileLimit);
  std::string bytes(size, '\0');
  std::size_t done = 0;
  while (done < size) {
    const ssize_t count = ::read(file.get(), bytes.data() + done, size - done);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) throw_system_error("cannot read " + path);
    MANIPLE_REQUIRE(count > 0, "{}: became shorter while it was read, {} of {} bytes", path, done, size);
    done += count;
  }
  return parse_idx(bytes, path);
}

LabelledImages labelled_images(IdxArray images, const std::string& images_name, IdxArray labels,
                               const std::string& labels_name, int classes) {
  MANIPLE_REQUIRE(images.shape.size() == 3, "{}: offset 3: {} dimensions; images have 3 (count, rows, columns)",
                  images_name, images.shape.size());
  MANIPLE_REQUIRE(labels.shape.size() == 1, "{}: offset 3: {} dimensions; labels have 1 (count)", labels_name,
                  labels.shape.size());
  MANIPLE_REQUIRE(images.shape[1] > 0 && images.shape[2] > 0, "{}: offset 8: images of {} x {} pixels", images_name,
                  images.shape[1], images.shape[2]);
  MANIPLE_REQUIRE(images.shape[0] == labels.shape[0], "{} holds {} images, but {} holds {} labels", images_name,
                  images.shape[0], labels_name, labels.shape[0]);
  const auto wrong =
      std::find_if(labels.bytes.begin(), labels.bytes.end(), [&](std::uint8_t label) { return label >= classes; });
  if (wrong != labels.bytes.end()) {
    const std::size_t place = wrong - labels.bytes.begin();
    throw InvalidArgument(format_text("{}: offset {}: label {} of image {}; expected 0 to {}", labels_name, 8 + place,
                                      *wrong, place, classes - 1));
  }
  return {images.shape[0], images.shape[1], images.shape[2], std::move(images.bytes), std::move(labels.bytes)};
}

}  // namespace maniple
