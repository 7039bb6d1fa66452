// The CIFAR-10 pictures as a torch::data dataset.
//
//   auto pictures = maniple::Cifar10("data/cifar10", maniple::Cifar10::Split::train)
//                       .map(torch::data::transforms::Stack<>());
//   auto loader = torch::data::make_data_loader(std::move(pictures), sampler, 64);
//   for (auto& batch : *loader) { batch.data /* [64, 3, 32, 32] float */; batch.target /* [64] int64 */; }
//
// The folder holds the files of the "binary version" (cifar-10-binary.tar.gz, unpacked), or a folder
// cifar-10-batches-bin with them:
//
//   data_batch_1.bin ... data_batch_5.bin   test_batch.bin
//
// each with 10000 records of 3073 bytes: the label, then 32 x 32 bytes of red, of green, of blue. A file of another
// length, or with a label above 9, is an InvalidArgument that names the file, the offset and what was expected there; a
// file that is not there is a SystemError.
//
// Copies share the pictures (154 MB for the training set), so that each worker of a loader may have one; reading is
// safe from several threads.
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
  /// Bytes 0 .. 255 of red, green and blue become (byte / 255 - mean) / deviation. These are the mean and the deviation
  /// of the training pictures.
  std::array<float, 3> mean = {0.4914F, 0.4822F, 0.4465F};
  std::array<float, 3> deviation = {0.2470F, 0.2435F, 0.2616F};
  /// Only the first so many samples; 0: all. Files beyond them are not read.
  std::size_t limit = 0;
  /// That each file must have; 0: as many as there are.
  std::size_t records_per_file = 10000;
};

class Cifar10 : public torch::data::datasets::Dataset<Cifar10> {
 public:
  enum class Split { train, test };

  /// What the labels mean.
  static constexpr std::array<const char*, 10> kClasses = {"airplane", "automobile", "bird",  "cat",  "deer",
                                                           "dog",      "frog",       "horse", "ship", "truck"};

  Cifar10(const std::string& folder, Split split, Cifar10Options options = {});

  /// Whether the folder has all six files (it does not look inside).
  static bool is_in(const std::string& folder);

  /// One picture, 3 x 32 x 32 floats, and its label.
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
