// The IDX format, in which MNIST and its relatives come: numbers are big-endian,
//
//   offset 0   0, 0, type of an element (8: unsigned byte), number of dimensions d
//   offset 4   d sizes, 4 bytes each
//   then       the elements, the last dimension fastest, and nothing after them
//
// as it is or inside gzip; which of the two is seen by the content. Only bytes are read: no other type is in use for
// images and labels. No LibTorch here, so that the parser can be fuzzed without it.
//
// A file is never believed before it is checked: memory is set aside for no more elements than the file can hold.
// Whatever is wrong is an InvalidArgument that names the file, the offset and what was expected there; SystemError when
// it cannot be read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace maniple {

struct IdxArray {
  std::vector<std::size_t> shape;   ///< at least one dimension
  std::vector<std::uint8_t> bytes;  ///< as many as the shape says
};

/// `name` is the file's, for errors.
IdxArray parse_idx(std::string_view file, const std::string& name);

/// Reads and parses a file of at most `kIdxFileLimit` bytes.
inline constexpr std::size_t kIdxFileLimit = std::size_t{1} << 30;
IdxArray read_idx(const std::string& path);

/// Images and their labels, checked against each other.
struct LabelledImages {
  std::size_t count = 0;
  std::size_t rows = 0;
  std::size_t columns = 0;
  std::vector<std::uint8_t> pixels;  ///< count x rows x columns
  std::vector<std::uint8_t> labels;  ///< count, each below the number of classes
};

/// Puts them together, or says which file does not fit. Images have three dimensions, labels one.
LabelledImages labelled_images(IdxArray images, const std::string& images_name, IdxArray labels,
                               const std::string& labels_name, int classes);

// Digits for when there are no files: drawn from a font of 5 x 7 points, moved, scaled, slanted, with strokes of
// different strength and noise. Deterministic; no LibTorch.

/// 28 x 28 pixels each, all ten digits equally often (but for the remainder) and in random order.
LabelledImages draw_digits(std::size_t count, std::uint64_t seed);

}  // namespace maniple
