#include "train/data/csv_records.h"

#include <algorithm>
#include <charconv>
#include <cstring>

#include "comm/base/check.h"

namespace maniple {
namespace {

constexpr std::size_t kCsvPortion = std::size_t{64} << 10;

/// "FILE:LINE:COLUMN" of a byte in a record, which may span several lines.
std::string csv_place(const std::string& file, const CsvRecord& record, std::size_t at) {
  const std::string_view before = std::string_view(record.text).substr(0, at);
  const std::size_t lines = std::count(before.begin(), before.end(), '\n');
  const std::size_t last = before.rfind('\n');
  return format_text("{}:{}:{}", file, record.line + lines, last == std::string_view::npos ? at + 1 : at - last);
}

std::string_view trimmed(std::string_view text) {
  const std::size_t first = text.find_first_not_of(" \t");
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(" \t") - first + 1);
}

/// Replaces doubled quotes by single ones.
std::string single_quoted(std::string_view text) {
  std::string result;
  for (std::size_t i = 0; i < text.size(); ++i) {
    result += text[i];
    if (text[i] == '"' && i + 1 < text.size() && text[i + 1] == '"') ++i;
  }
  return result;
}

/// from_chars does not accept "+1".
std::string_view without_plus(std::string_view text) {
  if (text.size() > 1 && text[0] == '+' && text[1] != '-') text.remove_prefix(1);
  return text;
}

template <class Number>
std::errc read_number(std::string_view text, Number& number) {
  text = without_plus(text);
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error == std::errc{} && end != text.data() + text.size()) return std::errc::invalid_argument;
  return error;
}

}  // namespace

/// Adds bytes to the buffer; false at the end of the file.
bool CsvRecords::fill() {
  if (ended_) return false;
  buffer_offset_ += at_;
  buffer_.erase(0, std::exchange(at_, 0));
  const std::size_t before = buffer_.size();
  buffer_.resize(before + kCsvPortion);
  const std::size_t got = bytes_->read(buffer_.data() + before, kCsvPortion);
  buffer_.resize(before + got);
  ended_ = got == 0;
  return !ended_;
}

/// The distance from `at_` to the line end of the record, or to the end of the file. A quote counts only at the
/// beginning of a field: a stray quote inside an unquoted field must not swallow the following lines. split_csv then
/// reports where the stray quote is.
std::size_t CsvRecords::find_end() {
  const std::string_view rest = std::string_view(buffer_).substr(at_);
  const std::size_t end = rest.find('\n');
  if (end != std::string_view::npos && rest.substr(0, end).find('"') == std::string_view::npos)
    return end;  // the common case
  enum class In {
    field_start,
    plain,
    quotes,
    quote
  } in = In::field_start;  // quote: after a quote that ends the quoted text or is the first of a doubled quote
  for (std::size_t scanned = 0;;) {
    for (; at_ + scanned < buffer_.size(); ++scanned) {
      const char c = buffer_[at_ + scanned];
      if (in == In::quotes) {
        if (c == '"') in = In::quote;
      } else if (c == '\n') {
        return scanned;
      } else if (c == '"' && in != In::plain) {
        in = In::quotes;
      } else {
        in = c == separator_ ? In::field_start : In::plain;
      }
    }
    MANIPLE_REQUIRE(scanned <= kCsvRecordLimit, "{}:{}:1: a record of more than {} bytes; is a quote not closed?",
                    name(), line_, kCsvRecordLimit);
    if (!fill()) return scanned;
  }
}

bool CsvRecords::next(CsvRecord& record) {
  for (;;) {
    if (at_ == buffer_.size() && !fill()) return false;
    if (!std::exchange(began_, true)) {
      while (buffer_.size() < 3 && fill()) {
      }
      if (buffer_.starts_with("\xef\xbb\xbf")) at_ = 3;
    }
    const std::size_t length = find_end();
    record.offset = buffer_offset_ + at_;
    record.line = line_;
    record.text.assign(buffer_, at_, length);
    line_ += 1 + std::count(record.text.begin(), record.text.end(), '\n');
    at_ = std::min(at_ + length + 1, buffer_.size());
    if (!record.text.empty() && record.text.back() == '\r') record.text.pop_back();
    if (!record.text.empty()) return true;
  }
}

void split_csv(const CsvRecord& record, char separator, const std::string& file, std::vector<CsvField>& fields) {
  fields.clear();
  const std::string_view text = record.text;
  std::size_t at = 0;
  for (;;) {
    if (at < text.size() && text[at] == '"') {
      const std::size_t start = at + 1;
      std::size_t end = start;
      for (;;) {
        end = text.find('"', end);
        MANIPLE_REQUIRE(end != std::string_view::npos, "{}: the quote that begins here is not closed",
                        csv_place(file, record, at));
        if (end + 1 >= text.size() || text[end + 1] != '"') break;
        end += 2;
      }
      fields.push_back({text.substr(start, end - start), start});
      at = end + 1;
      MANIPLE_REQUIRE(
          at == text.size() || text[at] == separator,
          "{}: a closing quote must be followed by \"{}\" or the line end; write a quote inside a field as two",
          csv_place(file, record, at), separator);
    } else {
      const std::size_t end = std::min(text.find(separator, at), text.size());
      const std::string_view field = text.substr(at, end - at);
      const std::size_t quote = field.find('"');
      MANIPLE_REQUIRE(quote == std::string_view::npos, "{}: a quote inside a field that does not begin with one",
                      csv_place(file, record, at + quote));
      fields.push_back({field, at});
      at = end;
    }
    if (at == text.size()) return;
    ++at;  // the separator
  }
}

