#define ZLIB_CONST
#include <zlib.h>

#include <optional>

#include "fuzz/entry_points.h"
#include "fuzz/tolerate.h"
#include "train/data/csv_records.h"
#include "train/data/idx.h"
#include "train/data/tar_bytes.h"
#include "train/data/tar_reader.h"

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
  // Random bytes hardly ever pass gzip's checksum, so each input is also read from inside a right one: with the same
  // result.
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

namespace {

/// How many samples a reader finds before it complains or ends; those that are read hold no more bytes than the input.
std::size_t count_samples_of(std::unique_ptr<ShardReader> reader, bool pass_over, std::size_t most_bytes) {
  std::size_t count = 0;
  tolerate([&] {
    RawSample sample;
    while (reader->next(pass_over ? nullptr : &sample)) {
      ++count;
      std::size_t bytes = 0;
      for (const auto& [extension, file] : sample.files) bytes += file.size();
      require(bytes <= most_bytes);
    }
  });
  return count;
}

}  // namespace

void tar(std::string_view bytes) {
  const auto count = [&](bool pass_over) {
    std::size_t samples = 0;
    tolerate([&] {
      samples = count_samples_of(tar_samples(bytes_in_memory(bytes, "input"), "input"), pass_over, 2000 * bytes.size());
    });
    return samples;
  };
  require(count(false) == count(true));
}

std::vector<std::string> tar_seeds() {
  const std::string two =
      tar_file("a/1.jpg", "picture") + tar_file("a/1.cls", "3") + tar_file("a/2.cls", "4") + tar_end();
  return {"",
          tar_end(),
          two,
          gzipped(two),
          tar_file("pax", pax_record("path", "long/1.txt") + pax_record("size", "3"), 'x') + tar_file("1", "abc") +
              tar_end(),
          tar_file("././@LongLink", "long/2.txt", 'L') + tar_file("2", "abc") + tar_end()};
}

void csv(std::string_view bytes) {
  const auto records = [&](std::unique_ptr<ReadableBytes> source) {
    std::size_t count = 0;
    tolerate([&] {
      CsvRecords reader(std::move(source), ',');
      std::optional<CsvLayout> layout;
      std::vector<float> data;
      for (CsvRecord record; reader.next(record); ++count) {
        require(record.line > 0 && !record.text.empty());
        tolerate([&] {
          if (!layout) layout.emplace(CsvOptions{.label = "1"}, record, "input");
          data.resize(layout->width());
          layout->parse(record, "input", data.data());
        });
      }
    });
    return count;
  };
  std::size_t plain = 0, inside = 0;
  tolerate([&] { plain = records(bytes_in_memory(bytes, "input")); });
  if (bytes.substr(0, 2) == "\x1f\x8b") return;
  const std::string zipped = gzipped(bytes);
  tolerate([&] { inside = records(bytes_in_memory(zipped, "input")); });
  require(plain == inside);
}

std::vector<std::string> csv_seeds() {
  return {"", "a,b\n1,2\n", "\xef\xbb\xbf\"a\",\"b,c\"\r\n1.5,\"2\"\r\n\r\n-3e4,nan", "a,b\n\"1\n2\",\"\"\"\"\n",
          gzipped("a,b\n1,2\n")};
}

}  // namespace maniple::fuzz
