#include <maniple/train/text.h>

#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

#include "comm/base/check.h"
#include "train/disk_file.h"

namespace maniple {

class ByteText::Source {
 public:
  virtual ~Source() = default;
  virtual const std::string& name() const = 0;
  virtual std::size_t size() const = 0;
  virtual void read(std::size_t offset, void* to, std::size_t count) const = 0;
};

class ByteText::FileSource final : public Source {
 public:
  explicit FileSource(const std::string& path) : file_(path) {}
  const std::string& name() const override { return file_.path(); }
  std::size_t size() const override { return file_.size(); }
  void read(std::size_t offset, void* to, std::size_t count) const override { file_.read(offset, to, count); }

 private:
  RegularFile file_;
};

class ByteText::MemorySource final : public Source {
 public:
  MemorySource(std::string text, std::string name) : text_(std::move(text)), name_(std::move(name)) {}
  const std::string& name() const override { return name_; }
  std::size_t size() const override { return text_.size(); }
  void read(std::size_t offset, void* to, std::size_t count) const override {
    std::memcpy(to, text_.data() + offset, count);
  }

 private:
  std::string text_;
  std::string name_;
};

namespace {

const char* part_name(ByteTextSplit split) {
  switch (split) {
    case ByteTextSplit::train: return "its training part";
    case ByteTextSplit::validation: return "its validation part";
    default: return "it";
  }
}

}  // namespace

ByteText::ByteText(std::shared_ptr<const Source> source, ByteTextOptions options)
    : source_(std::move(source)),
      block_size_(options.block_size),
      stride_(options.stride > 0 ? options.stride : options.block_size) {
  constexpr std::size_t kLargestBlock = std::size_t{1} << 30;
  MANIPLE_REQUIRE(block_size_ >= 1 && block_size_ <= kLargestBlock,
                  "ByteText: a block_size of {}; expected 1 to {} bytes", block_size_, kLargestBlock);
  MANIPLE_REQUIRE(
      options.split == ByteTextSplit::all || (options.validation_fraction > 0 && options.validation_fraction < 1),
      "ByteText: a validation_fraction of {}; expected more than 0 and less than 1", options.validation_fraction);
  const std::size_t all = source_->size();
  MANIPLE_REQUIRE(all > 0, "{}: is empty", source_->name());
  // A whole number of bytes, at least one: the parts always add up to the text.
  const auto held_back = std::clamp<std::size_t>(
      static_cast<std::size_t>(std::llround(static_cast<double>(all) * options.validation_fraction)), 1, all);
  switch (options.split) {
    case ByteTextSplit::all: length_ = all; break;
    case ByteTextSplit::train: length_ = all - held_back; break;
    case ByteTextSplit::validation:
      first_ = all - held_back;
      length_ = held_back;
      break;
  }
  MANIPLE_REQUIRE(length_ > block_size_,
                  "{}: too short: {} has {} bytes; a window with a block_size of {} takes {}, take a smaller one",
                  source_->name(), part_name(options.split), length_, block_size_, block_size_ + 1);
  windows_ = (length_ - block_size_ - 1) / stride_ + 1;
}

ByteText::ByteText(const std::string& path, ByteTextOptions options)
    : ByteText(std::make_shared<FileSource>(path), options) {}

ByteText ByteText::from_memory(std::string text, ByteTextOptions options, const std::string& name) {
  return {std::make_shared<MemorySource>(std::move(text), name), options};
}

torch::data::Example<> ByteText::get(std::size_t index) {
  MANIPLE_REQUIRE(index < windows_, "ByteText: window {} of {}, of which there are {}", index, source_->name(),
                  windows_);
  std::vector<std::uint8_t> window(block_size_ + 1);
  source_->read(first_ + index * stride_, window.data(), window.size());
  const auto numbers = torch::empty({static_cast<std::int64_t>(window.size())}, torch::kInt64);
  std::copy(window.begin(), window.end(), numbers.data_ptr<std::int64_t>());
  const auto length = static_cast<std::int64_t>(block_size_);
  return {numbers.narrow(0, 0, length), numbers.narrow(0, 1, length)};
}

std::string ByteText::text(std::size_t offset, std::size_t count) const {
  MANIPLE_REQUIRE(offset <= length_, "ByteText: offset {} in {} bytes of {}", offset, length_, source_->name());
  std::string result(std::min(count, length_ - offset), '\0');
  source_->read(first_ + offset, result.data(), result.size());
  return result;
}

}  // namespace maniple
