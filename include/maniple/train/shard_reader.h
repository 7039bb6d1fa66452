// Shards: files that hold many samples each, and sequential readers for tar and CSV shards. Does not depend on
// LibTorch.
//
//   auto reader = maniple::open_tar("train-000.tar");
//   for (maniple::RawSample sample; reader->next(&sample);)
//     use(sample.key, sample.files.at("jpg"), sample.files.at("cls"));
//
// streaming.h divides a list of shards among ranks and shuffles them. To add a format, derive a reader from
// ShardReader.
//
// Tars   WebDataset's convention: consecutive files whose paths agree up to the first dot of the last component form a
//        sample. "a/0001.jpg" and "a/0001.seg.png" are the sample "a/0001" with the files "jpg" and "seg.png". Names
//        without such a dot, directories and links are skipped. Supported: ustar, pax (path, size), GNU long names;
//        numbers in octal or base 256.
// CSV    As in RFC 4180: fields in double quotes may hold separators, line ends and doubled quotes; lines end with LF
//        or CRLF. Empty lines and a byte order mark are skipped.
//
// Both may be gzip-compressed; compression is detected from the file's contents. A malformed file throws
// InvalidArgument, which names the file and the offset ("train-000.tar: offset 1536: ...") or the line and column
// ("table.csv:17:4: ..."). An unreadable file throws SystemError. All data is validated before use, and a reader never
// allocates more memory than the file has bytes.
#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <maniple/export.h>

namespace MANIPLE_API maniple {

/// An undecoded sample, as stored in its file.
struct RawSample {
  std::string key = {};                           ///< name of the sample in the shard: "a/0001"; CSV: "line 17"
  std::map<std::string, std::string> files = {};  ///< contents by lower-case extension; CSV: only "csv", the record
  std::string shard = {};                         ///< path of the file
  std::size_t offset = 0;                         ///< of its first byte in the file (gzip: in the uncompressed data)
  std::size_t line = 0;                           ///< CSV: first line of the sample, from 1
  std::size_t shard_number = 0;                   ///< index of the shard in the list; set by streaming.h
  std::size_t number = 0;                         ///< index of the sample in the shard, from 0; set by streaming.h
  std::shared_ptr<const void> format = {};        ///< shard information for the reader's decoder
};

/// Reads one shard sequentially. One thread at a time.
class ShardReader {
 public:
  virtual ~ShardReader() = default;
  /// Reads the next sample. Null: skips it, which should be cheaper. Returns false at the end.
  virtual bool next(RawSample* sample) = 0;
};

using OpenShard = std::function<std::unique_ptr<ShardReader>(const std::string& path)>;

std::unique_ptr<ShardReader> open_tar(const std::string& path);

struct CsvOptions {
  bool header = true;  ///< the first record holds the column names
  char separator = ',';
  /// The columns that make up the data, in this order, by name or by index (from 0, as text). Empty: all but the label.
  std::vector<std::string> columns = {};
  std::string label = "";                       ///< the label column, by name or index; empty: none
  bool real_label = false;                      ///< true: the label is a float; false: an integer, int64
  std::optional<float> missing = std::nullopt;  ///< value of an empty field (for example NaN); without it an error
};

std::unique_ptr<ShardReader> open_csv(const std::string& path, CsvOptions options = {});

/// The files that match a shell pattern ("data/train-*.tar"), sorted. Throws InvalidArgument if none matches.
std::vector<std::string> find_shards(const std::string& pattern);

/// Number of samples in each shard, for StreamOptions::samples_per_shard. Reads through all shards once, so keep the
/// result.
std::vector<std::size_t> count_samples(const std::vector<std::string>& paths, const OpenShard& open = open_tar);

}  // namespace maniple
