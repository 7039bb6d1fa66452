// CSV files as datasets: numeric columns and a label.
//
//   // random access
//   maniple::CsvDataset table("iris.csv", {.columns = {"width", "length"}, .label = "species"});
//   // for files too large to index
//   auto stream = maniple::csv_stream("parts/*.csv", {.label = "species"}, {.shuffle_buffer = 10000});
//   maniple::DataLoader loader(table, {.batch_size = 32, .workers = 2});
//
// A sample's data is a float tensor with one number per column. Its target is the label, a zero-dimensional int64 (with
// real_label, a float), or 0 without a label. shard_reader.h describes the CSV syntax and the options. A field that is
// not a number throws InvalidArgument when its record is fetched: "iris.csv:17:4: "abc" in column "width"; expected a
// number".
//
// CsvDataset reads each file once to index its records, and keeps 8 bytes per record. Fetching a sample is one read of
// the file. All files must have the same number of columns. Gzip files can only be streamed.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include <torch/data/example.h>

#include <maniple/export.h>
#include <maniple/train/streaming.h>

namespace MANIPLE_API maniple {

class CsvDataset {
 public:
  /// One file, or all files that match a shell pattern.
  explicit CsvDataset(const std::string& pattern, const CsvOptions& options = {});
  CsvDataset(const std::vector<std::string>& paths, const CsvOptions& options);

  torch::data::Example<> get(std::size_t index) const;  ///< may be called from any thread
  std::size_t size() const noexcept;
  std::size_t columns() const noexcept;  ///< numbers in a sample's data

 private:
  struct File;
  std::shared_ptr<const std::vector<File>> files_;  ///< shared by copies
};

ShardStream<torch::data::Example<>> csv_stream(std::vector<std::string> paths, CsvOptions csv,
                                               StreamOptions options = {});
ShardStream<torch::data::Example<>> csv_stream(const std::string& pattern, CsvOptions csv = {},
                                               StreamOptions options = {});

}  // namespace maniple
