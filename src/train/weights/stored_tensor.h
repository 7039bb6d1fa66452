// What a file of weights holds, before any of it is read: names, dtypes, shapes and places of tensors.
//
// The readers of the formats (safetensors, torch.save) make such lists and need no LibTorch for it. What they return
// has been checked: every element of every tensor lies inside its file.
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
  std::uint64_t begin = 0;            ///< of its first element in the file, in bytes
  std::size_t file = 0;               ///< which one of several

  friend bool operator==(const StoredTensor&, const StoredTensor&) = default;
};

struct StoredTensors {
  std::vector<StoredTensor> tensors;  ///< in the order of the file
  std::vector<std::string> ignored;   ///< what is no tensor: "epoch (a whole number)"
};

/// Fills `to` with `count` bytes from `offset` on, or throws.
using ReadAt = std::function<void(std::uint64_t offset, void* to, std::size_t count)>;

/// Of a tensor without holes whose last dimension is the innermost one.
std::vector<std::int64_t> row_major_strides(const std::vector<std::int64_t>& shape);

/// Whether its elements follow each other in the file. Dimensions of one element may have any stride.
bool is_row_major(const StoredTensor& tensor) noexcept;

/// At most ten texts, and how many more there are: "a", "b", ... and 7 more.
std::string shortened(const std::vector<std::string>& names);

}  // namespace maniple
