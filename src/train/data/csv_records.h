// CSV (RFC 4180): splits a byte stream into records and records into fields, and parses numbers in chosen columns. Does
// not use LibTorch, so that the parser can be fuzzed without it. Errors are InvalidArgument, "FILE:LINE:COLUMN: what";
// the column counts bytes, from 1.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "train/data/readable_bytes.h"
#include <maniple/train/shard_reader.h>

namespace maniple {

/// Upper limit of a record: otherwise a quote that is never closed would make the rest of a file one record.
inline constexpr std::size_t kCsvRecordLimit = std::size_t{16} << 20;

struct CsvRecord {
  std::string text = {};   ///< without its line end
  std::size_t offset = 0;  ///< in the file
  std::size_t line = 0;    ///< line in which the record begins, from 1
};

/// The records of a file, one after another. Empty lines are skipped.
class CsvRecords {
 public:
  CsvRecords(std::unique_ptr<ReadableBytes> bytes, char separator) : bytes_(std::move(bytes)), separator_(separator) {}
  bool next(CsvRecord& record);
  const std::string& name() const noexcept { return bytes_->name(); }

 private:
  bool fill();
  std::size_t find_end();

  std::unique_ptr<ReadableBytes> bytes_;
  char separator_;
  std::string buffer_;  ///< bytes from `at_` on are not used yet
  std::size_t at_ = 0;
  std::size_t buffer_offset_ = 0;  ///< of the buffer's first byte in the file
  std::size_t line_ = 1;
  bool ended_ = false, began_ = false;
};

struct CsvField {
  std::string_view text;  ///< without enclosing quotes; quotes inside are still doubled
  std::size_t at = 0;     ///< offset in the record
};

/// `file` and `record.line` are used in errors.
void split_csv(const CsvRecord& record, char separator, const std::string& file, std::vector<CsvField>& fields);

/// The roles of a file's columns, made from its first record.
class CsvLayout {
 public:
  CsvLayout(const CsvOptions& options, const CsvRecord& first, const std::string& file);
  std::size_t width() const noexcept { return columns_.size(); }  ///< numbers in a sample's data
  bool has_label() const noexcept { return label_.has_value(); }
  const CsvOptions& options() const noexcept { return options_; }

  struct Label {
    std::int64_t whole = 0;
    float real = 0;
  };
  /// Fills data[0 .. width()), and returns the label if there is one.
  Label parse(const CsvRecord& record, const std::string& file, float* data) const;

 private:
  std::size_t find(const std::string& column, const char* role, const std::string& file) const;
  std::string column_name(std::size_t column) const;
  [[noreturn]] void refuse(const CsvRecord& record, const std::string& file, const CsvField& field, std::size_t column,
                           const char* expected) const;
  float real_of(const CsvRecord& record, const std::string& file, const CsvField& field, std::size_t column) const;

  CsvOptions options_;
  std::vector<std::string> names_;  ///< empty without a header
  std::size_t fields_ = 0;          ///< number of fields in every record
  std::vector<std::size_t> columns_;
  std::optional<std::size_t> label_;
};

/// The records of a file as samples, with the file's layout as RawSample::format.
std::unique_ptr<ShardReader> csv_samples(std::unique_ptr<ReadableBytes> bytes, const std::string& path,
                                         CsvOptions options);

}  // namespace maniple
