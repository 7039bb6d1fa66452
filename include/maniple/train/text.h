// A text file as bytes, for byte-level language models: needs no vocabulary, and every file is valid.
//
//   maniple::ByteText text("book.txt", {.block_size = 128, .split = maniple::ByteTextSplit::train});
//   maniple::DistributedSampler sampler(text.size().value(), {.seed = 7});
//   auto loader = torch::data::make_data_loader(text.map(torch::data::transforms::Stack<>()), sampler, 32);
//   for (auto& batch : *loader) { batch.data /* [32, 128] int64 */; batch.target /* the same, shifted by one byte */; }
//
// Window i holds block_size + 1 bytes from i * stride on. The first block_size bytes are the data, the last block_size
// bytes the target, so target[t] follows data[t]. With the default stride each byte is a target once; with stride 1 a
// window begins at every byte. A remainder shorter than a window is not used.
//
// The end of the file is the validation part (by default a tenth), the rest is the training part. No window crosses the
// boundary.
//
// Each sample is read on demand with one pread(2), so the file may be larger than memory; the kernel caches frequently
// used parts. Copies share the open file, so each worker of a loader may have a copy. Several threads may read at the
// same time.
//
// Errors   SystemError for a file that cannot be opened or read. InvalidArgument for a directory, a file that is empty
//          or shorter than one window, and (from get) a file that has shrunk since it was opened. The errors name the
//          file.
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
  std::size_t block_size = 128;  ///< context length of the model in bytes; at least 1
  std::size_t stride = 0;        ///< bytes between the starts of successive windows; 0: block_size
  ByteTextSplit split = ByteTextSplit::all;
  double validation_fraction = 0.1;  ///< fraction of the bytes, for `split`; more than 0, less than 1
};

class ByteText : public torch::data::datasets::Dataset<ByteText> {
 public:
  /// Number of values of a byte.
  static constexpr std::int64_t kVocabulary = 256;

  explicit ByteText(const std::string& path, ByteTextOptions options = {});
  /// The same for a text in memory. Errors use `name` as the file name.
  static ByteText from_memory(std::string text, ByteTextOptions options = {}, const std::string& name = "text");

  /// Data and target, block_size int64 each.
  torch::data::Example<> get(std::size_t index) override;
  torch::optional<std::size_t> size() const override { return windows_; }

  /// Size of the selected part.
  std::size_t bytes() const noexcept { return length_; }
  /// `count` bytes of the part from `offset`, fewer at its end; for example for a prompt.
  std::string text(std::size_t offset, std::size_t count) const;

 private:
  class Source;
  class FileSource;
  class MemorySource;
  ByteText(std::shared_ptr<const Source> source, ByteTextOptions options);

  std::shared_ptr<const Source> source_;
  std::size_t block_size_;
  std::size_t stride_;
  std::size_t first_ = 0;   ///< start of the part in the file
  std::size_t length_ = 0;  ///< length of the part
  std::size_t windows_ = 0;
};

}  // namespace maniple
