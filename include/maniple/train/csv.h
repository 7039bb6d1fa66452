// CSV files as datasets: columns of numbers, and a label.
//
//   // any sample at any time
//   maniple::CsvDataset table("iris.csv", {.columns = {"width", "length"}, .label = "species"});
//   // larger than the index may be
//   auto stream = maniple::csv_stream("parts/*.csv", {.label = "species"}, {.shuffle_buffer = 10000});
//   maniple::DataLoader loader(table, {.batch_size = 32, .workers = 2});
//
// A sample's data is a float tensor with a number for each column; its target is the label, an int64 (or, with
// real_label, a float) of no dimensions, or 0 without one. What is read as CSV, and the options, are in shards.h.
// Fields that are no numbers are an InvalidArgument when their record is fetched: "iris.csv:17:4: "abc" in column
// "width"; expected a number".
//
// CsvDataset reads each file once to find where records begin, and keeps 8 bytes for each; a sample is one read of the
// file. Several files need equally many columns. Files inside gzip can only be streams.
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
  /// One file, or all that fit a pattern of the shell.
  explicit CsvDataset(const std::string& pattern, const CsvOptions& options = {});
  CsvDataset(const std::vector<std::string>& paths, const CsvOptions& options);

  torch::data::Example<> get(std::size_t index) const;  ///< from any thread
  std::size_t size() const noexcept;
  std::size_t columns() const noexcept;  ///< numbers in a sample's data

 private:
  struct File;
  std::shared_ptr<const std::vector<File>> files_;  ///< copies share them
};

ShardStream<torch::data::Example<>> csv_stream(std::vector<std::string> paths, CsvOptions csv,
                                               StreamOptions options = {});
ShardStream<torch::data::Example<>> csv_stream(const std::string& pattern, CsvOptions csv = {},
                                               StreamOptions options = {});

}  // namespace maniple
