#include <maniple/train/mnist.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include <torch/torch.h>

#include "comm/base/check.h"
#include "train/data/idx.h"
#include "train/data/split_mix.h"
#include "train/disk_file.h"

namespace maniple {
namespace {

constexpr std::size_t kSide = 28;
constexpr int kFontRows = 7;
constexpr int kFontColumns = 5;

// A row of points is five bits, leftmost point in the highest bit.
constexpr std::array<std::array<std::uint8_t, kFontRows>, 10> kFont = {{
    {0b01110, 0b10001, 0b10001, 0b10001, 0b10001, 0b10001, 0b01110},
    {0b00100, 0b01100, 0b00100, 0b00100, 0b00100, 0b00100, 0b01110},
    {0b01110, 0b10001, 0b00001, 0b00110, 0b01000, 0b10000, 0b11111},
    {0b01110, 0b10001, 0b00001, 0b00110, 0b00001, 0b10001, 0b01110},
    {0b00010, 0b00110, 0b01010, 0b10010, 0b11111, 0b00010, 0b00010},
    {0b11111, 0b10000, 0b11110, 0b00001, 0b00001, 0b10001, 0b01110},
    {0b00110, 0b01000, 0b10000, 0b11110, 0b10001, 0b10001, 0b01110},
    {0b11111, 0b00001, 0b00010, 0b00100, 0b01000, 0b01000, 0b01000},
    {0b01110, 0b10001, 0b10001, 0b01110, 0b10001, 0b10001, 0b01110},
    {0b01110, 0b10001, 0b10001, 0b01111, 0b00001, 0b00010, 0b01100},
}};

double point(std::size_t digit, int row, int column) {
  if (row < 0 || row >= kFontRows || column < 0 || column >= kFontColumns) return 0;
  return (kFont[digit][row] >> (kFontColumns - 1 - column)) & 1;
}

/// The font's value between its points: linear interpolation in both directions.
double ink(std::size_t digit, double y, double x) {
  const int row = static_cast<int>(std::floor(y));
  const int column = static_cast<int>(std::floor(x));
  const double down = y - row;
  const double right = x - column;
  return (point(digit, row, column) * (1 - right) + point(digit, row, column + 1) * right) * (1 - down) +
         (point(digit, row + 1, column) * (1 - right) + point(digit, row + 1, column + 1) * right) * down;
}

void draw(std::size_t digit, SplitMix& random, std::uint8_t* pixels) {
  const auto between = [&](double low, double high) { return low + (high - low) * random.unit(); };
  const double height = between(2.2, 3.2);  // pixels per point of the font
  const double width = between(2.4, 3.6);
  const double slant = between(-0.25, 0.25);
  const double middle_y = 13.5 + between(-2.5, 2.5);
  const double middle_x = 13.5 + between(-2.5, 2.5);
  const double strength = between(1.3, 2.2);  // above 1: broader strokes
  const double noise = between(0, 0.12);
  for (std::size_t row = 0; row < kSide; ++row) {
    for (std::size_t column = 0; column < kSide; ++column) {
      const double y = static_cast<double>(row) - middle_y;
      const double x = static_cast<double>(column) - middle_x - slant * y;
      const double there = std::min(1.0, strength * ink(digit, y / height + 3, x / width + 2));
      const double value = there * between(0.85, 1) + noise * random.unit();
      pixels[row * kSide + column] = static_cast<std::uint8_t>(std::min(255.0, 255 * value));
    }
  }
}

}  // namespace

LabelledImages draw_digits(std::size_t count, std::uint64_t seed) {
  LabelledImages set{.count = count, .rows = kSide, .columns = kSide, .pixels = {}, .labels = {}};
  set.pixels.resize(count * kSide * kSide);
  set.labels.resize(count);
  SplitMix random(mixed(seed + SplitMix::kStep));
  for (std::size_t i = 0; i < count; ++i) set.labels[i] = static_cast<std::uint8_t>(i % kFont.size());
  for (std::size_t i = count; i > 1; --i) std::swap(set.labels[i - 1], set.labels[random.below(i)]);
  for (std::size_t i = 0; i < count; ++i) draw(set.labels[i], random, set.pixels.data() + i * kSide * kSide);
  return set;
}

namespace {

constexpr int kClasses = 10;
constexpr const char* kFiles[2][2] = {{"train-images-idx3-ubyte", "train-labels-idx1-ubyte"},
                                      {"t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"}};

/// The file with or without ".gz". If neither exists, the plain name, which the error then names.
std::string idx_file(const std::string& folder, const char* name) {
  const std::string plain = folder + "/" + name;
  return !is_readable(plain) && is_readable(plain + ".gz") ? plain + ".gz" : plain;
}

/// Copies the vector's bytes into a tensor of these sizes.
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
  MANIPLE_REQUIRE(index < size().value(), "Mnist: index {} in a set of {}", index, images_.size(0));
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

torch::optional<std::size_t> Mnist::size() const { return images_.size(0); }

}  // namespace maniple
