// The IDX format of MNIST and its relatives. Numbers are big-endian:
//
//   offset 0   0, 0, type of an element (8: unsigned byte), number of dimensions d
//   offset 4   d sizes, 4 bytes each
//   then       the elements, the last dimension fastest, and nothing after them
//
// The file is plain or gzip-compressed; its contents show which. Only bytes are supported: other types are not in use
// for images and labels. Does not use LibTorch, so that the parser can be fuzzed without it.
//
// A file is checked before it is trusted: no more elements are allocated than the file can hold. An error is an
// InvalidArgument that names the file, the offset and what was expected there, or a SystemError if the file cannot be
// read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace maniple {

struct IdxArray {
  std::vector<std::size_t> shape;   ///< at least one dimension
  std::vector<std::uint8_t> bytes;  ///< count: the product of `shape`
};

/// `name` is the file's name, used in errors.
IdxArray parse_idx(std::string_view file, const std::string& name);

/// Reads and parses a file of at most kIdxFileLimit bytes.
inline constexpr std::size_t kIdxFileLimit = std::size_t{1} << 30;
IdxArray read_idx(const std::string& path);

/// Images and labels that were checked against each other.
struct LabelledImages {
  std::size_t count = 0;
  std::size_t rows = 0;
  std::size_t columns = 0;
  std::vector<std::uint8_t> pixels;  ///< count x rows x columns
  std::vector<std::uint8_t> labels;  ///< `count` labels, each below the number of classes
};

/// Combines images and labels; throws InvalidArgument naming the file that does not fit. Images have three dimensions,
/// labels one.
LabelledImages labelled_images(IdxArray images, const std::string& images_name, IdxArray labels,
                               const std::string& labels_name, int classes);

// Synthetic digits for use without files, drawn from a 5 x 7 font, then moved, scaled and slanted, with varying stroke
// strength and noise. Deterministic; without LibTorch.

/// Images of 28 x 28 pixels, in random order. All ten digits are equally frequent, except for the remainder.
LabelledImages draw_digits(std::size_t count, std::uint64_t seed);

}  // namespace maniple
