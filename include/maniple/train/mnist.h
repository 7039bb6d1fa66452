// The MNIST digits as a torch::data dataset.
//
//   auto digits = maniple::Mnist("data/mnist", maniple::Mnist::Split::train).map(torch::data::transforms::Stack<>());
//   auto loader = torch::data::make_data_loader(std::move(digits), sampler, 64);
//   for (auto& batch : *loader) { batch.data /* [64, 1, 28, 28] float */; batch.target /* [64] int64 */; }
//
// The folder holds the four original files, compressed or not, with or without ".gz" in their names:
//
//   train-images-idx3-ubyte  train-labels-idx1-ubyte  t10k-images-idx3-ubyte  t10k-labels-idx1-ubyte
//
// scripts/fetch_mnist.sh downloads them. Datasets in the same format (Fashion-MNIST, KMNIST) work as well. Files that
// are damaged or do not belong together throw InvalidArgument with the file, the offset and the expected value. A
// missing file throws SystemError.
//
// Copies share the images, so each worker of a loader may have a copy. Several threads may read at the same time.
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
  /// Pixels 0 .. 255 become (pixel / 255 - mean) / deviation. The defaults are mean and deviation of MNIST's training
  /// images.
  float mean = 0.1307F;
  float deviation = 0.3081F;
  /// Use only the first `limit` samples; 0: all.
  std::size_t limit = 0;
};

class Mnist : public torch::data::datasets::Dataset<Mnist> {
 public:
  enum class Split { train, test };

  Mnist(const std::string& folder, Split split, MnistOptions options = {});

  /// Digits drawn by the program from a small font, shifted, scaled, slanted and with noise, for use without a network.
  /// Much easier than MNIST: accuracy on them only shows that training works. The same seed gives the same set.
  static Mnist drawn(std::size_t count, std::uint64_t seed, MnistOptions options = {});

  /// Whether the folder has all four files. Does not check their contents.
  static bool is_in(const std::string& folder);

  /// One image, 1 x 28 x 28 floats, and its label.
  torch::data::Example<> get(std::size_t index) override;
  torch::optional<std::size_t> size() const override;

  const torch::Tensor& images() const noexcept { return images_; }    ///< count x 28 x 28, bytes as in the file
  const torch::Tensor& targets() const noexcept { return targets_; }  ///< count, int64

 private:
  Mnist(torch::Tensor images, torch::Tensor targets, MnistOptions options);

  torch::Tensor images_;
  torch::Tensor targets_;
  MnistOptions options_;
};

}  // namespace maniple
