#define ZLIB_CONST
#include <zlib.h>

#include <optional>

#include "fuzz/entry_points.h"
#include "fuzz/tolerate.h"
#include "train/data/idx.h"

namespace maniple::fuzz {
namespace {

std::string gzipped(std::string_view bytes) {
  z_stream stream = {};
  require(deflateInit2(&stream, 1, Z_DEFLATED, 16 + MAX_WBITS, 8, Z_DEFAULT_STRATEGY) == Z_OK);
  std::string result(deflateBound(&stream, bytes.size()), '\0');
  stream.next_in = reinterpret_cast<const Bytef*>(bytes.data());
  stream.avail_in = static_cast<uInt>(bytes.size());
  stream.next_out = reinterpret_cast<Bytef*>(result.data());
  stream.avail_out = static_cast<uInt>(result.size());
  require(deflate(&stream, Z_FINISH) == Z_STREAM_END);
  result.resize(stream.total_out);
  deflateEnd(&stream);
  return result;
}

std::optional<IdxArray> parsed(std::string_view bytes) {
  std::optional<IdxArray> array;
  tolerate([&] { array = parse_idx(bytes, "input"); });
  if (!array) return array;
  std::size_t elements = 1;
  for (const std::size_t size : array->shape) elements *= size;
  require(elements == array->bytes.size());
  return array;
}

std::string idx_text(std::initializer_list<char> shape, std::string_view elements) {
  std::string text = {0, 0, 8, static_cast<char>(shape.size())};
  for (const char size : shape) text += std::string(3, '\0') + size;
  return text + std::string(elements);
}

}  // namespace

void idx(std::string_view bytes) {
  const auto plain = parsed(bytes);
  // Random bytes hardly ever pass gzip's checksum, so each input is also read from inside a right one: with the same result.
  const auto inside = parsed(gzipped(bytes));
  if (bytes.substr(0, 2) == "\x1f\x8b") return;  // gzip inside gzip is refused
  require(plain.has_value() == inside.has_value());
  if (plain) require(plain->shape == inside->shape && plain->bytes == inside->bytes);
  tolerate([&] { labelled_images(plain.value_or(IdxArray{}), "images", inside.value_or(IdxArray{}), "labels", 10); });
}

std::vector<std::string> idx_seeds() {
  const std::string images = idx_text({3, 2, 2}, "0123456789ab");
  const std::string labels = idx_text({3}, std::string_view("\0\1\2", 3));
  return {"",
          images,
          labels,
          gzipped(images),
          gzipped(labels),
          gzipped(images.substr(0, 7)) + gzipped(images.substr(7)),
          idx_text({0}, "")};
}

}  // namespace maniple::fuzz