CsvLayout::CsvLayout(const CsvOptions& options, const CsvRecord& first, const std::string& file) : options_(options) {
  MANIPLE_REQUIRE(options.separator != '"' && options.separator != '\n' && options.separator != '\r',
                  "CsvOptions: a quote or a line end cannot be the separator");
  std::vector<CsvField> fields;
  split_csv(first, options.separator, file, fields);
  fields_ = fields.size();
  if (options.header) {
    for (const CsvField& field : fields) names_.push_back(single_quoted(trimmed(field.text)));
  }
  if (!options.label.empty()) label_ = find(options.label, "label", file);
  for (const std::string& column : options.columns) columns_.push_back(find(column, "column", file));
  if (options.columns.empty()) {
    for (std::size_t i = 0; i < fields_; ++i) {
      if (i != label_) columns_.push_back(i);
    }
  }
}

std::size_t CsvLayout::find(const std::string& column, const char* role, const std::string& file) const {
  const auto found = std::find(names_.begin(), names_.end(), column);
  if (found != names_.end()) return found - names_.begin();
  std::size_t number = 0;
  const bool is_number = read_number(column, number) == std::errc{};
  MANIPLE_REQUIRE(is_number && number < fields_, "{}:1:1: there is no {} \"{}\"; {}", file, role, one_line(column),
                  names_.empty() ? format_text("the file has no header and columns 0 to {}", fields_ - 1)
                                 : "its header has " + one_line(joined(names_).substr(0, 400)));
  return number;
}

std::string CsvLayout::column_name(std::size_t column) const {
  return names_.empty() ? format_text("{}", column) : "\"" + one_line(names_[column]) + "\"";
}

void CsvLayout::refuse(const CsvRecord& record, const std::string& file, const CsvField& field, std::size_t column,
                       const char* expected) const {
  throw InvalidArgument(format_text("{}: \"{}\" in column {}; expected {}", csv_place(file, record, field.at),
                                    one_line(field.text.substr(0, 40)), column_name(column), expected));
}

float CsvLayout::real_of(const CsvRecord& record, const std::string& file, const CsvField& field,
                         std::size_t column) const {
  const std::string_view text = trimmed(field.text);
  if (text.empty()) {
    if (options_.missing) return *options_.missing;
    throw InvalidArgument(
        format_text("{}: nothing in column {}; expected a number (CsvOptions::missing says what nothing means)",
                    csv_place(file, record, field.at), column_name(column)));
  }
  float value = 0;
  std::errc error = read_number(text, value);
  if (error == std::errc::result_out_of_range) {  // also for values that are too small, which become 0
    double wide = 0;
    error = read_number(text, wide);
    value = static_cast<float>(wide);
    if (error == std::errc{} && (wide > 1 || wide < -1)) error = std::errc::result_out_of_range;
  }
  if (error == std::errc::result_out_of_range) refuse(record, file, field, column, "a number that a float can hold");
  if (error != std::errc{}) refuse(record, file, field, column, "a number");
  return value;
}

CsvLayout::Label CsvLayout::parse(const CsvRecord& record, const std::string& file, float* data) const {
  thread_local std::vector<CsvField> fields;
  split_csv(record, options_.separator, file, fields);
  MANIPLE_REQUIRE(fields.size() == fields_, "{}: a record of {} fields; {} has {}", csv_place(file, record, 0),
                  fields.size(), options_.header ? "the header" : "the first record", fields_);
  for (std::size_t i = 0; i < columns_.size(); ++i) data[i] = real_of(record, file, fields[columns_[i]], columns_[i]);
  Label label;
  if (label_ && options_.real_label) label.real = real_of(record, file, fields[*label_], *label_);
  if (label_ && !options_.real_label) {
    const CsvField& field = fields[*label_];
    if (read_number(trimmed(field.text), label.whole) != std::errc{})
      refuse(record, file, field, *label_, "a whole number as label (CsvOptions::real_label takes others)");
  }
  return label;
}

namespace {

class CsvSamples final : public ShardReader {
 public:
  CsvSamples(std::unique_ptr<ReadableBytes> bytes, std::string path, CsvOptions options)
      : records_(std::move(bytes), options.separator), path_(std::move(path)), options_(std::move(options)) {}

  bool next(RawSample* sample) override {
    CsvRecord record;
    if (!records_.next(record)) return false;
    if (layout_ == nullptr) {
      layout_ = std::make_shared<CsvLayout>(options_, record, path_);
      if (options_.header && !records_.next(record)) return false;
    }
    if (sample == nullptr) return true;
    *sample = RawSample{};
    sample->key = format_text("line {}", record.line);
    sample->shard = path_;
    sample->offset = record.offset;
    sample->line = record.line;
    sample->format = layout_;
    sample->files["csv"] = std::move(record.text);
    return true;
  }

 private:
  CsvRecords records_;
  std::string path_;
  CsvOptions options_;
  std::shared_ptr<const CsvLayout> layout_;
};

}  // namespace

std::unique_ptr<ShardReader> csv_samples(std::unique_ptr<ReadableBytes> bytes, const std::string& path,
                                         CsvOptions options) {
  return std::make_unique<CsvSamples>(std::move(bytes), path, std::move(options));
}

std::unique_ptr<ShardReader> open_csv(const std::string& path, CsvOptions options) {
  return csv_samples(open_bytes(path), path, std::move(options));
}

}  // namespace maniple
