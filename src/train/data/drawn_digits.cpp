#include "train/data/drawn_digits.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "train/data/split_mix.h"

namespace maniple {
namespace {

constexpr std::size_t kSide = 28;
constexpr int kFontRows = 7;
constexpr int kFontColumns = 5;

// A row of points is five bits, the leftmost point highest.
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
  return (kFont[digit][static_cast<std::size_t>(row)] >> (kFontColumns - 1 - column)) & 1;
}

/// The font between its points: linear in both directions.
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
  const double height = between(2.2, 3.2);  // pixels for each point of the font
  const double width = between(2.4, 3.6);
  const double slant = between(-0.25, 0.25);
  const double middle_y = 13.5 + between(-2.5, 2.5);
  const double middle_x = 13.5 + between(-2.5, 2.5);
  const double strength = between(1.3, 2.2);  // above 1: strokes become broader
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

}  // namespace maniple
