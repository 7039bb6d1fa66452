// The CIFAR-10 images as a torch::data dataset.
//
//   auto pictures = maniple::Cifar10("data/cifar10", maniple::Cifar10::Split::train)
//                       .map(torch::data::transforms::Stack<>());
//   auto loader = torch::data::make_data_loader(std::move(pictures), sampler, 64);
//   for (auto& batch : *loader) { batch.data /* [64, 3, 32, 32] float */; batch.target /* [64] int64 */; }
//
// The folder holds the files of the "binary version" (cifar-10-binary.tar.gz, unpacked), directly or in a subfolder
// cifar-10-batches-bin:
//
//   data_batch_1.bin ... data_batch_5.bin   test_batch.bin
//
// Each file has 10000 records of 3073 bytes: the label, then 32 x 32 bytes each of red, green and blue. A file with
// another length, or with a label above 9, throws InvalidArgument with the file, the offset and the expected value. A
// missing file throws SystemError.
//
// Copies share the images (154 MB for the training set), so each worker of a loader may have a copy. Several threads
// may read at the same time.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include <torch/data/datasets/base.h>
#include <torch/data/example.h>
#include <torch/types.h>

#include <maniple/export.h>

namespace MANIPLE_API maniple {

struct Cifar10Options {
  /// Bytes 0 .. 255 of red, green and blue become (byte / 255 - mean) / deviation. The defaults are mean and deviation
  /// of the training images.
  std::array<float, 3> mean = {0.4914F, 0.4822F, 0.4465F};
  std::array<float, 3> deviation = {0.2470F, 0.2435F, 0.2616F};
  /// Use only the first `limit` samples; 0: all. Files beyond them are not read.
  std::size_t limit = 0;
  /// Number of records that each file must have; 0: any.
  std::size_t records_per_file = 10000;
};

class Cifar10 : public torch::data::datasets::Dataset<Cifar10> {
 public:
  enum class Split { train, test };

  /// Class names, by label.
  static constexpr std::array<const char*, 10> kClasses = {"airplane", "automobile", "bird",  "cat",  "deer",
                                                           "dog",      "frog",       "horse", "ship", "truck"};

  Cifar10(const std::string& folder, Split split, Cifar10Options options = {});

  /// Whether the folder has all six files. Does not check their contents.
  static bool is_in(const std::string& folder);

  /// One image, 3 x 32 x 32 floats, and its label.
  torch::data::Example<> get(std::size_t index) override;
  torch::optional<std::size_t> size() const override;

  const torch::Tensor& images() const noexcept { return images_; }    ///< count x 3 x 32 x 32, bytes as in the files
  const torch::Tensor& targets() const noexcept { return targets_; }  ///< count, int64

 private:
  torch::Tensor images_;
  torch::Tensor targets_;
  Cifar10Options options_;
};

}  // namespace maniple
