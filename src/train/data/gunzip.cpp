#include "train/data/gunzip.h"

#define ZLIB_CONST  // next_in of the stream points to const
#include <zlib.h>

#include <algorithm>
#include <limits>
#include <new>
#include <utility>

#include "base/check.h"
#include "base/system_error.h"

namespace maniple {

bool is_gzip(std::string_view bytes) noexcept { return bytes.substr(0, 2) == "\x1f\x8b"; }

struct GzipReader::Stream {
  z_stream z = {};
  std::string_view rest;  ///< what zlib was not given yet; it counts in 32 bits
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
        MANIPLE_REQUIRE(stream.z.next_in[0] == 0x1f, "{}: offset {}: {} bytes that are no gzip follow its end", name_,
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

}  // namespace maniple
