// The contents of a weights file before any data is read: names, dtypes, shapes and places of its tensors.
//
// The readers of the formats (safetensors, torch.save) make these lists without LibTorch. Their results are checked:
// every element of every tensor lies inside its file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace maniple {

struct StoredTensor {
  std::string name;
  std::string dtype;  ///< as safetensors spells it: "F32", "BF16", ...
  std::vector<std::int64_t> shape;
  std::vector<std::int64_t> strides;  ///< in elements
  std::uint64_t begin = 0;            ///< offset of the first element in the file, in bytes
  std::size_t file = 0;               ///< index of the file, if there are several

  friend bool operator==(const StoredTensor&, const StoredTensor&) = default;
};

struct StoredTensors {
  std::vector<StoredTensor> tensors;  ///< in the order of the file
  std::vector<std::string> ignored;   ///< entries that are not tensors: "epoch (a whole number)"
};

/// Fills `to` with `count` bytes at `offset`, or throws.
using ReadAt = std::function<void(std::uint64_t offset, void* to, std::size_t count)>;

/// The strides of a tensor without gaps whose last dimension is innermost.
std::vector<std::int64_t> row_major_strides(const std::vector<std::int64_t>& shape);

/// Whether the elements are contiguous in the file, in row-major order. Dimensions of one element may have any stride.
bool is_row_major(const StoredTensor& tensor) noexcept;

/// At most ten of the texts, quoted, then the number of the others: "a", "b", ... and 7 more.
std::string shortened(const std::vector<std::string>& names);

}  // namespace maniple
