#include <maniple/train/mnist.h>

#include <torch/torch.h>

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "train/data/drawn_digits.h"
#include "train/data/idx.h"
#include "train/data/regular_file.h"

namespace maniple {
namespace {

constexpr int kClasses = 10;
constexpr const char* kFiles[2][2] = {{"train-images-idx3-ubyte", "train-labels-idx1-ubyte"},
                                      {"t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"}};

/// With or without ".gz"; if there is neither, the plain name, which the error will show.
std::string idx_file(const std::string& folder, const char* name) {
  const std::string plain = folder + "/" + name;
  return !is_readable(plain) && is_readable(plain + ".gz") ? plain + ".gz" : plain;
}

/// The vector's bytes as a tensor of these sizes, copied once.
torch::Tensor tensor_of(std::vector<std::uint8_t>& bytes, torch::IntArrayRef sizes) {
  torch::Tensor tensor = torch::empty(sizes, torch::kUInt8);
  std::copy(bytes.begin(), bytes.end(), tensor.data_ptr<std::uint8_t>());
  return tensor;
}

std::pair<torch::Tensor, torch::Tensor> tensors_of(LabelledImages set, std::size_t limit) {
  if (limit > 0 && limit < set.count) {
    set.count = limit;
    set.pixels.resize(limit * set.rows * set.columns);
    set.labels.resize(limit);
  }
  const auto count = static_cast<std::int64_t>(set.count);
  return {tensor_of(set.pixels, {count, static_cast<std::int64_t>(set.rows), static_cast<std::int64_t>(set.columns)}),
          tensor_of(set.labels, {count}).to(torch::kInt64)};
}

std::pair<torch::Tensor, torch::Tensor> read(const std::string& folder, Mnist::Split split, std::size_t limit) {
  const auto& names = kFiles[split == Mnist::Split::train ? 0 : 1];
  const std::string images = idx_file(folder, names[0]);
  const std::string labels = idx_file(folder, names[1]);
  IdxArray pixels = read_idx(images);
  return tensors_of(labelled_images(std::move(pixels), images, read_idx(labels), labels, kClasses), limit);
}

}  // namespace

Mnist::Mnist(torch::Tensor images, torch::Tensor targets, MnistOptions options)
    : images_(std::move(images)), targets_(std::move(targets)), options_(options) {
  MANIPLE_REQUIRE(options.deviation > 0, "Mnist: a deviation of {}; expected a positive number", options.deviation);
}

Mnist::Mnist(const std::string& folder, Split split, MnistOptions options)
    : Mnist(torch::Tensor(), torch::Tensor(), options) {
  std::tie(images_, targets_) = read(folder, split, options.limit);
}

Mnist Mnist::drawn(std::size_t count, std::uint64_t seed, MnistOptions options) {
  auto [images, targets] = tensors_of(draw_digits(count, seed), options.limit);
  return {std::move(images), std::move(targets), options};
}

bool Mnist::is_in(const std::string& folder) {
  for (const auto& names : kFiles) {
    for (const char* name : names) {
      if (!is_readable(idx_file(folder, name))) return false;
    }
  }
  return true;
}

torch::data::Example<> Mnist::get(std::size_t index) {
  MANIPLE_REQUIRE(index < static_cast<std::size_t>(images_.size(0)), "Mnist: index {} in a set of {}", index,
                  images_.size(0));
  const std::int64_t rows = images_.size(1);
  const std::int64_t columns = images_.size(2);
  torch::Tensor image = torch::empty({1, rows, columns});
  const std::uint8_t* from = images_.data_ptr<std::uint8_t>() + static_cast<std::int64_t>(index) * rows * columns;
  const float scale = 1 / (255 * options_.deviation);
  const float shift = -options_.mean / options_.deviation;
  std::transform(from, from + rows * columns, image.data_ptr<float>(),
                 [&](std::uint8_t pixel) { return static_cast<float>(pixel) * scale + shift; });
  return {std::move(image), targets_[static_cast<std::int64_t>(index)]};
}

torch::optional<std::size_t> Mnist::size() const { return static_cast<std::size_t>(images_.size(0)); }

}  // namespace maniple
