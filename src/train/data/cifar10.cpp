#include <maniple/train/cifar10.h>

#include <torch/torch.h>

#include <algorithm>
#include <span>
#include <utility>
#include <vector>

#include "comm/base/check.h"
#include "train/disk_file.h"

namespace maniple {
namespace {

constexpr std::size_t kWidth = 32;
constexpr std::size_t kChannels = 3;
constexpr std::size_t kPlane = kWidth * kWidth;
constexpr std::size_t kPixels = kChannels * kPlane;
constexpr std::size_t kRecord = 1 + kPixels;
constexpr std::size_t kRecordsAtOnce = 1000;
constexpr const char* kTrainFiles[] = {"data_batch_1.bin", "data_batch_2.bin", "data_batch_3.bin", "data_batch_4.bin",
                                       "data_batch_5.bin"};
constexpr const char* kTestFiles[] = {"test_batch.bin"};

std::span<const char* const> names_of(Cifar10::Split split) {
  return split == Cifar10::Split::train ? std::span<const char* const>(kTrainFiles) : kTestFiles;
}

/// The file in the folder, or in the folder that unpacking the archive creates. If neither exists, the former, which
/// the error then names.
std::string batch_file(const std::string& folder, const char* name) {
  const std::string plain = folder + "/" + name;
  const std::string unpacked = folder + "/cifar-10-batches-bin/" + name;
  return !is_readable(plain) && is_readable(unpacked) ? unpacked : plain;
}

std::size_t records_in(const RegularFile& file, std::size_t expected) {
  const std::size_t records = file.size() / kRecord;
  MANIPLE_REQUIRE(file.size() > 0, "{}: is empty; expected records of {} bytes", file.path(), kRecord);
  if (expected > 0) {
    MANIPLE_REQUIRE(
        file.size() == expected * kRecord,
        "{}: ends at offset {}; expected {} records of {} bytes up to offset {} (is it the binary version?)",
        file.path(), file.size(), expected, kRecord, expected * kRecord);
  }
  MANIPLE_REQUIRE(file.size() % kRecord == 0,
                  "{}: ends at offset {}, inside record {}; expected whole records of {} bytes", file.path(),
                  file.size(), records, kRecord);
  return records;
}

/// Reads the first `count` records of the file into `pixels` and `labels`.
void read_records(const RegularFile& file, std::size_t count, std::uint8_t* pixels, std::int64_t* labels) {
  std::vector<std::uint8_t> bytes(std::min(count, kRecordsAtOnce) * kRecord);
  for (std::size_t begin = 0; begin < count; begin += kRecordsAtOnce) {
    const std::size_t end = std::min(count, begin + kRecordsAtOnce);
    file.read(begin * kRecord, bytes.data(), (end - begin) * kRecord);
    for (std::size_t i = begin; i < end; ++i) {
      const std::uint8_t* record = bytes.data() + (i - begin) * kRecord;
      MANIPLE_REQUIRE(*record < Cifar10::kClasses.size(), "{}: offset {}: label {} of record {}; expected 0 to {}",
                      file.path(), i * kRecord, *record, i, Cifar10::kClasses.size() - 1);
      labels[i] = *record;
      std::copy_n(record + 1, kPixels, pixels + i * kPixels);
    }
  }
}

}  // namespace

Cifar10::Cifar10(const std::string& folder, Split split, Cifar10Options options) : options_(options) {
  for (const float deviation : options.deviation) {
    MANIPLE_REQUIRE(deviation > 0, "Cifar10: a deviation of {}; expected a positive number", deviation);
  }
  std::vector<std::pair<RegularFile, std::size_t>> files;  // each with the number of records to take
  std::size_t count = 0;
  for (const char* name : names_of(split)) {
    if (options.limit > 0 && count >= options.limit) break;
    RegularFile file(batch_file(folder, name));
    std::size_t records = records_in(file, options.records_per_file);
    if (options.limit > 0) records = std::min(records, options.limit - count);
    count += records;
    files.emplace_back(std::move(file), records);
  }
  const auto rows = static_cast<std::int64_t>(count);
  images_ = torch::empty({rows, kChannels, kWidth, kWidth}, torch::kUInt8);
  targets_ = torch::empty({rows}, torch::kInt64);
  std::size_t done = 0;
  for (const auto& [file, records] : files) {
    read_records(file, records, images_.data_ptr<std::uint8_t>() + done * kPixels,
                 targets_.data_ptr<std::int64_t>() + done);
    done += records;
  }
}

bool Cifar10::is_in(const std::string& folder) {
  for (const Split split : {Split::train, Split::test}) {
    for (const char* name : names_of(split)) {
      if (!is_readable(batch_file(folder, name))) return false;
    }
  }
  return true;
}

torch::data::Example<> Cifar10::get(std::size_t index) {
  MANIPLE_REQUIRE(index < size().value(), "Cifar10: index {} in a set of {}", index, images_.size(0));
  torch::Tensor image = torch::empty({kChannels, kWidth, kWidth});
  const std::uint8_t* from = images_.data_ptr<std::uint8_t>() + index * kPixels;
  float* to = image.data_ptr<float>();
  for (std::size_t channel = 0; channel < kChannels; ++channel, from += kPlane, to += kPlane) {
    const float scale = 1 / (255 * options_.deviation[channel]);
    const float shift = -options_.mean[channel] / options_.deviation[channel];
    std::transform(from, from + kPlane, to,
                   [&](std::uint8_t byte) { return static_cast<float>(byte) * scale + shift; });
  }
  return {std::move(image), targets_[static_cast<std::int64_t>(index)]};
}

torch::optional<std::size_t> Cifar10::size() const { return images_.size(0); }

}  // namespace maniple
