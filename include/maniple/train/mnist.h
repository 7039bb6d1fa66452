// The MNIST digits as a torch::data dataset.
//
//   auto digits = maniple::Mnist("data/mnist", maniple::Mnist::Split::train).map(torch::data::transforms::Stack<>());
//   auto loader = torch::data::make_data_loader(std::move(digits), sampler, 64);
//   for (auto& batch : *loader) { batch.data /* [64, 1, 28, 28] float */; batch.target /* [64] int64 */; }
//
// The folder holds the four files of the original, compressed or not, with or without ".gz" in their names:
//
//   train-images-idx3-ubyte  train-labels-idx1-ubyte  t10k-images-idx3-ubyte  t10k-labels-idx1-ubyte
//
// scripts/fetch_mnist.sh gets them. Sets of the same form (Fashion-MNIST, KMNIST) work as well. Files that are damaged
// or do not belong together are an InvalidArgument that names the file, the offset and what was expected there; a file
// that is not there is a SystemError.
//
// Copies share the images, so that each worker of a loader may have one; reading is safe from several threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include <torch/data/datasets/base.h>
#include <torch/data/example.h>
#include <torch/types.h>

#include <maniple/export.h>

namespace MANIPLE_API maniple {

struct MnistOptions {
  /// Pixels 0 .. 255 become (pixel / 255 - mean) / deviation. These are the mean and the deviation of MNIST's training
  /// images.
  float mean = 0.1307F;
  float deviation = 0.3081F;
  /// Only the first so many samples; 0: all.
  std::size_t limit = 0;
};

class Mnist : public torch::data::datasets::Dataset<Mnist> {
 public:
  enum class Split { train, test };

  Mnist(const std::string& folder, Split split, MnistOptions options = {});

  /// Digits that the program draws by itself, from a small font, shifted, scaled, slanted and with noise: what there is
  /// without a network. Much easier than MNIST: accuracies on them say that training works, nothing more. The same seed
  /// gives the same set.
  static Mnist drawn(std::size_t count, std::uint64_t seed, MnistOptions options = {});

  /// Whether the folder has all four files (it does not look inside).
  static bool is_in(const std::string& folder);

  /// One image, 1 x 28 x 28 floats, and its label.
  torch::data::Example<> get(std::size_t index) override;
  torch::optional<std::size_t> size() const override;

  const torch::Tensor& images() const noexcept { return images_; }  ///< count x 28 x 28, bytes as they are in the file
  const torch::Tensor& targets() const noexcept { return targets_; }  ///< count, int64

 private:
  Mnist(torch::Tensor images, torch::Tensor targets, MnistOptions options);

  torch::Tensor images_;
  torch::Tensor targets_;
  MnistOptions options_;
};

}  // namespace maniple
