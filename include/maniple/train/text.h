// A text file as bytes, for language models that read and write bytes: no vocabulary to make, every file is valid.
//
//   maniple::ByteText text("book.txt", {.block_size = 128, .split = maniple::ByteTextSplit::train});
//   maniple::DistributedSampler sampler(text.size().value(), {.seed = 7});
//   auto loader = torch::data::make_data_loader(text.map(torch::data::transforms::Stack<>()), sampler, 32);
//   for (auto& batch : *loader) { batch.data /* [32, 128] int64 */; batch.target /* the same, one byte further */; }
//
// Window i holds the block_size + 1 bytes from i * stride on: the first block_size are the data, the last block_size
// the target, so that target[t] is what comes after data[t]. With the default stride each byte is a target once; with
// stride 1 there is a window for every place of the text. A rest that is shorter than a window belongs to none.
//
// The end of the file is the validation part (a tenth, by default), what comes before it the training part; no window
// reaches from one into the other.
//
// Only what is asked for is read, with one pread(2) for a sample, so that the file may be larger than memory; the
// kernel keeps what is used often. Copies share the open file, so that each worker of a loader may have one; reading is
// safe from several threads.
//
// Errors   SystemError for a file that cannot be opened or read; InvalidArgument for one that is a directory, empty or
//          too short for a single window, and for a file that has become shorter since it was opened (by get). They
//          name the file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include <torch/data/datasets/base.h>
#include <torch/data/example.h>
#include <torch/types.h>

#include <maniple/export.h>

namespace MANIPLE_API maniple {

enum class ByteTextSplit { all, train, validation };

struct ByteTextOptions {
  std::size_t block_size = 128;  ///< bytes that the model sees; at least 1
  std::size_t stride = 0;        ///< from one window to the next; 0: block_size
  ByteTextSplit split = ByteTextSplit::all;
  double validation_fraction = 0.1;  ///< of the bytes, for `split`; more than 0, less than 1
};

class ByteText : public torch::data::datasets::Dataset<ByteText> {
 public:
  /// Bytes have so many values.
  static constexpr std::int64_t kVocabulary = 256;

  explicit ByteText(const std::string& path, ByteTextOptions options = {});
  /// The same for a text in memory. `name` stands for the file in errors.
  static ByteText from_memory(std::string text, ByteTextOptions options = {}, const std::string& name = "text");

  /// data and target, block_size int64 each.
  torch::data::Example<> get(std::size_t index) override;
  torch::optional<std::size_t> size() const override { return windows_; }

  /// Of the part that was chosen.
  std::size_t bytes() const noexcept { return length_; }
  /// `count` bytes from `offset` of the part on; fewer at its end. For a prompt, say.
  std::string text(std::size_t offset, std::size_t count) const;

 private:
  class Source;
  class FileSource;
  class MemorySource;
  ByteText(std::shared_ptr<const Source> source, ByteTextOptions options);

  std::shared_ptr<const Source> source_;
  std::size_t block_size_;
  std::size_t stride_;
  std::size_t first_ = 0;   ///< of the part, in the file
  std::size_t length_ = 0;  ///< of the part
  std::size_t windows_ = 0;
};

}  // namespace maniple
