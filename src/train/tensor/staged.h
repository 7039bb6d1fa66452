// Conversion from at::Tensor to Buffer and back.
//
// A group works on contiguous memory. A contiguous tensor is used in place. Any other tensor is *staged*: a contiguous
// copy takes its place and is written back when the operation is done. A list of tensors is staged as one block of
// memory.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include <torch/types.h>

#include <maniple/comm/types.h>

namespace maniple {

enum class Access { read, write, read_write };

/// The argument position of a tensor, for messages: "all_gather: tensor_list[2]".
struct Argument {
  const char* operation;
  const char* name;
  int index = -1;
};

std::string named(const Argument& argument);

/// The dtype as the group names it. Throws InvalidArgument for a dtype that the group does not have.
DType dtype_of(const torch::Tensor& tensor, const Argument& argument);

/// Throws unless a group can work on the tensor: it must be defined, strided and not quantized.
void require_usable(const torch::Tensor& tensor, const Argument& argument);

class Staged {
 public:
  Staged() = default;
  Staged(const torch::Tensor& tensor, Access access, const Argument& argument);
  /// All tensors, one after another; counts() returns their sizes. All must have the same dtype.
  Staged(const std::vector<torch::Tensor>& tensors, Access access, const Argument& argument);

  Buffer buffer() const noexcept { return buffer_; }
  bool defined() const noexcept { return !tensors_.empty(); }
  std::string name() const { return named(argument_); }
  bool writes_back() const noexcept { return writes_ && copied_; }
  bool complex() const noexcept { return complex_; }

  /// The number of elements of each tensor of a list, as the group counts them.
  const std::vector<std::size_t>& counts() const noexcept { return counts_; }

  /// Call after the operation: copies the contents of buffer() to the tensors.
  void write_back() const;

 private:
  std::vector<torch::Tensor> tensors_;  // the caller's, kept alive
  torch::Tensor memory_;                // contiguous
  bool copied_ = false;
  bool writes_ = false;
  bool complex_ = false;
  Buffer buffer_;
  Argument argument_{"", ""};
  std::vector<std::size_t> counts_;
};

}  // namespace maniple
