#include <maniple/train/csv.h>

#include <torch/torch.h>

#include <algorithm>
#include <utility>

#include "comm/base/check.h"
#include "train/data/csv_records.h"
#include "train/disk_file.h"

namespace maniple {
namespace {

torch::data::Example<> example_of(const CsvLayout& layout, const CsvRecord& record, const std::string& file) {
  const auto data = torch::empty({static_cast<std::int64_t>(layout.width())});
  const CsvLayout::Label label = layout.parse(record, file, data.data_ptr<float>());
  const auto target = torch::empty({}, layout.options().real_label ? torch::kFloat32 : torch::kInt64);
  if (layout.options().real_label) {
    *target.data_ptr<float>() = label.real;
  } else {
    *target.data_ptr<std::int64_t>() = label.whole;
  }
  return {data, target};
}

}  // namespace

struct CsvDataset::File {
  explicit File(const std::string& path) : bytes(path) {}
  RegularFile bytes;
  std::shared_ptr<const CsvLayout> layout = nullptr;
  std::vector<std::size_t> offsets = {};  ///< of records; the last entry is the end of the last record
  std::size_t first = 0;                  ///< index of its first sample
};

CsvDataset::CsvDataset(const std::string& pattern, const CsvOptions& options)
    : CsvDataset(find_shards(pattern), options) {}

CsvDataset::CsvDataset(const std::vector<std::string>& paths, const CsvOptions& options) {
  MANIPLE_REQUIRE(!paths.empty(), "CsvDataset: the list of files is empty");
  auto files = std::make_shared<std::vector<File>>();
  std::size_t samples = 0;
  for (const std::string& path : paths) {
    File& file = files->emplace_back(path);
    CsvRecords records(open_bytes(path), options.separator);
    MANIPLE_REQUIRE(records.name() == path, "{}: is compressed; read it by csv_stream, or uncompress it", path);
    CsvRecord record;
    while (records.next(record)) {
      if (file.layout == nullptr) {
        file.layout = std::make_shared<CsvLayout>(options, record, path);
        if (options.header) continue;
      }
      file.offsets.push_back(record.offset);
    }
    MANIPLE_REQUIRE(file.layout != nullptr, "{}: is empty", path);
    MANIPLE_REQUIRE(file.layout->width() == files->front().layout->width(), "{}: {} columns of numbers, but {} has {}",
                    path, file.layout->width(), paths.front(), files->front().layout->width());
    file.first = samples;
    samples += file.offsets.size();
    file.offsets.push_back(file.bytes.size());
  }
  files_ = std::move(files);
}

std::size_t CsvDataset::size() const noexcept { return files_->back().first + files_->back().offsets.size() - 1; }
std::size_t CsvDataset::columns() const noexcept { return files_->front().layout->width(); }

torch::data::Example<> CsvDataset::get(std::size_t index) const {
  MANIPLE_REQUIRE(index < size(), "CsvDataset: record {} of {}, of which there are {}", index,
                  files_->front().bytes.path(), size());
  const auto behind = std::upper_bound(files_->begin(), files_->end(), index,
                                       [](std::size_t i, const File& file) { return i < file.first; });
  const File& file = *(behind - 1);
  const std::size_t place = index - file.first;
  const std::size_t offset = file.offsets[place];
  const auto read = [&](std::size_t from, std::size_t to) {
    std::string text(to - from, '\0');
    file.bytes.read(from, text.data(), text.size());
    return text;
  };
  CsvRecord record;
  record.text = read(offset, file.offsets[place + 1]);
  while (record.text.ends_with('\n') || record.text.ends_with('\r')) record.text.pop_back();  // including empty lines
  try {
    return example_of(*file.layout, record, file.bytes.path());
  } catch (const InvalidArgument&) {  // parsed again with the line number, for the error
    const std::string before = read(0, offset);
    record.line = 1 + std::count(before.begin(), before.end(), '\n');
    return example_of(*file.layout, record, file.bytes.path());
  }
}

ShardStream<torch::data::Example<>> csv_stream(std::vector<std::string> paths, CsvOptions csv, StreamOptions options) {
  const auto decode = [](RawSample& raw) {
    CsvRecord record;
    record.text = std::move(raw.files.at("csv"));
    record.offset = raw.offset;
    record.line = raw.line;
    return example_of(*std::static_pointer_cast<const CsvLayout>(raw.format), record, raw.shard);
  };
  return {std::move(paths), [csv = std::move(csv)](const std::string& path) { return open_csv(path, csv); }, decode,
          std::move(options)};
}

ShardStream<torch::data::Example<>> csv_stream(const std::string& pattern, CsvOptions csv, StreamOptions options) {
  return csv_stream(find_shards(pattern), std::move(csv), std::move(options));
}

}  // namespace maniple
