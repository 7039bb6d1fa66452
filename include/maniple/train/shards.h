// Files that hold many samples each (shards), and what reads them from beginning to end: tars and CSV files. No
// LibTorch here.
//
//   auto reader = maniple::open_tar("train-000.tar");
//   for (maniple::RawSample sample; reader->next(&sample);)
//     use(sample.key, sample.files.at("jpg"), sample.files.at("cls"));
//
// streaming.h divides a list of shards among ranks and shuffles them; a reader of your own for it is a class derived
// from ShardReader.
//
// Tars   by the convention of WebDataset: files that follow each other and share their path up to the first dot of the
//        last component are a sample. "a/0001.jpg" and "a/0001.seg.png" are the sample "a/0001" with the files "jpg"
//        and "seg.png". Names without such a dot, directories and links are passed over. ustar, pax (path, size) and
//        GNU's long names; numbers in octal or base 256.
// CSV    as in RFC 4180: fields in double quotes may hold separators, line ends and doubled quotes; lines end with LF
//        or CRLF. Lines without anything are passed over, and so is a byte order mark.
//
// Both may be inside gzip; which is seen by the content. Whatever is wrong with a file is an InvalidArgument that names
// it and the offset ("train-000.tar: offset 1536: ...") or the line and column ("table.csv:17:4: ..."); a file that
// cannot be read is a SystemError. Nothing in a file is believed before it is checked: no more memory is set aside than
// the file has bytes.
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

/// A sample as it lies in its file, before it is decoded.
struct RawSample {
  std::string key = {};                           ///< its name in the shard: "a/0001"; of CSV "line 17"
  std::map<std::string, std::string> files = {};  ///< bytes by extension, in lower case; of CSV one, "csv", the record
  std::string shard = {};                         ///< path of the file
  std::size_t offset = 0;                         ///< of its first byte there (inside gzip: in what was compressed)
  std::size_t line = 0;                           ///< of CSV: the line it begins in, from 1
  std::size_t shard_number = 0;                   ///< place of the shard in the list; set by streaming.h
  std::size_t number = 0;                         ///< place of the sample in the shard, from 0; set by streaming.h
  std::shared_ptr<const void> format = {};        ///< what the reader's decoder needs to know about the shard
};

/// Reads one shard from beginning to end. One thread at a time.
class ShardReader {
 public:
  virtual ~ShardReader() = default;
  /// Reads the next sample; null: passes over it, which should cost less. False: there are no more.
  virtual bool next(RawSample* sample) = 0;
};

using OpenShard = std::function<std::unique_ptr<ShardReader>(const std::string& path)>;

std::unique_ptr<ShardReader> open_tar(const std::string& path);

struct CsvOptions {
  bool header = true;  ///< the first record names the columns
  char separator = ',';
  /// What becomes the data, in this order: names of columns, or their numbers, from 0, as text. Empty: all but the
  /// label.
  std::vector<std::string> columns = {};
  std::string label = "";                       ///< the column of the label, by name or number; empty: none
  bool real_label = false;                      ///< true: a float; false: a whole number, int64
  std::optional<float> missing = std::nullopt;  ///< what an empty field means (NaN, say); without it, it is an error
};

std::unique_ptr<ShardReader> open_csv(const std::string& path, CsvOptions options = {});

/// The files that fit a pattern of the shell ("data/train-*.tar"), sorted. Throws InvalidArgument when none does.
std::vector<std::string> find_shards(const std::string& pattern);

/// How many samples each shard holds, for StreamOptions::samples_per_shard. Passes over all of them once, so keep the
/// numbers.
std::vector<std::size_t> count_samples(const std::vector<std::string>& paths, const OpenShard& open = open_tar);

}  // namespace maniple
